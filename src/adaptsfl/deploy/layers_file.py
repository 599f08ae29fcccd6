"""Layers on the wire and on disk: one safetensors file, whose keys are the layer's number and the tensor's name."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from adaptsfl.checks import printable
from adaptsfl.errors import BadMessage
from adaptsfl.models import SplitModel
from adaptsfl.training.layers import OPTIMIZER_STATE, Layer
from adaptsfl.training.settings import OptimizerSettings

LayerState = dict[str, Tensor]  # the result of `Layer.state`
LayerStates = dict[int, LayerState]  # by the layer's number, from 1

# The state that torch's optimisers keep of a parameter after its first step.
KEPT = {"sgd": (), "momentum": ("momentum_buffer",), "adam": ("step", "exp_avg", "exp_avg_sq")}
NEVER_NEGATIVE = ("step.", "exp_avg_sq.")  # else Adam divides by 0, or takes the root of a negative number
LARGEST = 1e9  # limit of any number of a layer; sums of such numbers stay far from infinity

HEADER_BYTES = 2**16  # of a safetensors file with a hundred layers; each takes about 100 bytes per tensor


def to_bytes(states: Mapping[int, LayerState]) -> bytes:
    """Return layers as the bytes of a file."""
    return save(named(states))


def named(states: Mapping[int, LayerState]) -> dict[str, Tensor]:
    """Return the tensors of several layers under the name LAYER.NAME."""
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


def copied(states: Mapping[int, LayerState]) -> LayerStates:
    """Return layers whose tensors do not change when training goes on."""
    return {number: {name: tensor.clone() for name, tensor in state.items()} for number, state in states.items()}


def without_optimizer(state: LayerState) -> LayerState:
    """Return only a layer's parameters and buffers."""
    return {name: tensor for name, tensor in state.items() if name.partition(".")[0] not in OPTIMIZER_STATE}


class Template:
    """The names, shapes and types of every layer of a model; layers of other parties are validated against it."""

    def __init__(self, model: SplitModel, settings: OptimizerSettings) -> None:
        self.model, self.settings = model, settings
        self._shapes: list[dict[str, tuple[torch.Size, torch.dtype]]] = []
        self._constants: list[LayerState] = []  # buffers with large numbers on purpose, such as masks
        self._optional: list[dict[str, tuple[torch.Size, torch.dtype]]] = []
        self._frozen: list[set[str]] = []  # parameters that are not trained
        for piece in model.pieces:
            layer = Layer(piece, settings)
            state = layer.state()
            self._shapes.append({name: (tensor.shape, tensor.dtype) for name, tensor in state.items()})
            self._constants.append({name: tensor for name, tensor in state.items() if not _plausible(name, tensor)})
            parameters = {name: tensor for name, tensor in piece.named_parameters() if tensor.requires_grad}
            self._frozen.append({f"parameters.{n}" for n, _ in piece.named_parameters() if n not in parameters})
            self._optional.append(
                {
                    f"{key}.{name}": (torch.Size(()), torch.float32) if key == "step" else (tensor.shape, tensor.dtype)
                    for name, tensor in parameters.items()
                    for key in KEPT[settings.name]
                }
            )

    def layer(self, number: int, state: Mapping[str, Tensor] | None = None) -> Layer:
        """Return a new copy of a layer, with the model's own weights or with `state`."""
        layer = Layer(self.model.pieces[number - 1], self.settings)
        if state is not None:
            layer.load(state)
        return layer

    def largest_bytes(self, layers: Iterable[int]) -> int:
        """Return the maximum size in bytes of a file with these layers."""
        total = HEADER_BYTES
        for number in layers:
            shapes, optional = self._shapes[number - 1], self._optional[number - 1]
            both = (*shapes.values(), *optional.values())
            total += sum(shape.numel() * dtype.itemsize + 200 for shape, dtype in both)
        return total

    def from_bytes(self, data: bytes | bytearray, layers: Iterable[int]) -> LayerStates:
        """Return exactly these layers from a file, or reject it."""
        try:
            states = by_layer(load(bytes(data)))
        except (SafetensorError, ValueError, KeyError, RuntimeError, OverflowError) as error:
            raise BadMessage(f"layers came in a file that cannot be read ({printable(str(error), 200)})") from None
        wanted = list(layers)
        if sorted(states) != wanted:
            raise BadMessage(f"layers {sorted(states)[:20]} came, {wanted} were expected")
        self.check(states)
        return states

    def check(self, states: LayerStates) -> None:
        """Reject layers whose tensors differ from the model's in name, shape or type, or hold implausible numbers."""
        for number, state in states.items():
            self._check(number, state)

    def mean(self, copies: Sequence[LayerStates], shares: Sequence[float]) -> LayerStates:
        """Return the mean of several copies of the same layers: that of `training.layers.average`, without modules.

        The copies are added one after another, so beside them memory is needed for one sum only.
        """
        copies, shares = zip(*((copy, share) for copy, share in zip(copies, shares, strict=True) if share), strict=True)
        return {number: self._mean(number, [copy[number] for copy in copies], shares) for number in sorted(copies[0])}

    def _mean(self, number: int, copies: Sequence[LayerState], shares: Sequence[float]) -> LayerState:
        if self.settings.at_averaging != "average":
            copies = [without_optimizer(copy) for copy in copies]
        every = {name: tensor for copy in copies for name, tensor in copy.items()}
        zeros = {name: torch.zeros_like(tensor) for name, tensor in every.items()}  # optimiser state that a copy lacks
        found: LayerState = {}
        sums: LayerState = {}
        for name, tensor in every.items():
            if name in self._frozen[number - 1] or tensor.is_complex():
                found[name] = copies[0][name].clone()
            elif name.startswith("step.") or not tensor.is_floating_point():
                found[name] = torch.stack([copy.get(name, zeros[name]) for copy in copies]).amax(0)
            else:
                sums[name] = torch.zeros_like(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32))
        if sums:
            totals = list(sums.values())
            for copy, share in zip(copies, shares, strict=True):
                torch._foreach_add_(totals, [copy.get(name, zeros[name]) for name in sums], alpha=share)
        return found | {name: total.to(every[name].dtype) for name, total in sums.items()}

    def _check(self, number: int, state: LayerState) -> None:
        shapes, optional = self._shapes[number - 1], self._optional[number - 1]
        known = shapes | optional
        kept = [name for name in optional if name in state]
        # An optimiser has all of its state after its first step, and none before.
        for name in (*shapes, *(optional if kept else ())):
            if name not in state:
                raise BadMessage(f"layer {number} came without {name}")
        for name, tensor in state.items():
            if known.get(name) != (tensor.shape, tensor.dtype):
                raise BadMessage(f"layer {number} came with {name[:60]!r} of {tensor.dtype}, {tuple(tensor.shape)[:8]}")
            if not _plausible(name, tensor, self._constants[number - 1].get(name)):
                raise BadMessage(f"layer {number} came with numbers in {name[:60]!r} that cannot be")


def _plausible(name: str, tensor: Tensor, constant: Tensor | None = None) -> bool:
    """Whether numbers can be the result of training: averages are finite, and optimisers can go on from them."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    if constant is not None:
        tensor = torch.where(tensor == constant, 0.0, tensor)
    least, most = map(float, torch.aminmax(tensor))  # NaN, which is in no range, if there is one
    never_negative = name.startswith(NEVER_NEGATIVE) or name.endswith(".running_var")
    return (0 if never_negative else -LARGEST) <= least and most <= LARGEST
