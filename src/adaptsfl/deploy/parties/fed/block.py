"""The fed server's state of a block: the deliveries, and the result."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from adaptsfl.deploy.layers_file import LayerStates
from adaptsfl.deploy.moments_file import NormMoments
from adaptsfl.errors import BadMessage
from adaptsfl.training.statistics import Moments, Norm


@dataclass
class FedBlock:
    """The block that is open.

    Attributes:
        base: the layers with which it began: 1 … L_c, and those that become common with it.
        from_devices, from_edge: delivered copies, by device.
        moments: batch-norm's moments, by device; `edge_moments` are those of layers that run at the edge server.
        merged: the moments merged over all devices; None before.
    """

    attempt: int
    version: int
    deepest: int
    cuts: dict[str, int]
    base: LayerStates
    from_devices: dict[str, LayerStates] = field(default_factory=dict)
    from_edge: dict[str, LayerStates] = field(default_factory=dict)
    moments: dict[str, NormMoments] = field(default_factory=dict)
    edge_moments: NormMoments = field(default_factory=dict)
    merged: dict[Norm, Moments] | None = None

    def delivered(self, device: str) -> bool:
        """Whether all of a device's layers were delivered."""
        return device in self.from_devices and (self.cuts[device] == self.deepest or device in self.from_edge)

    def forged(self, device: str) -> LayerStates:
        """Return h_{c,i}: a device's layers 1 … L_c, wherever they were trained."""
        return {**self.from_devices[device], **self.from_edge.get(device, {})}


@dataclass(frozen=True)
class ClosedBlock:
    """The block that was closed last: the answer, should the call to close it be repeated.

    Attributes:
        version: the version that it produced.
        divergence: of layers 1 … L_c, if it was requested.
    """

    attempt: int
    version: int
    divergence: tuple[float, ...] = ()


def checked_weights(given: Mapping[str, float], block: FedBlock) -> dict[str, float]:
    """Return the weights of devices, sorted by name, or reject them.

    A message's map has a different order in every process, and sums of floats depend on the order.
    """
    if not given or any(name not in block.cuts or not 0 < w < math.inf for name, w in given.items()):
        raise BadMessage("averaging was asked for with unknown devices or weights that are not positive")
    return dict(sorted(given.items()))
