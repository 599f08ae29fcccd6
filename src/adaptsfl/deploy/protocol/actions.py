"""The protocol's actions. The conductor carries them out in their order, and returns no result."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Action:
    """Base class of all actions."""


# --- messages to devices ---


@dataclass(frozen=True)
class SendWelcome(Action):
    """Send the settings of the run."""

    connection: int
    device: int


@dataclass(frozen=True)
class SendPlan(Action):
    """Send the plan of the block.

    Attributes:
        evaluate: whether to evaluate the layers as they are fetched, while the device waits for gradients.
        estimate: the round on whose mini-batch batch-norm's statistics are estimated; 0 if they are not.
    """

    connection: int
    attempt: int
    block: int
    next_round: int
    last_round: int
    cut: int
    evaluate: bool
    estimate: int


@dataclass(frozen=True)
class SendGradients(Action):
    """Send the gradients of a part that was trained, for the first time or once more."""

    connection: int
    device: int
    round: int
    part: int = 0


@dataclass(frozen=True)
class SendSkip(Action):
    """Tell a device to go on with another round."""

    connection: int
    next_round: int


@dataclass(frozen=True)
class SendEvaluate(Action):
    """Tell a device to evaluate with the merged statistics of batch-norm."""

    connection: int
    attempt: int


@dataclass(frozen=True)
class SendEvaluated(Action):
    """Tell a device that a mini-batch of its test samples was evaluated, so that it may send another one."""

    connection: int
    attempt: int
    number: int


@dataclass(frozen=True)
class SendDeliver(Action):
    """Ask a device to deliver its layers to the fed server."""

    connection: int
    attempt: int


@dataclass(frozen=True)
class SendStop(Action):
    """Tell a device that the run is over."""

    connection: int
    reason: str


@dataclass(frozen=True)
class Close(Action):
    """End a connection.

    Attributes:
        reason: the error that is sent to the device; if empty, the messages sent before are still delivered.
        violation: whether the device broke the protocol; violations are counted.
    """

    connection: int
    reason: str = ""
    violation: bool = False


# --- work of the edge server ---


@dataclass(frozen=True)
class PlaceLayers(Action):
    """Fetch the averaged layers that run at the edge server in the block, and place them."""

    attempt: int


@dataclass(frozen=True)
class GiveLayers(Action):
    """Initialise a device's layers above its cut with the weights with which the block began."""

    attempt: int
    device: int
    cut: int


@dataclass(frozen=True)
class UseActivations(Action):
    """Keep the activations that have just arrived for the open round, and run the device's layers above its cut."""

    connection: int
    device: int
    part: int = 0


@dataclass(frozen=True)
class EvaluateBatch(Action):
    """Evaluate the mini-batch that has just arrived with the model with which the block began."""

    connection: int
    attempt: int
    device: int
    number: int


@dataclass(frozen=True)
class KeepForEstimation(Action):
    """Keep the activations that have just arrived for the estimation of batch-norm's statistics."""

    connection: int
    device: int


@dataclass(frozen=True)
class TrainRound(Action):
    """Train a part of a round with the activations of these devices; layers change after the last part.

    Attributes:
        everybody: whether every awaited device has sent: then all time since the last arrival is the server's own.
        part: of the mini-batches, from 0; `parts` is their number.
    """

    attempt: int
    round: int
    devices: tuple[int, ...]
    everybody: bool
    part: int = 0
    parts: int = 1


@dataclass(frozen=True)
class DropRound(Action):
    """Drop the activations and the gradients of the parts that were trained: the round begins again."""

    attempt: int
    round: int


@dataclass(frozen=True)
class EstimateMoments(Action):
    """Estimate batch-norm's statistics from the activations of these devices, and have them merged."""

    attempt: int
    devices: tuple[int, ...]


@dataclass(frozen=True)
class EndEvaluation(Action):
    """Record an evaluation of the model after a round."""

    round: int
    accuracy: float
    loss: float


# --- calls of the fed server ---


@dataclass(frozen=True)
class Reopen(Action):
    """Make sure that the fed server knows the block."""

    attempt: int


@dataclass(frozen=True)
class DeliverOwn(Action):
    """Deliver a device's layers above its cut to the fed server."""

    attempt: int
    device: int
    cut: int


@dataclass(frozen=True)
class Average(Action):
    """Have the fed server average the layers of these devices."""

    attempt: int
    devices: tuple[int, ...]


# --- the course of the run ---


@dataclass(frozen=True)
class EndBlock(Action):
    """The block is over."""

    attempt: int


@dataclass(frozen=True)
class Diverged(Action):
    """Training has diverged: end the run."""

    reason: str


@dataclass(frozen=True)
class EndShutdown(Action):
    """End the wait for devices that should be informed that the run is over."""


# --- what people see ---


@dataclass(frozen=True)
class Show(Action):
    """Update the status display of these devices."""

    devices: tuple[int, ...]


@dataclass(frozen=True)
class Say(Action):
    """Write a line to the log."""

    text: str


@dataclass(frozen=True)
class WaitFor(Action):
    """Show what is being waited for."""

    what: str
