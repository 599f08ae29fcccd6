"""Tensors as raw bytes with a type and a shape: the wire format of activations and gradients.

A tensor of another party is validated against the plan before memory is allocated for it.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from adaptsfl.deploy.wire_pb2 import TensorHeader
from adaptsfl.errors import BadMessage

DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
    "int64": torch.int64,
}
LARGEST_INT8 = 127
MOST_DIMENSIONS = 8  # of any tensor; the product of thousands of them would keep a server busy for seconds
# Limits of a scale: smaller ones are rounded to 0 in a header, larger ones times 127 are infinite.
SMALLEST_SCALE, LARGEST_SCALE = 2.0**-126, 2.0**121


class NonFiniteTensor(BadMessage):
    """A tensor contains NaN or infinity, or leads to it: a device is broken, or training has diverged."""


def pack(tensor: Tensor, wire_dtype: str) -> tuple[TensorHeader, memoryview]:
    """Return a tensor's header and bytes, in its type on the wire.

    Numbers too large for that type are clamped to its largest number: the receiver would reject infinity.
    """
    tensor = tensor.detach().cpu()
    dtype, scale = DTYPES[wire_dtype], 0.0
    if wire_dtype == "int8":
        largest = float(tensor.abs().amax()) if tensor.numel() else 0.0
        scale = min(max(largest / LARGEST_INT8, SMALLEST_SCALE), LARGEST_SCALE) if largest else 1.0
        tensor = (tensor / scale).round_().clamp_(-LARGEST_INT8, LARGEST_INT8)
    elif dtype in (torch.float16, torch.bfloat16):
        tensor = tensor.clamp(torch.finfo(dtype).min, torch.finfo(dtype).max)
    sent = tensor.to(dtype).contiguous()
    header = TensorHeader(dtype=wire_dtype, shape=sent.shape, scale=scale)
    return header, sent.reshape(-1).view(torch.uint8).numpy().data


def size_of(shape: Sequence[int], wire_dtype: str) -> int:
    """Return the number of a tensor's bytes on the wire; its type must be one of `DTYPES`."""
    if len(shape) > MOST_DIMENSIONS:
        raise BadMessage(f"a tensor of {len(shape)} dimensions came, {MOST_DIMENSIONS} are the most")
    return math.prod(shape) * DTYPES[wire_dtype].itemsize


def check_header(header: TensorHeader, shape: Sequence[int], wire_dtype: str) -> None:
    """Reject a tensor that is not the one that the plan expects."""
    if header.dtype != wire_dtype:
        raise BadMessage(f"a tensor of {header.dtype[:20]!r} came, {wire_dtype} was expected")
    if tuple(header.shape) != tuple(shape):
        raise BadMessage(f"a tensor of shape {tuple(header.shape[:8])} came, {tuple(shape)} was expected")
    if wire_dtype == "int8" and not (0 < header.scale < math.inf):
        raise BadMessage(f"a tensor's scale is {header.scale}, a number above 0 was expected")


def unpack(header: TensorHeader, data: bytearray | memoryview) -> Tensor:
    """Return a tensor from its bytes, in float32 if it holds real numbers; reject NaN and infinity."""
    if len(data) != size_of(header.shape, header.dtype):
        raise BadMessage(f"{len(data)} bytes came for a tensor of shape {tuple(header.shape)} in {header.dtype}")
    if not data:
        raise BadMessage(f"a tensor of shape {tuple(header.shape)} came, which holds nothing")
    tensor = torch.frombuffer(data, dtype=DTYPES[header.dtype]).view(tuple(header.shape))
    if header.dtype == "int64":
        return tensor
    tensor = tensor.to(torch.float32)
    if header.dtype == "int8":
        tensor *= header.scale
    if not all_finite(tensor):
        raise NonFiniteTensor("a tensor with NaN or infinity came")
    return tensor


def all_finite(tensor: Tensor) -> bool:
    """Whether a tensor contains neither NaN nor infinity; a finite sum shows it fast, but a sum may overflow."""
    return math.isfinite(tensor.sum().item()) or bool(torch.isfinite(tensor).all())
