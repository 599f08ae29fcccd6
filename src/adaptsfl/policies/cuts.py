"""Cuts that ignore convergence: given, the fastest, or the fastest single cut for all devices."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from adaptsfl import checks, planner
from adaptsfl.checks import FloatArray, IntArray
from adaptsfl.convergence import PowerRounds
from adaptsfl.errors import InfeasiblePlan, InvalidInput
from adaptsfl.planner import PlanProblem
from adaptsfl.policies.policy import BasePolicy, Observation


class CutOptions(BasePolicy):
    """A policy with the options `cut`, one for all devices, and `cuts`, one per device."""

    def __init__(self, cut: int | None = None, cuts: Sequence[int] | None = None) -> None:
        if cut is not None and cuts is not None:
            raise InvalidInput("cuts", "is given beside cut", "Give one cut for all, or one per device")
        if cut is not None:
            checks.whole_number("cut", cut)
        if cuts is not None:
            if isinstance(cuts, str) or not isinstance(cuts, Sequence):
                problem = f"is {checks.short(cuts)}"
                raise InvalidInput("cuts", problem, "Give a list, one per device; or cut, one for all")
            checks.cut_numbers("cuts", cuts, checks.LARGEST_WHOLE)
        self.cut, self.cuts = cut, cuts

    def cuts_for(self, seen: Observation, interval: int | None) -> tuple[int, ...]:
        """Return the cuts given, or the fastest for this interval."""
        chosen = given_cuts(seen, self.cut, self.cuts)
        return tuple(int(cut) for cut in fastest_cuts(seen, interval)) if chosen is None else chosen


def fastest_cuts(seen: Observation, interval: int | None) -> IntArray:
    """Return the cuts with the least seconds per round, A + B/I; where layers are never averaged, A alone.

    It plans a problem without drift, where every plan needs equally many rounds. If layers are never averaged, sending
    models costs nothing.
    """
    problem = _blind(seen, interval=interval or 1)
    if interval is None:
        free = dataclasses.replace(seen.costs, client_model_bits=np.zeros(seen.layers))
        problem = dataclasses.replace(problem, costs=free)
    return planner.plan(problem).cuts


def given_cuts(seen: Observation, cut: int | None, cuts: Sequence[int] | None) -> tuple[int, ...] | None:
    """Return the cuts that a policy's options give, checked against the devices' memory; None if they give none."""
    if cut is not None:
        chosen = [cut] * seen.devices
    elif cuts is not None:
        chosen = seen.of_those_present("policy.cuts", cuts)
    else:
        return None
    checks.cut_numbers("policy.cut" if cut is not None else "policy.cuts", chosen, seen.layers)
    # Cuts given as a policy's options need not be in the planner's allowed_cuts.
    dataclasses.replace(_blind(seen, interval=1, cuts=chosen), allowed_cuts=None).check_feasible()
    return tuple(chosen)


def one_cut(seen: Observation, seconds: FloatArray) -> int:
    """Return the cut that is allowed to every device and takes the fewest of `seconds`, which has one per cut."""
    check_every_device_has_a_cut(seen)
    common = seen.allowed.all(axis=1)
    if not common.any():
        raise InfeasiblePlan("policy.cut: no cut is allowed to every device. Raise their memory, or allow more cuts.")
    return int(np.argmin(np.where(common, seconds, np.inf))) + 1


def every_cut(seen: Observation) -> IntArray:
    """Return all plans in which every device has the same cut: shape (L, devices)."""
    return np.repeat(np.arange(1, seen.layers + 1)[:, None], seen.devices, axis=1)


def check_every_device_has_a_cut(seen: Observation) -> None:
    """Raise InfeasiblePlan if memory and limits leave a device without any cut."""
    _blind(seen, interval=1).check_feasible()


def _blind(seen: Observation, **fixed: Any) -> PlanProblem:
    """Return the current problem without convergence: every plan needs equally many rounds."""
    return dataclasses.replace(seen.problem(**fixed), convergence=PowerRounds(np.zeros(seen.layers)))
