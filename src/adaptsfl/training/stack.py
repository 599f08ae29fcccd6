"""All copies of one layer as stacked tensors, so that averaging them is one mean over the first axis."""

from collections.abc import Mapping, Sequence
from copy import deepcopy

import torch
from torch import Tensor, nn

from adaptsfl.errors import InvalidInput
from adaptsfl.training.batchnorm import mixes_samples
from adaptsfl.training.settings import OptimizerSettings, StateRule
from adaptsfl.training.updates import STATE_NAMES, step


class Slot:
    """A module that runs one layer on whichever copy it was last pointed at."""

    def __init__(self, module: nn.Module) -> None:
        self.run = module
        self.parameters: dict[str, Tensor] = dict(module.named_parameters())
        self.buffers = dict(module.named_buffers())
        self.trained = [tensor for tensor in self.parameters.values() if tensor.requires_grad]


class LayerStack:
    """One layer: its parameters, buffers and optimiser state, with one row per device, or one while all are equal.

    A common layer is a stack that stays at one row. So a layer that becomes client-specific needs nothing until its
    copies first differ, when it is spread, and a layer that becomes common is merged.

    Attributes:
        steps: the optimiser's steps since its state was zero.
        mixes_samples: whether it normalises over the batch.
    """

    def __init__(self, piece: nn.Module, settings: OptimizerSettings) -> None:
        self.piece = piece
        self.settings = settings
        self.steps = 0
        self.mixes_samples = mixes_samples([piece])
        self.parameters = {name: _rows(tensor.detach(), 1) for name, tensor in piece.named_parameters()}
        self.buffers = {name: _rows(tensor, 1) for name, tensor in piece.named_buffers()}
        self.trained = [name for name, tensor in piece.named_parameters() if tensor.requires_grad]
        self.state = {
            key: {name: torch.zeros_like(self.parameters[name]) for name in self.trained}
            for key in STATE_NAMES[settings.name]
        }

    def point(self, slot: Slot, row: int) -> None:
        """Let `slot` run on copy `row`: it reads the stack's own memory, and batch-norm writes its statistics there."""
        for tensors, rows in ((slot.parameters, self.parameters), (slot.buffers, self.buffers)):
            for name, tensor in tensors.items():
                tensor.data = rows[name][row if len(rows[name]) > 1 else 0]

    def update(self, rows: Sequence[int], gradients: list[Tensor], rate: float) -> None:
        """Step the copies `rows` at once, by gradients in the order of the copies and of `trained` within each.

        The caller counts `steps`, because the copies of one layer step together but not all in one call.
        """
        parameters = [self.parameters[name][row] for row in rows for name in self.trained]
        state = {key: [of[name][row] for row in rows for name in self.trained] for key, of in self.state.items()}
        step(self.settings, rate, self.steps, parameters, gradients, state)

    def spread(self, devices: int) -> None:
        """Give every device a row of its own."""
        for tensors in self._groups().values():
            for name, tensor in tensors.items():
                if len(tensor) != devices:
                    tensors[name] = _rows(tensor[0], devices)

    def merge(self, weights: Tensor, rule: StateRule) -> None:
        """Replace all copies by their weighted mean, and do to the optimiser's state what `rule` says."""
        for tensors in (self.parameters, self.buffers, *(self.state.values() if rule == "average" else ())):
            for name, tensor in tensors.items():
                tensors[name] = mean(tensor, weights)
        if rule == "reset":
            self.steps = 0
            for tensors in self.state.values():
                for name, tensor in tensors.items():
                    tensors[name] = torch.zeros_like(tensor[:1])

    def tensors(self) -> dict[str, Tensor]:
        """Return a copy of everything the layer holds, rows first; `load` takes it back."""
        groups = self._groups().items()
        return {f"{group}.{name}": tensor.clone() for group, tensors in groups for name, tensor in tensors.items()}

    def load(self, given: Mapping[str, Tensor], devices: int) -> None:
        """Take the tensors that `tensors` of the same layer gave, in whatever memory layout they come."""
        expected = self.tensors()
        if given.keys() != expected.keys():
            names = ", ".join(sorted(given.keys() ^ expected.keys()))
            raise InvalidInput("tensors", f"lack or add {names}", "Give what the same model and optimiser had")
        for name, tensor in given.items():
            shape = tuple(expected[name].shape[1:])
            if tuple(tensor.shape) not in ((1, *shape), (devices, *shape)):
                problem = f"has the shape {tuple(tensor.shape)}"
                raise InvalidInput(f"tensors[{name!r}]", problem, f"Give 1 or {devices} rows of shape {shape}")
        for group, tensors in self._groups().items():
            for name, tensor in tensors.items():
                found = given[f"{group}.{name}"]
                tensors[name] = _rows(tensor[0], len(found)).copy_(found)

    def merged(self, weights: Tensor) -> dict[str, Tensor]:
        """Return the mean of all copies as the layer's state_dict."""
        piece = deepcopy(self.piece)
        for name, tensor in [*piece.named_parameters(), *piece.named_buffers()]:
            rows = self.parameters[name] if name in self.parameters else self.buffers[name]
            tensor.data = mean(rows, weights)[0].clone()
        state: dict[str, Tensor] = piece.state_dict()
        return state

    def _groups(self) -> dict[str, dict[str, Tensor]]:
        states = {f"state.{key}": tensors for key, tensors in self.state.items()}
        return {"parameters": self.parameters, "buffers": self.buffers, **states}


def _rows(tensor: Tensor, count: int) -> Tensor:
    """Return `count` copies of `tensor`, each laid out in memory as convolutions are fastest: channels last."""
    row = tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor.contiguous()
    rows = torch.empty_strided((count, *row.shape), (row.numel(), *row.stride()), dtype=row.dtype, device=row.device)
    return rows.copy_(row)


def mean(rows: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted mean of the rows as one row; counters, equal in all, are taken from the first."""
    if len(rows) == 1:
        return rows
    if not rows.is_floating_point():
        return rows[:1].clone()
    return _rows(torch.tensordot(weights.to(rows.dtype), rows, 1), 1)
