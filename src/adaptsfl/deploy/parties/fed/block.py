"""A block as the fed server sees it: who has delivered what, and what a block led to."""

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
        moments: of batch-norm on some samples, by device; `edge_moments` those of layers that run at the edge server.
        merged: over all devices; None before.
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
        """Whether all of a device's layers are here."""
        return device in self.from_devices and (self.cuts[device] == self.deepest or device in self.from_edge)

    def forged(self, device: str) -> LayerStates:
        """Return h_{c,i}: a device's layers 1 … L_c, wherever they were trained."""
        return {**self.from_devices[device], **self.from_edge.get(device, {})}


@dataclass(frozen=True)
class ClosedBlock:
    """The block that was closed last: what its closing is answered with, should it be asked for once more.

    Attributes:
        version: that it led to.
        divergence: of layers 1 … L_c, if it was asked for.
    """

    attempt: int
    version: int
    divergence: tuple[float, ...] = ()


def checked_weights(given: Mapping[str, float], block: FedBlock) -> dict[str, float]:
    """Return the weights of devices in an order of their own, or refuse them.

    A message's map has another order in every process, and sums of floats differ with theirs.
    """
    if not given or any(name not in block.cuts or not 0 < w < math.inf for name, w in given.items()):
        raise BadMessage("averaging was asked for with unknown devices or weights that are not positive")
    return dict(sorted(given.items()))
