"""What the paper claims in Sections I and VII, in its order, as one table; and the judge who tries every row of it.

A row names the panels in which the claim is tried and the kind of comparison; `compare` has the tolerances.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from adaptsfl.report.series import OURS
from adaptsfl.reproduce import comparisons
from adaptsfl.reproduce.compare import Missing
from adaptsfl.reproduce.comparisons import FAIRLY_STEADY, LEAST_LOSS, SLIGHTLY, STEADY, Scored
from adaptsfl.reproduce.numbers import Evidence

Verdict = Literal["holds", "holds in part", "does not hold", "not tried"]


class Comparison(NamedTuple):
    """In which panels (figure/panel) what is compared, and how; `given` are the further arguments of `kind`."""

    panels: Sequence[str]
    kind: Callable[..., Scored]
    given: Sequence[Any] = ()


@dataclass(frozen=True)
class Claim:
    """A claim of the paper.

    Attributes:
        name: short, for findings and links.
        figure: the paper's.
        claim: in our words.
        criterion: what decides.
        paper: its number, or a dash.
        trained: whether runs decide; else costs do.
        everywhere: whether one comparison that fails refutes all of it.
    """

    name: str
    figure: str
    claim: str
    criterion: str
    comparison: Comparison
    paper: str = "–"
    trained: bool = True
    everywhere: bool = False


@dataclass(frozen=True)
class JudgedClaim:
    """A claim, and what became of it.

    Attributes:
        measured: with the spread over seeds; one line per panel.
        note: why it does not hold, or not in full, where a person found the reason.
    """

    claim: Claim
    measured: str
    verdict: Verdict
    note: str = ""


def judge(evidence: Evidence) -> list[JudgedClaim]:
    """Judge every claim by what was run."""
    return [_judged(claim, evidence) for claim in CLAIMS]


def _judged(claim: Claim, evidence: Evidence) -> JudgedClaim:
    """Try a claim in its panels. Where some were not run it holds in part at best."""
    texts, missing = [], []
    scores: list[float] = []
    for key in claim.comparison.panels:
        try:
            scored = claim.comparison.kind(evidence, key, *claim.comparison.given)
        except Missing as error:
            missing.append(str(error))
            continue
        texts.append(f"{key}: {scored.measured}" if claim.trained else scored.measured)
        scores += scored.scores
    if missing:
        texts.append(f"not run: {', '.join(missing)}")
    verdict = "does not hold" if claim.everywhere and 0 in scores else verdict_of(scores)
    return JudgedClaim(claim, "\n".join(texts), "holds in part" if missing and verdict == "holds" else verdict)


def verdict_of(scores: Sequence[float]) -> Verdict:
    """Return what scores add up to: all as claimed, at least half of it, or less."""
    if not scores:
        return "not tried"
    if min(scores) == 1:
        return "holds"
    return "holds in part" if sum(scores) >= len(scores) / 2 else "does not hold"


INTERVALS = [f"fixed@I={interval}" for interval in (1, 5, 15, 25)]
CUTS = [f"fixed@L_c={cut}" for cut in (2, 4, 8, 12)]
BENCHMARKS = ("rma+ms", "ma+rms", "rma+rms", "dama+rms", "rma+ams")
PLANNED_CUTS, RANDOM_CUTS = (OURS, "rma+ms", "rma+ams"), ("ma+rms", "dama+rms", "rma+rms")
SIX = (*PLANNED_CUTS, *RANDOM_CUTS)
ACCURACY = [f"accuracy/{name}" for name in ("cifar10-iid", "cifar10-noniid", "cifar100-iid", "cifar100-noniid")]
RESOURCES = ["compute/devices", "compute/server", "communication/uplink", "communication/inter-server"]
DEVICES = ["devices/iid", "devices/noniid"]
INTERVAL = ["ablation-interval/iid", "ablation-interval/noniid"]
CUT = ["ablation-cut/iid", "ablation-cut/noniid"]
HALF = "in part if at least half of these comparisons do"
TWO_RATIOS = (
    "Two comparisons of MA+RMS with RMA+MS: points of converged accuracy that each loses on AdaptSFL (a loss under "
    f"{LEAST_LOSS} points counts as {LEAST_LOSS}), and their times to the common accuracy, one over the other. Holds "
    "if both reach the printed number; a ratio above 1 that does not counts half; in part if that makes at least half."
)

CLAIMS: tuple[Claim, ...] = (
    Claim(
        "interval-accuracy-by-epoch",
        "Fig. 2",
        "The more rounds pass between two aggregations, the lower the accuracy after as many epochs.",
        "Converged accuracy for I = 1, 5, 15, 25 after equally many rounds. Holds if it falls from the first to the "
        "last and rises nowhere between; in part if it falls from the first to the last only.",
        Comparison(("motivation-interval/epochs",), comparisons.falling_accuracy, INTERVALS),
    ),
    Claim(
        "interval-accuracy-by-aggregation",
        "Fig. 2",
        "The more rounds pass between two aggregations, the higher the accuracy after as many aggregations.",
        "Accuracy after as many aggregations as I = 25 had in all. Holds if it rises from I = 1 to 25 and falls "
        "nowhere between; in part if it rises from the first to the last only.",
        Comparison(("motivation-interval/epochs",), comparisons.rising_accuracy_by_aggregation, INTERVALS),
    ),
    Claim(
        "computing-by-cut",
        "Fig. 3",
        "The deeper the model is split, the more a device computes.",
        "Work of a device per sample, forward and backward, at every cut. Holds if it rises from each cut to the "
        "next; in part if it is larger at the last than at the first.",
        Comparison(("motivation-cut/overhead",), comparisons.rising_work),
        trained=False,
    ),
    Claim(
        "communication-by-cut",
        "Fig. 3",
        "The deeper a convolutional network is split, the less has to be sent per sample: not always, but often.",
        "Activations of every cut, every two cuts compared. Holds if the deeper one sends no more in 90 % of the "
        "pairs; in part in half of them.",
        Comparison(("motivation-cut/overhead",), comparisons.falling_traffic),
        trained=False,
    ),
    Claim(
        "accuracy-by-cut",
        "Fig. 3",
        "With data that are not IID, the deeper the model is split, the lower the accuracy after as many epochs.",
        "Converged accuracy for L_c = 2, 4, 8, 12. Holds if it falls from the first to the last and rises nowhere "
        "between; in part if it falls from the first to the last only.",
        Comparison(("motivation-cut/epochs",), comparisons.falling_accuracy, CUTS),
    ),
    Claim(
        "fastest-of-six",
        "Fig. 5",
        "AdaptSFL converges sooner than the five benchmarks, on both datasets, IID or not.",
        "In each of the four panels AdaptSFL reaches the common accuracy sooner than each other. Holds if all do; "
        f"{HALF}.",
        Comparison(ACCURACY, comparisons.sooner, SIX[1:]),
    ),
    Claim(
        "most-accurate-of-six",
        "Fig. 5",
        "AdaptSFL is more accurate than the five benchmarks once they have converged, on both datasets, IID or not.",
        "In each of the four panels no other's converged accuracy is above AdaptSFL's; equal counts. Holds if none "
        f"is; {HALF}.",
        Comparison(ACCURACY, comparisons.as_accurate, SIX[1:]),
    ),
    Claim(
        "planned-cuts-before-random-cuts",
        "Fig. 5",
        "Those that choose the cuts by resources (AdaptSFL, RMA+MS, RMA+AMS) converge much sooner than those that "
        "draw them (MA+RMS, DAMA+RMS, RMA+RMS).",
        "In each panel each of the three reaches the common accuracy sooner than each of the other three. Holds if "
        f"all nine pairs of all panels do; {HALF}.",
        Comparison(ACCURACY, comparisons.each_sooner, (PLANNED_CUTS, RANDOM_CUTS)),
    ),
    Claim(
        "planned-interval-saves-time",
        "Fig. 5",
        "Choosing the interval as well saves further time over RMA+MS and RMA+AMS, at no cost in accuracy.",
        "In each panel AdaptSFL reaches the common accuracy sooner than either, which is not more accurate. Holds if "
        f"both comparisons of all panels say so; {HALF}.",
        Comparison(ACCURACY, comparisons.ahead, ("rma+ms", "rma+ams")),
    ),
    Claim(
        "noniid-is-slower",
        "Fig. 5",
        "AdaptSFL and all benchmarks converge more slowly with data that are not IID.",
        "Each of the six takes longer to the accuracy that it reaches with both kinds of data, on both datasets. "
        f"Holds if all do; {HALF}.",
        Comparison(ACCURACY[1::2], comparisons.slower_than_iid, SIX),
    ),
    Claim(
        "cuts-matter-more",
        "Fig. 6",
        "Choosing the cuts matters more than choosing the interval.",
        "MA+RMS takes longer to the common accuracy than RMA+MS, and is not more accurate; one of the two, by more "
        f"than noise, counts half. Holds if it is so in each panel; {HALF}.",
        Comparison(ACCURACY, comparisons.worse, (("ma+rms", "rma+ms"),)),
    ),
    Claim(
        "harm-of-random-cuts",
        "Fig. 6",
        "On CIFAR-10, IID, cuts drawn at random (MA+RMS) cost accuracy and make convergence almost five times as long.",
        "Two comparisons: loss of converged accuracy, and time to the common accuracy over AdaptSFL's. Holds if at "
        "least 1.5 points are lost and the time is at least 4.5-fold; a loss or a longer time that is smaller counts "
        "half; in part if that makes at least half.",
        Comparison(
            ACCURACY[:1], comparisons.gain, ("ma+rms", "{points} lost, time {times}", {ACCURACY[0]: (1.5, 4.5)})
        ),
        paper="1.5 points; almost 5×",
    ),
    Claim(
        "cuts-over-interval-iid",
        "Fig. 6",
        "On CIFAR-10, IID, random cuts do several times the harm of random intervals, in accuracy and in time.",
        TWO_RATIOS,
        Comparison(ACCURACY[:1], comparisons.more_harm, ("ma+rms", "rma+ms", 6.2, 4.6)),
        paper="6.2× and 4.6×",
    ),
    Claim(
        "cuts-over-interval-noniid",
        "Fig. 6",
        "With data that are not IID, random cuts do even more harm compared with random intervals.",
        TWO_RATIOS,
        Comparison(ACCURACY[1:2], comparisons.more_harm, ("ma+rms", "rma+ms", 7.3, 10.0)),
        paper="about 7.3× and 10×",
    ),
    Claim(
        "nothing-optimised",
        "Fig. 6",
        "Against RMA+RMS, which chooses nothing, AdaptSFL converges many times sooner and is no less accurate.",
        "Time of RMA+RMS to the common accuracy over AdaptSFL's, the least of the panels. Holds if it is at least "
        "7.7 and AdaptSFL is nowhere less accurate; in part if it is longer in every panel.",
        Comparison(ACCURACY, comparisons.many_times_sooner, ("rma+rms",)),
        paper="≥ 7.7×",
        everywhere=True,
    ),
    Claim(
        "heuristics-are-worse",
        "Fig. 6",
        "Rules of thumb do worse than plans made for convergence: RMA+AMS converges later and to less accuracy than "
        "RMA+MS, and DAMA+RMS than MA+RMS.",
        "Each of the two takes longer to the common accuracy, and is not more accurate; one of the two, by more than "
        f"noise, counts half. Holds if both are so in each panel; {HALF}.",
        Comparison(ACCURACY, comparisons.worse, (("rma+ams", "rma+ms"), ("dama+rms", "ma+rms"))),
    ),
    Claim(
        "fastest-with-any-resources",
        "Figs. 7, 8",
        "However much computing power and bandwidth there is, AdaptSFL converges much sooner than the five benchmarks.",
        "At each point of the four sweeps AdaptSFL reaches the common accuracy sooner than each other. Holds if all "
        f"do; {HALF}.",
        Comparison(RESOURCES, comparisons.sooner, BENCHMARKS),
    ),
    Claim(
        "robust-to-resources",
        "Figs. 7, 8",
        "As resources shrink, AdaptSFL's time rises only slightly, that of RMA+RMS noticeably.",
        "Times to the common accuracy at the poorest point of a sweep over those at its richest. Holds if, in each "
        f"of the four, AdaptSFL's rises by {100 * SLIGHTLY:.0f} % at most, and by less than that of RMA+RMS both as a "
        f"share and in seconds. Three comparisons each; {HALF}.",
        Comparison(RESOURCES, comparisons.slight_rise, ("rma+rms",)),
    ),
    Claim(
        "one-of-two-lies-between",
        "Figs. 7, 8",
        "Choosing only the cuts (RMA+MS) or only the interval (MA+RMS) softens the rise: both lie between AdaptSFL "
        "and RMA+RMS.",
        "At each point of the four sweeps each of the two takes no less time to the common accuracy than AdaptSFL, "
        f"and no more than RMA+RMS; equal counts. Holds if all do; {HALF}.",
        Comparison(RESOURCES, comparisons.between, (("rma+ms", "ma+rms"), "rma+rms")),
    ),
    Claim(
        "robust-to-measurement-errors",
        "Fig. 9",
        "Errors in what is measured of computing power and uplinks change AdaptSFL's time but little.",
        "AdaptSFL's longest time to the common accuracy over its shortest, over all errors of a sweep. Holds if it "
        f"is at most {STEADY:g} in both; up to {FAIRLY_STEADY:g} counts half; in part if that makes at least half.",
        Comparison(("uncertainty/compute", "uncertainty/uplink"), comparisons.steady),
    ),
    Claim(
        "fastest-with-any-devices",
        "Fig. 10",
        "With any number of devices AdaptSFL takes much less time than RMA+MS, MA+RMS and RMA+RMS.",
        "At each number of devices, IID or not, AdaptSFL reaches the common accuracy sooner than each other. Holds "
        f"if all do; {HALF}.",
        Comparison(DEVICES, comparisons.sooner, BENCHMARKS[:3]),
    ),
    Claim(
        "gap-grows-with-devices",
        "Fig. 10",
        "The more devices, the larger the gap between AdaptSFL and every benchmark.",
        "Times to the common accuracy. For each benchmark, IID or not, its delay against AdaptSFL in seconds grows "
        "with every step in the number of devices, and its time over AdaptSFL's is larger at the most devices than "
        f"at the fewest. Holds if all do; {HALF}.",
        Comparison(DEVICES, comparisons.widening_gap, BENCHMARKS[:3]),
    ),
    Claim(
        "noniid-is-slower-with-any-devices",
        "Fig. 10",
        "With data that are not IID everything takes longer, with any number of devices.",
        "Each policy at each number of devices takes longer to the accuracy that it reaches with both kinds of data. "
        f"Holds if all do; {HALF}.",
        Comparison(DEVICES[1:], comparisons.slower_than_iid, (OURS, *BENCHMARKS[:3])),
    ),
    Claim(
        "psl-is-worst",
        "Fig. 11",
        "PSL, which never averages the devices' layers, converges last and to the lowest accuracy.",
        "IID or not, PSL takes longer to the common accuracy than each of AdaptSFL, I = 1 and I = 15, and is not "
        f"more accurate; one of the two, by more than noise, counts half. Holds if all are so; {HALF}.",
        Comparison(INTERVAL, comparisons.worse, (("psl", OURS), ("psl", "sfl"), ("psl", "fixed@I=15"))),
    ),
    Claim(
        "adaptive-interval-over-psl",
        "Fig. 11",
        "With an adaptive interval, converged accuracy is higher than PSL's, more so where data are not IID.",
        "Points of converged accuracy over PSL. Holds if they reach the printed number, IID and not; fewer count "
        "half; in part if that makes at least half.",
        Comparison(
            INTERVAL,
            comparisons.gain,
            ("psl", "converged accuracy {points} against PSL", {INTERVAL[0]: (1.5, None), INTERVAL[1]: (5.1, None)}),
        ),
        paper="1.5 and 5.1 points",
    ),
    Claim(
        "adaptive-interval-over-every-round",
        "Fig. 11",
        "An adaptive interval converges almost twice as fast as averaging after every round.",
        "Time to the common accuracy with I = 1 over that of the adaptive interval. Holds if it reaches the printed "
        "number, IID and not; less, but longer, counts half; in part if that makes at least half.",
        Comparison(
            INTERVAL, comparisons.gain, ("sfl", "time {times}", {INTERVAL[0]: (None, 1.8), INTERVAL[1]: (None, 1.9)})
        ),
        paper="1.8× and 1.9×",
    ),
    Claim(
        "adaptive-interval-keeps-accuracy",
        "Fig. 11",
        "An adaptive interval is about as accurate as averaging after every round.",
        f"IID or not, converged accuracy is not below that of I = 1; equal counts. Holds if both are so; {HALF}.",
        Comparison(INTERVAL, comparisons.as_accurate, ("sfl",)),
    ),
    Claim(
        "deeper-is-less-accurate",
        "Fig. 12",
        "The deeper all models are split, the lower the accuracy.",
        "Converged accuracy for L_c = 2, 4, 8, 12, IID and not. Holds if it falls from the first to the last and "
        "rises nowhere between; falling from the first to the last only counts half; in part if that makes at least "
        "half.",
        Comparison(CUT, comparisons.falling_accuracy, CUTS),
    ),
    Claim(
        "deeper-is-slower",
        "Fig. 12",
        "The deeper all models are split, the slower the convergence.",
        "Time to the common accuracy for L_c = 2, 4, 8, 12, IID and not. Holds if it rises from the first to the "
        "last and falls nowhere between; rising from the first to the last only counts half; in part if that makes "
        "at least half.",
        Comparison(CUT, comparisons.rising_time, CUTS),
    ),
    Claim(
        "depth-matters-more-for-noniid",
        "Fig. 12",
        "Where data are not IID, the depth of the split matters more, for accuracy and for speed.",
        "From L_c = 2 to 12: points of converged accuracy lost, and time to the common accuracy of one over that of "
        f"the other. Holds if both are larger for data that are not IID; {HALF}.",
        Comparison(CUT[1:], comparisons.more_with_noniid, (CUTS[0], CUTS[-1])),
    ),
    Claim(
        "adaptive-cuts-are-fastest",
        "Fig. 12",
        "Cuts chosen for each device converge sooner than any cut that is the same for all, at no cost in accuracy.",
        "IID or not, AdaptSFL with I = 15 reaches the common accuracy sooner than each of L_c = 2, 4, 8, 12, and is "
        f"not less accurate than it. Holds if all are so; {HALF}.",
        Comparison(CUT, comparisons.ahead, CUTS),
    ),
)
