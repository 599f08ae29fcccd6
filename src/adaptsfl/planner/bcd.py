"""Algorithm 3: the paper's block-coordinate descent. It alternates Theorem 2 and Algorithm 2 until neither helps.

It stops when changing only the interval or only the cuts brings no improvement, which need not be the optimum; `exact`
finds the optimum. The plan has a lower bound, and its status is optimal only if its time equals the bound.
"""

import time

import numpy as np

from adaptsfl.checks import IntArray
from adaptsfl.planner.bound import bounds_by_deepest, cut_times, least_terms
from adaptsfl.planner.fractional import best_cuts
from adaptsfl.planner.interval import best_interval
from adaptsfl.planner.problem import Plan, PlanProblem, explained

RELATIVE_TOLERANCE = 1e-9


def solve(problem: PlanProblem, *, start: IntArray | None = None, time_limit_s: float = float("inf")) -> Plan:
    """Return the plan at which the descent from `start` ends.

    Without `start` it begins with every device's shallowest allowed cut, where the drift is least: if any plan is
    admissible, one with these cuts is.
    """
    started = time.perf_counter()
    problem.check_feasible()
    cuts = problem.allowed.argmax(axis=0) + 1 if start is None else start
    interval, best_s, programs, finished = best_interval(problem, cuts), np.inf, 0, True
    while finished:
        found = best_cuts(problem, interval, cuts, started + time_limit_s)  # line 5
        cuts, programs, finished = found.cuts, programs + found.programs, found.finished
        interval = best_interval(problem, cuts)  # line 4 of the next iteration
        time_s = float(problem.time_to_target_s(interval, cuts))
        if time_s >= best_s * (1 - RELATIVE_TOLERANCE):  # line 6
            break
        best_s = time_s
    lower_bound_s = float(bounds_by_deepest(problem, least_terms(problem, cut_times(problem))).min())
    time_s = float(problem.time_to_target_s(interval, cuts))
    return explained(
        problem,
        interval,
        cuts,
        lower_bound_s=lower_bound_s,
        proven=time_s <= lower_bound_s * (1 + RELATIVE_TOLERANCE),
        solver="bcd",
        solve_s=time.perf_counter() - started,
        nodes=programs,
    )
