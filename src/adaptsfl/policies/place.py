"""Plans as far as they are trusted; cuts without a thought for convergence."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from adaptsfl import checks, planner
from adaptsfl.checks import FloatArray, IntArray
from adaptsfl.convergence import LONGEST_INTERVAL, PowerRounds
from adaptsfl.errors import InfeasiblePlan, InvalidInput
from adaptsfl.planner import Plan, PlanProblem
from adaptsfl.policies.policy import Observation


def trusted_plan(seen: Observation, **fixed: Any) -> Plan:
    """Return the best plan of this moment whose interval is trusted.

    That is an interval that experience speaks for. Where an averaging takes long, an interval may be longer: if its
    rounds take no longer than a few averagings, a mistake costs no more than these. But it must pay also if longer
    intervals cost as much as is still plausible.
    """
    plan = planner.plan(seen.problem(**fixed))
    if seen.limits.interval is not None or plan.interval <= seen.trust.longest_interval:
        return plan
    if plan.interval > (longest := trusted_interval(seen, plan)):
        plan = planner.plan(seen.problem(**fixed, max_interval=longest))
    # A shorter interval has other cuts, whose averaging takes fewer rounds.
    known = planner.plan(seen.problem(**fixed, max_interval=seen.trust.longest_interval))
    if plan.interval > trusted_interval(seen, plan):
        return known
    doubted = seen.problem(convergence=seen.trust.pessimistic or seen.convergence)
    times = [float(doubted.time_to_target_s(one.interval, one.cuts)) for one in (plan, known)]
    return plan if times[0] <= times[1] else known


def trusted_interval(seen: Observation, plan: Plan) -> int:
    """Return the longest interval that is trusted with a plan's cuts."""
    problem = seen.problem()
    round_s, averaging_s = float(problem.round_s(plan.cuts)), float(problem.aggregation_s(plan.cuts))
    rounds = seen.trust.averagings * averaging_s / round_s if round_s > 0 else LONGEST_INTERVAL
    return max(seen.trust.longest_interval, int(min(rounds, seen.trust.longest_averaging)))


def worth_probing(seen: Observation, plan: Plan) -> bool:
    """Whether to look how much copies drift: the plan would not show it, and might be much too careful."""
    trust, limits = seen.trust, seen.limits
    if plan.interval >= trust.probe or trust.optimistic is None or limits.interval is not None:
        return False
    if limits.max_interval is not None and limits.max_interval < trust.probe:
        return False
    problem = seen.problem(convergence=trust.optimistic)
    least_s = planner.plan(problem).predicted_time_s
    return least_s < (1 - trust.probe_gain) * float(problem.time_to_target_s(plan.interval, plan.cuts))


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
