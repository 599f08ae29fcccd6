"""Try every plan of a tiny problem: the oracle that the other solvers are compared with.

It evaluates only the objective: every allowed combination of cuts with every allowed interval.
"""

import itertools
import math
import time

import numpy as np

from adaptsfl.checks import IntArray
from adaptsfl.errors import SolverError
from adaptsfl.planner.problem import Plan, PlanProblem, explained, total_s

MOST_PLANS = 50_000_000
MOST_CUTS = 20_000_000  # cuts in memory at once: combinations times devices


def solve(problem: PlanProblem) -> Plan:
    """Return the best of all plans."""
    started = time.perf_counter()
    problem.check_feasible()
    _refuse_if_large(problem)
    cuts = _combinations(problem)
    aggregation_s, deepest = problem.aggregation_s(cuts), cuts.max(axis=1)
    best_s, best, tried = math.inf, (0, 0, 1, problem.wire_dtypes[0]), 0
    for wire, k in itertools.product(problem.wire_dtypes, problem.micro_batches):
        sent = problem.sent_as(wire)
        round_s = sent.round_s(cuts, k)
        for cut in np.unique(deepest):
            rows = np.flatnonzero(deepest == cut)
            for interval in problem.convergence.choices(int(cut), *problem.intervals):
                rounds = sent.rounds_factor * problem.convergence.rounds(interval, int(cut))
                times = total_s(rounds, interval, round_s[rows], aggregation_s[rows])
                tried += rows.size
                row = int(np.argmin(times))
                if times[row] < best_s:
                    best_s, best = float(times[row]), (interval, int(rows[row]), k, wire)
    interval, row, k, wire = best
    return explained(
        problem,
        interval,
        cuts[row],
        micro_batches=k,
        wire_dtype=wire,
        lower_bound_s=best_s,
        proven=True,
        solver="exhaustive",
        solve_s=time.perf_counter() - started,
        nodes=tried,
    )


def _refuse_if_large(problem: PlanProblem) -> None:
    combinations = math.prod(int(count) for count in problem.allowed.sum(axis=0))
    shallowest = int(problem.allowed.argmax(axis=0).max()) + 1
    intervals = len(problem.convergence.choices(shallowest, *problem.intervals))
    if combinations * intervals > MOST_PLANS or combinations * problem.devices > MOST_CUTS:
        raise SolverError(
            f"exhaustive search would try about {combinations:.3g} combinations of cuts with up to {intervals:.3g} "
            f"intervals, more than it can. Use the exact solver, or limit planner.allowed_cuts and "
            "planner.max_interval."
        )


def _combinations(problem: PlanProblem) -> IntArray:
    """Return all allowed combinations of cuts, one per row: row r is r in a number system with one digit per device."""
    choices = [np.flatnonzero(column) + 1 for column in problem.allowed.T]
    rows = np.arange(math.prod(choice.size for choice in choices))
    cuts = np.empty((rows.size, problem.devices), dtype=np.int64)
    for device, choice in enumerate(choices):
        cuts[:, device] = choice[rows % choice.size]
        rows //= choice.size
    return cuts
