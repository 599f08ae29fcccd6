"""Bounds on the best plan's time that need no search.

Lower bound: each device takes its best cut for each term separately. Upper bound: all devices take the same cut.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from adaptsfl import latency
from adaptsfl.checks import FloatArray, IntArray
from adaptsfl.fleet import FIXED, RATES, Fleet
from adaptsfl.planner.interval import Rules, interval_rule
from adaptsfl.planner.problem import PlanProblem
from adaptsfl.planner.terms import UNDIVIDED, Terms

AT_ONCE = 1 << 15  # times computed at once, so that they stay in the processor's cache


def cut_times(problem: PlanProblem, terms: Terms = UNDIVIDED, deepest: int | None = None) -> FloatArray:
    """Return the time of each device with each cut up to `deepest` for every maximum: shape (terms, deepest, N)."""
    deepest = problem.layers if deepest is None else deepest
    times = np.empty((terms.count, deepest, problem.devices))
    step = max(1, AT_ONCE // problem.devices)
    for first in range(1, deepest + 1, step):
        cuts = np.arange(first, min(first + step, deepest + 1))[:, None]
        times[:, cuts[0, 0] - 1 : cuts[-1, 0]] = terms.times(problem, cuts)
    return times


def least_terms(problem: PlanProblem, times: FloatArray) -> FloatArray:
    """Return lower bounds of all maxima for plans whose deepest cut is exactly L_c: shape (terms, L).

    Each maximum is at least its value if every device minimised that term alone, and at least the smallest time of any
    device with cut L_c. The bound is infinite if no plan has that deepest cut. `times` may end before the last cut.
    """
    least, so_far = np.empty(times.shape[:2]), np.full((len(times), problem.devices), np.inf)
    for index in range(times.shape[1]):
        allowed = problem.allowed[index]
        own = times[:, index] if allowed.all() else np.where(allowed, times[:, index], np.inf)
        np.minimum(so_far, own, out=so_far)
        least[:, index] = np.maximum(so_far.max(axis=1), own.min(axis=1))
    return least


def some_least_terms(problem: PlanProblem, terms: Terms, some: IntArray, best_device: Fleet) -> FloatArray:
    """Return weaker bounds than `least_terms`, but quickly: from the devices in `some` and from `best_device` alone.

    Only `some` minimise each term, and the device with cut L_c is as fast as `best_device`.
    """
    cuts = np.arange(1, problem.layers + 1)[:, None]
    part = replace(problem, fleet=problem.fleet.subset(some.tolist()), cuts=None)
    times = np.where(problem.allowed[:, some], terms.times(part, cuts), np.inf)
    least = np.minimum.accumulate(times, axis=1).max(axis=2)
    exactly = terms.times(replace(problem, fleet=best_device, cuts=None), cuts)[:, :, 0]
    return np.where(problem.allowed.any(axis=1), np.maximum(least, exactly), np.inf)


def ideal_device(fleet: Fleet) -> Fleet:
    """Return one device, with the best that any device of the fleet has of each resource."""
    best = {name: getattr(fleet, name).max(keepdims=True) for name in RATES}
    best |= {name: getattr(fleet, name).min(keepdims=True) for name in FIXED}
    return replace(fleet, **best, memory_bytes=None, names=())


def slowest_devices(problem: PlanProblem, most: int = 8) -> IntArray:
    """Return devices that are among the `most` slowest in some term with some cut, or have the least memory."""
    most = min(most, problem.devices)
    found = [np.argpartition(problem.allowed.sum(axis=0), most - 1)[:most]]
    for cut in np.unique(np.linspace(1, problem.layers, 5).astype(np.int64)):
        times = UNDIVIDED.times(problem, np.array([cut]))
        found += list(np.argpartition(-times, most - 1, axis=1)[:, :most])
    return np.unique(np.concatenate(found))


def deepest_allowed(problem: PlanProblem) -> Iterator[IntArray]:
    """Yield every device's deepest allowed cut up to each L_c, 0 if it has none: for L_c = 1, 2, … L."""
    deepest = np.zeros(problem.devices, dtype=np.int64)
    for cut, allowed in enumerate(problem.allowed, start=1):
        deepest = np.where(allowed, cut, deepest)
        yield deepest


def least_server_flops(problem: PlanProblem) -> FloatArray:
    """Return the server's work per data sample for every L_c, if each device takes its deepest allowed cut."""
    remaining = np.append(latency.remaining_flops(problem.costs), 0.0)  # the last entry: no cut is allowed
    return np.array([remaining[cuts - 1].sum() for cuts in deepest_allowed(problem)])


def bounds_by_deepest(
    problem: PlanProblem, least: FloatArray, flops: FloatArray, rules: Rules, terms: Terms = UNDIVIDED
) -> FloatArray:
    """Return, for every L_c, a time that no plan with exactly that deepest cut beats, before `rounds_factor`.

    The server's turn takes at least as long as with every device at its deepest allowed cut, where it has `flops`
    (see `least_server_flops`). `least` may end before the last cut.
    """
    server, part, cuts = problem.fleet.server, problem.batch_size // terms.micro_batches, least.shape[1]
    round_s = terms.round_s(least[:-2], server.turn_s + part * flops[:cuts] / server.flops)
    averaging_s = latency.averaging_s(problem.costs, problem.fleet, np.arange(1, cuts + 1))
    possible = np.flatnonzero(np.isfinite(round_s))
    bounds = np.full(cuts, np.inf)
    rule = rules(possible + 1)
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
    plans = [cuts for cuts in deepest_allowed(problem) if cuts.all()]
    rule = interval_rule(problem, np.array([cuts.max() for cuts in plans]))
    step = max(1, AT_ONCE // problem.devices)
    blocks = [np.array(plans[first : first + step]) for first in range(0, len(plans), step)]
    round_s = np.concatenate([problem.round_s(cuts, micro_batches) for cuts in blocks])
    intervals, times = rule.choose(round_s, np.concatenate([problem.aggregation_s(cuts) for cuts in blocks]))
    best = int(np.argmin(times))
    return UniformPlan(int(intervals[best]), plans[best], float(times[best]))
