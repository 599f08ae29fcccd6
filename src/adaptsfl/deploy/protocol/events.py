"""What can happen to the edge server. Devices and connections are numbers; a block is known by its attempt."""

from dataclasses import dataclass
from typing import Literal

Purpose = Literal["round", "evaluation", "estimation"]


@dataclass(frozen=True)
class Event:
    """Anything that happens."""


@dataclass(frozen=True)
class DeadlinePassed(Event):
    """The time has come that the protocol asked to be called at."""


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
    """This side is ending a connection, for a reason that the protocol does not know."""

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
    """A device broke the protocol, in whichever call."""

    device: int
    reason: str


@dataclass(frozen=True)
class GaveUp(Event):
    """A device says that it cannot go on; `diverged` if its layers or activations contain NaN or infinity."""

    connection: int
    reason: str
    diverged: bool = False


# --- messages of devices ---


@dataclass(frozen=True)
class Activations(Event):
    """Activations of a device have arrived whole.

    Attributes:
        number: the round, or of an evaluation the mini-batch.
        batches: how many mini-batches the device evaluates on.
    """

    connection: int
    attempt: int
    number: int
    purpose: Purpose = "round"
    batches: int = 0


@dataclass(frozen=True)
class StaleActivations(Event):
    """Activations of a block that is over have arrived, and were thrown away."""

    connection: int


@dataclass(frozen=True)
class NotFinite(Event):
    """What a device has sent for a block contains NaN or infinity, or leads to it."""

    device: int
    attempt: int


@dataclass(frozen=True)
class Delivered(Event):
    """A device says that its layers are at the fed server."""

    connection: int
    attempt: int


# --- work of the edge server ---


@dataclass(frozen=True)
class BlockOpened(Event):
    """The fed server knows a block, and the edge server has placed its layers.

    Attributes:
        rounds: none in the block at a run's end, in which the model is only evaluated.
        cuts: one per device of the fleet, also for those who may still come.
        planned: how many devices it was planned for.
        evaluate: whether devices evaluate the model with which it begins.
        estimate: whether batch-norm's statistics are estimated before that.
        result_wanted: whether the evaluation's result is wanted; if not, only the statistics are.
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


@dataclass(frozen=True)
class LayersGiven(Event):
    """The edge server holds a device's layers above its cut, as they were when the block began."""

    attempt: int
    device: int


@dataclass(frozen=True)
class RoundTrained(Event):
    """A round was trained; the gradients of all its devices can be sent."""

    attempt: int
    round: int


@dataclass(frozen=True)
class RoundRejected(Event):
    """Nothing was trained: activations of these devices led to NaN, infinity or absurd losses."""

    attempt: int
    round: int
    devices: tuple[int, ...]


@dataclass(frozen=True)
class BatchEvaluated(Event):
    """A mini-batch of test samples was evaluated: samples recognised, the sum of losses, the number of samples."""

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
        merged: whether the fed server has merged them; if not there is no evaluation.
        missing: devices whose moments were not at the fed server.
    """

    attempt: int
    merged: bool
    missing: tuple[int, ...] = ()


# --- answers of the fed server ---


@dataclass(frozen=True)
class Reopened(Event):
    """The fed server knows the block; `forgotten` if it had to be told again, and has lost all deliveries."""

    attempt: int
    forgotten: bool


@dataclass(frozen=True)
class OwnDelivered(Event):
    """The fed server has a device's layers above its cut, which the edge server trains."""

    attempt: int
    device: int


@dataclass(frozen=True)
class OwnRefused(Event):
    """A device's layers above its cut cannot be averaged: what it sent has ruined them."""

    attempt: int
    device: int
    reason: str


@dataclass(frozen=True)
class BlockForgotten(Event):
    """The fed server does not know the block: it was restarted.

    Attributes:
        device: whose layers above the cut were being delivered; None if it was asked to average.
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
        version: of the averaged layers.
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
        expected: devices that should hear of it, also if they are away for a moment.
        shutdown_s: how long to wait for them.
        preparing_s: how long beyond that for those who are connected, but do not read yet.
    """

    reason: str
    expected: tuple[int, ...]
    shutdown_s: float
    preparing_s: float
