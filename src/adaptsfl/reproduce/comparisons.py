"""The kinds of comparison that claims are made of.

Each function takes the evidence, figure/panel, and the claim's `given`. It returns a text with the measured values and
a score for every comparison: 1 if it is as claimed, 0 if not, half if only the direction is right.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from adaptsfl.costs import CutCosts
from adaptsfl.report.series import OURS, spread
from adaptsfl.reproduce.compare import (
    IN_PERCENT,
    TIMES,
    Bound,
    Missing,
    Number,
    Seeds,
    accuracy,
    along,
    label,
    less_accurate,
    longer,
    lower,
    mean_seconds,
    points,
    reaches_printed,
    seeds_of,
    slowdown,
    slowdowns,
    target_of,
    time_ratio,
    to_accuracy,
    trend,
)
from adaptsfl.reproduce.numbers import Evidence, aggregations


@dataclass(frozen=True)
class Scored:
    """What was measured, and a score for every comparison."""

    measured: str
    scores: Sequence[float]


def _listed(values: Iterable[tuple[Seeds, Number]]) -> str:
    return ", ".join(f"{label(runs)} {value}" for runs, value in values)


def _mean(number: Number) -> float:
    return number.mean


def _together(parts: Sequence[Scored]) -> Scored:
    return Scored("; ".join(part.measured for part in parts), [score for part in parts for score in part.scores])


def sooner(evidence: Evidence, key: str, others: Sequence[str]) -> Scored:
    """AdaptSFL reaches the common accuracy sooner than each other policy, at every point of a sweep."""
    ours = along(evidence, key, OURS)
    found = [(runs, slowdowns(runs, ours)) for runs in (along(evidence, key, policy) for policy in others)]
    where = ", the least of all points" if len(ours) > 1 else ""
    text = _listed((runs[0], min(ratios, key=_mean)) for runs, ratios in found)
    return Scored(f"time over AdaptSFL's{where}: {text}", [float(longer(r)) for _, ratios in found for r in ratios])


def as_accurate(evidence: Evidence, key: str, others: Sequence[str]) -> Scored:
    """No other policy has a higher converged accuracy than AdaptSFL."""
    ours = seeds_of(evidence, key, OURS)
    found = [(runs, points(ours, runs)) for runs in (seeds_of(evidence, key, policy) for policy in others)]
    text = f"converged accuracy {accuracy(ours)}, against {_listed(found)}"
    return Scored(text, [float(not lower(difference)) for _, difference in found])


def ahead(evidence: Evidence, key: str, others: Sequence[str]) -> Scored:
    """AdaptSFL is sooner than each other policy, and that policy is not more accurate: one score for both."""
    time, accurate = sooner(evidence, key, others), as_accurate(evidence, key, others)
    scores = [min(pair) for pair in zip(time.scores, accurate.scores, strict=True)]
    return Scored(f"{time.measured}; {accurate.measured}", scores)


def each_sooner(evidence: Evidence, key: str, first: Sequence[str], last: Sequence[str]) -> Scored:
    """Each policy in `first` reaches the common accuracy sooner than each policy in `last`."""
    runs = {policy: seeds_of(evidence, key, policy) for policy in (*first, *last)}
    ratios = [slowdown(runs[slow], runs[fast]) for fast in first for slow in last]
    right = [float(longer(ratio)) for ratio in ratios]
    return Scored(f"{sum(right):.0f} of {len(right)} pairs sooner, the closest {min(ratios, key=_mean)}", right)


def slower_than_iid(evidence: Evidence, key: str, policies: Sequence[str]) -> Scored:
    """Each policy takes longer than with IID data, at every point of a sweep."""
    noniid, iid = ([along(evidence, k, policy) for policy in policies] for k in (key, key.replace("noniid", "iid")))
    both = [pair for along_both in zip(noniid, iid, strict=True) for pair in zip(*along_both, strict=True)]
    ratios = [slowdown(slow, fast) for slow, fast in both]
    right = [float(longer(ratio)) for ratio in ratios]
    if len(ratios) == len(policies):
        found = zip((fast for _, fast in both), ratios, strict=True)
        return Scored(f"time over that with IID data: {_listed(found)}", right)
    return Scored(f"longer in {sum(right):.0f} of {len(right)} cases, the closest {min(ratios, key=_mean)}", right)


def worse(evidence: Evidence, key: str, pairs: Sequence[Sequence[str]]) -> Scored:
    """The first of each pair takes longer than the second, and is not more accurate.

    Scores half if it takes longer but is more accurate, or is less accurate but does not take longer.
    """
    return _together([_worse(*(seeds_of(evidence, key, policy) for policy in pair)) for pair in pairs])


def _worse(runs: Seeds, better: Seeds) -> Scored:
    ratio, behind = slowdown(runs, better), points(better, runs)
    slower, less, more = longer(ratio), less_accurate(runs, better), less_accurate(better, runs)
    text = f"{label(runs)} {ratio} of the time of {label(better)}; behind in converged accuracy by {behind}"
    return Scored(text, [1.0 if slower and not more else 0.5 if slower or less else 0.0])


def _harm(evidence: Evidence, key: str, policy: str) -> tuple[Number, Number]:
    """Return how far a policy is behind AdaptSFL: points of converged accuracy, and the ratio of times."""
    ours, runs = seeds_of(evidence, key, OURS), seeds_of(evidence, key, policy)
    return points(ours, runs), slowdown(runs, ours)


def gain(evidence: Evidence, key: str, policy: str, words: str, printed: Mapping[str, Mapping[str, float]]) -> Scored:
    """AdaptSFL is ahead of a policy by what the paper prints for the panel: points of accuracy, a ratio of times."""
    found = dict(zip(("points", "times"), _harm(evidence, key, policy), strict=True))
    least = {"points": 0.0, "times": 1 + TIMES}
    scores = [reaches_printed(found[k], number, direction=least[k]) for k, number in printed[key].items()]
    return Scored(words.format(**found), scores)


def many_times_sooner(evidence: Evidence, key: str, policy: str, times: float) -> Scored:
    """AdaptSFL is `times` times as fast as a policy and no less accurate; half if it is only sooner."""
    lost, ratio = _harm(evidence, key, policy)
    score = 0.0 if not longer(ratio) else 1.0 if ratio.reaches(times) and not lower(lost) else 0.5
    return Scored(f"time {ratio}, AdaptSFL more accurate by {lost}", [score])


def more_harm(
    evidence: Evidence, key: str, policy: str, other: str, points: float, times: float, least_points: float
) -> Scored:
    """A policy loses `points` times as much accuracy against AdaptSFL as another, and takes `times` times as long.

    A loss of the other below `least_points` counts as `least_points`.
    """
    lost, slow = _harm(evidence, key, policy)
    little, little_slow = _harm(evidence, key, other)
    losses = Number(max(lost.mean, 0.0) / max(little.mean, least_points), unit="×")
    slows = slowdown(seeds_of(evidence, key, policy), seeds_of(evidence, key, other))
    text = f"loss {lost} against {little}: {losses}; time {slow} against {little_slow}: {slows}"
    right = reaches_printed(losses, points, direction=1.0), reaches_printed(slows, times, direction=1 + TIMES)
    return Scored(text, right)


def falling_accuracy(evidence: Evidence, key: str, policies: Sequence[str]) -> Scored:
    """Converged accuracy falls from the first policy to the last, and rises at no step."""
    runs = [seeds_of(evidence, key, policy) for policy in policies]
    rises = any(less_accurate(before, after) for before, after in pairwise(runs))
    score = trend(ends=less_accurate(runs[-1], runs[0]), against=rises)
    return Scored(f"converged accuracy {_listed((seeds, accuracy(seeds)) for seeds in runs)}", [score])


def rising_time(evidence: Evidence, key: str, policies: Sequence[str]) -> Scored:
    """Time to the common accuracy rises from the first policy to the last, and falls at no step."""
    runs = [seeds_of(evidence, key, policy) for policy in policies]
    target = target_of(*runs)
    falls = any(longer(time_ratio(before, after, target)) for before, after in pairwise(runs))
    score = trend(ends=longer(time_ratio(runs[-1], runs[0], target)), against=falls)
    times = _listed((seeds, mean_seconds(seeds, target)) for seeds in runs)
    return Scored(f"time {to_accuracy(target)}: {times}", [score])


def rising_accuracy_by_aggregation(evidence: Evidence, key: str, policies: Sequence[str]) -> Scored:
    """Accuracy rises from the first policy to the last, after as many aggregations as the last has in its run."""
    runs = [seeds_of(evidence, key, policy) for policy in policies]
    fewest = {seed: aggregations(run)[-1] for seed, run in runs[-1].items()}
    if len({tuple(seeds) for seeds in runs}) > 1:
        raise Missing(f"{key}, some seeds of those that are compared")
    if not all(fewest.values()):
        raise Missing(f"{key} {policies[-1]} for so long that it is averaged once")
    found = np.array([_accuracies_after(seeds, fewest) for seeds in runs])  # [policy, seed]
    falls = any(lower(Number(*spread(step))) for step in np.diff(found, axis=0))
    score = trend(ends=lower(Number(*spread(found[0] - found[-1]))), against=falls)
    values = [Number(*spread(by_seed), unit=IN_PERCENT) for by_seed in found]
    count = next(iter(fewest.values()))
    return Scored(f"after {count:.0f} aggregations {_listed(zip(runs, values, strict=True))}", [score])


def _accuracies_after(runs: Seeds, allowed: Mapping[int, float]) -> list[float]:
    """Return, for every seed, the accuracy in percent after the allowed number of aggregations.

    If the first evaluation comes later, it is used, which favours the policy that averages most.
    """
    found = []
    for seed, run in runs.items():
        known = np.isfinite(run.evaluations.accuracies)
        last = int(np.searchsorted(aggregations(run)[known], allowed[seed], side="right")) - 1
        found.append(100 * float(run.evaluations.accuracies[known][max(last, 0)]))
    return found


def more_with_noniid(evidence: Evidence, key: str, shallow: str, deep: str) -> Scored:
    """A deeper cut loses more accuracy and more time where data are not IID."""

    def harm(key: str) -> tuple[Number, Number]:
        first, last = seeds_of(evidence, key, shallow), seeds_of(evidence, key, deep)
        return points(first, last), slowdown(last, first)

    (lost, slow), (lost_noniid, slow_noniid) = harm(key.replace("noniid", "iid")), harm(key)
    slower = slow.bound in ("", "<") and slow_noniid.bound in ("", ">") and slow_noniid.mean > slow.mean
    text = f"{lost} and {slow} IID, {lost_noniid} and {slow_noniid} not IID"
    return Scored(f"lost, and slower: {text}", [float(lost_noniid.mean > lost.mean), float(slower)])


def slight_rise(evidence: Evidence, key: str, other: str, most: float) -> Scored:
    """From the richest to the poorest point, AdaptSFL's time grows `most`-fold at most, and less than another's."""
    both = along(evidence, key, OURS), along(evidence, key, other)
    target = target_of(*both[0], *both[1])
    share, other_share = (time_ratio(runs[0], runs[-1], target) for runs in both)  # the richest point is last
    more, other_more = (mean_seconds(runs[0], target).mean - mean_seconds(runs[-1], target).mean for runs in both)
    exact = share.bound == "" and other_share.bound in ("", ">")
    scores = [
        exact and share.mean <= most,
        exact and share.mean * (1 + TIMES) < other_share.mean,
        exact and more < other_more,
    ]
    text = f"AdaptSFL {share}, {_signed(more)}; {label(both[1][0])} {other_share}, {_signed(other_more)}"
    return Scored(f"time {to_accuracy(target)}, poorest over richest: {text}", [float(score) for score in scores])


def _signed(time_s: float) -> str:
    return f"{'+' if time_s >= 0 else ''}{Number(time_s, unit=' s')}"


def between(evidence: Evidence, key: str, policies: Sequence[str], slowest: str) -> Scored:
    """At every point of a sweep the time of each policy lies between AdaptSFL's and the slowest one's."""
    ours, last = along(evidence, key, OURS), along(evidence, key, slowest)
    scores, texts = [], []
    for runs in (along(evidence, key, policy) for policy in policies):
        pairs = zip(slowdowns(runs, ours), slowdowns(last, runs), strict=True)
        inside = [all(ratio.reaches(1 - max(TIMES, ratio.spread or 0.0)) for ratio in pair) for pair in pairs]
        scores += [float(point) for point in inside]
        texts.append(f"{label(runs[0])} between at {sum(inside)} of {len(inside)} points")
    return Scored(", ".join(texts), scores)


def steady(evidence: Evidence, key: str, most: float, half: float) -> Scored:
    """Along a sweep, AdaptSFL's longest time is at most `most` times its shortest; up to `half` times scores half."""
    runs = along(evidence, key, OURS)
    target = target_of(*runs)
    times = [mean_seconds(seeds, target) for seeds in runs]
    shortest, longest = min(times, key=_mean), max(times, key=_mean)
    # If only a bound of a time is known, the ratio is not known either.
    bound: Bound = "?" if shortest.bound else ">" if any(time_s.bound for time_s in times) else ""
    ratio = Number(longest.mean / shortest.mean, bound=bound, unit="×")
    score = 0.0 if bound else 1.0 if ratio.mean <= most else 0.5 if ratio.mean <= half else 0.0
    return Scored(f"time {to_accuracy(target)} from {shortest} to {longest}: {ratio}", [score])


def widening_gap(evidence: Evidence, key: str, others: Sequence[str]) -> Scored:
    """Along a sweep each other policy falls further behind AdaptSFL: in seconds at every step, as a ratio overall."""
    ours = along(evidence, key, OURS)
    return _together([_gap(ours, along(evidence, key, policy)) for policy in others])


def _gap(ours: Sequence[Seeds], others: Sequence[Seeds]) -> Scored:
    target = target_of(*ours, *others)
    ratios = [time_ratio(slow, fast, target) for slow, fast in zip(others, ours, strict=True)]
    times = [(mean_seconds(slow, target), mean_seconds(fast, target)) for slow, fast in zip(others, ours, strict=True)]
    gaps = [slow.mean - fast.mean for slow, fast in times]
    # A lower bound of the slow time proves that the gap grows if it is at the end of a step, not at its beginning.
    known = all(not fast.bound for _, fast in times) and all(not slow.bound for slow, _ in times[:-1])
    wider = known and all(after > before for before, after in pairwise(gaps))
    larger = known and ratios[-1].mean > ratios[0].mean
    text = f"{label(others[0])} {' → '.join(map(_signed, gaps))}, {' → '.join(map(str, ratios))}"
    return Scored(text, [float(wider), float(larger)])


def _costs(evidence: Evidence, key: str) -> CutCosts:
    panel = evidence.panel(key)
    if panel is None:
        raise Missing(key)
    return panel.costs


def rising_work(evidence: Evidence, key: str) -> Scored:
    """A device computes more at every deeper cut; scores half if only the last cut costs more than the first."""
    costs = _costs(evidence, key)
    work = costs.forward_flops + costs.backward_flops
    score = trend(ends=bool(work[-1] > work[0]), against=bool((np.diff(work) <= 0).any()))
    return Scored(f"{work[0] / 1e6:,.1f} MFLOP at cut 1, {work[-1] / 1e6:,.0f} at cut {work.size}", [score])


def falling_traffic(evidence: Evidence, key: str) -> Scored:
    """In nine of ten pairs of cuts, the deeper one sends no more; scores half if in half of the pairs."""
    bits = _costs(evidence, key).activation_bits
    shallow, deep = np.triu_indices(bits.size, 1)
    share = float((bits[deep] <= bits[shallow]).mean())
    rises = int((np.diff(bits) > 0).sum())
    monotone = "it never rises" if not rises else f"not monotone: {rises} of {bits.size - 1} steps rise"
    text = f"{bits[0] / 8e3:.3g} kB at cut 1, {bits[-1] / 8e3:.3g} kB at cut {bits.size}"
    score = 1.0 if share >= 0.9 else 0.5 if share >= 0.5 else 0.0
    return Scored(f"{text}; no more in {100 * share:.0f} % of pairs; {monotone}", [score])
