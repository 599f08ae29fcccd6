"""The edge server's part of the model: the common layers, and every device's own layers above its cut.

The mathematics are those of `training.reference`; this module loads and hands out layers, and protects the common
layers from bad data of a device. All of it runs in one thread, one call at a time.
"""

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn import functional

from adaptsfl.deploy.layers_file import LARGEST, LayerStates, Template, copied
from adaptsfl.deploy.moments_file import plausible
from adaptsfl.deploy.tensors import NonFiniteTensor
from adaptsfl.models import SplitModel
from adaptsfl.training.layers import Layer
from adaptsfl.training.reference import ServerSide
from adaptsfl.training.settings import Statistics, sample_cross_entropy
from adaptsfl.training.statistics import Moments, Norm, evaluated, recorded, running_buffers

# A loss so many times larger than the others' is an outlier; one optimiser step on it would destroy the model. Losses
# of labels that are hard for a while, or rare, are far below.
ABSURD = 1e3
# Limit before an update of shared layers. Adam keeps squares, and the fed server accepts numbers up to 1e9.
LARGEST_GRADIENT = 3e4


class RejectedActivations(Exception):
    """Activations of some devices made the loss or the gradients absurd, NaN or infinite; nothing was updated."""

    def __init__(self, devices: Sequence[int]) -> None:
        self.devices = tuple(devices)
        super().__init__(f"devices {self.devices}")


class StartModel:
    """The model with which a block began, as far as it runs at the edge server: test samples are evaluated with it.

    Args:
        states: its layers above the lowest cut; training must not change these tensors.

    Attributes:
        running: by layer: statistics of batch-norm in place of the layers' own.
    """

    def __init__(self, template: Template, states: LayerStates) -> None:
        self._template, self._states = template, states
        self.running: Mapping[int, Mapping[str, Tensor]] = {}

    @cached_property
    def pieces(self) -> dict[int, nn.Module]:
        """The layers as modules; made when they are first needed, and not while devices wait for a block to begin."""
        states = sorted(self._states.items())
        return {number: self._template.layer(number, state).piece for number, state in states}

    def evaluate(self, cut: int, activations: Tensor, labels: Tensor) -> tuple[int, float, int]:
        """Return how many test samples are classified correctly, the sum of losses, and the number of samples."""
        above = {number: piece for number, piece in self.pieces.items() if number > cut}
        outputs = evaluated(above, self.running, activations).flatten(0, -2)
        flat = labels.flatten()
        right = int((outputs.argmax(1) == flat).sum())
        loss = float(functional.cross_entropy(outputs, flat, reduction="sum"))
        if not math.isfinite(loss):
            raise NonFiniteTensor("test samples came that lead to NaN or infinity")
        return right, loss, len(flat)


class EdgeModel:
    """The layers with which the edge server computes.

    Attributes:
        deepest: L_c.
        start: the model with which the block began, while it is evaluated.
    """

    def __init__(self, model: SplitModel, template: Template, statistics: Statistics, devices: int, floor: int) -> None:
        self.template, self.deepest = template, floor
        common = [template.layer(number) for number in range(floor + 1, model.layers + 1)]
        self.server = ServerSide(common, statistics, template.settings, sample_cross_entropy)
        self.server.non_common = [[] for _ in range(devices)]
        # By device and part: activations, and the buffers before them.
        self._sent: dict[tuple[int, int], tuple[Tensor, list[Tensor]]] = {}
        self._base: LayerStates = {}  # client-specific layers above the lowest cut, as the block began
        self._running: dict[int, dict[str, Tensor]] = {}  # by layer: batch-norm's statistics for evaluations
        self.start: StartModel | None = None

    def common_states(self) -> LayerStates:
        """Return the common layers, for a checkpoint or for the complete model."""
        return {number: layer.state() for number, layer in enumerate(self.server.common, start=self.deepest + 1)}

    def load_common(self, states: LayerStates, deepest: int) -> None:
        """Replace the common layers."""
        self.deepest = deepest
        self.server.common = [self.template.layer(number, state) for number, state in sorted(states.items())]

    def becoming_specific(self, deepest: int) -> LayerStates:
        """Return the common layers that become client-specific with a new L_c."""
        return {number: state for number, state in self.common_states().items() if number <= deepest}

    def place(self, deepest: int, fetched: LayerStates, *, evaluates: bool = False) -> None:
        """Begin a block: load averaged layers that become common, and keep the client-specific ones for `admit`.

        Args:
            evaluates: whether to keep a copy of the model, to be evaluated while training goes on.
        """
        common = {number: state for number, state in self.common_states().items() if number > deepest}
        common |= {number: state for number, state in fetched.items() if number > deepest}
        self.load_common(common, deepest)
        self._base = {number: state for number, state in fetched.items() if number <= deepest}
        self._running = {}
        self.server.non_common = [[] for _ in self.server.non_common]
        self.start = StartModel(self.template, {**self._base, **copied(self.common_states())}) if evaluates else None

    def admit(self, device: int, cut: int) -> None:
        """Create a device's own layers above the cut, with the weights with which the block began."""
        self._sent = {key: sent for key, sent in self._sent.items() if key[0] != device}
        self.server.non_common[device] = [
            self.template.layer(number, self._base[number]) for number in range(cut + 1, self.deepest + 1)
        ]

    def has_own_layers(self, device: int) -> bool:
        """Whether the edge server runs layers of this device alone, between its cut and L_c."""
        return bool(self.server.non_common[device])

    def own_states(self, device: int, cut: int) -> LayerStates:
        """Return a device's layers above its cut."""
        return {number: layer.state() for number, layer in enumerate(self.server.non_common[device], start=cut + 1)}

    def receive(self, device: int, activations: Tensor, part: int = 0) -> None:
        """Run a device's own layers on a part of its activations, while other devices still send."""
        activations, own = _laid_out(activations), self.server.non_common[device]
        self._sent[device, part] = activations, [buffer.clone() for buffer in _buffers(own)]
        self.server.receive(device, activations, part)

    def train(
        self,
        round_: int,
        present: Sequence[int],
        labels: Mapping[int, Tensor],
        weights: Sequence[float],
        part: int = 0,
        parts: int = 1,
    ) -> tuple[Tensor, list[Tensor]]:
        """Train on one part of the present devices' mini-batches in round 1, 2, …; return their losses and gradients.

        Layers change after the last part only. Raises `RejectedActivations`, and leaves all layers and the gradients of
        earlier parts as they were, if a device's activations lead to NaN, infinity or absurd losses.
        """
        kept = [buffer.clone() for buffer in _buffers(self.server.common)]
        losses = self.server.forward(present, [labels[device] for device in present], weights, part, parts)
        gradients: list[Tensor] = []
        rejected = self._absurd(present, losses.tolist()) or self._swollen(present, part, kept)
        if not rejected:
            gradients = self.server.backward()
            rejected = [device for device, gradient in zip(present, gradients, strict=True) if not _bounded(gradient)]
            if not all(_bounded(gradient) for gradient in self.server.gradients):
                rejected = rejected or [self._largest(present, part)]
        if rejected:
            _restore(self.server.common, kept)
            for device in present:
                self._receive_again(device, part, rejected=device in rejected)
            raise RejectedActivations(rejected)
        self.server.accumulate()
        for device in present:
            del self._sent[device, part]
        if part + 1 == parts:
            self.update(round_, present)
        return losses, gradients

    def update(self, round_: int, present: Sequence[int]) -> None:
        """Update the layers after the last part of round 1, 2, …; own layers only of devices with all their parts."""
        self.server.update(round_, present)
        self._sent.clear()

    def drop_round(self) -> None:
        """Drop activations and gradients of the round under way: it begins again, and no layer has changed."""
        self.server.drop()
        self._sent.clear()

    def _receive_again(self, device: int, part: int, *, rejected: bool) -> None:
        """Undo what a device's own layers did from a part on; if it was not rejected, run them again."""
        _restore(self.server.non_common[device], self._sent[device, part][1])
        for later in sorted(own for k, own in self._sent if k == device and own >= part):
            activations, _ = self._sent.pop((device, later))
            if not rejected:  # the second attempt needs the others' autograd graphs
                self.receive(device, activations.detach(), later)

    def estimate(self, sent: Mapping[int, Tensor], weights: Mapping[int, float]) -> dict[Norm, Moments]:
        """Return the moments of batch-norm in all layers at the edge server, for these activations; no layer changes.

        As in training, a device's samples are normalised by themselves in its own layers. Raises `RejectedActivations`
        if a device's activations lead to NaN or infinity.
        """
        pooled = self.server.statistics == "pooled"
        parts: dict[Norm, list[Moments]] = {}
        outputs = []
        for device, activations in sent.items():
            pieces = self._pieces(device)
            apart = {number: piece for number, piece in pieces.items() if number <= self.deepest or not pooled}
            found, output = recorded(apart, _laid_out(activations))
            if not _sound(found):
                raise RejectedActivations([device])
            outputs.append(output)
            for norm, moments in found.items():
                parts.setdefault(norm, []).append(moments.weighing(weights[device]))
        merged = {norm: Moments.merged(moments) for norm, moments in parts.items()}
        if pooled:
            common = dict(enumerate((layer.piece for layer in self.server.common), start=self.deepest + 1))
            found, _ = recorded(common, torch.cat(outputs))
            if not _sound(found):
                raise RejectedActivations([max(sent, key=lambda device: float(sent[device].abs().max()))])
            merged |= {norm: moments.weighing(sum(weights.values())) for norm, moments in found.items()}
        return merged

    def take_statistics(self, merged: Mapping[Norm, Moments]) -> None:
        """Evaluate with these statistics of batch-norm until the next block begins; training goes on with its own."""
        self._running = {
            number: running_buffers(piece, number, merged)
            for number, piece in enumerate(self.template.model.pieces, start=1)
        }
        if self.start is not None:
            self.start.running = self._running

    def estimated(self, states: LayerStates) -> LayerStates:
        """Return layers with the statistics of `take_statistics`."""
        buffers = {n: {f"buffers.{name}": value for name, value in own.items()} for n, own in self._running.items()}
        return {number: {**state, **buffers.get(number, {})} for number, state in states.items()}

    def _pieces(self, device: int) -> dict[int, nn.Module]:
        """Return the layers that the edge server runs for a device, by number."""
        own = self.server.non_common[device]
        layers = [*own, *self.server.common]
        return dict(enumerate((layer.piece for layer in layers), start=self.deepest - len(own) + 1))

    def _absurd(self, present: Sequence[int], losses: Sequence[float]) -> list[int]:
        """Return the outliers: devices whose loss is NaN or infinite, or far above the median."""
        finite = [loss for loss in losses if math.isfinite(loss)]
        limit = ABSURD * max(1.0, median(finite)) if len(finite) > 2 else math.inf
        return [device for device, loss in zip(present, losses, strict=True) if not (loss < math.inf and loss <= limit)]

    def _swollen(self, present: Sequence[int], part: int, common: Sequence[Tensor]) -> list[int]:
        """Return devices whose activations drove running statistics out of bounds, which the loss does not show."""
        own = [device for device in present if _grown(self._sent[device, part][1], self.server.non_common[device])]
        return own or ([self._largest(present, part)] if _grown(common, self.server.common) else [])

    def _largest(self, present: Sequence[int], part: int) -> int:
        """Return the device with the largest activations."""
        return max(present, key=lambda device: float(self.server.received(device, part).abs().max()))


def _sound(found: Mapping[Norm, Moments]) -> bool:
    """Whether moments, and the running statistics that they give, are within bounds."""
    return all(plausible(moments) and _bounded(moments.running[1], LARGEST) for moments in found.values())


def _laid_out(activations: Tensor) -> Tensor:
    """Return activations in the memory format in which convolutions are fastest: channels last."""
    images = activations.dim() == 4
    return activations.contiguous(memory_format=torch.channels_last) if images else activations


def _buffers(layers: Sequence[Layer]) -> list[Tensor]:
    return [buffer for layer in layers for buffer in layer.piece.buffers()]


def _grown(before: Sequence[Tensor], layers: Sequence[Layer]) -> bool:
    """Whether a buffer has changed and is out of bounds now; unchanged ones, such as masks, may hold large numbers."""
    after = _buffers(layers)
    return any(not torch.equal(old, new) and not _bounded(new, LARGEST) for old, new in zip(before, after, strict=True))


def _restore(layers: Sequence[Layer], values: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for buffer, value in zip(_buffers(layers), values, strict=True):
            buffer.copy_(value)


def _bounded(tensor: Tensor, most: float = LARGEST_GRADIENT) -> bool:
    """Whether all numbers are within bounds, which NaN is not; makes no copy."""
    if tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
        tensor = tensor.permute(0, 2, 3, 1)  # the order in memory, in which torch is three times as fast
    return not tensor.numel() or all(abs(float(end)) <= most for end in tensor.aminmax())
