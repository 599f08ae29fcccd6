"""Bounds on the best plan's time that need no search.

Lower bound: each device takes its best cut for each term separately. Upper bound: all devices take the same cut.
"""

from dataclasses import dataclass

import numpy as np

from adaptsfl import latency
from adaptsfl.checks import FloatArray, IntArray
from adaptsfl.planner.interval import interval_rule
from adaptsfl.planner.problem import PlanProblem


def cut_times(problem: PlanProblem) -> FloatArray:
    """Return the time of each device with each cut for T3 … T6: shape (4, L, N)."""
    costs, fleet, batch = problem.costs, problem.fleet, problem.batch_size
    every_cut = np.arange(1, problem.layers + 1)[:, None]
    return np.stack(
        (
            latency.to_server_s(costs, fleet, every_cut, batch),
            latency.from_server_s(costs, fleet, every_cut, batch),
            latency.client_model_upload_s(costs, fleet, every_cut),
            latency.client_model_download_s(costs, fleet, every_cut),
        )
    )


def least_terms(problem: PlanProblem, times: FloatArray) -> FloatArray:
    """Return lower bounds of T3 … T6 for plans whose deepest cut is exactly L_c: shape (4, L).

    Each maximum is at least its value if every device minimised that term alone, and at least the smallest time of any
    device with cut L_c. The bound is infinite if no plan has that deepest cut.
    """
    least = np.empty((4, problem.layers))
    for row, term in zip(least, times, strict=True):
        allowed = np.where(problem.allowed, term, np.inf)
        row[:] = np.maximum(np.minimum.accumulate(allowed).max(axis=1), allowed.min(axis=1))
    return least


def deepest_allowed(problem: PlanProblem) -> IntArray:
    """Return every device's deepest allowed cut up to each L_c, 0 if it has none: shape (L, N)."""
    cuts = np.arange(1, problem.layers + 1)[:, None]
    return np.maximum.accumulate(np.where(problem.allowed, cuts, 0))


def bounds_by_deepest(problem: PlanProblem, least: FloatArray) -> FloatArray:
    """Return, for every L_c, a time that no plan with exactly that deepest cut beats.

    The server's turn takes at least as long as with every device at its deepest allowed cut.
    """
    remaining = np.append(latency.remaining_flops(problem.costs), 0.0)  # the last entry: no cut is allowed
    flops = remaining[deepest_allowed(problem) - 1].sum(axis=1)
    server = problem.fleet.server
    round_s = least[0] + server.turn_s + problem.batch_size * flops / server.flops + least[1]
    averaging_s = latency.averaging_s(problem.costs, problem.fleet, np.arange(1, problem.layers + 1))
    possible = np.flatnonzero(np.isfinite(round_s))
    bounds = np.full(problem.layers, np.inf)
    rule = interval_rule(problem, possible + 1)
    bounds[possible] = rule.best_time_s(round_s[possible], (least[2] + averaging_s + least[3])[possible])
    return bounds


@dataclass(frozen=True)
class UniformPlan:
    """The best plan in which all devices take the same cut, or their deepest allowed cut before it."""

    interval: int
    cuts: IntArray
    time_s: float


def best_uniform(problem: PlanProblem) -> UniformPlan:
    """Try every cut for all devices, each with its best interval."""
    cuts = deepest_allowed(problem)
    cuts = cuts[(cuts > 0).all(axis=1)]
    rule = interval_rule(problem, cuts.max(axis=1))
    intervals, times = rule.choose(problem.round_s(cuts), problem.aggregation_s(cuts))
    best = int(np.argmin(times))
    return UniformPlan(int(intervals[best]), cuts[best], float(times[best]))
