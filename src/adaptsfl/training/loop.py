"""Rounds one after another, stopped where training makes no sense any more."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from adaptsfl import checks
from adaptsfl.errors import TrainingDiverged
from adaptsfl.training.settings import Batch, Batches

EXPLODED = 1e3  # times the first round's loss: for cross-entropy far worse than guessing


class Trainer(Protocol):
    """Whatever trains round by round and can say what the global model is now."""

    def round(self, batches: Sequence[Batch]) -> Tensor:
        """Train one round; return every device's loss."""
        ...

    def state(self) -> dict[str, Tensor]:
        """Return the global model's state_dict."""
        ...


@dataclass(frozen=True)
class RoundRecord:
    """What one round gave: every device's mean loss over its batch, before the round's update."""

    round: int
    losses: tuple[float, ...]

    @property
    def loss(self) -> float:
        """The plain mean over devices."""
        return math.fsum(self.losses) / len(self.losses)


def train(trainer: Trainer, batches: Batches, rounds: int, *, start: int = 1) -> Iterator[RoundRecord]:
    """Train rounds `start`, `start` + 1, … and yield the record of each; between two the plan may be changed.

    A loss that is not finite, or a thousand times the first round's, raises TrainingDiverged.
    """
    last = checks.whole_number("start", start) + checks.whole_number("rounds", rounds) - 1
    first: float | None = None
    for t in range(start, last + 1):
        record = RoundRecord(t, tuple(float(loss) for loss in trainer.round(batches(t)).tolist()))
        _check(record, first)
        first = record.loss if first is None else first
        yield record


def _check(record: RoundRecord, first: float | None) -> None:
    remedy = "Lower the learning rate, or use a model with normalisation; weights from before this round may be sound."
    for device, loss in enumerate(record.losses):
        if not math.isfinite(loss):
            raise TrainingDiverged(f"round {record.round}: the loss of device {device} is {loss}. {remedy}")
    if first is not None and record.loss > EXPLODED * max(first, 1e-3):
        raise TrainingDiverged(
            f"round {record.round}: the loss is {record.loss:.3g}, it began at {first:.3g}. {remedy}"
        )
