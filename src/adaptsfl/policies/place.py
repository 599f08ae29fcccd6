"""Plans with an interval that lets drift be measured; cuts without a thought for convergence."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from adaptsfl import checks, planner
from adaptsfl.checks import FloatArray, IntArray
from adaptsfl.convergence import PowerRounds
from adaptsfl.errors import InfeasiblePlan, InvalidInput
from adaptsfl.planner import Plan, PlanProblem
from adaptsfl.policies.policy import Observation


def measurable_plan(seen: Observation, **fixed: Any) -> Plan:
    """Return the best plan of this moment; where drift is to be measured, the best with an interval that lets it.

    Without this a plan of I = 1 would never be mended: nothing drifts, so nothing is learned about drift.
    """
    plan = planner.plan(seen.problem(**fixed))
    if seen.limits.interval is None:
        longest = min(seen.probe, seen.limits.max_interval or seen.probe)
        for interval in range(longest, plan.interval, -1):
            try:
                return planner.plan(seen.problem(**fixed, interval=interval))
            except InfeasiblePlan:  # so long a drift would leave no progress, as far as is known
                continue
    return plan


def fastest_cuts(seen: Observation, interval: int | None) -> IntArray:
    """Return the cuts with the least seconds per round, A + B/I; where layers are never averaged, A alone.

    That is the plan of a problem without drift: then every plan needs equally many rounds. Where nothing is averaged,
    a model costs nothing to send.
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
    # What a policy is told to do needs no place among the planner's choices.
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


def check_options(cut: int | None, cuts: Sequence[int] | None) -> None:
    """Refuse options for cuts that cannot be right whatever the model."""
    if cut is not None and cuts is not None:
        raise InvalidInput("cuts", "is given beside cut", "Give one cut for all, or one per device")
    if cut is not None:
        checks.whole_number("cut", cut)
    if cuts is not None:
        if isinstance(cuts, str) or not isinstance(cuts, Sequence):
            raise InvalidInput("cuts", f"is {checks.short(cuts)}", "Give a list, one per device; or cut, one for all")
        checks.cut_numbers("cuts", cuts, checks.LARGEST_WHOLE)


def check_every_device_has_a_cut(seen: Observation) -> None:
    """Raise InfeasiblePlan if memory and limits leave a device without any cut."""
    _blind(seen, interval=1).check_feasible()


def _blind(seen: Observation, **fixed: Any) -> PlanProblem:
    """Return the problem of this moment with convergence left out: every plan needs equally many rounds."""
    return dataclasses.replace(seen.problem(**fixed), convergence=PowerRounds(np.zeros(seen.layers)))
