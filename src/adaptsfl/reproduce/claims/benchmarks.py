"""Section VII-B, Figs. 5 and 6: AdaptSFL and the five benchmarks."""

from adaptsfl.report.series import OURS
from adaptsfl.reproduce.claims.claim import (
    HALF,
    Claims,
    Judged,
    all_of,
    listed,
    ours_ahead,
    ours_as_accurate,
    ours_sooner,
    together,
    worse,
)
from adaptsfl.reproduce.compare import (
    TIMES,
    Number,
    Tried,
    longer,
    lower,
    over_panels,
    points,
    printed,
    seeds_of,
    slowdown,
)
from adaptsfl.reproduce.numbers import Evidence

CLAIMS = Claims()

PANELS = [f"accuracy/{name}" for name in ("cifar10-iid", "cifar10-noniid", "cifar100-iid", "cifar100-noniid")]
PLANNED_CUTS = (OURS, "rma+ms", "rma+ams")
RANDOM_CUTS = ("ma+rms", "dama+rms", "rma+rms")
SIX = (*PLANNED_CUTS, *RANDOM_CUTS)
LEAST_LOSS = 0.1  # points: a smaller loss of accuracy is no divisor


@CLAIMS.add(
    "Fig. 5",
    f"In each of the four panels AdaptSFL reaches the common accuracy sooner than each other. Holds if all do; {HALF}.",
)
def fastest_of_six(evidence: Evidence) -> Judged:
    """AdaptSFL converges sooner than the five benchmarks, on both datasets, IID or not."""
    return over_panels(PANELS, lambda key: ours_sooner(evidence, key, SIX[1:]))


@CLAIMS.add(
    "Fig. 5",
    f"In each of the four panels no other's converged accuracy is above AdaptSFL's; equal counts. Holds if none is; "
    f"{HALF}.",
)
def most_accurate_of_six(evidence: Evidence) -> Judged:
    """AdaptSFL is more accurate than the five benchmarks once they have converged, on both datasets, IID or not."""
    return over_panels(PANELS, lambda key: ours_as_accurate(evidence, key, SIX[1:]))


@CLAIMS.add(
    "Fig. 5",
    f"In each panel each of the three reaches the common accuracy sooner than each of the other three. Holds if all "
    f"nine pairs of all panels do; {HALF}.",
)
def planned_cuts_before_random_cuts(evidence: Evidence) -> Judged:
    """Those that choose the cuts by resources (AdaptSFL, RMA+MS, RMA+AMS) converge much sooner than those that draw
    them (MA+RMS, DAMA+RMS, RMA+RMS).
    """

    def one(key: str) -> Tried:
        runs = all_of(evidence, key, SIX)
        ratios = [slowdown(runs[drawn], runs[chosen]) for chosen in PLANNED_CUTS for drawn in RANDOM_CUTS]
        least = min(ratios, key=lambda ratio: ratio.mean)
        right = [float(longer(ratio)) for ratio in ratios]
        return Tried(f"{sum(right):.0f} of 9 pairs sooner, the closest {least}", right)

    return over_panels(PANELS, one)


@CLAIMS.add(
    "Fig. 5",
    f"In each panel AdaptSFL reaches the common accuracy sooner than either, which is not more accurate. Holds if "
    f"both comparisons of all panels say so; {HALF}.",
)
def planned_interval_saves_time(evidence: Evidence) -> Judged:
    """Choosing the interval as well saves further time over RMA+MS and RMA+AMS, at no cost in accuracy."""
    others = PLANNED_CUTS[1:]
    return over_panels(PANELS, lambda key: ours_ahead(evidence, key, others))


@CLAIMS.add(
    "Fig. 5",
    f"Each of the six takes longer to the accuracy that it reaches with both kinds of data, on both datasets. Holds if "
    f"all do; {HALF}.",
)
def noniid_is_slower(evidence: Evidence) -> Judged:
    """AdaptSFL and all benchmarks converge more slowly with data that are not IID."""

    def one(key: str) -> Tried:
        noniid, iid = all_of(evidence, key, SIX), all_of(evidence, key.replace("noniid", "iid"), SIX)
        ratios = {policy: slowdown(noniid[policy], iid[policy]) for policy in SIX}
        scores = [float(longer(ratio)) for ratio in ratios.values()]
        return Tried(f"time over that with IID data: {listed(iid, ratios)}", scores)

    return over_panels([PANELS[1], PANELS[3]], one)


@CLAIMS.add(
    "Fig. 6",
    "MA+RMS takes longer to the common accuracy than RMA+MS, and is not more accurate; one of the two, by more than "
    f"noise, counts half. Holds if it is so in each panel; {HALF}.",
)
def cuts_matter_more(evidence: Evidence) -> Judged:
    """Choosing the cuts matters more than choosing the interval."""
    return over_panels(PANELS, lambda key: worse(evidence, key, "ma+rms", "rma+ms"))


def _harm(evidence: Evidence, key: str, policy: str) -> tuple[Number, Number]:
    """Return what a policy loses on AdaptSFL: points of converged accuracy, and the ratio of times."""
    ours, runs = seeds_of(evidence, key, OURS), seeds_of(evidence, key, policy)
    return points(ours, runs), slowdown(runs, ours)


@CLAIMS.add(
    "Fig. 6",
    "Two comparisons: loss of converged accuracy, and time to the common accuracy over AdaptSFL's. Holds if at least "
    "1.5 points are lost and the time is at least 4.5-fold; a loss or a longer time that is smaller counts half; in "
    "part if that makes at least half.",
    paper="1.5 points; almost 5×",
)
def harm_of_random_cuts(evidence: Evidence) -> Judged:
    """On CIFAR-10, IID, cuts drawn at random (MA+RMS) cost accuracy and make convergence almost five times as long."""

    def one(key: str) -> Tried:
        lost, ratio = _harm(evidence, key, "ma+rms")
        scores = [printed(lost, 1.5, direction=0.0), printed(ratio, 4.5, direction=1 + TIMES)]
        return Tried(f"{lost} lost, time {ratio}", scores)

    return over_panels(PANELS[:1], one)


def _cuts_over_interval(evidence: Evidence, key: str, in_points: float, in_time: float) -> Judged:
    def one(key: str) -> Tried:
        lost, slow = _harm(evidence, key, "ma+rms")
        little, little_slow = _harm(evidence, key, "rma+ms")
        losses = Number(max(lost.mean, 0.0) / max(little.mean, LEAST_LOSS), unit="×")
        slows = slowdown(seeds_of(evidence, key, "ma+rms"), seeds_of(evidence, key, "rma+ms"))
        text = f"loss {lost} against {little}: {losses}; time {slow} against {little_slow}: {slows}"
        return Tried(text, [printed(losses, in_points, direction=1.0), printed(slows, in_time, direction=1 + TIMES)])

    return over_panels([key], one)


_CUTS_OVER_INTERVAL = (
    "Two comparisons of MA+RMS with RMA+MS: points of converged accuracy that each loses on AdaptSFL (a loss under "
    f"{LEAST_LOSS} points counts as {LEAST_LOSS}), and their times to the common accuracy, one over the other. Holds "
    "if both reach the printed number; a ratio above 1 that does not counts half; in part if that makes at least half."
)


@CLAIMS.add(
    "Fig. 6",
    _CUTS_OVER_INTERVAL,
    paper="6.2× and 4.6×",
)
def cuts_over_interval_iid(evidence: Evidence) -> Judged:
    """On CIFAR-10, IID, random cuts do several times the harm of random intervals, in accuracy and in time."""
    return _cuts_over_interval(evidence, PANELS[0], 6.2, 4.6)


@CLAIMS.add(
    "Fig. 6",
    _CUTS_OVER_INTERVAL,
    paper="about 7.3× and 10×",
)
def cuts_over_interval_noniid(evidence: Evidence) -> Judged:
    """With data that are not IID, random cuts do even more harm compared with random intervals."""
    return _cuts_over_interval(evidence, PANELS[1], 7.3, 10.0)


@CLAIMS.add(
    "Fig. 6",
    "Time of RMA+RMS to the common accuracy over AdaptSFL's, the least of the panels. Holds if it is at least 7.7 and "
    "AdaptSFL is nowhere less accurate; in part if it is longer in every panel.",
    paper="≥ 7.7×",
)
def nothing_optimised(evidence: Evidence) -> Judged:
    """Against RMA+RMS, which chooses nothing, AdaptSFL converges many times sooner and is no less accurate."""
    found: list[float] = []

    def one(key: str) -> Tried:
        lost, ratio = _harm(evidence, key, "rma+rms")
        score = 0.0 if not longer(ratio) else 1.0 if ratio.reaches(7.7) and not lower(lost) else 0.5
        found.append(score)
        return Tried(f"time {ratio}, AdaptSFL more accurate by {lost}", [score])

    measured, verdict = over_panels(PANELS, one)
    return measured, verdict if min(found) > 0 else "does not hold"


@CLAIMS.add(
    "Fig. 6",
    "Each of the two takes longer to the common accuracy, and is not more accurate; one of the two, by more than "
    f"noise, counts half. Holds if both are so in each panel; {HALF}.",
)
def heuristics_are_worse(evidence: Evidence) -> Judged:
    """Rules of thumb do worse than plans made for convergence: RMA+AMS converges later and to less accuracy than
    RMA+MS, and DAMA+RMS than MA+RMS.
    """
    pairs = (("rma+ams", "rma+ms"), ("dama+rms", "ma+rms"))
    return over_panels(PANELS, lambda key: together(*(worse(evidence, key, *pair) for pair in pairs)))
