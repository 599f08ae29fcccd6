"""Runs compared, with their noise: times to one accuracy, accuracies in points, trends, and the verdict they add up to.

Every comparison is made seed by seed; its value is the mean over seeds, its spread their standard deviation.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

import numpy as np

from adaptsfl.report.series import spread
from adaptsfl.reproduce.numbers import (
    Evidence,
    common_target,
    converged_accuracy,
    time_to,
)
from adaptsfl.runs.folder import Run

Verdict = Literal["holds", "holds in part", "does not hold", "not tried"]
POINTS = 1.0  # accuracies that differ by less are equal
TIMES = 0.05  # and times, as a share

IN_POINTS, IN_PERCENT = " points", " %"
_DECIMALS = {IN_POINTS: 2, IN_PERCENT: 1}

Seeds = Mapping[int, Run]  # runs that differ in their seed only


class Missing(Exception):
    """Runs that a claim needs and that are not there; the message names them."""


def seeds_of(evidence: Evidence, key: str, policy: str, fleet: str = "") -> Seeds:
    """Return the runs of one policy in figure/panel, and in one fleet of a sweep, by seed: all there, and finished."""
    runs = {run.seed: run for run in evidence.of(key, policy=policy, fleet=fleet)}
    if not runs or not all(run.whole and _evaluated(run) for run in runs.values()):
        name = " ".join(part for part in (key, policy, fleet and f"at {fleet}") if part)
        raise Missing(f"{name} (unfinished)" if runs else name)
    return runs


def _evaluated(run: Run) -> bool:
    return bool(np.isfinite(run.evaluations.accuracies).any())


@dataclass(frozen=True)
class Number:
    """A mean over seeds.

    Attributes:
        spread: the seeds' standard deviation, None for one seed alone.
        bound: ">" where the value is at least the mean, "<" where it is at most the mean, "?" where nothing is known.
        unit: written behind it.
    """

    mean: float
    spread: float | None = None
    bound: Literal["", ">", "<", "?"] = ""
    unit: str = ""

    def __str__(self) -> str:
        if self.bound == "?":
            return "unknown (neither got there)"
        decimals = _DECIMALS.get(self.unit, _decimals(self.mean))
        text = f"{self.mean:{'+' if self.unit == IN_POINTS else ''},.{decimals}f}"
        if self.spread is not None and not self.bound:
            text += f" ± {self.spread:,.{decimals}f}"
        return f"{self.bound} {text}{self.unit}".lstrip()

    def reaches(self, value: float) -> bool:
        """Whether it is known to be at least so much."""
        return self.bound in ("", ">") and self.mean >= value


def _decimals(value: float) -> int:
    """Return how many decimals give three figures, six at most."""
    return 2 if abs(value) < 1e-6 else min(max(2 - math.floor(math.log10(abs(value))), 0), 6)


def points(first: Seeds, second: Seeds) -> Number:
    """Return how many points of converged accuracy the first has more than the second."""
    values = [100 * (converged_accuracy(first[s]) - converged_accuracy(second[s])) for s in _common(first, second)]
    return Number(*spread(values), unit=IN_POINTS)


def accuracy(runs: Seeds) -> Number:
    """Return the converged accuracy in percent."""
    return Number(*spread(100 * converged_accuracy(run) for run in runs.values()), unit=IN_PERCENT)


def less_accurate(first: Seeds, second: Seeds) -> bool:
    """Whether the first is less accurate by more than noise: a point, and the seeds' spread."""
    return lower(points(first, second))


def lower(difference: Number) -> bool:
    """Whether a difference of accuracies lies below zero by more than noise."""
    return difference.mean < -max(POINTS, difference.spread or 0.0)


def target_of(*compared: Seeds) -> float:
    """Return the accuracy to which their times are compared."""
    return common_target(runs.values() for runs in compared)


def time_ratio(slow: Seeds, fast: Seeds, target: float) -> Number:
    """Return how many times the fast one's time the slow one takes to an accuracy.

    A run that never gets there takes longer than all of its time, which bounds the ratio.
    """
    seeds = _common(slow, fast)
    times = [(time_to(slow[s], target), time_to(fast[s], target)) for s in seeds]
    missed = any(long is None for long, _ in times), any(short is None for _, short in times)
    bound: Literal["", ">", "<", "?"] = "?" if all(missed) else ">" if missed[0] else "<" if missed[1] else ""
    ratios = [
        (slow[s].time_s if long is None else long) / (fast[s].time_s if short is None else short)
        for s, (long, short) in zip(seeds, times, strict=True)
    ]
    return Number(*spread(ratios), bound=bound, unit="×")


def slowdown(slow: Seeds, fast: Seeds) -> Number:
    """Return how many times the fast one's time the slow one takes to the accuracy that suits both."""
    target = target_of(slow, fast)
    return replace(time_ratio(slow, fast, target), unit=f"× {to_accuracy(target)}")


def to_accuracy(target: float) -> str:
    """Return an accuracy as a remark."""
    return f"(to {100 * target:.3g} %)"


def longer(ratio: Number) -> bool:
    """Whether a ratio of times lies above 1 by more than noise: a twentieth, and the seeds' spread."""
    return ratio.reaches(1 + TIMES) and ratio.mean > 1 + (ratio.spread or 0.0)


def mean_seconds(runs: Seeds, target: float) -> Number:
    """Return the virtual seconds to an accuracy; at least those of the whole run where it never gets there."""
    times = [time_to(run, target) for run in runs.values()]
    known = [run.time_s if found is None else found for found, run in zip(times, runs.values(), strict=True)]
    return Number(*spread(known), bound=">" if None in times else "", unit=" s")


def _common(first: Seeds, second: Seeds) -> list[int]:
    if set(first) != set(second):
        raise Missing("some seeds of those that are compared")
    return list(first)


def falling_accuracy(series: Sequence[Seeds]) -> float:
    """Return 1 if accuracy falls from the first to the last and rises nowhere between, by more than noise each.

    Half if it falls from the first to the last but rises between, 0 if it does not fall.
    """
    rises = any(less_accurate(before, after) for before, after in pairwise(series))
    return trend(ends=less_accurate(series[-1], series[0]), against=rises)


def rising_time(series: Sequence[Seeds]) -> float:
    """Return the same for times to a common accuracy that rise."""
    target = target_of(*series)
    falls = any(longer(time_ratio(before, after, target)) for before, after in pairwise(series))
    return trend(ends=longer(time_ratio(series[-1], series[0], target)), against=falls)


def trend(*, ends: bool, against: bool) -> float:
    """Return the score of a trend: whether the ends show it, and whether some step goes against it."""
    return 0.0 if not ends else 0.5 if against else 1.0


def printed(value: Number, number: float, *, direction: float) -> float:
    """Return 1 for a value that reaches the printed number, half for one beyond `direction` only, else 0."""
    return 1.0 if value.reaches(number) else 0.5 if value.bound in ("", ">") and value.mean > direction else 0.0


@dataclass(frozen=True)
class Tried:
    """What was measured, and a score for every comparison: 1 as claimed, 0 not, half for the direction alone."""

    measured: str
    scores: Sequence[float]

    @property
    def verdict(self) -> Verdict:
        """All as claimed, at least half of it, or less."""
        if not self.scores:
            return "not tried"
        if min(self.scores) == 1:
            return "holds"
        return "holds in part" if sum(self.scores) >= len(self.scores) / 2 else "does not hold"


def over_panels(keys: Iterable[str], one: Callable[[str], Tried]) -> tuple[str, Verdict]:
    """Try a claim in several panels. Where some were not run it holds in part at best."""
    tried: dict[str, Tried] = {}
    missing = []
    for key in keys:
        try:
            tried[key] = one(key)
        except Missing as error:
            missing.append(str(error))
    if not tried:
        raise Missing(", ".join(missing))
    scores = [score for found in tried.values() for score in found.scores]
    texts = [f"{key}: {found.measured}" for key, found in tried.items()]
    verdict = Tried("", scores).verdict
    if missing:
        texts.append(f"not run: {', '.join(missing)}")
        verdict = "holds in part" if verdict == "holds" else verdict
    return "\n".join(texts), verdict
