"""Tensors as raw bytes with a type and a shape: what activations and gradients are on the wire.

Whatever comes from another party is checked against what the plan expects before memory is taken for it.
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


def pack(tensor: Tensor, wire_dtype: str) -> tuple[TensorHeader, memoryview]:
    """Return a tensor's header and bytes, in the type that it travels in."""
    tensor = tensor.detach().cpu()
    scale = 0.0
    if wire_dtype == "int8" and tensor.is_floating_point():
        scale = float(tensor.abs().amax()) / LARGEST_INT8 or 1.0
        tensor = (tensor / scale).round_().clamp_(-LARGEST_INT8, LARGEST_INT8)
    sent = tensor.to(DTYPES[wire_dtype]).contiguous()
    header = TensorHeader(dtype=wire_dtype, shape=sent.shape, scale=scale)
    return header, sent.reshape(-1).view(torch.uint8).numpy().data


def size_of(shape: Sequence[int], wire_dtype: str) -> int:
    """Return how many bytes a tensor has on the wire."""
    return math.prod(shape) * DTYPES[wire_dtype].itemsize


def check_header(header: TensorHeader, shape: Sequence[int], wire_dtype: str) -> None:
    """Refuse any other tensor than the plan expects."""
    if header.dtype != wire_dtype:
        raise BadMessage(f"a tensor of {header.dtype[:20]!r} came, {wire_dtype} was expected")
    if tuple(header.shape) != tuple(shape):
        raise BadMessage(f"a tensor of shape {tuple(header.shape[:8])} came, {tuple(shape)} was expected")
    if wire_dtype == "int8" and not (0 < header.scale < math.inf):
        raise BadMessage(f"a tensor's scale is {header.scale}, a number above 0 was expected")


def unpack(header: TensorHeader, data: bytearray) -> Tensor:
    """Return a tensor from its bytes, in float32 if it is one of real numbers; NaN and infinity are refused."""
    tensor = torch.frombuffer(data, dtype=DTYPES[header.dtype]).view(tuple(header.shape))
    if header.dtype == "int64":
        return tensor
    tensor = tensor.to(torch.float32)
    if header.dtype == "int8":
        tensor *= header.scale
    if not all_finite(tensor):
        raise BadMessage("a tensor with NaN or infinity came")
    return tensor


def all_finite(tensor: Tensor) -> bool:
    """Whether there is neither NaN nor infinity in it: then its sum is finite, unless that is too large a number."""
    return bool(torch.isfinite(tensor.sum())) or bool(torch.isfinite(tensor).all())
