"""Section I, Figs. 2 and 3: why the interval and the cuts matter."""

from collections.abc import Mapping
from itertools import pairwise

import numpy as np

from adaptsfl import loading
from adaptsfl.costs import CutCosts
from adaptsfl.report.series import spread
from adaptsfl.reproduce.claims.claim import CUTS, Claims, Judged, all_of, falling, listed
from adaptsfl.reproduce.compare import IN_PERCENT, Missing, Number, Seeds, Tried, lower, over_panels, trend
from adaptsfl.reproduce.numbers import Evidence, aggregations

CLAIMS = Claims()

INTERVALS = [f"fixed@I={interval}" for interval in (1, 5, 15, 25)]


@CLAIMS.add(
    "Fig. 2",
    "Converged accuracy for I = 1, 5, 15, 25 after equally many rounds. Holds if it falls from the first to the last "
    "and rises nowhere between; in part if it falls from the first to the last only.",
)
def interval_accuracy_by_epoch(evidence: Evidence) -> Judged:
    """The more rounds pass between two aggregations, the lower the accuracy after as many epochs."""
    return over_panels(["motivation-interval/epochs"], lambda key: falling(all_of(evidence, key, INTERVALS)))


@CLAIMS.add(
    "Fig. 2",
    "Accuracy after as many aggregations as I = 25 had in all. Holds if it rises from I = 1 to 25 and falls nowhere "
    "between; in part if it rises from the first to the last only.",
)
def interval_accuracy_by_aggregation(evidence: Evidence) -> Judged:
    """The more rounds pass between two aggregations, the higher the accuracy after as many aggregations."""

    def one(key: str) -> Tried:
        runs = all_of(evidence, key, INTERVALS)
        if len({tuple(seeds) for seeds in runs.values()}) > 1:
            raise Missing(f"{key}, some seeds of those that are compared")
        if any(not aggregations(run)[-1] for run in runs[INTERVALS[-1]].values()):
            raise Missing(f"{key} {INTERVALS[-1]} for so long that it is averaged once")
        found = [_accuracies_after(seeds, runs[INTERVALS[-1]]) for seeds in runs.values()]
        steps = [_difference(after, before) for before, after in pairwise(found)]
        rises = lower(_difference(found[0], found[-1]))
        values = [Number(*spread(by_seed.values()), unit=IN_PERCENT) for by_seed in found]
        score = trend(ends=rises, against=any(map(lower, steps)))
        count = aggregations(next(iter(runs[INTERVALS[-1]].values())))[-1]
        return Tried(f"after {count:.0f} aggregations {listed(runs, dict(zip(runs, values, strict=True)))}", [score])

    return over_panels(["motivation-interval/epochs"], one)


def _accuracies_after(runs: Seeds, fewest: Seeds) -> dict[int, float]:
    """Return, by seed, the accuracy in percent after as many aggregations as another policy has at its end.

    At the first evaluation, if that comes later: to the advantage of who averages most.
    """
    found = {}
    for seed, run in runs.items():
        known = np.isfinite(run.evaluations.accuracies)
        allowed = aggregations(fewest[seed])[-1]
        last = int(np.searchsorted(aggregations(run)[known], allowed, side="right")) - 1
        found[seed] = 100 * float(run.evaluations.accuracies[known][max(last, 0)])
    return found


def _difference(first: Mapping[int, float], second: Mapping[int, float]) -> Number:
    return Number(*spread(first[seed] - second[seed] for seed in first))


@CLAIMS.add(
    "Fig. 3",
    "Work of a device per sample, forward and backward, at every cut. Holds if it rises from each cut to the next; "
    "in part if it is larger at the last than at the first.",
    trained=False,
)
def computing_by_cut(evidence: Evidence) -> Judged:
    """The deeper the model is split, the more a device computes."""
    costs = _costs(evidence)
    work = costs.forward_flops + costs.backward_flops
    steps = np.diff(work)
    score = 1.0 if (steps > 0).all() else 0.5 if work[-1] > work[0] else 0.0
    tried = Tried(f"{work[0] / 1e6:,.1f} MFLOP at cut 1, {work[-1] / 1e6:,.0f} at cut {work.size}", [score])
    return tried.measured, tried.verdict


@CLAIMS.add(
    "Fig. 3",
    "Activations of every cut, every two cuts compared. Holds if the deeper one sends no more in 90 % of the pairs; "
    "in part in half of them.",
    trained=False,
)
def communication_by_cut(evidence: Evidence) -> Judged:
    """The deeper a convolutional network is split, the less has to be sent per sample: not always, but often."""
    bits = _costs(evidence).activation_bits
    shallow, deep = np.triu_indices(bits.size, 1)
    share = float((bits[deep] <= bits[shallow]).mean())
    rises = int((np.diff(bits) > 0).sum())
    monotone = "it never rises" if not rises else f"not monotone: {rises} of {bits.size - 1} steps rise"
    text = f"{bits[0] / 8e3:.3g} kB at cut 1, {bits[-1] / 8e3:.3g} kB at cut {bits.size}"
    text = f"{text}; no more in {100 * share:.0f} % of pairs; {monotone}"
    return text, Tried("", [1.0 if share >= 0.9 else 0.5 if share >= 0.5 else 0.0]).verdict


def _costs(evidence: Evidence) -> CutCosts:
    panel = evidence.panel("motivation-cut/overhead")
    if panel is None:
        raise Missing("motivation-cut/overhead")
    return loading.model_costs(panel.recipe.model, panel.recipe.training.batch_size, panel.recipe.training.optimizer)


@CLAIMS.add(
    "Fig. 3",
    "Converged accuracy for L_c = 2, 4, 8, 12. Holds if it falls from the first to the last and rises nowhere "
    "between; in part if it falls from the first to the last only.",
)
def accuracy_by_cut(evidence: Evidence) -> Judged:
    """With data that are not IID, the deeper the model is split, the lower the accuracy after as many epochs."""
    return over_panels(["motivation-cut/epochs"], lambda key: falling(all_of(evidence, key, CUTS)))
