"""Tensors as they travel: what arrives is what was sent, as far as the type allows, or it is refused."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adaptsfl.deploy.tensors import MOST_DIMENSIONS, check_header, pack, size_of, unpack
from adaptsfl.deploy.wire_pb2 import TensorHeader
from adaptsfl.errors import BadMessage

FLOATS = ("float32", "float16", "bfloat16", "int8", "int4")
# How far a number may be from what was sent: relative to itself, and to the largest of its tensor.
PRECISION = {
    "float32": (0.0, 0.0),
    "float16": (2**-11, 0.0),
    "bfloat16": (2**-8, 0.0),
    "int8": (0.0, 0.51 / 127),
    "int4": (0.0, 0.51 / 7),
}


def sent(tensor: torch.Tensor, dtype: str) -> torch.Tensor:
    header, data = pack(tensor, dtype)
    assert len(data) == size_of(header.shape, dtype)
    check_header(TensorHeader.FromString(header.SerializeToString()), tensor.shape, dtype)
    return unpack(TensorHeader.FromString(header.SerializeToString()), bytearray(data))


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(st.floats(-60000, 60000, width=32), min_size=1, max_size=40),
    scale=st.sampled_from((1.0, 1e-3, 1e-30, 1e30)),
    dtype=st.sampled_from(FLOATS),
)
def test_a_round_trip_is_as_exact_as_the_type(values: list[float], scale: float, dtype: str) -> None:
    if dtype == "float16":
        scale = 1.0
    tensor = torch.tensor(values, dtype=torch.float32) * scale
    relative, absolute = PRECISION[dtype]
    tiny = 2**-24 if dtype == "float16" else 2**-126
    allowed = tensor.abs() * relative + tensor.abs().max() * absolute + tiny * (dtype != "float32")
    assert bool(((sent(tensor, dtype) - tensor).abs() <= allowed).all())


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(1,), (2, 3, 4, 5), ()])
def test_zeros_stay_zeros_in_every_shape(shape: tuple[int, ...], dtype: str) -> None:
    arrived = sent(torch.zeros(shape), dtype)
    assert arrived.shape == shape
    assert arrived.dtype == torch.float32
    assert not bool(arrived.any())


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_tensor_in_any_memory_layout_arrives_in_its_order(dtype: str) -> None:
    tensor = torch.arange(-8.0, 8.0).reshape(2, 2, 2, 2).to(memory_format=torch.channels_last).transpose(1, 3)
    assert torch.allclose(sent(tensor, dtype), tensor, atol=0.6 if dtype == "int4" else 0.04)


def test_labels_arrive_as_they_are() -> None:
    labels = torch.tensor([[0, 9], [2**62, -1]])
    assert torch.equal(sent(labels, "int64"), labels)


@pytest.mark.parametrize("dtype", [*FLOATS, "int64"])
def test_a_single_number_arrives_whatever_its_stride(dtype: str) -> None:
    """Torch calls it contiguous: the label of a mini-batch of one sample, every other one of a row."""
    kind = torch.int64 if dtype == "int64" else torch.float32
    tensor = torch.ones(2, dtype=kind)[::2]
    assert tensor.stride() == (2,)
    assert torch.allclose(sent(tensor, dtype), tensor, rtol=0.01)


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_largest_numbers_arrive_as_numbers(dtype: str) -> None:
    """Of a type that is too small, its largest: infinity would be refused, and an honest device with it."""
    largest = torch.finfo(torch.float32).max
    arrived = sent(torch.tensor([largest, -largest, 1e5]), dtype)
    assert bool(torch.isfinite(arrived).all())
    assert arrived[0] > 60000
    assert arrived[1] < -60000


@pytest.mark.parametrize("value", [1e-45, 1e-40, 1e-38])
def test_int8_of_the_smallest_numbers_has_a_scale_that_is_accepted(value: float) -> None:
    assert float(sent(torch.tensor([value, 0.0]), "int8").abs().max()) <= 2 * value + 2**-126


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_refused(value: float, dtype: str) -> None:
    header, data = pack(torch.zeros(4), dtype)
    raw = bytearray(data)
    dtype = "bfloat16" if dtype in ("int8", "int4") else dtype  # that of their scales, which come first
    kind = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}[dtype]
    raw[: kind.itemsize] = torch.tensor([value], dtype=kind).view(torch.uint8).numpy().tobytes()
    with pytest.raises(BadMessage, match="NaN or infinity"):
        unpack(header, raw)


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_a_scale_that_makes_infinity_is_refused(dtype: str) -> None:
    header, data = pack(torch.full((1, 1), -1.0), dtype)
    raw = bytearray(data)
    raw[:2] = torch.tensor([3e38], dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes()
    with pytest.raises(BadMessage, match="NaN or infinity"):
        unpack(header, raw)


@pytest.mark.parametrize("shape", [(), (8,), (8, 3, 2), (9, 3), (0, 3), (2**32 - 1, 2**32 - 1)])
def test_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(BadMessage, match=r"\(8, 3\) was expected"):
        check_header(TensorHeader(dtype="float32", shape=shape), (8, 3), "float32")


@pytest.mark.parametrize("dtype", ["", "float64", "int64", "\x1b[2J" * 100])
def test_another_type_is_refused_in_words_that_can_be_shown(dtype: str) -> None:
    with pytest.raises(BadMessage, match="float32 was expected") as caught:
        check_header(TensorHeader(dtype=dtype, shape=[1]), (1,), "float32")
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 200


def test_thousands_of_dimensions_are_not_multiplied() -> None:
    with pytest.raises(BadMessage, match=f"{MOST_DIMENSIONS} are the most"):
        size_of([2**32 - 1] * 200_000, "float32")


@pytest.mark.parametrize("size", [0, 11, 13, 16])
def test_bytes_of_another_number_are_refused(size: int) -> None:
    with pytest.raises(BadMessage, match=f"{size} bytes came"):
        unpack(TensorHeader(dtype="float32", shape=[3]), bytearray(size))


def test_a_tensor_of_nothing_is_refused() -> None:
    header, data = pack(torch.zeros(0, 3), "int8")
    with pytest.raises(BadMessage, match="holds nothing"):
        unpack(header, bytearray(data))
