"""Layers on the wire and on disk: one safetensors file, every tensor under its layer's number and its own name."""

from collections.abc import Iterable, Mapping

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from adaptsfl.errors import BadMessage
from adaptsfl.models import SplitModel
from adaptsfl.training.layers import OPTIMIZER_STATE, Layer
from adaptsfl.training.settings import OptimizerSettings

LayerState = dict[str, Tensor]  # as `Layer.state` gives it
LayerStates = dict[int, LayerState]  # by the layer's number, from 1

HEADER_BYTES = 2**16  # of a safetensors file with a hundred layers; each has about 100 bytes per tensor


def to_bytes(states: Mapping[int, LayerState]) -> bytes:
    """Return layers as a file."""
    return save(named(states))


def named(states: Mapping[int, LayerState]) -> dict[str, Tensor]:
    """Return the tensors of several layers under names that say whose they are."""
    return {
        f"{layer}.{name}": tensor.detach().cpu().contiguous()
        for layer, state in states.items()
        for name, tensor in state.items()
    }


def by_layer(tensors: Mapping[str, Tensor]) -> LayerStates:
    """Return tensors by layer, from their `named` form."""
    states: LayerStates = {}
    for full, tensor in tensors.items():
        layer, _, name = full.partition(".")
        states.setdefault(int(layer), {})[name] = tensor
    return states


def without_optimizer(state: LayerState) -> LayerState:
    """Return a layer's parameters and buffers alone."""
    return {name: tensor for name, tensor in state.items() if name.partition(".")[0] not in OPTIMIZER_STATE}


class Template:
    """What every layer of a model looks like: whatever another party sends is held against it."""

    def __init__(self, model: SplitModel, settings: OptimizerSettings) -> None:
        self.model, self.settings = model, settings
        self._shapes: list[dict[str, tuple[torch.Size, torch.dtype]]] = []
        self._optional: list[dict[str, torch.Size]] = []
        for piece in model.pieces:
            layer = Layer(piece, settings)
            state = layer.state()
            self._shapes.append({name: (tensor.shape, tensor.dtype) for name, tensor in state.items()})
            parameters = {name: tensor.shape for name, tensor in piece.named_parameters() if tensor.requires_grad}
            self._optional.append(
                {
                    f"{key}.{name}": torch.Size(()) if key == "step" else shape
                    for name, shape in parameters.items()
                    for key in OPTIMIZER_STATE
                }
            )

    def layer(self, number: int, state: Mapping[str, Tensor] | None = None) -> Layer:
        """Return a new copy of a layer, with the model's own weights or with `state`."""
        layer = Layer(self.model.pieces[number - 1], self.settings)
        if state is not None:
            layer.load(state)
        return layer

    def largest_bytes(self, layers: Iterable[int]) -> int:
        """Return the most bytes that these layers can have as a file."""
        total = HEADER_BYTES
        for number in layers:
            shapes, optional = self._shapes[number - 1], self._optional[number - 1]
            total += sum(shape.numel() * dtype.itemsize + 200 for shape, dtype in shapes.values())
            total += sum(4 * shape.numel() + 200 for shape in optional.values())
        return total

    def from_bytes(self, data: bytes | bytearray, layers: Iterable[int]) -> LayerStates:
        """Return exactly these layers from a file, or refuse it."""
        try:
            states = by_layer(load(bytes(data)))
        except (SafetensorError, ValueError) as error:
            raise BadMessage(f"layers came in a file that cannot be read ({error})") from None
        wanted = list(layers)
        if sorted(states) != wanted:
            raise BadMessage(f"layers {sorted(states)[:20]} came, {wanted} were expected")
        for number, state in states.items():
            self._check(number, state)
        return states

    def _check(self, number: int, state: LayerState) -> None:
        shapes, optional = self._shapes[number - 1], self._optional[number - 1]
        for name in shapes:
            if name not in state:
                raise BadMessage(f"layer {number} came without {name}")
        for name, tensor in state.items():
            if name in shapes:
                fits = (tensor.shape, tensor.dtype) == shapes[name]
            else:
                fits = name in optional and tensor.shape == optional[name] and tensor.is_floating_point()
            if not fits:
                raise BadMessage(f"layer {number} came with {name[:60]!r} of {tensor.dtype}, {tuple(tensor.shape)}")
            # A buffer may hold infinities on purpose, as masks of attention do.
            good = ~torch.isnan(tensor) if name.startswith("buffers.") else torch.isfinite(tensor)
            if not bool(good.all()):
                raise BadMessage(f"layer {number} came with NaN or infinity in {name[:60]!r}")
