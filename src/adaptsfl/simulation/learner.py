"""Trains, evaluates and measures the blocks of a simulated run, on one rank or several."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adaptsfl.decisions import Decision
from adaptsfl.errors import InvalidInput
from adaptsfl.policies import TrainerName
from adaptsfl.runs.backend import Learned, Order
from adaptsfl.simulation.trainers import TRAINERS
from adaptsfl.simulation.world import World
from adaptsfl.training import Trainer
from adaptsfl.training.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from adaptsfl.training.dispatch import Replicated, on_all_ranks
from adaptsfl.training.estimate import ConstantsSample
from adaptsfl.training.loop import RoundRecord, check_round
from adaptsfl.training.settings import Batch


class Learner(Replicated):
    """Trains one run's blocks.

    On several ranks every rank has a learner of the same run; see `Replicated`.

    Args:
        trainer: the name of the trainer.
        divergence: whether to measure how far apart copies are before every averaging.
        on_round: called after every round that is trained, with its number and loss.
        folder: where checkpoints go, if any are to be written; all ranks see it.

    Attributes:
        round: rounds done.
    """

    def __init__(
        self,
        world: World,
        trainer: TrainerName,
        *,
        divergence: bool = False,
        on_round: Callable[[int, float], None] = lambda _round, _loss: None,
        folder: Path | None = None,
    ) -> None:
        super().__init__(world.ranks)
        self.world, self.kind, self.on_round, self.folder = world, TRAINERS[trainer], on_round, folder
        self.round = 0
        self._record_divergence = divergence
        self._reestimates = self.kind.reestimates(world)
        self._trainer: Trainer | None = None

    @property
    def begun(self) -> bool:
        """Whether there is a trainer, whose model can be evaluated and saved."""
        return self._trainer is not None

    @property
    def divergence(self) -> dict[int, float]:
        """By layer, how far apart its copies were when they were last averaged, as far as it was measured."""
        return {} if self._trainer is None else self._trainer.last_divergence

    @on_all_ranks
    def train(self, order: Order, first_loss: float | None) -> Learned:
        """Train the rounds of one block; `first_loss` is that of the run's first round, None before it."""
        trainer = self._begin(order.decision)
        places = bool(order.compared)  # types are compared at every device's own cut
        trainer.change_plan(order.decision.levelled(self.world.devices, order.members, places=places))
        self._seed()
        losses: list[float] = []
        evaluations: list[tuple[int, float, float]] = []
        constants: ConstantsSample | None = None
        wires: Mapping[str, float] = {}
        for k in range(order.rounds):
            last = k == order.rounds - 1
            present = None if order.present is None else order.present[k]
            if order.compared and k == 0:
                record, wires = self._compared_round(trainer, present, order.compared)
            else:
                record, constants = self._round(trainer, present, measure=order.measure and last)
            check_round(record, first_loss)
            first_loss = first_loss or record.loss
            losses.append(record.loss)
            self.round = record.round
            if self.round % self.world.run.evaluate_every == 0 or (order.final and last):
                evaluations.append((self.round, *self.world.evaluate(self._model(trainer))))
            self.on_round(self.round, record.loss)
        layers = range(1, order.decision.deepest + 1) if self.divergence else ()
        apart = tuple(self.divergence.get(layer, 0.0) for layer in layers)
        return Learned(tuple(losses), tuple(evaluations), apart, constants, wires)

    @on_all_ranks
    def state(self) -> dict[str, Tensor]:
        """Return the global model as it is now."""
        assert self._trainer is not None
        return self._model(self._trainer)

    @on_all_ranks
    def save(self, extra: Mapping[str, Any], identity: Mapping[str, Any]) -> None:
        """Write a checkpoint."""
        assert self._trainer is not None
        assert self.folder is not None
        save_checkpoint(self.folder, self._trainer.snapshot(), extra=extra, identity=identity, ranks=self.ranks)

    @on_all_ranks
    def restore(
        self, first: Decision, round_: int, divergence: Mapping[int, float], identity: Mapping[str, Any]
    ) -> bool:
        """Continue after `round_` from the checkpoint; return whether all ranks could read it.

        `first` is the run's first decision. If one rank cannot read the checkpoint, nothing changes.
        """
        trainer = self._begin(first)
        found: Checkpoint | None = None
        assert self.folder is not None
        with suppress(InvalidInput):  # damaged: training again gives the same
            found = load_checkpoint(self.folder, identity=identity, devices=trainer.sharding.shard)
        readable = all(self.ranks.all_gather(found is not None))
        if found is None or not readable:
            return False
        trainer.restore(found.state)
        trainer.last_divergence = dict(divergence)
        self.round = round_
        return True

    def _begin(self, first: Decision) -> Trainer:
        """Return the trainer; the first call makes it."""
        if self._trainer is None:
            torch.manual_seed(self.world.seed)
            self._trainer = self.kind.make(self.world, first, self._record_divergence)
        return self._trainer

    def _seed(self) -> None:
        """Seed dropout by the start of the block and the rank, so that earlier work in this process has no effect."""
        rank = f" {self.ranks.rank}" if self.ranks.rank else ""
        torch.manual_seed(int.from_bytes(sha256(f"{self.world.seed} {self.round}{rank}".encode()).digest()[:7]))

    def _round(
        self, trainer: Trainer, present: tuple[int, ...] | None, *, measure: bool
    ) -> tuple[RoundRecord, ConstantsSample | None]:
        """Train one round; measure the paper's constants on its mini-batches where asked, if the trainer can."""
        t = self.round + 1
        batches = self._batches(trainer, t, present)
        constants: ConstantsSample | None = None
        if measure and self.kind.measured_round is not None:
            losses, constants = self.kind.measured_round(trainer, batches, present)
        else:
            losses = trainer.round(batches, present)
        return RoundRecord(t, tuple(losses.tolist()), trainer.present), constants

    def _compared_round(
        self, trainer: Trainer, present: tuple[int, ...] | None, types: tuple[str, ...]
    ) -> tuple[RoundRecord, Mapping[str, float]]:
        """Train one round with exact numbers; measure on its mini-batches what these types cost in rounds."""
        assert self.kind.compared_round is not None
        t = self.round + 1
        losses, factors = self.kind.compared_round(trainer, self._batches(trainer, t, present), present, types)
        return RoundRecord(t, tuple(losses.tolist()), trainer.present), factors

    def _model(self, trainer: Trainer) -> dict[str, Tensor]:
        """Return the global model; if copies are averaged, batch-norm's statistics come from the last mini-batches."""
        return trainer.state(self._batches(trainer, self.round, trainer.present) if self._reestimates else None)

    def _batches(self, trainer: Trainer, t: int, present: tuple[int, ...] | None) -> list[Batch]:
        """Return this rank's batches for round 1, 2, …; no others are read."""
        chosen = range(self.world.devices) if present is None else present
        local = [device for device in chosen if device in trainer.batch_devices]
        return self.world.batches(t, local) if local else []
