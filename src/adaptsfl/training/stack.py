"""All copies of one layer as stacked tensors, so that averaging them is one mean over the first axis."""

from collections.abc import Mapping, Sequence
from copy import deepcopy

import torch
from torch import Tensor, nn

from adaptsfl.errors import InvalidInput
from adaptsfl.training.batchnorm import mixes_samples
from adaptsfl.training.divergence import divergence
from adaptsfl.training.settings import OptimizerSettings, StateRule
from adaptsfl.training.sharding import Sharding
from adaptsfl.training.updates import STATE_NAMES, step


class Slot:
    """A module that runs one layer on the copy that `LayerStack.point` chose last."""

    def __init__(self, module: nn.Module) -> None:
        self.run = module
        self.parameters: dict[str, Tensor] = dict(module.named_parameters())
        self.buffers = dict(module.named_buffers())
        self.trained = [tensor for tensor in self.parameters.values() if tensor.requires_grad]


class LayerStack:
    """One layer: its parameters, buffers and optimiser state, with one row per device, or one while all are equal.

    On several ranks the rows are those of this rank's devices; shares are always those of all devices.

    A common layer is a stack that stays at one row. A layer that becomes client-specific is spread to several rows
    only when its copies first differ; a layer that becomes common is merged.

    Attributes:
        steps: the optimiser's steps since its state was zero, of every copy, or one number while all are equal.
        mixes_samples: whether it normalises over the batch.
    """

    def __init__(self, piece: nn.Module, settings: OptimizerSettings, sharding: Sharding) -> None:
        self.piece, self.settings, self.sharding = piece, settings, sharding
        self.steps = [0]
        self.mixes_samples = mixes_samples([piece])
        self.parameters = {name: _rows(tensor.detach(), 1) for name, tensor in piece.named_parameters()}
        self.buffers = {name: _rows(tensor, 1) for name, tensor in piece.named_buffers()}
        self.trained = [name for name, tensor in piece.named_parameters() if tensor.requires_grad]
        self.state = {
            key: {name: torch.zeros_like(self.parameters[name]) for name in self.trained}
            for key in STATE_NAMES[settings.name]
        }

    def point(self, slot: Slot, device: int | None = None) -> None:
        """Point `slot` at the copy of a device, or at the only copy.

        The slot shares the stack's memory: batch-norm writes its statistics there.
        """
        row = 0 if device is None else self.sharding.row_of[device]
        for tensors, rows in ((slot.parameters, self.parameters), (slot.buffers, self.buffers)):
            for name, tensor in tensors.items():
                tensor.data = rows[name][row if len(rows[name]) > 1 else 0]

    def update(self, devices: Sequence[int] | None, gradients: list[Tensor], rate: float) -> None:
        """Update the copies of `devices` at once, or the only copy.

        Gradients come in the order of the copies, and of `trained` within each.
        """
        rows = [0] if devices is None else [self.sharding.row_of[device] for device in devices]
        width, counts = len(self.trained), [self.steps[row] for row in rows]
        for row in rows:
            self.steps[row] += 1
        for count in sorted(set(counts)):  # a single count, unless devices were absent
            same = [k for k, own in enumerate(counts) if own == count]
            chosen = [rows[k] for k in same]
            parameters = [self.parameters[name][row] for row in chosen for name in self.trained]
            state = {key: [of[name][row] for row in chosen for name in self.trained] for key, of in self.state.items()}
            chosen_gradients = [gradient for k in same for gradient in gradients[k * width : (k + 1) * width]]
            step(self.settings, rate, count + 1, parameters, chosen_gradients, state)

    def spread(self) -> None:
        """Give every device a row of its own."""
        count = self.sharding.rows
        if len(self.steps) != count:
            self.steps = self.steps * count
        for tensors in self._groups().values():
            for name, tensor in tensors.items():
                if len(tensor) != count:
                    tensors[name] = _rows(tensor[0], count)

    def reset(self) -> None:
        """Reset the optimiser's state to zero, in all copies."""
        self.steps = [0]
        for tensors in self.state.values():
            for name, tensor in tensors.items():
                tensors[name] = torch.zeros_like(tensor[:1])

    def divergence(self, shares: Sequence[float]) -> float:
        """Return how far apart the copies with a share are; see `divergence.divergence`."""
        apart = [rows.unbind() for rows in self.parameters.values() if len(rows) > 1]
        root = self.sharding.rank_of(next(device for device, share in enumerate(shares) if share))
        return divergence(apart, self.sharding.row_shares(shares), self.sharding.ranks, root)

    def zeros(self) -> list[Tensor]:
        """Return a zero gradient of one copy."""
        return [torch.zeros_like(self.parameters[name][0]) for name in self.trained]

    def tensors(self) -> dict[str, Tensor]:
        """Return a copy of all the layer's tensors, rows first; `load` restores it."""
        groups = self._groups().items()
        return {f"{group}.{name}": tensor.clone() for group, tensors in groups for name, tensor in tensors.items()}

    def load(self, given: Mapping[str, Tensor]) -> None:
        """Load the result of `tensors` of the same layer, in any memory layout."""
        expected, count = self.tensors(), self.sharding.rows
        if given.keys() != expected.keys():
            names = ", ".join(sorted(given.keys() ^ expected.keys()))
            raise InvalidInput("tensors", f"lack or add {names}", "Give what the same model and optimiser had")
        for name, tensor in given.items():
            shape = tuple(expected[name].shape[1:])
            if tuple(tensor.shape) not in ((1, *shape), (count, *shape)):
                problem = f"has the shape {tuple(tensor.shape)}"
                raise InvalidInput(f"tensors[{name!r}]", problem, f"Give 1 or {count} rows of shape {shape}")
        for group, tensors in self._groups().items():
            for name, tensor in tensors.items():
                found = given[f"{group}.{name}"]
                tensors[name] = _rows(tensor[0], len(found)).copy_(found)

    def merged(self, shares: Sequence[float]) -> nn.Module:
        """Return the mean of the copies with a nonzero share, as a new module."""
        piece = deepcopy(self.piece)
        parameters, buffers = means([self.parameters, self.buffers], shares, self.sharding)
        for name, tensor in [*piece.named_parameters(), *piece.named_buffers()]:
            tensor.data = (parameters[name] if name in parameters else buffers[name])[0].clone()
        return piece

    def _groups(self) -> dict[str, dict[str, Tensor]]:
        states = {f"state.{key}": tensors for key, tensors in self.state.items()}
        return {"parameters": self.parameters, "buffers": self.buffers, **states}


def _rows(tensor: Tensor, count: int) -> Tensor:
    """Return `count` copies of `tensor`, each in the memory layout that is fastest for convolutions: channels last."""
    row = tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor.contiguous()
    rows = torch.empty_strided((count, *row.shape), (row.numel(), *row.stride()), dtype=row.dtype, device=row.device)
    return rows.copy_(row)


def moved(x: Tensor, device: torch.device) -> Tensor:
    """Return inputs on the device that computes, images with channels last."""
    x = x.to(device, non_blocking=True)
    return x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x


def mean(rows: Tensor, shares: Sequence[float]) -> Tensor:
    """Return the mean of the rows with a share as one row; for counters, which differ only by absence, the maximum.

    Rows without a share are left out rather than multiplied by zero, so that NaN in them does not spread. If no row of
    this rank has a share, the result is neutral in the all-reduce: zero, or the smallest number for a maximum.
    """
    if len(rows) == 1:
        return rows
    here = [k for k, share in enumerate(shares) if share]
    if rows.is_complex():  # constants, which have no order
        return _rows(rows[here[0] if here else 0], 1)
    if not here:
        least = 0 if rows.is_floating_point() or rows.dtype == torch.bool else torch.iinfo(rows.dtype).min
        return _rows(torch.full_like(rows[0], least), 1)
    if len(here) < len(rows):
        rows = rows[here]
    if not rows.is_floating_point():
        return _rows(rows.amax(0), 1)
    return _rows(torch.tensordot(rows.new_tensor([shares[k] for k in here]), rows, 1), 1)


def means(
    groups: Sequence[Mapping[str, Tensor]], shares: Sequence[float], sharding: Sharding
) -> list[dict[str, Tensor]]:
    """Return the `mean` of every tensor of every group, over the copies of all ranks."""
    local = sharding.row_shares(shares)
    found = [{name: mean(rows, local) for name, rows in group.items()} for group in groups]
    apart = [
        merged[name]
        for group, merged in zip(groups, found, strict=True)
        for name, rows in group.items()
        if len(rows) > 1 and not rows.is_complex()
    ]
    sharding.ranks.all_reduce_sum([tensor for tensor in apart if tensor.is_floating_point()])
    sharding.ranks.all_reduce_max([tensor for tensor in apart if not tensor.is_floating_point()])
    return found


def merge(layers: Sequence[LayerStack], shares: Sequence[float], rule: StateRule) -> None:
    """Replace all copies by the mean of those with a share, and apply `rule` to the optimiser's state."""
    if not layers:
        return
    sharding = layers[0].sharding
    groups: list[dict[str, Tensor]] = []
    for layer in layers:
        groups += [layer.parameters, layer.buffers, *(layer.state.values() if rule == "average" else ())]
    for group, merged in zip(groups, means(groups, shares, sharding), strict=True):
        group.update(merged)
    unequal = [layer for layer in layers if len(layer.steps) > 1 and (rule == "average" or not layer.state)]
    local = sharding.row_shares(shares)
    counts = [max((n for n, share in zip(layer.steps, local, strict=True) if share), default=0) for layer in unequal]
    largest = torch.tensor(counts, dtype=torch.int64)
    sharding.ranks.all_reduce_max([largest])
    for layer, count in zip(unequal, largest.tolist(), strict=True):
        layer.steps = [count]
    if rule == "reset":
        for layer in layers:
            layer.reset()
