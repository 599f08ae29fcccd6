"""Plans checked against the formulas, and the exact solver against exhaustive search."""

import numpy as np
import pytest

from adaptsfl import planner
from adaptsfl.errors import InfeasiblePlan
from adaptsfl.planner import PlanProblem

CLOSE = 1e-9


def solve(problem: PlanProblem, solver: str) -> planner.Plan | None:
    try:
        return planner.plan(problem, solver)
    except InfeasiblePlan:
        return None


def check_plan(problem: PlanProblem, plan: planner.Plan) -> None:
    """A plan must obey its problem and its times must be those of the formulas."""
    shortest, longest = problem.intervals
    assert shortest <= plan.interval <= longest
    assert problem.allowed[plan.cuts - 1, np.arange(problem.devices)].all()
    assert plan.micro_batches in problem.micro_batches
    assert plan.wire_dtype in problem.wire_dtypes
    assert plan.predicted_time_s == problem.time_of(plan)
    assert plan.lower_bound_s <= plan.predicted_time_s
    total = sum(plan.total_s(phase) for phase in plan.phases)
    assert total == pytest.approx(plan.predicted_time_s, rel=1e-9)


def check_exact(problem: PlanProblem) -> None:
    """Exact and exhaustive find the same time, or both find that there is no plan."""
    best, oracle = solve(problem, "exact"), solve(problem, "exhaustive")
    assert (best is None) == (oracle is None)
    if best is None or oracle is None:
        return
    assert best.status == "optimal"
    assert best.predicted_time_s == pytest.approx(oracle.predicted_time_s, rel=CLOSE)
    assert best.lower_bound_s == pytest.approx(best.predicted_time_s, rel=CLOSE)
    check_plan(problem, best)
    check_plan(problem, oracle)
