"""Comparisons of runs that allow for noise: times to one accuracy, accuracies in points, trends.

Every comparison is made seed by seed; its value is the mean over seeds, its spread their standard deviation.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from adaptsfl.report.series import spread
from adaptsfl.reproduce.numbers import Evidence, common_target, converged_accuracy, finished, label_of, time_to
from adaptsfl.runs.folder import Run

POINTS = 1.0  # accuracies that differ by less count as equal
TIMES = 0.05  # times that differ by a smaller share count as equal

Bound = Literal["", ">", "<", "?"]
IN_POINTS, IN_PERCENT = " points", " %"
_DECIMALS = {IN_POINTS: 2, IN_PERCENT: 1}

Seeds = Mapping[int, Run]  # runs that differ in their seed only


class Missing(Exception):
    """Runs that a claim needs are missing; the message names them."""


def seeds_of(evidence: Evidence, key: str, policy: str, fleet: str = "") -> Seeds:
    """Return the runs of one policy in figure/panel, and of one fleet of a sweep, by seed. All must have finished."""
    runs = {run.seed: run for run in evidence.of(key, policy=policy, fleet=fleet)}
    if not runs or not all(map(finished, runs.values())):
        name = " ".join(part for part in (key, policy, fleet and f"at {fleet}") if part)
        raise Missing(f"{name} (unfinished)" if runs else name)
    return runs


def along(evidence: Evidence, key: str, policy: str) -> list[Seeds]:
    """Return the runs of a policy at every point of a sweep, from left to right; one entry if a panel has no sweep."""
    panel = evidence.panel(key)
    fleets = ("",) if panel is None or panel.sweep is None else panel.sweep.fleets
    found = [seeds_of(evidence, key, policy, fleet) for fleet in fleets]
    if len({frozenset(seeds) for seeds in found}) > 1:
        raise Missing(f"{key} {policy}, some seeds at some points")
    return found


def label(runs: Seeds) -> str:
    """Return the label of the runs' policy in legends."""
    return label_of(next(iter(runs.values())))


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
    bound: Bound = ""
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
        """Whether the number is known to be at least `value`."""
        return self.bound in ("", ">") and self.mean >= value


def _decimals(value: float) -> int:
    """Return the number of decimals that gives three significant figures, at most six."""
    return 2 if abs(value) < 1e-6 else min(max(2 - math.floor(math.log10(abs(value))), 0), 6)


def points(first: Seeds, second: Seeds) -> Number:
    """Return the converged accuracy of the first minus that of the second, in points."""
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
    """Return the accuracy to which the times of these runs are compared."""
    return common_target(runs.values() for runs in compared)


def time_ratio(slow: Seeds, fast: Seeds, target: float) -> Number:
    """Return the time of `slow` to an accuracy over that of `fast`.

    A run that never reaches it takes longer than its whole time, which bounds the ratio.
    """
    seeds = _common(slow, fast)
    times = [(time_to(slow[s], target), time_to(fast[s], target)) for s in seeds]
    missed = any(long is None for long, _ in times), any(short is None for _, short in times)
    bound: Bound = "?" if all(missed) else ">" if missed[0] else "<" if missed[1] else ""
    ratios = [
        (slow[s].time_s if long is None else long) / (fast[s].time_s if short is None else short)
        for s, (long, short) in zip(seeds, times, strict=True)
    ]
    return Number(*spread(ratios), bound=bound, unit="×")


def slowdowns(slow: Sequence[Seeds], fast: Sequence[Seeds]) -> list[Number]:
    """Return the time ratios at every point of a sweep, to the common accuracy of all these runs."""
    target = target_of(*slow, *fast)
    ratios = [time_ratio(*pair, target) for pair in zip(slow, fast, strict=True)]
    return [replace(ratio, unit=f"× {to_accuracy(target)}") for ratio in ratios]


def slowdown(slow: Seeds, fast: Seeds) -> Number:
    """Return the time of `slow` over that of `fast`, to the common accuracy of both."""
    return slowdowns([slow], [fast])[0]


def to_accuracy(target: float) -> str:
    """Return an accuracy as a remark in parentheses: (to 53.4 %)."""
    return f"(to {100 * target:.3g} %)"


def longer(ratio: Number) -> bool:
    """Whether a ratio of times lies above 1 by more than noise: a twentieth, and the seeds' spread."""
    return ratio.reaches(1 + TIMES) and ratio.mean > 1 + (ratio.spread or 0.0)


def mean_seconds(runs: Seeds, target: float) -> Number:
    """Return the virtual seconds to an accuracy; those of the whole run, as a bound, if it is never reached."""
    times = [time_to(run, target) for run in runs.values()]
    known = [run.time_s if found is None else found for found, run in zip(times, runs.values(), strict=True)]
    return Number(*spread(known), bound=">" if None in times else "", unit=" s")


def _common(first: Seeds, second: Seeds) -> list[int]:
    if set(first) != set(second):
        raise Missing("some seeds of those that are compared")
    return list(first)


def trend(*, ends: bool, against: bool) -> float:
    """Score a trend: 1 if the ends show it and no step goes against it, half if only the ends show it."""
    return 0.0 if not ends else 0.5 if against else 1.0


def reaches_printed(value: Number, number: float, *, direction: float) -> float:
    """Score a value: 1 if it reaches the printed number, half if it only exceeds `direction`, else 0."""
    return 1.0 if value.reaches(number) else 0.5 if value.bound in ("", ">") and value.mean > direction else 0.0
