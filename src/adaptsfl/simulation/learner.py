"""Trains the blocks of a simulated run, evaluated and measured on the way, on one rank or several."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adaptsfl.decisions import Decision
from adaptsfl.errors import InvalidInput, NotWritten, RankFailed, TrainingDiverged, message_of
from adaptsfl.policies import Trainer
from adaptsfl.runs.backend import Learned, Order
from adaptsfl.simulation.world import World
from adaptsfl.training import Engine, Sequential
from adaptsfl.training.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from adaptsfl.training.estimate import SmoothnessProbe, measure_constants
from adaptsfl.training.loop import RoundRecord, check_round
from adaptsfl.training.ranks import ALONE, Ranks
from adaptsfl.training.settings import Batch


class Learner:
    """Trains one run's blocks.

    On several ranks every one has a learner of the same run. What the first one's is asked to do, all do: the others
    `follow`. `end` lets them go.

    Args:
        trainer: who trains.
        divergence: whether to measure how far apart copies are before every averaging.
        on_round: called after every round that is trained, with its number and loss.
        folder: where checkpoints go, if any are to be written; all ranks see it.

    Attributes:
        round: rounds done.
        divergence: by layer, how far apart its copies were when they were last averaged, as far as it was measured.
    """

    def __init__(
        self,
        world: World,
        trainer: Trainer,
        *,
        divergence: bool = False,
        on_round: Callable[[int, float], None] = lambda _round, _loss: None,
        ranks: Ranks = ALONE,
        folder: Path | None = None,
    ) -> None:
        self.world, self.trainer, self.on_round, self.ranks, self.folder = world, trainer, on_round, ranks, folder
        self.round = 0
        self._record_divergence = divergence
        self._reestimates = world.reestimates(trainer)
        self._made: Engine | Sequential | None = None

    @property
    def begun(self) -> bool:
        """Whether there is anything to evaluate or to keep."""
        return self._made is not None

    @property
    def divergence(self) -> dict[int, float]:
        """By layer, how far apart its copies were when they were last averaged, as far as it was measured."""
        return self._made.last_divergence if isinstance(self._made, Engine) else {}

    def train(self, order: Order, first_loss: float | None) -> Learned:
        """Train the rounds of one block; `first_loss` is that of the run's first round, None before it."""
        with self._all_ranks("train", order, first_loss):
            made = self._made = self._made or self._make(order.decision)
            if isinstance(made, Engine):
                plan = order.decision.levelled(len(made.weights))
                if plan != made.schedule.plan:
                    made.change_plan(plan)
            self._seed()
            losses: list[float] = []
            evaluations: list[tuple[int, float, float]] = []
            measured: dict[str, Any] = {}
            for k in range(order.rounds):
                last = k == order.rounds - 1
                measure = order.measure and last
                record = self._round(made, None if order.present is None else order.present[k], measure, measured)
                check_round(record, first_loss)
                first_loss = first_loss or record.loss
                losses.append(record.loss)
                self.round = record.round
                if self.round % self.world.run.evaluate_every == 0 or (order.final and last):
                    evaluations.append((self.round, *self.world.evaluate(self._model(made), self.ranks)))
                self.on_round(self.round, record.loss)
            divergence = self.divergence
            apart = (
                tuple(divergence.get(layer, 0.0) for layer in range(1, order.decision.deepest + 1))
                if divergence
                else ()
            )
            return Learned(tuple(losses), tuple(evaluations), apart, **measured)

    def state(self) -> dict[str, Tensor]:
        """Return the global model as it is now."""
        with self._all_ranks("state"):
            assert self._made is not None
            return self._model(self._made)

    def save(self, extra: Mapping[str, Any], identity: Mapping[str, Any]) -> None:
        """Write a checkpoint, of which every rank writes the copies of its own devices."""
        with self._all_ranks("save", extra, identity):
            assert self._made is not None
            assert self.folder is not None
            save_checkpoint(self.folder, self._made.snapshot(), extra=extra, identity=identity, ranks=self.ranks)

    def restore(
        self, first: Decision, round_: int, divergence: Mapping[int, float], identity: Mapping[str, Any]
    ) -> bool:
        """Go on after `round_` from the checkpoint; return whether all ranks could read it.

        `first` is the run's first decision.

        Where one of them could not, nothing changes.
        """
        with self._all_ranks("restore", first, round_, dict(divergence), identity):
            made = self._made = self._made or self._make(first)
            mine = made.mine if isinstance(made, Engine) and self.ranks.size > 1 else None
            found: Checkpoint | None = None
            assert self.folder is not None
            with suppress(InvalidInput):  # damaged: training again gives the same
                found = load_checkpoint(self.folder, identity=identity, devices=mine)
            read = all(self.ranks.everybodys(found is not None))
            if found is not None and read:
                made.restore(found.state)
                self.round = round_
                if isinstance(made, Engine):
                    made.last_divergence = dict(divergence)
            return read

    def follow(self) -> None:
        """Do what the first rank is asked to do, until it says that the run is over."""
        assert not self.ranks.first
        while True:
            name, arguments = self.ranks.from_first(("", ()))
            if not name:
                return
            with suppress(TrainingDiverged, NotWritten):  # the first rank has seen it too, and tells
                getattr(self, name)(*arguments)

    def end(self) -> None:
        """Let the other ranks go."""
        if self.ranks.first:
            self.ranks.from_first(("", ()))

    @contextmanager
    def _all_ranks(self, name: str, *arguments: Any) -> Iterator[None]:
        """Let the other ranks do the same; where one of them cannot, none can go on."""
        if self.ranks.size == 1:
            yield
            return
        if self.ranks.first:
            self.ranks.from_first((name, arguments))
        try:
            yield
        except (TrainingDiverged, NotWritten, RankFailed):
            raise
        except Exception as error:
            raise RankFailed(f"rank {self.ranks.rank}: {message_of(error)}") from error

    def _seed(self) -> None:
        """Let what dropout draws depend on where the block begins and on the rank, not on what else was done here."""
        rank = f" {self.ranks.rank}" if self.ranks.rank else ""
        torch.manual_seed(int.from_bytes(sha256(f"{self.world.seed} {self.round}{rank}".encode()).digest()[:7]))

    def _make(self, first: Decision) -> Engine | Sequential:
        world, training = self.world, self.world.recipe.training
        torch.manual_seed(world.seed)
        if self.trainer in ("turns", "relay"):
            return Sequential(
                world.model,
                first.deepest,
                world.devices,
                world.optimizer,
                interval=first.interval,
                relayed=self.trainer == "relay",
                seed=world.seed,
                weights=world.data.weights.tolist(),
                device=training.device,
            )
        devices = 1 if self.trainer == "centralized" else world.devices
        return Engine(
            world.model,
            first.levelled(devices),
            world.optimizer,
            weights=None if self.trainer == "centralized" else world.data.weights.tolist(),
            statistics=training.statistics,
            device=training.device,
            record_divergence=self._record_divergence,
            ranks=self.ranks,
            # The one that holds all samples is the first rank's.
            parts=[[0], *([] for _ in self.ranks.speeds[1:])] if self.trainer == "centralized" else None,
        )

    def _round(
        self,
        made: Engine | Sequential,
        present: tuple[int, ...] | None,
        measure: bool,
        measured: dict[str, Any],
    ) -> RoundRecord:
        """Train one round, after measuring on its mini-batches what is to be measured."""
        t = self.round + 1
        batches = self._batches(made, t, present)
        probe: SmoothnessProbe | None = None
        if isinstance(made, Engine) and measure:
            measured["constants"] = sample = measure_constants(made, batches, present)
            probe = SmoothnessProbe(made, batches, present) if sample.smoothness is None else None
        losses = made.round(batches, None if self.trainer == "centralized" else present)
        if probe is not None and isinstance(made, Engine):
            measured["constants"] = replace(measured["constants"], smoothness=probe.measure(made))
        return RoundRecord(t, tuple(losses.tolist()), None if self.trainer == "centralized" else present)

    def _model(self, made: Engine | Sequential) -> dict[str, Tensor]:
        """Return the global model, where copies are averaged with batch-norm's statistics on the last mini-batches."""
        return made.state(self._batches(made, self.round, made.present) if self._reestimates else None)

    def _batches(self, made: Engine | Sequential, t: int, present: tuple[int, ...] | None) -> list[Batch]:
        """Return what this rank trains on in round 1, 2, …: nothing else is read."""
        if isinstance(made, Sequential):
            return self.world.batches(t, present)
        if self.trainer == "centralized":  # one device that has all samples
            given = self.world.batches(t, present) if made.mine else []
            return [(torch.cat([x for x, _ in given]), torch.cat([y for _, y in given]))] if given else []
        here = range(self.world.devices) if present is None else present
        mine = [device for device in here if device in made.mine]
        return self.world.batches(t, mine) if mine else []
