"""What fewer bits per number cost in rounds: the progress that is left when activations and gradients are rounded.

A step along d, if it is as long as is best, lowers a smooth loss in proportion to ⟨g, d⟩²/‖d‖² = ‖g‖² cos²(g, d),
where g is the exact gradient. With rounded numbers a round thus makes cos² of its progress, and a target needs 1/cos²
times as many rounds. Both gradients are of the same mini-batches, so that one round is enough to compare them.

The edge server can compare two gradients. One is that of the common layers, which shows what rounded activations do.
The other stands for the layers on a device, whose gradients the edge server never sees: the gradient of a scale and a
shift per channel, as if a layer at the cut had them, from the activations' gradient as it arrives at the device. Like
the gradient of a real layer, it is a sum over samples and positions, in which errors partly cancel. The larger factor
of the two counts.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

NO_PROGRESS = 1e6  # the factor where rounded gradients do not point along the exact ones at all


@dataclass(frozen=True)
class ServerGradients:
    """The gradients of one round, of which nothing is updated.

    Attributes:
        common: of the common layers, the mean over devices.
        at_cut: by device, the gradient of its own loss by scale and shift at its cut (see `affine_gradient`).
    """

    common: Sequence[Tensor]
    at_cut: Mapping[int, Tensor]


@contextmanager
def repeated(device: torch.device) -> Iterator[None]:
    """Run with the same random numbers every time, so that gradients of several types have the same dropout."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        yield


def affine_gradient(activations: Tensor, gradient: Tensor) -> Tensor:
    """Return the gradient of scale 1 and shift 0 of every channel, for activations and the gradient that arrives.

    Channels are the second axis, or the last of three, as transformers have it.
    """
    g, x = gradient.detach().double(), activations.detach().double()
    if g.dim() == 1:  # one number per sample
        g, x = g[:, None], x[:, None]
    channel = 2 if g.dim() == 3 else 1
    others = [axis for axis in range(g.dim()) if axis != channel]
    return torch.cat([(g * x).sum(others), g.sum(others)])


def products(exact: ServerGradients, rounded: ServerGradients, shares: Sequence[float]) -> list[float]:
    """Return ⟨g, d⟩, ‖g‖² and ‖d‖² of the common layers, then at the cuts, the sum over devices by their shares.

    Where ranks hold the devices, the last three are sums over a rank's own.
    """
    of_common = [_three(g, d) for g, d in zip(exact.common, rounded.common, strict=True)]
    of_cuts = [
        [shares[device] * number for number in _three(gradient, rounded.at_cut[device])]
        for device, gradient in exact.at_cut.items()
    ]
    return [math.fsum(column) for three in (of_common, of_cuts) for column in zip(*(three or [[0.0] * 3]), strict=True)]


def rounds_factor(numbers: Sequence[float]) -> float:
    """Return the factor on the rounds for what `products` returned: from 1 to `NO_PROGRESS`."""
    return min(max(_lost(*numbers[:3]), _lost(*numbers[3:])), NO_PROGRESS)


def _three(g: Tensor, d: Tensor) -> list[float]:
    g, d = g.detach().flatten().double(), d.detach().flatten().double()
    return [float(torch.dot(g, d)), float(torch.dot(g, g)), float(torch.dot(d, d))]


def _lost(along: float, exact: float, rounded: float) -> float:
    """Return 1/cos² of two gradients; 1 where the exact one is zero, because then there is nothing to lose."""
    if exact == 0:
        return 1.0
    return max(1.0, exact * rounded / along**2) if along > 0 else math.inf
