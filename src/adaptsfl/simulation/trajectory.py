"""What is learned, apart from how long it takes: trained once per schedule, and looked up wherever it recurs.

Weights depend on the schedule alone: intervals, L_c, and who was there. Where a layer below L_c runs changes only the
clock. So a run asks for one step of its schedule after another, each named by all the steps before it. A step that
was taken before, in this run before it was interrupted, or under another fleet, is not trained again.
"""

import errno
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from adaptsfl.errors import InvalidInput
from adaptsfl.policies.policy import Trainer
from adaptsfl.simulation.record import plain
from adaptsfl.simulation.world import World
from adaptsfl.training import Engine, Sequential, TrainingPlan
from adaptsfl.training.checkpoint import has_checkpoint, load_checkpoint, save_checkpoint
from adaptsfl.training.estimate import (
    ConstantsSample,
    DriftSample,
    SmoothnessProbe,
    measure_constants,
    measure_drift,
)
from adaptsfl.training.loop import RoundRecord, check_round

Measurement = Literal["drift", "constants"]
Present = tuple[tuple[int, ...], ...]  # the devices in every round of a step


@dataclass(frozen=True)
class Step:
    """Some rounds under one plan, as far as learning is concerned.

    Attributes:
        deepest: L_c.
        layer_intervals: (layer, its interval), for layers with an interval of their own.
        present: who took part, round by round; None if everybody did.
        measure: what to measure at the start of the last round, when the copies have drifted longest.
        evaluate_last: whether to evaluate after the last round, whatever its number.
    """

    rounds: int
    interval: int | None
    deepest: int
    layer_intervals: tuple[tuple[int, int], ...] = ()
    present: Present | None = None
    measure: Measurement | None = None
    evaluate_last: bool = False


@dataclass(frozen=True)
class Learned:
    """What a step gave.

    Attributes:
        losses: the mean training loss of every round.
        evaluations: (round, accuracy, loss) on the test samples.
        divergence: ‖w_i − w̄‖/‖w̄‖ of every client-specific layer before it was last averaged.
        drift, constants: what was measured.
    """

    losses: tuple[float, ...]
    evaluations: tuple[tuple[int, float, float], ...]
    divergence: tuple[float, ...] = ()
    drift: DriftSample | None = None
    constants: ConstantsSample | None = None


class Store:
    """Steps that were taken, by name, in a file that any number of runs may add to, in any number of processes.

    Attributes:
        steps: those that this process knows of; `find` also sees what others have added since.
    """

    def __init__(self, file: Path | None = None) -> None:
        self.file = file
        self.steps: dict[str, Learned] = {}
        self._read_bytes = 0  # of the file: whole lines
        self._read_on()

    def find(self, key: str) -> Learned | None:
        """Return a step that was taken, by whomever; None if nobody did."""
        if key not in self.steps:
            self._read_on()
        return self.steps.get(key)

    def add(self, key: str, learned: Learned) -> None:
        """Keep a step, in memory and in the file."""
        self.steps[key] = learned
        if self.file is not None:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            data = _to_data(learned)
            _append_line(self.file, json.dumps({"key": key, "learned": data, "check": _check(key, data)}))

    def _read_on(self) -> None:
        """Read what was added to the file since it was last read."""
        if self.file is None or not self.file.exists():
            return
        with self.file.open("rb") as file:
            file.seek(self._read_bytes)
            lines = file.read().split(b"\n")
        self._read_bytes += sum(len(line) + 1 for line in lines[:-1])  # the last one may be in the making
        for line in lines:
            try:
                entry = json.loads(line)
                if entry["check"] == _check(entry["key"], entry["learned"]):
                    self.steps.setdefault(entry["key"], _from_data(entry["learned"]))
            except (ValueError, KeyError, TypeError):
                continue  # torn by a crash while it was written, or damaged since: taken again


def _append_line(place: Path, line: str) -> None:
    """Append by one single write, so that lines of several processes do not mix."""
    handle = os.open(place, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        size = os.fstat(handle).st_size
        # The end of the last line was never written. Or it is being written right now: an empty line does no harm.
        torn = size > 0 and os.pread(handle, 1, size - 1) != b"\n"
        content = (("\n" if torn else "") + line + "\n").encode()
        if os.write(handle, content) < len(content):  # whoever reads it takes this step again
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(place))
    finally:
        os.close(handle)


class Trajectory:
    """One run's way through weights: `advance` gives every step's outcome, trained only where nobody was before.

    Args:
        trainer: who trains.
        store: steps taken before.
        folder: where checkpoints go; none are written without it.
        divergence: whether to measure how far apart copies are before every averaging.
        on_round: called after every round that is trained, with its number and loss.
    """

    def __init__(
        self,
        world: World,
        trainer: Trainer,
        store: Store,
        *,
        folder: Path | None = None,
        divergence: bool = False,
        on_round: Callable[[int, float], None] = lambda _round, _loss: None,
    ) -> None:
        self.world, self.trainer, self.store, self.folder, self.on_round = world, trainer, store, folder, on_round
        self.divergence = divergence
        self.key = sha256(f"{world.learning_identity} {trainer} {divergence}".encode()).hexdigest()[:32]
        self.round = 0
        self._waiting: list[tuple[str, Step]] = []  # steps that the store knew, not trained here
        self._trained_key: str | None = self.key  # of the step that was trained last; None in the middle of one
        self._trained_round, self._saved_round = 0, 0
        self._first_loss: float | None = None
        self._made: Engine | Sequential | None = None

    def advance(self, step: Step) -> Learned:
        """Go one step further."""
        key = sha256(f"{self.key} {json.dumps(asdict(step))}".encode()).hexdigest()[:32]
        known = self.store.find(key)
        if known is None:
            self._catch_up()
            known = self._train(step)
            self.store.add(key, known)
            self._trained_key = key
            if self._trained_round - self._saved_round >= self.world.run.checkpoint_every:
                self.save()
        else:
            self._waiting.append((key, step))
            self._first_loss = self._first_loss or known.losses[0]
        self.key, self.round = key, self.round + step.rounds
        return known

    def state(self) -> dict[str, Tensor]:
        """Return the global model as it is now."""
        self._catch_up()
        assert self._made is not None
        return self._made.state()

    def save(self) -> None:
        """Write a checkpoint of what was trained last, but not in the middle of a step, which has no name to find."""
        if self._made is None or self._trained_key is None:
            return
        if self.folder is not None and self._trained_round > self._saved_round:
            extra = {"key": self._trained_key, "divergence": list(_divergence(self._made).items())}
            save_checkpoint(self.folder, self._made.snapshot(), extra=extra, identity=self._identity)
            self._saved_round = self._trained_round

    @property
    def _identity(self) -> dict[str, Any]:
        return {"learning": self.world.learning_identity, "trainer": self.trainer}

    def _catch_up(self) -> None:
        """Train the steps that were only looked up, from the checkpoint if it lies on their way."""
        if self._made is None:
            first = self._waiting[0][1] if self._waiting else None
            if first is not None:
                self._made = self._make(first)
                self._restore()
        waiting, self._waiting = self._waiting, []
        for key, step in waiting:
            self._train(step)
            self._trained_key = key

    def _restore(self) -> None:
        if self.folder is None or not has_checkpoint(self.folder):
            return
        try:
            found = load_checkpoint(self.folder, identity=self._identity)
        except InvalidInput:
            return  # damaged, or of another run: training again gives the same
        keys = [key for key, _ in self._waiting]
        if found.extra["key"] in keys and self._made is not None:
            self._made.restore(found.state)
            if isinstance(self._made, Engine):
                self._made.last_divergence = {int(layer): apart for layer, apart in found.extra["divergence"]}
            done = keys.index(found.extra["key"]) + 1
            self._trained_round = self._saved_round = sum(step.rounds for _, step in self._waiting[:done])
            self._trained_key = found.extra["key"]
            self._waiting = self._waiting[done:]

    def _make(self, step: Step) -> Engine | Sequential:
        world, training = self.world, self.world.recipe.training
        torch.manual_seed(world.seed)
        if self.trainer in ("turns", "relay"):
            return Sequential(
                world.model,
                step.deepest,
                world.devices,
                world.optimizer,
                interval=step.interval,
                relayed=self.trainer == "relay",
                seed=world.seed,
                weights=world.data.weights.tolist(),
                device=training.device,
            )
        devices = 1 if self.trainer == "centralized" else world.devices
        return Engine(
            world.model,
            TrainingPlan((step.deepest,) * devices, step.interval, dict(step.layer_intervals)),
            world.optimizer,
            weights=None if self.trainer == "centralized" else world.data.weights.tolist(),
            statistics=training.statistics,
            device=training.device,
            record_divergence=self.divergence,
        )

    def _train(self, step: Step) -> Learned:
        """Train the rounds of one step; whoever asked says by which name it was taken."""
        self._trained_key = None
        made = self._made = self._made or self._make(step)
        if isinstance(made, Engine):
            plan = TrainingPlan((step.deepest,) * len(made.weights), step.interval, dict(step.layer_intervals))
            if plan != made.schedule.plan:
                made.change_plan(plan)
        # What dropout draws depends on where the step begins, not on what else this process did.
        torch.manual_seed(int.from_bytes(sha256(f"{self.world.seed} {self._trained_round}".encode()).digest()[:7]))
        learned: list[float] = []
        evaluations: list[tuple[int, float, float]] = []
        measured: dict[str, Any] = {}
        for k in range(step.rounds):
            last = k == step.rounds - 1
            measure = step.measure if last else None
            loss = self._round(made, None if step.present is None else step.present[k], measure, measured)
            learned.append(loss)
            if self._trained_round % self.world.run.evaluate_every == 0 or (step.evaluate_last and last):
                evaluations.append((self._trained_round, *self.world.evaluate(made.state())))
            self.on_round(self._trained_round, loss)
        divergence = _divergence(made)
        apart = tuple(divergence.get(layer, 0.0) for layer in range(1, step.deepest + 1)) if divergence else ()
        return Learned(tuple(learned), tuple(evaluations), apart, **measured)

    def _round(
        self,
        made: Engine | Sequential,
        present: tuple[int, ...] | None,
        measure: Measurement | None,
        measured: dict[str, Any],
    ) -> float:
        """Train one round, after measuring on its mini-batches what is to be measured; return the mean loss."""
        t = self._trained_round + 1
        batches = self.world.batches(t, present)
        probe: SmoothnessProbe | None = None
        if isinstance(made, Engine) and measure == "drift":
            measured["drift"] = measure_drift(made, batches, present)
        elif isinstance(made, Engine) and measure == "constants":
            measured["constants"] = sample = measure_constants(made, batches, present)
            probe = SmoothnessProbe(made, batches, present) if sample.smoothness is None else None
        if self.trainer == "centralized":
            pooled = [(torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches]))]
            losses = made.round(pooled)
        else:
            losses = made.round(batches, present)
        if probe is not None and isinstance(made, Engine):
            measured["constants"] = replace(measured["constants"], smoothness=probe.measure(made))
        record = RoundRecord(t, tuple(losses.tolist()), None if self.trainer == "centralized" else present)
        check_round(record, self._first_loss)
        self._first_loss = self._first_loss or record.loss
        self._trained_round = t
        return record.loss


def _divergence(made: Engine | Sequential) -> dict[int, float]:
    """Return how far apart every layer's copies were when they were last averaged, as far as it was measured."""
    return made.last_divergence if isinstance(made, Engine) else {}


def _check(key: str, data: Any) -> str:
    """Return what tells a line that was changed from one that was written."""
    return sha256(f"{key} {json.dumps(data)}".encode()).hexdigest()[:16]


def _to_data(learned: Learned) -> dict[str, Any]:
    data: dict[str, Any] = plain(learned)
    return data


def _from_data(data: dict[str, Any]) -> Learned:
    drift, constants = data["drift"], data["constants"]
    if drift is not None:
        arrays = {name: np.array(drift[name], dtype=np.float64) for name in ("squared_norm", "lost", "drift", "spread")}
        drift = DriftSample(
            drift["age"],
            drift["deepest"],
            **arrays,
            norm_error=drift["norm_error"],
            noise_to_signal=drift["noise_to_signal"],
        )
    if constants is not None:
        constants = ConstantsSample(
            constants["smoothness"],
            tuple(constants["devices"]),
            np.array(constants["squared_norms"], dtype=np.float64),
            np.array(constants["variance"], dtype=np.float64),
        )
    evaluations = tuple((int(t), float(accuracy), float(loss)) for t, accuracy, loss in data["evaluations"])
    return Learned(tuple(data["losses"]), evaluations, tuple(data["divergence"]), drift, constants)
