"""What fewer bits per number cost in rounds: the progress that is left when activations and gradients are rounded.

A step along d, if it is as long as is best, lowers a smooth loss in proportion to ⟨g, d⟩²/‖d‖² = ‖g‖² cos²(g, d),
where g is the exact gradient. With rounded numbers a round thus makes cos² of its progress, and a target needs 1/cos²
times as many rounds. Both gradients are of the same mini-batches, so that one round is enough to compare them.

The edge server can compare two gradients: that of the common layers, and those of the activations, as they arrive at
the devices. The second stands for the layers on the devices, whose gradients the edge server never sees. It is a
cautious estimate, because the errors of single samples partly cancel in a mean over samples. The larger factor counts.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ServerGradients:
    """The gradients of one round, of which nothing is updated.

    Attributes:
        common: of the common layers, the mean over devices.
        arrived: by device, what arrives of the gradient of its activations.
    """

    common: Sequence[Tensor]
    arrived: Mapping[int, Tensor]


def products(exact: ServerGradients, rounded: ServerGradients, shares: Sequence[float]) -> list[float]:
    """Return ⟨g, d⟩, ‖g‖² and ‖d‖² of the common layers, then of what arrives, the sum over devices by their shares.

    Where ranks hold the devices, the last three are sums over a rank's own.
    """
    of_common = [_three(g, d) for g, d in zip(exact.common, rounded.common, strict=True)]
    of_arrived = [
        [shares[device] * number for number in _three(gradient, rounded.arrived[device])]
        for device, gradient in exact.arrived.items()
    ]
    return [
        math.fsum(column) for three in (of_common, of_arrived) for column in zip(*(three or [[0.0] * 3]), strict=True)
    ]


def rounds_factor(numbers: Sequence[float]) -> float:
    """Return the factor on the rounds, at least 1, for what `products` returned; infinite if no progress is left."""
    return max(_lost(*numbers[:3]), _lost(*numbers[3:]))


def _three(g: Tensor, d: Tensor) -> list[float]:
    g, d = g.detach().flatten().double(), d.detach().flatten().double()
    return [float(torch.dot(g, d)), float(torch.dot(g, g)), float(torch.dot(d, d))]


def _lost(along: float, exact: float, rounded: float) -> float:
    """Return 1/cos² of two gradients; 1 where the exact one is zero, because then there is nothing to lose."""
    if exact == 0:
        return 1.0
    return max(1.0, exact * rounded / along**2) if along > 0 else math.inf
