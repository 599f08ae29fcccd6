"""The edge server's events. Devices and connections are numbers; `attempt` identifies a block."""

from dataclasses import dataclass
from typing import Literal

from adaptsfl.deploy.sending import Sending

Purpose = Literal["round", "evaluation", "estimation"]
WHOLE = Sending()


@dataclass(frozen=True)
class Event:
    """Base class of all events."""


@dataclass(frozen=True)
class DeadlinePassed(Event):
    """The time `wake_at`, which the protocol has set, has come."""


# --- connections ---


@dataclass(frozen=True)
class Hello(Event):
    """A device has opened a connection, and still holds the layers of `attempt` (0 if none)."""

    connection: int
    device: int
    attempt: int = 0


@dataclass(frozen=True)
class Ready(Event):
    """A device has loaded its data and measured its links."""

    connection: int
    samples: int


@dataclass(frozen=True)
class Closing(Event):
    """The edge server is ending a connection, for a reason outside the protocol."""

    connection: int


@dataclass(frozen=True)
class Disconnected(Event):
    """A connection is over.

    Attributes:
        violated: whether it was ended because the device broke the protocol.
        informed: whether the device had read everything that was sent to it.
    """

    connection: int
    violated: bool = False
    informed: bool = False


@dataclass(frozen=True)
class Violated(Event):
    """A device broke the protocol, in any call."""

    device: int
    reason: str


@dataclass(frozen=True)
class GaveUp(Event):
    """A device reports that it cannot go on; `diverged` if its layers or activations contain NaN or infinity."""

    connection: int
    reason: str
    diverged: bool = False


# --- messages of devices ---


@dataclass(frozen=True)
class Activations(Event):
    """Activations of a device have arrived completely.

    Attributes:
        number: the round; in an evaluation, the number of the mini-batch.
        batches: the number of mini-batches on which the device evaluates.
        part: of the round's mini-batch, from 0.
    """

    connection: int
    attempt: int
    number: int
    purpose: Purpose = "round"
    batches: int = 0
    part: int = 0


@dataclass(frozen=True)
class StaleActivations(Event):
    """Activations of a block that is over have arrived, and were discarded."""

    connection: int


@dataclass(frozen=True)
class NotFinite(Event):
    """Data that a device has sent for a block contain NaN or infinity, or lead to it."""

    device: int
    attempt: int


@dataclass(frozen=True)
class Delivered(Event):
    """A device reports that it has delivered its layers to the fed server."""

    connection: int
    attempt: int


# --- work of the edge server ---


@dataclass(frozen=True)
class BlockOpened(Event):
    """The fed server knows a block: parties can fetch their layers.

    Attributes:
        rounds: their number; 0 in the last block of a run, which only evaluates the model.
        cuts: one per device of the fleet, also for devices that are not connected.
        planned: the number of devices for which it was planned.
        evaluate: whether devices evaluate the model with which the block begins.
        estimate: whether batch-norm's statistics are estimated before that.
        result_wanted: whether the evaluation's result is wanted; if not, only the statistics are.
        sending: in how many parts mini-batches are sent.
    """

    attempt: int
    number: int
    first_round: int
    rounds: int
    cuts: tuple[int, ...]
    planned: int
    evaluate: bool = False
    estimate: bool = False
    result_wanted: bool = True
    sending: Sending = WHOLE


@dataclass(frozen=True)
class LayersPlaced(Event):
    """The edge server has fetched and placed the layers with which it begins the block.

    Attributes:
        forgotten: whether the block had to be opened again at the fed server meanwhile: moments of devices are lost.
    """

    attempt: int
    forgotten: bool = False


@dataclass(frozen=True)
class LayersGiven(Event):
    """The edge server holds a device's layers above its cut, as they were when the block began."""

    attempt: int
    device: int


@dataclass(frozen=True)
class RoundTrained(Event):
    """A part of a round was trained; the gradients of all its devices can be sent."""

    attempt: int
    round: int
    part: int = 0


@dataclass(frozen=True)
class RoundRejected(Event):
    """A part of a round was not trained: activations of these devices led to NaN, infinity or absurd losses."""

    attempt: int
    round: int
    devices: tuple[int, ...]
    part: int = 0


@dataclass(frozen=True)
class BatchEvaluated(Event):
    """A mini-batch of test samples was evaluated: correctly classified samples, sum of losses, number of samples."""

    attempt: int
    device: int
    number: int
    row: tuple[int, float, int]


@dataclass(frozen=True)
class MomentsRejected(Event):
    """Batch-norm's statistics were not estimated: activations of these devices led to NaN or infinity."""

    attempt: int
    devices: tuple[int, ...]


@dataclass(frozen=True)
class MomentsMerged(Event):
    """The estimation of batch-norm's statistics has ended.

    Attributes:
        merged: whether the fed server has merged the statistics; if not, there is no evaluation.
        missing: devices whose moments the fed server does not have.
    """

    attempt: int
    merged: bool
    missing: tuple[int, ...] = ()


# --- answers of the fed server ---


@dataclass(frozen=True)
class Reopened(Event):
    """The fed server knows the block; `forgotten` if the block had to be opened again: all deliveries are lost."""

    attempt: int
    forgotten: bool


@dataclass(frozen=True)
class OwnDelivered(Event):
    """The fed server has a device's layers above its cut, which the edge server trains."""

    attempt: int
    device: int


@dataclass(frozen=True)
class OwnRefused(Event):
    """A device's layers above its cut cannot be averaged: the data that it sent made them unusable."""

    attempt: int
    device: int
    reason: str


@dataclass(frozen=True)
class BlockForgotten(Event):
    """The fed server does not know the block: it was restarted.

    Attributes:
        device: the device whose layers above the cut were being delivered; None if the call was to average.
    """

    attempt: int
    device: int | None = None


@dataclass(frozen=True)
class NotDelivered(Event):
    """The fed server could not average: it does not have the layers of these devices."""

    attempt: int
    devices: tuple[int, ...]


@dataclass(frozen=True)
class Averaged(Event):
    """The fed server has averaged the layers of a block.

    Attributes:
        version: the version of the averaged layers.
        divergence: ‖w_i − w̄‖/‖w̄‖ of layers 1 … L_c before they were averaged, the mean over devices; empty if not
            measured.
    """

    attempt: int
    version: int
    divergence: tuple[float, ...] = ()


# --- the end ---


@dataclass(frozen=True)
class RunOver(Event):
    """The run is over.

    Attributes:
        expected: devices that should be informed, even if they are not connected now.
        shutdown_s: how long to wait for them.
        preparing_s: how much longer to wait for devices that are connected, but do not read messages yet.
    """

    reason: str
    expected: tuple[int, ...]
    shutdown_s: float
    preparing_s: float
