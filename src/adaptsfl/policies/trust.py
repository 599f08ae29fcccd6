"""Plans whose interval the convergence model supports."""

from dataclasses import replace
from typing import Any

from adaptsfl import planner
from adaptsfl.convergence import LONGEST_INTERVAL
from adaptsfl.planner import Plan
from adaptsfl.policies.policy import Observation


def trusted_plan(seen: Observation, **fixed: Any) -> Plan:
    """Return the best current plan whose interval is trusted.

    Trusted intervals are those that measurements support. If averaging is slow, the interval may be longer: while its
    rounds take no longer than a few averagings, a mistake costs no more than these. Such an interval must also pay off
    under the pessimistic model.
    """
    plan = planner.plan(seen.problem(**fixed))
    if seen.limits.interval is not None or plan.interval <= seen.trust.longest_interval:
        return plan
    if plan.interval > (longest := trusted_interval(seen, plan)):
        plan = planner.plan(seen.problem(**fixed, max_interval=longest))
    # A shorter interval has other cuts, whose averaging may take fewer rounds.
    known = planner.plan(seen.problem(**fixed, max_interval=seen.trust.longest_interval))
    if plan.interval > trusted_interval(seen, plan):
        return known
    doubted = seen.problem(**{**fixed, "convergence": seen.trust.pessimistic or seen.convergence})
    return plan if doubted.time_of(plan) <= doubted.time_of(known) else known


def trusted_interval(seen: Observation, plan: Plan) -> int:
    """Return the longest interval that is trusted with a plan's cuts."""
    problem = seen.problem().sent_as(plan.wire_dtype)
    round_s = float(problem.round_s(plan.cuts, plan.micro_batches))
    averaging_s = float(problem.aggregation_s(plan.cuts))
    rounds = seen.trust.averagings * averaging_s / round_s if round_s > 0 else LONGEST_INTERVAL
    return max(seen.trust.longest_interval, int(min(rounds, seen.trust.longest_averaging)))


def worth_probing(seen: Observation, plan: Plan) -> bool:
    """Whether to measure the drift of copies: the plan would not show it, and may be far too cautious."""
    trust, limits = seen.trust, seen.limits
    if plan.interval >= trust.probe or trust.optimistic is None or limits.interval is not None:
        return False
    if limits.max_interval is not None and limits.max_interval < trust.probe:
        return False
    problem = seen.problem(**seen.choices, convergence=trust.optimistic).sent_as(plan.wire_dtype)
    least_s = planner.plan(replace(problem, micro_batches=(plan.micro_batches,))).predicted_time_s
    return least_s < (1 - trust.probe_gain) * problem.time_of(plan)
