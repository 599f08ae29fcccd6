"""Runs by panel, policy and fleet, and the numbers that figures and claims read from them.

In the paper, a run has converged when its test accuracy rises by less than 0.02 % over 5 rounds. Test accuracy jumps by
more than that from one evaluation to the next, so the printed rule would stop at random. Here, accuracy is the mean of
five evaluations; its highest value is the converged accuracy, and a run has converged when it first comes within 2 % of
it. A policy that learns little converges early by either rule. Compared times are therefore times to one accuracy for
all policies, about the highest that every policy reaches (`common_target`).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from adaptsfl.checks import FloatArray
from adaptsfl.report.series import Spread, spread
from adaptsfl.reproduce.study import Panel, Study
from adaptsfl.runs.folder import Run

WINDOW = 5  # evaluations that are averaged
NEARLY = 0.98  # of the highest accuracy
SAFELY = 0.99  # of the accuracy that every run reaches
WORTHWHILE = 0.9  # of the best policy's accuracy: the least that a common accuracy may be


@dataclass(frozen=True)
class Evidence:
    """All runs at one scale.

    Attributes:
        studies: the figures, in the order of the paper.
        runs: by figure/panel, in the order of policies, seeds and fleets; only of figures that were run.
    """

    studies: tuple[Study, ...]
    runs: Mapping[str, tuple[Run, ...]]

    def panel(self, key: str) -> Panel | None:
        """Return the panel figure/panel; None if that figure was not requested."""
        return next((panel for study in self.studies for panel in study.panels if panel.key == key), None)

    def of(self, key: str, *, policy: str = "", fleet: str = "") -> tuple[Run, ...]:
        """Return the runs that figure/panel shows; only of one policy or one fleet, if they are named."""
        panel = self.panel(key)
        found = self.runs.get(panel.runs if panel is not None else key, ())
        return tuple(run for run in found if policy in ("", run.policy) and fleet in ("", run.fleet))

    def policies(self, key: str) -> list[str]:
        """Return the policies that figure/panel shows, in order."""
        return list(dict.fromkeys(run.policy for run in self.of(key)))


def finished(run: Run) -> bool:
    """Whether a run is complete and was evaluated."""
    return run.whole and bool(np.isfinite(run.evaluations.accuracies).any())


def label_of(run: Run) -> str:
    """Return the label of a run's policy in legends: `I = 5` for `fixed@I=5`, else the policy's title."""
    variant = run.policy.partition("@")[2]
    return variant.replace("=", " = ") if variant else run.title


def smoothed(run: Run) -> tuple[FloatArray, FloatArray]:
    """Return virtual seconds and accuracies; each accuracy is the mean of the last `WINDOW` evaluations."""
    seconds, accuracies = run.evaluations.seconds, run.evaluations.accuracies
    known = np.isfinite(accuracies)
    seconds, accuracies = seconds[known], accuracies[known]
    if accuracies.size < WINDOW:
        return seconds, accuracies
    means = np.convolve(accuracies, np.full(WINDOW, 1 / WINDOW), mode="valid")
    return seconds[WINDOW - 1 :], means


def converged_accuracy(run: Run) -> float:
    """Return the highest smoothed accuracy; 0 for a run without evaluations."""
    accuracies = smoothed(run)[1]
    return float(accuracies.max()) if accuracies.size else 0.0


def converged_s(run: Run) -> float:
    """Return the virtual seconds to `NEARLY` of the converged accuracy."""
    found = time_to(run, NEARLY * converged_accuracy(run))
    return run.time_s if found is None else found


def time_to(run: Run, target: float) -> float | None:
    """Return the virtual seconds after which the smoothed accuracy is first at least `target`, None if never.

    Accuracy is interpolated linearly between two evaluations, so that times are not rounded up to the next one.
    """
    seconds, accuracies = smoothed(run)
    reached = np.flatnonzero(accuracies >= target)
    if not reached.size:
        return None
    first = int(reached[0])
    if first == 0:
        return float(seconds[0])
    return float(np.interp(target, accuracies[first - 1 : first + 1], seconds[first - 1 : first + 1]))


def common_target(compared: Iterable[Iterable[Run]], worthwhile: float = WORTHWHILE) -> float:
    """Return the accuracy to which times are compared: about the highest that all groups of runs reach.

    A group that learns almost nothing would set a target that all others pass at once. The target is therefore at
    least `worthwhile` of the best group's accuracy; for a run that never reaches it, only a lower bound of its time is
    known.

    Args:
        compared: groups of runs; the runs of a group differ only in their seed or their fleet.
        worthwhile: a share of the best group's accuracy.
    """
    reached = [[converged_accuracy(run) for run in runs] for runs in compared]
    best = max(spread(accuracies).mean for accuracies in reached)
    return max(SAFELY * min(map(min, reached)), worthwhile * best)


def mean_time_to(runs: Sequence[Run], target: float) -> Spread | None:
    """Return the mean over seeds of the time to an accuracy; None if a seed does not reach it."""
    times = [time_to(run, target) for run in runs]
    known = [time_s for time_s in times if time_s is not None]
    return spread(known) if known and len(known) == len(times) else None


def aggregations(run: Run) -> FloatArray:
    """Return how often client-specific layers had been averaged at every evaluation."""
    counts, before = [], 0
    for block in run.blocks:
        each = block.interval or np.inf  # never
        counts += [before + (t - block.first_round + 1) // each for t, *_ in block.evaluations]
        before += int(block.rounds // each)
    return np.array(counts, dtype=np.float64)


def epochs(run: Run) -> FloatArray:
    """Return the epochs that were trained, at every evaluation."""
    return run.evaluations.rounds / (run.epoch_rounds or 1)
