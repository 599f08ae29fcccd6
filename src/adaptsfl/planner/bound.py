"""Bounds on the best plan's time that need no search.

Lower bound: each device takes its best cut for each term separately. Upper bound: all devices take the same cut.
"""

from dataclasses import dataclass, replace

import numpy as np

from adaptsfl import latency
from adaptsfl.checks import FloatArray, IntArray
from adaptsfl.planner.interval import interval_rule
from adaptsfl.planner.problem import PlanProblem
from adaptsfl.planner.terms import UNDIVIDED, Terms


def cut_times(problem: PlanProblem, terms: Terms = UNDIVIDED) -> FloatArray:
    """Return the time of each device with each cut for every maximum, such as T3 … T6: shape (terms, L, N)."""
    return terms.times(problem, np.arange(1, problem.layers + 1)[:, None])


def least_terms(problem: PlanProblem, times: FloatArray) -> FloatArray:
    """Return lower bounds of all maxima for plans whose deepest cut is exactly L_c: shape (terms, L).

    Each maximum is at least its value if every device minimised that term alone, and at least the smallest time of any
    device with cut L_c. The bound is infinite if no plan has that deepest cut.
    """
    least = np.empty((len(times), problem.layers))
    for row, term in zip(least, times, strict=True):
        allowed = np.where(problem.allowed, term, np.inf)
        row[:] = np.maximum(np.minimum.accumulate(allowed).max(axis=1), allowed.min(axis=1))
    return least


def least_terms_of(problem: PlanProblem, terms: Terms, some: IntArray) -> FloatArray:
    """Return weaker bounds than `least_terms`, from the devices in `some` alone: faster for large fleets.

    The bound is infinite only if no device has that cut.
    """
    cuts = np.arange(1, problem.layers + 1)[:, None]
    part = replace(problem, fleet=problem.fleet.subset(some.tolist()), cuts=None)
    times = np.where(problem.allowed[:, some], terms.times(part, cuts), np.inf)
    least = np.minimum.accumulate(times, axis=1).max(axis=2)
    return np.where(problem.allowed.any(axis=1), least, np.inf)


def slowest_devices(problem: PlanProblem, most: int = 8) -> IntArray:
    """Return devices that are among the `most` slowest in some term with some cut, or have the least memory."""
    found = [np.argsort(problem.allowed.sum(axis=0), kind="stable")[:most]]
    for cut in range(1, problem.layers + 1):
        times = UNDIVIDED.times(problem, np.array([cut]))
        found += list(np.argpartition(-times, min(most, problem.devices - 1), axis=1)[:, :most])
    return np.unique(np.concatenate(found))


def deepest_allowed(problem: PlanProblem) -> IntArray:
    """Return every device's deepest allowed cut up to each L_c, 0 if it has none: shape (L, N)."""
    cuts = np.arange(1, problem.layers + 1)[:, None]
    return np.maximum.accumulate(np.where(problem.allowed, cuts, 0))


def least_server_flops(problem: PlanProblem) -> FloatArray:
    """Return the server's work per data sample for every L_c, if each device takes its deepest allowed cut."""
    remaining = np.append(latency.remaining_flops(problem.costs), 0.0)  # the last entry: no cut is allowed
    return remaining[deepest_allowed(problem) - 1].sum(axis=1)


def bounds_by_deepest(
    problem: PlanProblem, least: FloatArray, terms: Terms = UNDIVIDED, flops: FloatArray | None = None
) -> FloatArray:
    """Return, for every L_c, a time that no plan with exactly that deepest cut beats, before `rounds_factor`.

    The server's turn takes at least as long as with every device at its deepest allowed cut, where it has `flops`.
    """
    flops = least_server_flops(problem) if flops is None else flops
    server, part = problem.fleet.server, problem.batch_size // terms.micro_batches
    round_s = terms.round_s(least[:-2], server.turn_s + part * flops / server.flops)
    averaging_s = latency.averaging_s(problem.costs, problem.fleet, np.arange(1, problem.layers + 1))
    possible = np.flatnonzero(np.isfinite(round_s))
    bounds = np.full(problem.layers, np.inf)
    rule = interval_rule(problem, possible + 1)
    bounds[possible] = rule.best_time_s(round_s[possible], (least[-2] + averaging_s + least[-1])[possible])
    return bounds


@dataclass(frozen=True)
class UniformPlan:
    """The best plan in which all devices take the same cut, or their deepest allowed cut before it."""

    interval: int
    cuts: IntArray
    time_s: float


def best_uniform(problem: PlanProblem, micro_batches: int = 1) -> UniformPlan:
    """Try every cut for all devices, each with its best interval. Its time is before `rounds_factor`."""
    cuts = deepest_allowed(problem)
    cuts = cuts[(cuts > 0).all(axis=1)]
    rule = interval_rule(problem, cuts.max(axis=1))
    intervals, times = rule.choose(problem.round_s(cuts, micro_batches), problem.aggregation_s(cuts))
    best = int(np.argmin(times))
    return UniformPlan(int(intervals[best]), cuts[best], float(times[best]))
