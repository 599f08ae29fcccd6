"""Forward and backward passes of many devices: each through its own layers, all together through the common layers.

Devices run in chunks, one chunk after the other, so only the memory of their own layers grows with their number.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise

import torch
from torch import Tensor, nn

from adaptsfl import checks
from adaptsfl.training.batchnorm import SlicedBatchNorm, Slices, slice_batch_norm, spread_batch_norm
from adaptsfl.training.ranks import Ranks
from adaptsfl.training.settings import Batch, Loss, Statistics, batch_parts
from adaptsfl.training.stack import LayerStack, Slot, moved
from adaptsfl.training.wire_format import Crossing

CHUNK_SAMPLES = 160  # enough to keep the kernels busy, few enough for memory

# Takes the layers and the inputs of every device in a chunk; returns the concatenated activations.
ChunkForward = Callable[[Sequence[Sequence[nn.Module]], Sequence[Tensor]], Tensor]
# Takes the devices of a chunk and, for each client-specific layer, the gradients of all these devices.
OwnGradients = Callable[[Sequence[int], list[list[Tensor]]], None]


def one_after_another(devices: Sequence[Sequence[nn.Module]], inputs: Sequence[Tensor]) -> Tensor:
    """Run every device's own layers on its own inputs: on a CPU faster than batching the weights."""
    outputs = []
    for layers, given in zip(devices, inputs, strict=True):
        x = given
        for layer in layers:
            x = layer(x)
        outputs.append(x)
    return torch.cat(outputs) if len(outputs) > 1 else outputs[0]


@dataclass(frozen=True)
class Work:
    """The input of one pass over all devices.

    Attributes:
        batches: by device, for the devices of this rank.
        shares: the weight of every device, also of those on other ranks.
        own: how many of the first layers have one copy per device.
        ranks: the ranks that run the other devices.
        crossings: by device, the layer after which it sends its activations in another type, and the way they take.
        parts: into how many equal parts mini-batches are divided. Batch-norm normalises each part by itself; without
            batch-norm there is no need to divide them, because the parts' gradients add up to that of the whole.
    """

    batches: dict[int, Batch]
    shares: Sequence[float]
    own: int
    ranks: Ranks
    crossings: Mapping[int, tuple[int, Crossing]] = field(default_factory=dict)
    parts: int = 1

    @property
    def scale(self) -> float:
        """The largest share: the loss is divided by it, so with equal shares no device's own gradient is rescaled."""
        return max(self.shares)

    def divided(self) -> list["Work"]:
        """Return the work of every part of the mini-batches."""
        if self.parts == 1:
            return [self]
        batches = {device: batch_parts(batch, self.parts) for device, batch in self.batches.items()}
        works = []
        for part in range(self.parts):
            here = {device: own[part] for device, own in batches.items()}
            crossings = {
                device: (cut, way.of_samples(part * len(here[device][0])))
                for device, (cut, way) in self.crossings.items()
            }
            works.append(replace(self, batches=here, crossings=crossings))
        return works


class Passes:
    """Runs stacks of layers forward and backward.

    Args:
        device: where to compute.
        chunk: devices that run together; by default as many as have about 160 samples. With pooled statistics in a
            common batch-norm all devices run together, because each sample then depends on all others.
        chunk_forward: how a chunk runs through the client-specific layers.

    Attributes:
        sliced: the common layers' batch-norms that normalise each device's samples separately.
    """

    def __init__(
        self,
        layers: Sequence[LayerStack],
        loss: Loss,
        statistics: Statistics,
        device: torch.device,
        *,
        chunk: int | None = None,
        chunk_forward: ChunkForward = one_after_another,
    ) -> None:
        self.layers, self.loss, self.statistics, self.device = layers, loss, statistics, device
        self.chunk_forward = chunk_forward
        self.chunk = None if chunk is None else checks.whole_number("chunk", chunk)
        self.sliced: list[SlicedBatchNorm] = []
        self._sharding = layers[0].sharding
        self._boundary = -1  # how many own layers the modules below were built for
        self._own_slots: list[list[Slot]] = []  # for every device of a chunk, its own layers
        self._common_slots: list[Slot] = []
        self._slices = Slices()

    def accumulate(self, work: Work, use_own: OwnGradients, factor: float = 1.0) -> tuple[list[Tensor], list[Tensor]]:
        """Run all devices of this rank, chunk by chunk.

        A device's own gradients are those of its own loss. The common layers' gradient is that of the sum of the
        losses, each times the device's share over `work.scale`.

        Args:
            use_own: called after every chunk, before the next one begins.
            factor: multiplies the common layers' gradient of every chunk.

        Returns:
            The losses of every chunk's devices, and the gradient of the common layers, summed over chunks.
        """
        self._make_modules(work)
        losses: list[Tensor] = []
        total: list[Tensor] = []
        parts = work.divided()
        for devices in self._chunks(parts[0]):
            chunk_losses, common = self._run_chunk(devices, parts, use_own)
            losses.append(chunk_losses)
            add_to(total, common if factor == 1 else [factor * tensor for tensor in common])
        if not losses:  # all devices of this rank are absent
            total = [zero for layer in self.layers[work.own :] for zero in layer.zeros()]
        return losses, total

    def _run_chunk(
        self, devices: Sequence[int], parts: Sequence[Work], use_own: OwnGradients
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """Run one chunk, part by part; its memory is freed on return, except the result."""
        losses: list[Tensor] = []
        own: list[list[Tensor]] = [[] for _ in range(parts[0].own)]
        common: list[Tensor] = []
        for number, part in enumerate(parts):
            self._slices.part = number
            of_devices, of_own, of_common = self._chunk_gradients(devices, part)
            losses.append(of_devices)
            for total, gradients in zip([*own, common], [*of_own, of_common], strict=True):
                add_to(total, gradients)
        use_own(devices, own)
        return torch.stack(losses).mean(0), common

    def _chunks(self, work: Work) -> list[list[int]]:
        devices = list(work.batches)
        if self._pools(work.own):
            return [devices]  # also if empty: the all-reduce of the statistics needs every rank
        if not devices:
            return []
        samples = sum(len(x) for x, _ in work.batches.values())
        size = self.chunk or max(1, round(CHUNK_SAMPLES * len(devices) / samples))
        count = -(-len(devices) // size)  # chunks of nearly equal size
        edges = [len(devices) * k // count for k in range(count + 1)]
        return [devices[start:stop] for start, stop in pairwise(edges)]

    def _pools(self, own: int) -> bool:
        """Whether samples of the common layers depend on those of all devices."""
        return self.statistics == "pooled" and any(layer.mixes_samples for layer in self.layers[own:])

    def _make_modules(self, work: Work) -> None:
        """Build the modules of the common layers if L_c changed, and point them at the weights."""
        self._slices.ranks, self._slices.parts = work.ranks, work.parts
        if work.own != self._boundary:
            self._boundary, self._own_slots = work.own, []
            pieces = [deepcopy(layer.piece) for layer in self.layers[work.own :]]
            slicing = self.statistics == "device"
            self.sliced = [norm for piece in pieces if slicing for norm in slice_batch_norm(piece, self._slices)]
            if self._sharding.ranks.size > 1 and not slicing:
                for piece in pieces:
                    spread_batch_norm(piece, self._slices)
            self._common_slots = [Slot(piece) for piece in pieces]
        for layer, slot in zip(self.layers[work.own :], self._common_slots, strict=True):
            layer.point(slot)

    def _point(self, devices: Sequence[int], own: int) -> list[list[Slot]]:
        """Return modules for the devices of a chunk, each pointed at its device's copies."""
        while len(self._own_slots) < len(devices):
            self._own_slots.append([Slot(deepcopy(layer.piece)) for layer in self.layers[:own]])
        slots = self._own_slots[: len(devices)]
        for device, row in zip(devices, slots, strict=True):
            for layer, slot in zip(self.layers[:own], row, strict=True):
                layer.point(slot, device)
        return slots

    def _chunk_gradients(
        self, devices: Sequence[int], work: Work
    ) -> tuple[Tensor, list[list[Tensor]], Sequence[Tensor]]:
        """Return the devices' losses, for every own layer all devices' gradients, and those of the common layers."""
        if not devices:
            return self._idle_gradients(work)
        slots = self._point(devices, work.own)
        inputs, targets = zip(*(work.batches[device] for device in devices), strict=True)
        sizes = [len(x) for x in inputs]
        self._slices.begin(sizes, [work.shares[k] for k in devices])
        modules = [[slot.run for slot in row] for row in slots]
        for device, layers in zip(devices, modules, strict=True):
            if device in work.crossings:
                cut, crossing = work.crossings[device]
                layers.insert(cut, crossing)
        outputs = self.chunk_forward(modules, [moved(x, self.device) for x in inputs])  # (samples of the chunk, …)
        if self._pools(work.own):
            self._shape_for_idle(work, outputs)
        for slot in self._common_slots:
            outputs = slot.run(outputs)
        per_sample = self.loss(outputs, torch.cat([y.to(self.device, non_blocking=True) for y in targets]))
        means = torch.stack([part.mean() for part in per_sample.split_with_sizes(sizes)])
        relative = [work.shares[k] / work.scale for k in devices]
        total = (means * means.new_tensor([weight / work.parts for weight in relative])).sum()
        # One backward pass for every device's own layers and the common ones.
        wanted = [tensor for row in [*slots, self._common_slots] for slot in row for tensor in slot.trained]
        gradients = iter(torch.autograd.grad(total, wanted, allow_unused=True, materialize_grads=True))
        own: list[list[Tensor]] = [[] for _ in range(work.own)]  # per layer, for all devices
        for weight, row in zip(relative, slots, strict=True):
            for collected, slot in zip(own, row, strict=True):
                found = list(islice(gradients, len(slot.trained)))
                collected.extend(found if weight == 1 else torch._foreach_div(found, weight))
        return means.detach(), own, list(gradients)

    def _shape_for_idle(self, work: Work, outputs: Tensor | None) -> tuple[tuple[int, ...], torch.dtype]:
        """Return shape and type of a sample at the common layers, broadcast to ranks without a present device."""
        shape = None if outputs is None else (tuple(outputs.shape[1:]), outputs.dtype)
        busy = [any(work.shares[device] for device in part) for part in self._sharding.parts]
        if work.ranks.size > 1 and not all(busy):
            shape = work.ranks.broadcast(shape, busy.index(True))
        assert shape is not None
        return shape

    def _idle_gradients(self, work: Work) -> tuple[Tensor, list[list[Tensor]], Sequence[Tensor]]:
        """Run a dummy sample through the common layers, forward and backward.

        Pooled statistics need an all-reduce in every batch-norm, also on a rank without a present device.
        """
        shape, dtype = self._shape_for_idle(work, None)
        wanted = [tensor for slot in self._common_slots for tensor in slot.trained]
        x = torch.zeros(1, *shape, dtype=dtype, device=self.device)
        behind = any(layer.trained for layer in self.layers[: work.own])  # then backward passes continue to x
        wanted += [x.requires_grad_()] if behind else []
        self._slices.idle = True
        try:
            for slot in self._common_slots:
                x = slot.run(x)
            zero = torch.zeros_like(x)
            found = torch.autograd.grad(x, wanted, zero, allow_unused=True, materialize_grads=True)
        finally:
            self._slices.idle = False
        return torch.zeros(0), [[] for _ in range(work.own)], found[:-1] if behind else found


def add_to(total: list[Tensor], more: Sequence[Tensor]) -> None:
    """Add tensors to a running sum, which is empty at first."""
    if total:
        torch._foreach_add_(total, list(more))
    else:
        total.extend(_apart(more))


def _apart(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield gradients so that each can be changed in place.

    Autograd may return one tensor, or views of it, as the gradients of several parameters that are added up.
    """
    seen = set()
    for tensor in tensors:
        memory = tensor.untyped_storage()
        whole = memory.data_ptr() not in seen and memory.nbytes() >= tensor.nbytes
        seen.add(memory.data_ptr())
        yield tensor if whole else tensor.clone()
