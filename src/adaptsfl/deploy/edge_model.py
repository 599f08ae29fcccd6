"""The edge server's part of the model: the common layers, and every device's own layers above its cut.

The mathematics are those of `training.reference`; here are the layers' coming and going, and what protects the
common layers from what a device may send. All of it runs in one thread, one call at a time.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import median

import torch
from torch import Tensor
from torch.nn import functional

from adaptsfl.deploy.layers_file import LARGEST, LayerStates, Template
from adaptsfl.deploy.tensors import NoNumbers
from adaptsfl.models import SplitModel
from adaptsfl.training.layers import Layer, run
from adaptsfl.training.reference import EdgeServer
from adaptsfl.training.settings import Statistics, sample_cross_entropy

# A loss so many times the others' says nothing about the model; one step after it would leave nothing of what was
# learned. Labels that are hard for a while, or rare, are far below.
ABSURD = 1e3
# Before an update of layers that all devices share. Adam keeps squares, and the fed server takes numbers up to 1e9.
LARGEST_GRADIENT = 3e4


class Spoilt(Exception):
    """Devices whose activations made the loss or the gradients absurd, or no numbers; nothing was updated."""

    def __init__(self, devices: Sequence[int]) -> None:
        self.devices = tuple(devices)
        super().__init__(f"devices {self.devices}")


class EdgeModel:
    """What the edge server computes with.

    Attributes:
        deepest: L_c.
    """

    def __init__(self, model: SplitModel, template: Template, statistics: Statistics, devices: int, floor: int) -> None:
        self.template, self.deepest = template, floor
        common = [template.layer(number) for number in range(floor + 1, model.layers + 1)]
        self.server = EdgeServer(common, statistics, template.settings, sample_cross_entropy)
        self.server.non_common = [[] for _ in range(devices)]
        self._sent: dict[int, tuple[Tensor, list[Tensor]]] = {}  # by device: activations, and its buffers before them
        self._base: LayerStates = {}  # of the client-specific layers above the lowest cut, as the block began

    def common_states(self) -> LayerStates:
        """Return the common layers, for a checkpoint or for the whole model."""
        return {number: layer.state() for number, layer in enumerate(self.server.common, start=self.deepest + 1)}

    def load_common(self, states: LayerStates, deepest: int) -> None:
        """Go on with other common layers."""
        self.deepest = deepest
        self.server.common = [self.template.layer(number, state) for number, state in sorted(states.items())]

    def becoming_specific(self, deepest: int) -> LayerStates:
        """Return the common layers that another L_c makes client-specific."""
        return {number: state for number, state in self.common_states().items() if number <= deepest}

    def place(self, deepest: int, fetched: LayerStates) -> None:
        """Begin a block: take averaged layers that become common with it, and keep those of single devices."""
        common = {number: state for number, state in self.common_states().items() if number > deepest}
        common |= {number: state for number, state in fetched.items() if number > deepest}
        self.load_common(common, deepest)
        self._base = {number: state for number, state in fetched.items() if number <= deepest}
        self.server.non_common = [[] for _ in self.server.non_common]

    def admit(self, device: int, cut: int) -> None:
        """Give a device its own layers above the cut, as they were when the block began."""
        self.server.non_common[device] = [
            self.template.layer(number, self._base[number]) for number in range(cut + 1, self.deepest + 1)
        ]

    def own_states(self, device: int, cut: int) -> LayerStates:
        """Return a device's layers above its cut."""
        return {number: layer.state() for number, layer in enumerate(self.server.non_common[device], start=cut + 1)}

    def receive(self, device: int, activations: Tensor) -> None:
        """Run a device's own layers on what it sent, while others still send."""
        if activations.dim() == 4:
            activations = activations.contiguous(memory_format=torch.channels_last)
        self._sent[device] = activations, [buffer.clone() for buffer in _buffers(self.server.non_common[device])]
        self.server.receive(device, activations)

    def train(
        self, round_: int, present: Sequence[int], labels: Mapping[int, Tensor], weights: Sequence[float]
    ) -> tuple[Tensor, list[Tensor]]:
        """Train on what the present devices sent for round 1, 2, …; return their losses and gradients.

        Raises `Spoilt`, and leaves all layers as they were, if a device's activations lead to no numbers.
        """
        kept = [buffer.clone() for buffer in _buffers(self.server.common)]
        losses = self.server.forward(present, [labels[device] for device in present], weights)
        gradients: list[Tensor] = []
        spoilt = self._absurd(present, losses.tolist()) or self._swollen(present, kept)
        if not spoilt:
            gradients = self.server.backward()
            spoilt = [device for device, gradient in zip(present, gradients, strict=True) if not _bounded(gradient)]
            if not all(_bounded(gradient) for gradient in self.server.gradients):
                spoilt = spoilt or [self._largest(present)]
        if spoilt:
            _restore(self.server.common, kept)
            for device in present:
                activations, buffers = self._sent[device]
                _restore(self.server.non_common[device], buffers)
                if device not in spoilt:  # the others are trained in a second try, for which their graphs are needed
                    self.receive(device, activations.detach())
            raise Spoilt(spoilt)
        self.server.update(round_)
        self._sent.clear()
        return losses, gradients

    def evaluate(self, device: int, activations: Tensor, labels: Tensor) -> tuple[int, float, int]:
        """Return how many of a device's test samples are recognised, the sum of their losses, and their number."""
        layers = [*self.server.non_common[device], *self.server.common]
        _set_mode(layers, training=False)
        try:
            with torch.no_grad():
                outputs = run(layers, activations).flatten(0, -2)
        finally:
            _set_mode(layers, training=True)
        flat = labels.flatten()
        right = int((outputs.argmax(1) == flat).sum())
        loss = float(functional.cross_entropy(outputs, flat, reduction="sum"))
        if not math.isfinite(loss):
            raise NoNumbers("test samples came that lead to no numbers")
        return right, loss, len(flat)

    def _absurd(self, present: Sequence[int], losses: Sequence[float]) -> list[int]:
        """Return whose loss is no number, or far from that of most others."""
        finite = [loss for loss in losses if math.isfinite(loss)]
        limit = ABSURD * max(1.0, median(finite)) if len(finite) > 2 else math.inf
        return [device for device, loss in zip(present, losses, strict=True) if not (loss < math.inf and loss <= limit)]

    def _swollen(self, present: Sequence[int], common: Sequence[Tensor]) -> list[int]:
        """Return whose activations drove running statistics beyond reason: batch-norm hides that from the loss."""
        own = [device for device in present if _grown(self._sent[device][1], self.server.non_common[device])]
        return own or ([self._largest(present)] if _grown(common, self.server.common) else [])

    def _largest(self, present: Sequence[int]) -> int:
        """Return who sent the largest activations."""
        return max(present, key=lambda device: float(self.server.received(device).abs().max()))


def _buffers(layers: Sequence[Layer]) -> list[Tensor]:
    return [buffer for layer in layers for buffer in layer.piece.buffers()]


def _grown(before: Sequence[Tensor], layers: Sequence[Layer]) -> bool:
    """Whether a buffer has changed and is out of bounds now; some, such as masks, have large numbers on purpose."""
    after = _buffers(layers)
    return any(not torch.equal(old, new) and not _bounded(new, LARGEST) for old, new in zip(before, after, strict=True))


def _restore(layers: Sequence[Layer], values: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for buffer, value in zip(_buffers(layers), values, strict=True):
            buffer.copy_(value)


def _bounded(tensor: Tensor, most: float = LARGEST_GRADIENT) -> bool:
    """Whether all numbers are within reason, which NaN is not; without a copy of them."""
    return not tensor.numel() or all(abs(float(end)) <= most for end in tensor.aminmax())


def _set_mode(layers: Sequence[Layer], *, training: bool) -> None:
    for layer in layers:
        layer.piece.train(training)
