"""Trains round after round, and stops with an error if training diverges."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from adaptsfl import checks
from adaptsfl.errors import TrainingDiverged
from adaptsfl.training.settings import Batches, present_devices
from adaptsfl.training.trainer import Trainer

EXPLODED = 1e3  # times the first round's loss: for cross-entropy far worse than guessing


@dataclass(frozen=True)
class RoundRecord:
    """The result of one round.

    Attributes:
        losses: every present device's mean loss over its batch, before the round's update.
        present: the devices that took part; None if `train` got no `present`: all devices then took part.
    """

    round: int
    losses: tuple[float, ...]
    present: tuple[int, ...] | None = None

    @property
    def loss(self) -> float:
        """The plain mean over the devices that took part."""
        return math.fsum(self.losses) / len(self.losses)


def train(
    trainer: Trainer,
    batches: Batches,
    rounds: int,
    *,
    start: int = 1,
    present: Callable[[int], Sequence[int]] | None = None,
) -> Iterator[RoundRecord]:
    """Train rounds `start`, `start` + 1, … and yield the record of each; between two the plan may be changed.

    `present` returns the devices of a round. `batches` always returns one batch per device, and the batches of absent
    devices are ignored, so a device's batches do not depend on the other devices' presence.

    A loss that is NaN or infinity, or a thousand times the first round's, raises TrainingDiverged.
    """
    last = checks.whole_number("start", start) + checks.whole_number("rounds", rounds) - 1
    first: float | None = None
    for t in range(start, last + 1):
        if present is None:
            record = RoundRecord(t, _floats(trainer.round(batches(t))))
        else:
            given = batches(t)
            here = present_devices(present(t), len(given))
            record = RoundRecord(t, _floats(trainer.round([given[k] for k in here], here)), here)
        check_round(record, first)
        first = record.loss if first is None else first
        yield record


def _floats(losses: Tensor) -> tuple[float, ...]:
    return tuple(float(loss) for loss in losses.tolist())


def check_round(record: RoundRecord, first: float | None) -> None:
    """Raise TrainingDiverged if a loss is NaN or infinity, or the mean loss exploded since the first round."""
    remedy = "Lower the learning rate, or use a model with normalisation; weights from before this round may be sound."
    devices = range(len(record.losses)) if record.present is None else record.present
    for device, loss in zip(devices, record.losses, strict=True):
        if not math.isfinite(loss):
            raise TrainingDiverged(f"round {record.round}: the loss of device {device} is {loss}. {remedy}")
    if first is not None and record.loss > EXPLODED * max(first, 1e-3):
        raise TrainingDiverged(
            f"round {record.round}: the loss is {record.loss:.3g}, it began at {first:.3g}. {remedy}"
        )
