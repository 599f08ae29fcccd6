"""The status of a running edge server: snapshots that its thread replaces and any other thread may read."""

import dataclasses
import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import numpy as np

from adaptsfl.fleet import Device, Fleet, Server
from adaptsfl.latency import PHASES

State = Literal["away", "waiting", "training", "late", "quarantined"]
Points = tuple[tuple[int, float], ...]  # (round, value), rounds ascending

MOST_POINTS = 1000  # of a curve
LONGEST_ERROR = 500  # characters; devices can send long errors


@dataclass(frozen=True)
class DeviceStatus:
    """One device as the edge server sees it.

    Args:
        round: the last round in which it took part, 0 if none.
        rounds: the number of rounds in which it took part.
        forward_s, backward_s: its last measurements, None before the first.
        believed: its resources, as the last block in which it takes part was planned with; None before the first.
        violations: how often it broke the protocol.
    """

    name: str
    state: State = "away"
    cut: int | None = None
    round: int = 0
    rounds: int = 0
    forward_s: float | None = None
    backward_s: float | None = None
    believed: Device | None = None
    violations: int = 0
    last_error: str = ""

    @property
    def present(self) -> bool:
        """Whether it can take part in training: it is neither away nor quarantined."""
        return self.state not in ("away", "quarantined")


@dataclass(frozen=True)
class RoundsBelief:
    """How the rounds that training needs grow with the interval, as the record has it when a block begins.

    Args:
        kappa: κ, the estimate; it is between `kappa_low` and `kappa_high` eight times of ten.
        averagings: how many averagings this was learned from; 0 for the prior alone.
        relative_rounds: the rounds that the current plan needs, relative to I = 1, with the same range.
    """

    kappa: float
    kappa_low: float
    kappa_high: float
    averagings: int
    relative_rounds: float | None = None
    relative_rounds_low: float | None = None
    relative_rounds_high: float | None = None

    @classmethod
    def of(cls, estimates: Mapping[str, Any]) -> "RoundsBelief | None":
        """Return the belief from a block's estimates; None where κ is not estimated."""
        names = [field.name for field in dataclasses.fields(cls) if field.name in estimates]
        return cls(**{name: estimates[name] for name in names}) if "kappa" in estimates else None


@dataclass(frozen=True)
class Status:
    """The edge server at one moment.

    Args:
        run: the name of the run.
        started_at: seconds since 1970.
        rounds_planned: the number of rounds of the run; None if there is no limit.
        interval: I; None where layers are never averaged, or before the first plan.
        deepest: L_c, the deepest cut; None before the first plan.
        micro_batches: k, the parts of every mini-batch; None before the first plan.
        wire_dtype: the type of numbers in which activations and gradients are sent; empty before the first plan.
        losses: training loss by round.
        evaluations: test accuracy (0 to 1) by round.
        round_s: the measured time of one round, smoothed, without the aggregation.
        predicted_round_s: the same time as `latency` predicts it.
        phases: (a1 … b3, predicted seconds, measured seconds): of the last round, and of the last averaging.
        rounds_believed: how rounds grow with the interval; None before the first block, and where κ is not estimated.
        server: the servers' resources, as the block was planned with; None before the first.
        waiting_for: what keeps the server from training, such as "2 of 4 devices"; empty while it trains.
    """

    run: str
    started_at: float
    round: int = 0
    rounds_planned: int | None = None
    block: int = 0
    interval: int | None = None
    deepest: int | None = None
    micro_batches: int | None = None
    wire_dtype: str = ""
    devices: tuple[DeviceStatus, ...] = ()
    losses: Points = ()
    evaluations: Points = ()
    round_s: float | None = None
    predicted_round_s: float | None = None
    phases: tuple[tuple[str, float | None, float | None], ...] = ()
    rounds_believed: RoundsBelief | None = None
    server: Server | None = None
    received_bytes: int = 0
    sent_bytes: int = 0
    received_bps: float = 0.0
    sent_bps: float = 0.0
    waiting_for: str = ""
    last_error: str = ""


Snapshot = TypeVar("Snapshot", Status, DeviceStatus)


class Board:
    """Holds the newest status. Snapshots never change, so readers need no lock; writers take turns."""

    def __init__(self, status: Status) -> None:
        self._status = status
        self._writing = threading.Lock()

    @property
    def status(self) -> Status:
        """The newest snapshot."""
        return self._status

    def update(self, **changes: Any) -> None:
        """Replace fields of `Status`."""
        with self._writing:
            self._status = _changed(self._status, changes)

    def update_device(self, name: str, **changes: Any) -> None:
        """Replace fields of a device's `DeviceStatus`; a device that is not on the board yet is added."""
        self.update_devices({name: changes})

    def update_devices(self, changes: Mapping[str, dict[str, Any]]) -> None:
        """Replace fields of several devices, by name."""
        with self._writing:
            devices = {device.name: device for device in self._status.devices}
            for name, fields in changes.items():
                devices[name] = _changed(devices.get(name) or DeviceStatus(name), fields)
            self._status = dataclasses.replace(self._status, devices=tuple(devices.values()))

    def update_beliefs(self, estimates: Mapping[str, Any], fleet: Fleet) -> None:
        """Replace what is believed about convergence, the servers and these devices: those that a block is for."""
        self.update(rounds_believed=RoundsBelief.of(estimates), server=fleet.server)
        self.update_devices({device.name: {"believed": device} for device in fleet})

    def update_phases(self, predicted_s: Mapping[str, float], measured_s: Mapping[str, float]) -> None:
        """Replace the seconds of the phases that were measured."""
        with self._writing:
            rows = {row[0]: row for row in self._status.phases}
            rows |= {phase: (phase, predicted_s[phase], seconds) for phase, seconds in measured_s.items()}
            phases = tuple(rows[phase] for phase in PHASES if phase in rows)
            self._status = dataclasses.replace(self._status, phases=phases)

    def add_loss(self, round: int, loss: float) -> None:
        """Add the training loss of a round."""
        with self._writing:
            self._status = dataclasses.replace(self._status, losses=_added(self._status.losses, round, loss))

    def add_evaluation(self, round: int, accuracy: float) -> None:
        """Add the test accuracy after a round."""
        with self._writing:
            evaluations = _added(self._status.evaluations, round, accuracy)
            self._status = dataclasses.replace(self._status, evaluations=evaluations)


def status_data(status: Status) -> dict[str, Any]:
    """Return the status for JSON: phases with their titles, None for numbers that are not finite."""
    data = dataclasses.asdict(status)
    data["phases"] = [
        {"phase": phase, "title": PHASES[phase], "predicted_s": predicted_s, "measured_s": measured_s}
        for phase, predicted_s, measured_s in status.phases
    ]
    finite: dict[str, Any] = _finite(data)
    return finite


def _changed(before: Snapshot, changes: dict[str, Any]) -> Snapshot:
    """Return the snapshot with changed values, and its error cut to `LONGEST_ERROR`."""
    after = dataclasses.replace(before, **changes)
    if len(after.last_error) <= LONGEST_ERROR:
        return after
    return dataclasses.replace(after, last_error=after.last_error[: LONGEST_ERROR - 1] + "…")


def _added(points: Points, round: int, value: float) -> Points:
    """Return the curve with one more point; a repeated round removes the points after it.

    If there are too many, the point whose neighbours are closest to each other is removed: points stay evenly spread.
    """
    kept = [point for point in points if point[0] < round] if points and points[-1][0] >= round else list(points)
    kept.append((round, value))
    if len(kept) > MOST_POINTS:
        del kept[min(range(1, len(kept) - 1), key=lambda k: kept[k + 1][0] - kept[k - 1][0])]
    return tuple(kept)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    if isinstance(value, np.generic):
        return _finite(value.item())
    return None if isinstance(value, float) and not math.isfinite(value) else value
