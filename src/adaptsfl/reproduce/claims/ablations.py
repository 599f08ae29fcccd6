"""Section VII-C, Figs. 11 and 12: the interval alone, and the cuts alone."""

from adaptsfl.report.series import OURS
from adaptsfl.reproduce.claims.claim import (
    CUTS,
    HALF,
    Claims,
    Judged,
    all_of,
    falling,
    listed,
    ours_ahead,
    ours_as_accurate,
    together,
    worse,
)
from adaptsfl.reproduce.compare import (
    TIMES,
    Number,
    Tried,
    mean_seconds,
    over_panels,
    points,
    printed,
    rising_time,
    seeds_of,
    slowdown,
    target_of,
    to_accuracy,
)
from adaptsfl.reproduce.numbers import Evidence

CLAIMS = Claims()

INTERVAL = ["ablation-interval/iid", "ablation-interval/noniid"]
CUT = ["ablation-cut/iid", "ablation-cut/noniid"]


@CLAIMS.add(
    "Fig. 11",
    "IID or not, PSL takes longer to the common accuracy than each of AdaptSFL, I = 1 and I = 15, and is not more "
    f"accurate; one of the two, by more than noise, counts half. Holds if all are so; {HALF}.",
)
def psl_is_worst(evidence: Evidence) -> Judged:
    """PSL, which never averages the devices' layers, converges last and to the lowest accuracy."""
    others = (OURS, "sfl", "fixed@I=15")
    return over_panels(INTERVAL, lambda key: together(*(worse(evidence, key, "psl", other) for other in others)))


@CLAIMS.add(
    "Fig. 11",
    "Points of converged accuracy over PSL. Holds if they reach the printed number, IID and not; fewer count half; in "
    "part if that makes at least half.",
    paper="1.5 and 5.1 points",
)
def adaptive_interval_over_psl(evidence: Evidence) -> Judged:
    """With an adaptive interval, converged accuracy is higher than PSL's, more so where data are not IID."""
    numbers = dict(zip(INTERVAL, (1.5, 5.1), strict=True))

    def one(key: str) -> Tried:
        more = points(seeds_of(evidence, key, OURS), seeds_of(evidence, key, "psl"))
        return Tried(f"converged accuracy {more} against PSL", [printed(more, numbers[key], direction=0.0)])

    return over_panels(INTERVAL, one)


@CLAIMS.add(
    "Fig. 11",
    "Time to the common accuracy with I = 1 over that of the adaptive interval. Holds if it reaches the printed "
    "number, IID and not; less, but longer, counts half; in part if that makes at least half.",
    paper="1.8× and 1.9×",
)
def adaptive_interval_over_every_round(evidence: Evidence) -> Judged:
    """An adaptive interval converges almost twice as fast as averaging after every round."""
    numbers = dict(zip(INTERVAL, (1.8, 1.9), strict=True))

    def one(key: str) -> Tried:
        ratio = slowdown(seeds_of(evidence, key, "sfl"), seeds_of(evidence, key, OURS))
        return Tried(f"time {ratio}", [printed(ratio, numbers[key], direction=1 + TIMES)])

    return over_panels(INTERVAL, one)


@CLAIMS.add(
    "Fig. 11",
    f"IID or not, converged accuracy is not below that of I = 1; equal counts. Holds if both are so; {HALF}.",
)
def adaptive_interval_keeps_accuracy(evidence: Evidence) -> Judged:
    """An adaptive interval is about as accurate as averaging after every round."""
    return over_panels(INTERVAL, lambda key: ours_as_accurate(evidence, key, ["sfl"]))


@CLAIMS.add(
    "Fig. 12",
    "Converged accuracy for L_c = 2, 4, 8, 12, IID and not. Holds if it falls from the first to the last and rises "
    "nowhere between; falling from the first to the last only counts half; in part if that makes at least half.",
)
def deeper_is_less_accurate(evidence: Evidence) -> Judged:
    """The deeper all models are split, the lower the accuracy."""
    return over_panels(CUT, lambda key: falling(all_of(evidence, key, CUTS)))


@CLAIMS.add(
    "Fig. 12",
    "Time to the common accuracy for L_c = 2, 4, 8, 12, IID and not. Holds if it rises from the first to the last and "
    "falls nowhere between; rising from the first to the last only counts half; in part if that makes at least half.",
)
def deeper_is_slower(evidence: Evidence) -> Judged:
    """The deeper all models are split, the slower the convergence."""

    def one(key: str) -> Tried:
        runs = all_of(evidence, key, CUTS)
        target = target_of(*runs.values())
        times = {policy: mean_seconds(seeds, target) for policy, seeds in runs.items()}
        return Tried(f"time {to_accuracy(target)}: {listed(runs, times)}", [rising_time(list(runs.values()))])

    return over_panels(CUT, one)


@CLAIMS.add(
    "Fig. 12",
    "From L_c = 2 to 12: points of converged accuracy lost, and time to the common accuracy of one over that of the "
    f"other. Holds if both are larger for data that are not IID; {HALF}.",
)
def depth_matters_more_for_noniid(evidence: Evidence) -> Judged:
    """Where data are not IID, the depth of the split matters more, for accuracy and for speed."""
    iid, noniid = CUT

    def harm(key: str) -> tuple[Number, Number]:
        shallow, deep = seeds_of(evidence, key, CUTS[0]), seeds_of(evidence, key, CUTS[-1])
        return points(shallow, deep), slowdown(deep, shallow)

    def one(_key: str) -> Tried:
        (lost, slow), (lost_noniid, slow_noniid) = harm(iid), harm(noniid)
        slower = slow.bound in ("", "<") and slow_noniid.bound in ("", ">") and slow_noniid.mean > slow.mean
        text = f"{lost} and {slow} IID, {lost_noniid} and {slow_noniid} not IID"
        return Tried(f"lost, and slower: {text}", [float(lost_noniid.mean > lost.mean), float(slower)])

    return over_panels([noniid], one)


@CLAIMS.add(
    "Fig. 12",
    "IID or not, AdaptSFL with I = 15 reaches the common accuracy sooner than each of L_c = 2, 4, 8, 12, and is not "
    f"less accurate than it. Holds if all are so; {HALF}.",
)
def adaptive_cuts_are_fastest(evidence: Evidence) -> Judged:
    """Cuts chosen for each device converge sooner than any cut that is the same for all, at no cost in accuracy."""
    return over_panels(CUT, lambda key: ours_ahead(evidence, key, CUTS))
