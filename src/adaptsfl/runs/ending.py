"""When a run ends."""

from adaptsfl.config import RunConfig
from adaptsfl.runs.record import Block

# The paper's rule: accuracy has risen by less than this over so many evaluations.
CONVERGED_RISE, CONVERGED_OVER = 2e-4, 5


def rounds_planned(run: RunConfig, batch_size: int) -> int | None:
    """Return the largest number of rounds of a run; None if it is not limited."""
    limits = [] if run.rounds is None else [run.rounds]
    if run.samples is not None:
        limits.append(-(-run.samples // batch_size))
    return min(limits, default=None)


class Ending:
    """Sees every block of a run and says when to stop."""

    def __init__(self, run: RunConfig, batch_size: int) -> None:
        self.run, self.batch_size = run, batch_size
        self._accuracies: list[float] = []

    def rounds_left(self, rounds: int) -> int | None:
        """Return how many rounds are left after `rounds`; None if their number is not limited."""
        planned = rounds_planned(self.run, self.batch_size)
        return None if planned is None else planned - rounds

    def is_target(self, accuracy: float) -> bool:
        """Whether an accuracy reaches the target that ends the run."""
        return self.run.target_accuracy is not None and accuracy >= self.run.target_accuracy

    def after(self, block: Block) -> str:
        """Process a block; return what ends the run: target, rounds, samples, seconds, converged, or an empty text."""
        run, accuracies = self.run, [row[2] for row in block.evaluations]
        self._accuracies += accuracies
        if any(self.is_target(accuracy) for accuracy in accuracies):
            return "target"
        if run.rounds is not None and block.last_round >= run.rounds:
            return "rounds"
        if run.samples is not None and block.last_round * self.batch_size >= run.samples:
            return "samples"
        if run.seconds is not None and block.time_s >= run.seconds:
            return "seconds"
        return "converged" if run.converged and self._converged() else ""

    def _converged(self) -> bool:
        recent, before = self._accuracies[-CONVERGED_OVER:], self._accuracies[:-CONVERGED_OVER]
        return bool(before) and max(recent) - max(before) < CONVERGED_RISE
