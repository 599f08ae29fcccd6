"""Section VII-B, Figs. 7 to 10: resources, errors in measuring them, and the number of devices."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Literal

from adaptsfl.report.series import OURS
from adaptsfl.reproduce.claims.claim import HALF, Claims, Judged, label, listed, together
from adaptsfl.reproduce.compare import (
    TIMES,
    Missing,
    Number,
    Seeds,
    Tried,
    longer,
    mean_seconds,
    over_panels,
    seeds_of,
    slowdown,
    target_of,
    time_ratio,
    to_accuracy,
)
from adaptsfl.reproduce.numbers import Evidence

CLAIMS = Claims()

RESOURCES = ["compute/devices", "compute/server", "communication/uplink", "communication/inter-server"]
ERRORS = ["uncertainty/compute", "uncertainty/uplink"]
DEVICES = ["devices/iid", "devices/noniid"]
FIVE = ("rma+ms", "ma+rms", "rma+rms", "dama+rms", "rma+ams")
THREE = FIVE[:3]
SLIGHTLY = 0.5  # a time that rises by half at most, from the richest to the poorest point of a sweep
STEADY, FAIRLY_STEADY = 1.1, 1.25  # the longest time over the shortest


def _along(evidence: Evidence, key: str, policy: str) -> list[Seeds]:
    """Return the runs of a policy at every point of a sweep, from left to right."""
    panel = evidence.panel(key)
    if panel is None or panel.sweep is None:
        raise Missing(key)
    along = [seeds_of(evidence, key, policy, fleet) for fleet in panel.sweep.fleets]
    if len({frozenset(seeds) for seeds in along}) > 1:
        raise Missing(f"{key} {policy}, some seeds at some points")
    return along


def _ratios_along(evidence: Evidence, key: str, policy: str, other: str = OURS) -> list[Number]:
    """Return the ratio of two policies' times to one accuracy for the whole sweep, at every point."""
    runs, others = _along(evidence, key, policy), _along(evidence, key, other)
    target = target_of(*runs, *others)
    ratios = [time_ratio(slow, fast, target) for slow, fast in zip(runs, others, strict=True)]
    return [replace(ratio, unit=f"× {to_accuracy(target)}") for ratio in ratios]


def _fastest_along(evidence: Evidence, key: str, policies: Sequence[str]) -> Tried:
    ratios = {policy: _ratios_along(evidence, key, policy) for policy in policies}
    closest = {policy: min(along, key=lambda ratio: ratio.mean) for policy, along in ratios.items()}
    runs = {policy: _along(evidence, key, policy)[0] for policy in policies}
    text = f"time over AdaptSFL's, the least of all points: {listed(runs, closest)}"
    return Tried(text, [float(longer(ratio)) for along in ratios.values() for ratio in along])


@CLAIMS.add(
    "Figs. 7, 8",
    f"At each point of the four sweeps AdaptSFL reaches the common accuracy sooner than each other. Holds if all do; "
    f"{HALF}.",
)
def fastest_with_any_resources(evidence: Evidence) -> Judged:
    """However much computing power and bandwidth there is, AdaptSFL converges much sooner than the five benchmarks."""
    return over_panels(RESOURCES, lambda key: _fastest_along(evidence, key, FIVE))


@CLAIMS.add(
    "Figs. 7, 8",
    "Times to the common accuracy at the poorest point of a sweep over those at its richest. Holds if, in each of the "
    f"four, AdaptSFL's rises by {100 * SLIGHTLY:.0f} % at most, and by less than that of RMA+RMS both as a share and "
    f"in seconds. Three comparisons each; {HALF}.",
)
def robust_to_resources(evidence: Evidence) -> Judged:
    """As resources shrink, AdaptSFL's time rises only slightly, that of RMA+RMS noticeably."""

    def one(key: str) -> Tried:
        ours, random = _along(evidence, key, OURS), _along(evidence, key, "rma+rms")
        target = target_of(*ours, *random)
        share, other = (time_ratio(runs[0], runs[-1], target) for runs in (ours, random))  # richest last
        more, other_more = (_more_seconds(runs, target) for runs in (ours, random))
        exact = share.bound == "" and other.bound in ("", ">")
        scores = [
            exact and share.mean <= 1 + SLIGHTLY,
            exact and share.mean * (1 + TIMES) < other.mean,
            exact and more < other_more,
        ]
        text = f"AdaptSFL {share}, {_signed(more)}; RMA+RMS {other}, {_signed(other_more)}"
        return Tried(f"time {to_accuracy(target)}, poorest over richest: {text}", [float(score) for score in scores])

    return over_panels(RESOURCES, one)


def _signed(time_s: float) -> str:
    return f"{'+' if time_s >= 0 else ''}{Number(time_s, unit=' s')}"


def _more_seconds(runs: Sequence[Seeds], target: float) -> float:
    return mean_seconds(runs[0], target).mean - mean_seconds(runs[-1], target).mean


@CLAIMS.add(
    "Figs. 7, 8",
    "At each point of the four sweeps each of the two takes no less time to the common accuracy than AdaptSFL, and no "
    f"more than RMA+RMS; equal counts. Holds if all do; {HALF}.",
)
def one_of_two_lies_between(evidence: Evidence) -> Judged:
    """Choosing only the cuts (RMA+MS) or only the interval (MA+RMS) softens the rise: both lie between AdaptSFL and
    RMA+RMS.
    """

    def one(key: str) -> Tried:
        scores, texts = [], []
        for policy in ("rma+ms", "ma+rms"):
            above, below = _ratios_along(evidence, key, policy), _ratios_along(evidence, key, "rma+rms", policy)
            inside = [_not_shorter(a) and _not_shorter(b) for a, b in zip(above, below, strict=True)]
            scores += [float(point) for point in inside]
            texts.append(f"{label(_along(evidence, key, policy)[0])} between at {sum(inside)} of {len(inside)} points")
        return Tried(", ".join(texts), scores)

    return over_panels(RESOURCES, one)


def _not_shorter(ratio: Number) -> bool:
    return ratio.reaches(1 - max(TIMES, ratio.spread or 0.0))


@CLAIMS.add(
    "Fig. 9",
    f"AdaptSFL's longest time to the common accuracy over its shortest, over all errors of a sweep. Holds if it is at "
    f"most {STEADY:g} in both; up to {FAIRLY_STEADY:g} counts half; in part if that makes at least half.",
)
def robust_to_measurement_errors(evidence: Evidence) -> Judged:
    """Errors in what is measured of computing power and uplinks change AdaptSFL's time but little."""

    def one(key: str) -> Tried:
        runs = _along(evidence, key, OURS)
        target = target_of(*runs)
        times = [mean_seconds(seeds, target) for seeds in runs]
        shortest, longest = (pick(times, key=lambda time_s: time_s.mean) for pick in (min, max))
        # A time of which only a bound is known leaves the ratio open.
        bound: Literal["", ">", "?"] = "?" if shortest.bound else ">" if any(time_s.bound for time_s in times) else ""
        ratio = Number(longest.mean / shortest.mean, bound=bound, unit="×")
        score = 0.0 if bound else 1.0 if ratio.mean <= STEADY else 0.5 if ratio.mean <= FAIRLY_STEADY else 0.0
        return Tried(f"time {to_accuracy(target)} from {shortest} to {longest}: {ratio}", [score])

    return over_panels(ERRORS, one)


@CLAIMS.add(
    "Fig. 10",
    f"At each number of devices, IID or not, AdaptSFL reaches the common accuracy sooner than each other. Holds if all "
    f"do; {HALF}.",
)
def fastest_with_any_devices(evidence: Evidence) -> Judged:
    """With any number of devices AdaptSFL takes much less time than RMA+MS, MA+RMS and RMA+RMS."""
    return over_panels(DEVICES, lambda key: _fastest_along(evidence, key, THREE))


@CLAIMS.add(
    "Fig. 10",
    "Times to the common accuracy. For each benchmark, IID or not, its delay against AdaptSFL in seconds grows with "
    "every step in the number of devices, and its time over AdaptSFL's is larger at the most devices than at the "
    f"fewest. Holds if all do; {HALF}.",
)
def gap_grows_with_devices(evidence: Evidence) -> Judged:
    """The more devices, the larger the gap between AdaptSFL and every benchmark."""

    def one(key: str) -> Tried:
        parts = [_gap(_along(evidence, key, OURS), _along(evidence, key, policy)) for policy in THREE]
        return together(*parts)

    return over_panels(DEVICES, one)


def _gap(ours: Sequence[Seeds], others: Sequence[Seeds]) -> Tried:
    target = target_of(*ours, *others)
    ratios = [time_ratio(slow, fast, target) for slow, fast in zip(others, ours, strict=True)]
    times = [(mean_seconds(slow, target), mean_seconds(fast, target)) for slow, fast in zip(others, ours, strict=True)]
    gaps = [slow.mean - fast.mean for slow, fast in times]
    # A least time at the end of a step is enough to know that a gap grows, but not at its beginning.
    known = all(not fast.bound for _, fast in times) and all(not slow.bound for slow, _ in times[:-1])
    wider = known and all(after > before for before, after in pairwise(gaps))
    larger = known and ratios[-1].mean > ratios[0].mean
    text = f"{label(others[0])} {' → '.join(f'{_signed(gap)}' for gap in gaps)}, {' → '.join(map(str, ratios))}"
    return Tried(text, [float(wider), float(larger)])


@CLAIMS.add(
    "Fig. 10",
    f"Each policy at each number of devices takes longer to the accuracy that it reaches with both kinds of data. "
    f"Holds if all do; {HALF}.",
)
def noniid_is_slower_with_any_devices(evidence: Evidence) -> Judged:
    """With data that are not IID everything takes longer, with any number of devices."""
    iid, noniid = DEVICES

    def one(key: str) -> Tried:
        ratios: list[Number] = []
        for policy in (OURS, *THREE):
            both = zip(_along(evidence, noniid, policy), _along(evidence, iid, policy), strict=True)
            ratios += [slowdown(slow, fast) for slow, fast in both]
        slower = [float(longer(ratio)) for ratio in ratios]
        least = min(ratios, key=lambda ratio: ratio.mean)
        return Tried(f"longer in {sum(slower):.0f} of {len(slower)} cases, the closest {least}", slower)

    return over_panels([noniid], one)
