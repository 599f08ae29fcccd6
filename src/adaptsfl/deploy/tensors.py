"""Tensors as raw bytes with a type and a shape: the wire format of activations and gradients.

A tensor of another party is validated against the plan before memory is allocated for it.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from adaptsfl.deploy.wire_pb2 import TensorHeader
from adaptsfl.errors import BadMessage
from adaptsfl.training import wire_format
from adaptsfl.training.wire_format import Dither

LABELS = "int64"
MOST_DIMENSIONS = 8  # of any tensor; the product of thousands of them would keep a server busy for seconds


class NonFiniteTensor(BadMessage):
    """A tensor contains NaN or infinity, or leads to it: a device is broken, or training has diverged."""


def pack(tensor: Tensor, wire_dtype: str, dither: Dither | None = None) -> tuple[TensorHeader, memoryview]:
    """Return a tensor's header and bytes, in its type on the wire; `dither` is for gradients (see `wire_format`)."""
    tensor = tensor.detach().cpu()
    sent = wire_format.raw(tensor) if wire_dtype == LABELS else wire_format.encoded(tensor, wire_dtype, dither)
    return TensorHeader(dtype=wire_dtype, shape=tensor.shape), sent.numpy().data


def size_of(shape: Sequence[int], wire_dtype: str) -> int:
    """Return the number of a tensor's bytes on the wire; its type must be one of the wire format's, or int64."""
    if len(shape) > MOST_DIMENSIONS:
        raise BadMessage(f"a tensor of {len(shape)} dimensions came, {MOST_DIMENSIONS} are the most")
    return 8 * math.prod(shape) if wire_dtype == LABELS else wire_format.size_of(shape, wire_dtype)


def check_header(header: TensorHeader, shape: Sequence[int], wire_dtype: str) -> None:
    """Reject a tensor that is not the one that the plan expects."""
    if header.dtype != wire_dtype:
        raise BadMessage(f"a tensor of {header.dtype[:20]!r} came, {wire_dtype} was expected")
    if tuple(header.shape) != tuple(shape):
        raise BadMessage(f"a tensor of shape {tuple(header.shape[:8])} came, {tuple(shape)} was expected")


def unpack(header: TensorHeader, data: bytearray | memoryview) -> Tensor:
    """Return a tensor from its bytes, in float32 if it holds real numbers; reject NaN and infinity."""
    if len(data) != size_of(header.shape, header.dtype):
        raise BadMessage(f"{len(data)} bytes came for a tensor of shape {tuple(header.shape)} in {header.dtype}")
    if not data:
        raise BadMessage(f"a tensor of shape {tuple(header.shape)} came, which holds nothing")
    if header.dtype == LABELS:
        return torch.frombuffer(data, dtype=torch.int64).view(tuple(header.shape))
    tensor = wire_format.decoded(torch.frombuffer(data, dtype=torch.uint8), header.shape, header.dtype)
    if not all_finite(tensor):
        raise NonFiniteTensor("a tensor with NaN or infinity came")
    return tensor


def all_finite(tensor: Tensor) -> bool:
    """Whether a tensor contains neither NaN nor infinity; a finite sum shows it fast, but a sum may overflow."""
    return math.isfinite(tensor.sum().item()) or bool(torch.isfinite(tensor).all())
