"""Algorithm 3: the paper's block-coordinate descent. It alternates Theorem 2 and Algorithm 2 until neither helps.

It stops when changing only the interval or only the cuts brings no improvement, which need not be the optimum; `exact`
finds the optimum. The plan has a lower bound, and its status is optimal only if its time equals the bound.
"""

import time
from dataclasses import replace

import numpy as np

from adaptsfl.checks import IntArray
from adaptsfl.errors import InvalidInput
from adaptsfl.planner.bound import bounds_by_deepest, cut_times, least_server_flops, least_terms
from adaptsfl.planner.fractional import best_cuts
from adaptsfl.planner.interval import Rules, best_interval
from adaptsfl.planner.problem import Plan, PlanProblem, explained

RELATIVE_TOLERANCE = 1e-9


def solve(problem: PlanProblem, *, start: IntArray | None = None, time_limit_s: float = float("inf")) -> Plan:
    """Return the plan at which the descent from `start` ends.

    Without `start` it begins with every device's shallowest allowed cut, where the drift is least: if any plan is
    admissible, one with these cuts is.
    """
    started = time.perf_counter()
    original, problem = problem, _without_choices(problem)
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
    least = least_terms(problem, cut_times(problem))
    bounds = bounds_by_deepest(problem, least, least_server_flops(problem), Rules(problem))
    lower_bound_s = float(bounds.min())
    time_s = float(problem.time_to_target_s(interval, cuts))
    return explained(
        original,
        interval,
        cuts,
        wire_dtype=problem.costs.wire_dtype,
        lower_bound_s=lower_bound_s * original.sent_as(problem.costs.wire_dtype).rounds_factor,
        proven=time_s <= lower_bound_s * (1 + RELATIVE_TOLERANCE),
        solver="bcd",
        solve_s=time.perf_counter() - started,
        nodes=programs,
    )


def _without_choices(problem: PlanProblem) -> PlanProblem:
    """Return the problem that the paper solves, which has neither micro-batches nor a choice of numbers on the wire."""
    if tuple(problem.micro_batches) != (1,):
        raise InvalidInput(
            "planner.micro_batches",
            f"is {list(problem.micro_batches)}, but the solver bcd knows undivided mini-batches only",
            "Set it to 1, or use the exact solver",
        )
    if len(problem.wire_dtypes) > 1:
        raise InvalidInput(
            "planner.wires",
            f"gives {len(problem.wire_dtypes)} types of numbers, but the solver bcd chooses none",
            "Give one, or use the exact solver",
        )
    return replace(problem.sent_as(problem.wire_dtypes[0]), wires=None)
