"""Activations and gradients in the type in which they travel, and what arrives of them.

The engine and the reference train with what arrives, and a deployment sends it: one function each for both. `int8` and
`int4` divide every sample into blocks of 64 numbers, each with a scale of its own (bfloat16, 16 bits). No block crosses
the border of a sample, so that it does not matter with which others a sample travels. A block without negative numbers,
as after a ReLU, uses all levels for positive ones; its scale is then sent with a minus sign.

Rounding is to the nearest level. Gradients in `int4` are rounded at random, up or down, so that they are right in the
mean: to the nearest, most of their numbers would become 0. Both ends must agree on what was sent, so the random numbers
follow from the device, the round and the place of the sample in its mini-batch.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from adaptsfl.costs import BITS_PER_BYTE, NUMBER_BITS, SCALE_BITS, wire_bits
from adaptsfl.costs import SCALED_BLOCK as BLOCK

CASTS = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
SCALE_BYTES = SCALE_BITS // BITS_PER_BYTE
ROUND_UP = 1 + 2.0**-8  # a scale that bfloat16 rounds down would be too small for the largest number of its block
GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True)
class Dither:
    """Random numbers in [0, 1) for the gradients of one device in one round; `first` is its sample to begin with."""

    device: int
    round: int
    first: int = 0

    def numbers(self, samples: int, each: int, like: Tensor) -> Tensor:
        """Return `each` numbers for every sample: one draw, shifted by the golden ratio from sample to sample."""
        drawn = torch.from_numpy(np.random.default_rng([self.device, self.round]).random(each, dtype=np.float32))
        shifts = torch.arange(self.first, self.first + samples, dtype=torch.float64).mul_(GOLDEN).frac_()
        return (drawn.to(like) + shifts.to(like)[:, None]).frac_()


def exact(dtype: str | None) -> bool:
    """Whether what arrives is what was sent."""
    return dtype in (None, "float32")


def arriving(tensor: Tensor, dtype: str, dither: Dither | None = None) -> Tensor:
    """Return what arrives of a tensor, samples first, in the tensor's own type and memory order."""
    if exact(dtype):
        return tensor
    if dtype in CASTS:
        return _cast(_cast(tensor, CASTS[dtype]), tensor.dtype)
    levels, scales = _levels(tensor, dtype, dither)
    rows = (levels * scales[..., None].abs()).flatten(1)[:, : _each(tensor.shape)]
    found = _cast(rows.reshape(tensor.shape), tensor.dtype)
    keeps_order = tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    return found.contiguous(memory_format=torch.channels_last) if keeps_order else found


def encoded(tensor: Tensor, dtype: str, dither: Dither | None = None) -> Tensor:
    """Return the bytes of a tensor as they are sent: first all scales, if there are any, then the numbers."""
    if dtype in CASTS:
        return raw(_cast(tensor, CASTS[dtype]))
    levels, scales = _levels(tensor, dtype, dither)
    numbers = levels.flatten(1)[:, : _each(tensor.shape)].to(torch.int16).bitwise_and_(2 ** NUMBER_BITS[dtype] - 1)
    codes = numbers.to(torch.uint8)
    if dtype == "int4":
        if codes.shape[1] % 2:
            codes = nn.functional.pad(codes, (0, 1))
        codes = codes[:, ::2] | codes[:, 1::2] << 4
    return torch.cat((scales.to(torch.bfloat16).reshape(-1).view(torch.uint8), codes.reshape(-1)))


def raw(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor's numbers in the order of its dimensions; they share its memory if they can."""
    flat = tensor.contiguous().reshape(-1)
    if flat.stride(0) != 1:  # torch calls a single number contiguous, whatever its stride
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)


def decoded(data: Tensor, shape: Sequence[int], dtype: str) -> Tensor:
    """Return the float32 tensor that was sent as these bytes, of which there are `size_of(shape, dtype)`."""
    if dtype in CASTS:
        return data.view(CASTS[dtype]).view(tuple(shape)).to(torch.float32)
    samples, each = shape[0] if len(shape) else 1, _each(shape)
    blocks = -(-each // BLOCK)
    edge = samples * blocks * SCALE_BYTES
    scales = data[:edge].clone().view(torch.bfloat16).view(samples, blocks, 1).to(torch.float32)
    codes = data[edge:].view(samples, -(-each * NUMBER_BITS[dtype] // BITS_PER_BYTE))
    if dtype == "int4":
        codes = torch.stack((codes & 15, codes >> 4), dim=2).flatten(1)[:, :each]
    numbers = nn.functional.pad(codes.to(torch.float32), (0, blocks * BLOCK - each)).view(samples, blocks, BLOCK)
    levels = 2 ** NUMBER_BITS[dtype]
    signed = torch.where((numbers >= levels / 2) & ~scales.signbit(), numbers - levels, numbers)
    return (signed * scales.abs()).flatten(1)[:, :each].reshape(tuple(shape))


def size_of(shape: Sequence[int], dtype: str) -> int:
    """Return the number of bytes of a tensor."""
    samples = shape[0] if len(shape) else 1
    return samples * int(wire_bits(_each(shape), dtype)) // BITS_PER_BYTE


Observe = Callable[[Tensor, Tensor], None]


class Crossing(nn.Module):
    """The way between a device and the edge server, as a layer: activations forward, gradients backward.

    Args:
        dither: for gradients.
        weight: the gradient that comes back is that of the device's own loss times this.
        observe: called with the activations as they were sent and the gradient as it arrives, of the device's own loss.
    """

    def __init__(self, dtype: str, dither: Dither, weight: float = 1.0, observe: Observe | None = None) -> None:
        super().__init__()
        self.dtype, self.dither, self.weight, self.observe = dtype, dither, weight, observe

    def of_samples(self, first: int) -> "Crossing":
        """Return the way of a part of the mini-batch that begins with its sample `first`."""
        return Crossing(self.dtype, replace(self.dither, first=first), self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Return what the edge server receives."""
        crossed: Tensor = _Cross.apply(x, self)  # type: ignore[no-untyped-call]
        return crossed


class _Cross(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, way: Crossing) -> Tensor:
        ctx.way, ctx.sent = way, x if way.observe else None  # type: ignore[attr-defined]
        found = arriving(x, way.dtype)
        return found.view_as(found) if found is x else found

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *gradients: Tensor) -> tuple[Tensor, None]:
        way: Crossing = ctx.way  # type: ignore[attr-defined]
        (gradient,) = gradients
        found = arriving(gradient if way.weight == 1 else gradient / way.weight, way.dtype, way.dither)
        if way.observe is not None:
            way.observe(ctx.sent, found)  # type: ignore[attr-defined]
        return found if way.weight == 1 else found * way.weight, None


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert; numbers that are too large become the largest of the type, because receivers reject infinity."""
    if dtype in (torch.float32, torch.float64):
        return tensor.to(dtype)
    if tensor.dtype != torch.float64:
        tensor = tensor.to(torch.float32)  # the limits of bfloat16 are no numbers of float16
    return tensor.clamp(torch.finfo(dtype).min, torch.finfo(dtype).max).to(dtype)


def _levels(tensor: Tensor, dtype: str, dither: Dither | None) -> tuple[Tensor, Tensor]:
    """Return the level of every number, (samples, blocks, 64), and the signed scale of every block.

    The last block of a sample is filled with zeros.
    """
    samples, each = tensor.shape[0] if tensor.dim() else 1, _each(tensor.shape)
    rows = tensor.reshape(samples, each).to(torch.float64 if tensor.dtype == torch.float64 else torch.float32)
    blocks = nn.functional.pad(rows, (0, -each % BLOCK)).view(samples, -(-each // BLOCK), BLOCK)
    most = 2 ** (NUMBER_BITS[dtype] - 1) - 1
    lowest, highest = blocks.aminmax(dim=2)
    unsigned = lowest >= 0
    largest = torch.maximum(highest, -lowest)
    levels = torch.where(unsigned, 2.0 * most + 1, float(most)).to(rows.dtype)
    limit = 2.0**128 / 2.0 ** NUMBER_BITS[dtype]  # with a larger scale the largest level would be infinite
    scales = (largest / levels * ROUND_UP).clamp(max=limit).to(torch.bfloat16).to(rows.dtype)
    divided = blocks / torch.where(scales == 0, 1.0, scales)[..., None]
    if dither is not None and dtype == "int4":
        noise = nn.functional.pad(dither.numbers(samples, each, rows), (0, -each % BLOCK)).view_as(divided)
        rounded = divided.add_(noise).floor_()
    else:
        rounded = divided.round_()
    levels = levels[..., None]
    rounded = torch.minimum(torch.maximum(rounded, torch.where(unsigned[..., None], 0.0, -levels)), levels)
    rounded = torch.where((scales == 0)[..., None], 0.0, rounded)
    return rounded, torch.where(unsigned, -scales, scales)


def _each(shape: Sequence[int]) -> int:
    """Return the numbers of one sample."""
    return math.prod(shape[1:])
