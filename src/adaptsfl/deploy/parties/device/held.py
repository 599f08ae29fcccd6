"""What a device holds of a block: its layers, what it has sent, and what is left to be evaluated."""

from dataclasses import dataclass, field

from adaptsfl.deploy import wire_pb2 as wire
from adaptsfl.deploy.layers_file import LayerStates
from adaptsfl.deploy.parties.device.evaluation import DeviceEvaluation
from adaptsfl.deploy.sending import Sending
from adaptsfl.training.reference import DeviceSide


@dataclass
class Held:
    """A device's state in a block."""

    attempt: int
    block: int
    last_round: int
    cut: int
    next_round: int
    device: DeviceSide
    sending: Sending
    round: int = 0  # whose activations it has sent last
    pending: dict[int, tuple[wire.Activations, list[memoryview]]] = field(default_factory=dict)  # by part: not answered
    sample: tuple[int, ...] = ()  # the shape of the activations of one sample
    learned: int = 0  # the last round whose gradients it applied
    delivered: bool = False  # whether the fed server has its layers
    start: LayerStates | None = None  # the layers as they were fetched, until it is known that nobody evaluates them
    evaluation: DeviceEvaluation | None = None
    fed_downlink: float = 0.0
    fetch_s: float = 0.0

    @property
    def waits(self) -> bool:
        """Whether nothing is to be done before the edge server's next message."""
        return bool(self.pending) or self.delivered or self.next_round > self.last_round
