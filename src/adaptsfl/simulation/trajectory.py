"""What is learned, apart from how long it takes: trained once per schedule, and looked up wherever it recurs.

Weights depend on the schedule alone: intervals, L_c, and who was there. Where a layer below L_c runs changes only the
clock. So a run asks for one step of its schedule after another, each named by all the steps before it. A step that
was taken before, in this run before it was interrupted, or under another fleet, is not trained again.
"""

import errno
import json
import os
from collections.abc import Callable
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from adaptsfl.errors import InvalidInput, RankFailed
from adaptsfl.policies.policy import Trainer
from adaptsfl.simulation.learner import Learned, Learner, Step
from adaptsfl.simulation.record import plain
from adaptsfl.simulation.world import World
from adaptsfl.training.checkpoint import has_checkpoint, read_extra
from adaptsfl.training.estimate import ConstantsSample, DriftSample
from adaptsfl.training.ranks import ALONE, Ranks


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

    As a context, it lets the other ranks go at its end.

    Args:
        trainer: who trains.
        store: steps taken before.
        folder: where checkpoints go; none are written without it.
        divergence: whether to measure how far apart copies are before every averaging.
        on_round: called after every round that is trained, with its number and loss.
        ranks: the processes that train together; the others have a `Learner` that follows this one's.
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
        ranks: Ranks = ALONE,
    ) -> None:
        self.world, self.trainer, self.store, self.folder = world, trainer, store, folder
        self.key = sha256(f"{world.learning_identity} {trainer} {divergence}".encode()).hexdigest()[:32]
        self.round = 0
        self._learner = Learner(world, trainer, divergence=divergence, on_round=on_round, ranks=ranks, folder=folder)
        self._waiting: list[tuple[str, Step]] = []  # steps that the store knew, not trained here
        self._trained_key: str | None = self.key  # of the step that was trained last; None in the middle of one
        self._saved_round = 0
        self._first_loss: float | None = None

    def __enter__(self) -> "Trajectory":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # After an interruption or the loss of a rank, nobody knows what the others are waiting for.
        if kind is None or (issubclass(kind, Exception) and not issubclass(kind, RankFailed)):
            self._learner.end()

    def advance(self, step: Step) -> Learned:
        """Go one step further."""
        key = sha256(f"{self.key} {json.dumps(asdict(step))}".encode()).hexdigest()[:32]
        known = self.store.find(key)
        if known is None:
            self._catch_up()
            known = self._train(key, step)
            self.store.add(key, known)
            if self._learner.round - self._saved_round >= self.world.run.checkpoint_every:
                self.save()
        else:
            self._waiting.append((key, step))
            self._first_loss = self._first_loss or known.losses[0]
        self.key, self.round = key, self.round + step.rounds
        return known

    def state(self) -> dict[str, Tensor]:
        """Return the global model as it is now."""
        self._catch_up()
        return self._learner.state()

    def save(self) -> None:
        """Write a checkpoint of what was trained last, but not in the middle of a step, which has no name to find."""
        learner = self._learner
        if not learner.begun or self._trained_key is None:
            return
        if self.folder is not None and learner.round > self._saved_round:
            extra = {"key": self._trained_key, "divergence": list(learner.divergence.items())}
            learner.save(extra, self._identity)
            self._saved_round = learner.round

    @property
    def _identity(self) -> dict[str, Any]:
        return {"learning": self.world.learning_identity, "trainer": self.trainer}

    def _catch_up(self) -> None:
        """Train the steps that were only looked up, from the checkpoint if it lies on their way."""
        if not self._learner.begun and self._waiting:
            self._restore()
        waiting, self._waiting = self._waiting, []
        for key, step in waiting:
            self._train(key, step)

    def _restore(self) -> None:
        if self.folder is None or not has_checkpoint(self.folder):
            return
        try:
            extra = read_extra(self.folder, identity=self._identity)
        except InvalidInput:
            return  # damaged, or of another run: training again gives the same
        keys = [key for key, _ in self._waiting]
        if extra["key"] in keys:
            done = keys.index(extra["key"]) + 1
            trained = sum(step.rounds for _, step in self._waiting[:done])
            divergence = {int(layer): apart for layer, apart in extra["divergence"]}
            if self._learner.restore(self._waiting[0][1], trained, divergence, self._identity):
                self._saved_round, self._trained_key = trained, extra["key"]
                self._waiting = self._waiting[done:]

    def _train(self, key: str, step: Step) -> Learned:
        """Train the rounds of one step, which has that name once it is done."""
        self._trained_key = None
        learned = self._learner.train(step, self._first_loss)
        self._first_loss = self._first_loss or learned.losses[0]
        self._trained_key = key
        return learned


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
