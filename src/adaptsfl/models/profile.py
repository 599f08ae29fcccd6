"""Measure what every cut of a split model costs: work, payload, memory.

Everything runs on the meta device: only shapes are propagated, so a model larger than memory can be profiled.
FLOPs come from torch's own counter. Attention runs as plain matrix products, because the counter does not know the
CPU's fused kernel and would count zero FLOPs. The gradients of a convolution are counted here, because the counter
treats the weight gradient of a grouped convolution like that of a full one.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode, conv_flop_count

from adaptsfl import checks
from adaptsfl.costs import BITS_PER_BYTE, CutCosts, wire_bits
from adaptsfl.errors import InvalidInput, first_line
from adaptsfl.models.cuts import BATCHES, check_input, with_batch
from adaptsfl.models.keep import untouched
from adaptsfl.models.pieces import Piece, tracked_norms
from adaptsfl.models.record import storage
from adaptsfl.models.split import SplitModel
from adaptsfl.models.trace import mode

WireDtype = Literal["float32", "float16", "bfloat16", "int8", "int4"]
Optimizer = Literal["sgd", "momentum", "adam"]
OPTIMIZER_VALUES: Mapping[str, int] = {"sgd": 0, "momentum": 1, "adam": 2}  # numbers kept per parameter


@dataclass(frozen=True)
class _Measured:
    """The measurements of one layer with one batch."""

    forward_flops: int
    backward_flops: int
    saved_bytes: int
    output_values: int
    sends_gradient: bool


def profile(
    model: SplitModel,
    example_input: Tensor,
    *,
    batch_size: int,
    wire_dtype: WireDtype = "float32",
    optimizer: Optimizer = "sgd",
) -> CutCosts:
    """Return the costs of every cut of `model` when it trains with mini-batches of `batch_size`.

    FLOPs are those that one more sample adds. The first layer's input needs no gradient, so none is counted. The fed
    server averages every parameter and every floating-point buffer of the state_dict, in its own dtype; `wire_dtype` is
    the dtype in which activations and their gradients are sent.
    """
    check_input(example_input)
    checks.whole_number("batch_size", batch_size)
    kept = _lookup("optimizer", optimizer, OPTIMIZER_VALUES)
    small, large = (_measure(model, with_batch(example_input, size)) for size in BATCHES)
    model_bits, model_bytes = _state(model, kept)
    both = list(zip(small, large, strict=True))
    saved = np.array([a.saved_bytes + (batch_size - BATCHES[0]) * (b.saved_bytes - a.saved_bytes) for a, b in both])
    payload = wire_bits(np.array([b.output_values - a.output_values for a, b in both]), wire_dtype)
    return CutCosts(
        forward_flops=np.cumsum([b.forward_flops - a.forward_flops for a, b in both]),
        backward_flops=np.cumsum([b.backward_flops - a.backward_flops for a, b in both]),
        activation_bits=payload,
        gradient_bits=payload * [a.sends_gradient for a in small],
        client_model_bits=np.cumsum(model_bits),
        memory_bytes=np.cumsum(model_bytes + saved),
        names=model.names,
        statistics_bits=np.cumsum([_statistics_bits(piece) for piece in model.pieces]),
        wire_dtype=wire_dtype,
    )


def _lookup(field: str, value: str, table: Mapping[str, int]) -> int:
    if value not in table:
        raise InvalidInput(field, f"is {value!r}", f"Give one of {', '.join(table)}")
    return table[value]


def _measure(model: SplitModel, x: Tensor) -> list[_Measured]:
    """Run every layer forward and backward with one batch, layer after layer."""
    try:
        return _measure_on(model, x.to("meta"))
    except InvalidInput:
        if x.device.type == "meta":
            raise
        return _measure_on(model, x)  # a layer that reads values of its data needs real tensors


def _measure_on(model: SplitModel, x: Tensor) -> list[_Measured]:
    shape = ", ".join(["batch", *map(str, x.shape[1:])])
    seen: dict[int, Tensor] = {}
    measured = []
    for number, piece in enumerate(model.pieces, start=1):
        try:
            with untouched(piece), mode(piece, True), torch.random.fork_rng(), sdpa_kernel(SDPBackend.MATH):
                one, x = _measure_piece(piece, x, seen)
        except Exception as error:
            raise InvalidInput(
                "example_input",
                f"of shape ({shape}) fails in layer {number} ({model.names[number - 1]}): {first_line(error)}",
                "Give an input of the shape that the model was split with",
            ) from error
        measured.append(one)
    return measured


def _counter() -> FlopCounterMode:
    return FlopCounterMode(display=False, custom_mapping={torch.ops.aten.convolution_backward: _convolution_backward})


def _convolution_backward(
    gradient: Sequence[int],
    inputs: Sequence[int],
    weight: Sequence[int],
    _bias: object,
    _stride: object,
    _padding: object,
    _dilation: object,
    transposed: bool,
    _output_padding: object,
    _groups: int,
    output_mask: Sequence[bool],
    **_: Any,
) -> int:
    """Return the FLOPs of a convolution's requested gradients: input and weight each cost as much as forward."""
    forward = conv_flop_count(list(inputs), list(weight), list(gradient), transposed=transposed)
    return int(forward) * sum(map(bool, output_mask[:2]))


def _measure_piece(piece: Piece, x: Tensor, seen: dict[int, Tensor]) -> tuple[_Measured, Tensor]:
    state = {name: tensor.detach().to(x.device) for name, tensor in piece.named_parameters()}
    for name, tensor in piece.named_parameters():
        state[name].requires_grad_(tensor.requires_grad)
    state |= {name: tensor.detach().clone().to(x.device) for name, tensor in piece.named_buffers()}
    before = set(seen)
    own = {storage(tensor) for tensor in state.values()}
    with _counter() as forward, _saving(seen, own):
        output = torch.func.functional_call(piece, state, (x,))
    with _counter() as backward:
        wanted = [tensor for tensor in [x, *state.values()] if tensor.requires_grad]
        if output.requires_grad:
            torch.autograd.grad(output, wanted, torch.ones_like(output), allow_unused=True)
    saved = sum(seen[key].untyped_storage().nbytes() for key in seen.keys() - before)
    one = _Measured(forward.get_total_flops(), backward.get_total_flops(), saved, output.numel(), output.requires_grad)
    return one, output.detach().requires_grad_(output.requires_grad)


@contextmanager
def _saving(seen: dict[int, Tensor], own: set[int]) -> Iterator[None]:
    """Record the tensors that autograd saves for backward: each storage once, without the model's own state."""

    def keep(tensor: Tensor) -> Tensor:
        key = storage(tensor)
        if key not in own:
            seen.setdefault(key, tensor)  # keeps the tensor alive, so that its storage's id is not reused
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield


def _state(model: SplitModel, kept: int) -> tuple[list[int], list[int]]:
    """Return, per layer, the bits that are averaged and the bytes of parameters, gradients, optimiser and buffers."""
    bits, sizes = [], []
    counted: set[int] = set()
    for piece in model.pieces:
        saved = {id(tensor) for tensor in piece.state_dict(keep_vars=True).values()}
        new = {id(tensor): tensor for tensor in [*piece.parameters(), *piece.buffers()] if id(tensor) not in counted}
        averaged = [tensor for key, tensor in new.items() if key in saved and tensor.is_floating_point()]
        bits.append(sum(BITS_PER_BYTE * tensor.nbytes for tensor in averaged))
        sizes.append(sum(tensor.nbytes * (2 + kept if tensor.requires_grad else 1) for tensor in new.values()))
        counted |= new.keys()
    return bits, sizes


def _statistics_bits(piece: Piece) -> int:
    """Return the bits of the running statistics of batch-norm in a layer."""
    buffers = dict(piece.named_buffers())
    return sum(BITS_PER_BYTE * buffers[name].nbytes for pair in tracked_norms(piece).values() for name in pair)
