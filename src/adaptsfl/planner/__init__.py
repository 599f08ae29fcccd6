"""Choose the aggregation interval and every device's cut, so that the target is reached in the least time."""

from adaptsfl.errors import InvalidInput
from adaptsfl.planner import exact, exhaustive
from adaptsfl.planner.problem import Plan, PlanProblem, Status, time_ratio
from adaptsfl.planner.whatif import (
    Alternative,
    OtherRounds,
    Sensitivity,
    Without,
    alternatives,
    other_rounds,
    sensitivity,
    without,
)

SOLVERS = ("exact", "bcd", "exhaustive")


def plan(problem: PlanProblem, solver: str = "exact", time_limit_s: float = float("inf")) -> Plan:
    """Return the plan that `solver` finds: `exact` (the optimum), `bcd` (the paper's), `exhaustive` (tiny problems)."""
    match solver:
        case "exact":
            return exact.solve(problem, time_limit_s=time_limit_s)
        case "bcd":
            from adaptsfl.planner import bcd  # noqa: PLC0415  (scipy takes half a second to import)

            return bcd.solve(problem, time_limit_s=time_limit_s)
        case "exhaustive":
            return exhaustive.solve(problem)
        case _:
            raise InvalidInput("solver", f"is {solver!r}", f"Choose one of: {', '.join(SOLVERS)}")


__all__ = [
    "SOLVERS",
    "Alternative",
    "OtherRounds",
    "Plan",
    "PlanProblem",
    "Sensitivity",
    "Status",
    "Without",
    "alternatives",
    "other_rounds",
    "plan",
    "sensitivity",
    "time_ratio",
    "without",
]
