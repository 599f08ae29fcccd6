"""What arrives of activations and gradients: the same in training and on the wire, and as near as its bits allow."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adaptsfl.costs import BITS_PER_BYTE, WIRE_DTYPES, numbers_on_wire, wire_bits
from adaptsfl.training.wire_format import BLOCK, Crossing, Dither, arriving, decoded, encoded, size_of

LOSSY = WIRE_DTYPES[1:]
shapes = st.lists(st.integers(1, 70), min_size=2, max_size=3).filter(lambda shape: math.prod(shape) < 20_000)


def drawn(shape: tuple[int, ...], seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@settings(max_examples=80, deadline=None)
@given(shape=shapes, seed=st.integers(0, 9), dtype=st.sampled_from(WIRE_DTYPES), dithered=st.booleans(), positive=...)
def test_training_has_bit_for_bit_what_the_wire_brings(
    shape: list[int], seed: int, dtype: str, dithered: bool, positive: bool
) -> None:
    tensor = drawn(tuple(shape), seed)
    tensor = tensor.relu() if positive else tensor
    dither = Dither(3, 7) if dithered else None
    data = encoded(tensor, dtype, dither)
    assert data.numel() == size_of(shape, dtype)
    assert torch.equal(decoded(data, shape, dtype), arriving(tensor, dtype, dither))


def wild(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Return what a network may compute at worst: huge, denormal, many zeros, one sign only, nothing but -0."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    kinds = (
        x * torch.pow(2.0, torch.randint(-149, 128, shape, generator=generator).double()),
        x * 2.0 ** (31 * (seed % 9) - 145),
        x * (torch.rand(shape, generator=generator) < 0.2),
        -x.relu(),
        x.relu(),
        torch.full_like(x, -0.0),
    )
    largest = torch.finfo(torch.float32).max
    return kinds[seed % 6].clamp(-largest, largest).float()


LAYOUTS = {
    "contiguous": lambda x: x,
    "order of dimensions": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    "every other number": lambda x: torch.stack((x, x), -1)[..., 0],
    "channels last": lambda x: x.to(memory_format=torch.channels_last) if x.dim() == 4 else x,
}
any_shape = st.one_of(
    st.lists(st.integers(1, 9), min_size=2, max_size=5),
    st.tuples(st.integers(0, 3), st.integers(0, 200)),
    st.sampled_from(((1,), (3,), (1, 1), (1, 1, 1, 1), (2, 64), (2, 65), (1, 128))),
).filter(lambda shape: math.prod(shape) < 3000)


@settings(max_examples=300, deadline=None)
@given(
    shape=any_shape,
    seed=st.integers(0, 53),
    dtype=st.sampled_from(WIRE_DTYPES),
    layout=st.sampled_from(sorted(LAYOUTS)),
    dither=st.sampled_from((None, Dither(3, 7), Dither(3, 7, first=5))),
)
def test_whatever_is_sent_arrives_as_in_training(
    shape: tuple[int, ...], seed: int, dtype: str, layout: str, dither: Dither | None
) -> None:
    tensor = wild(tuple(shape), seed)
    sent = LAYOUTS[layout](tensor)
    found, data = arriving(sent, dtype, dither), encoded(sent, dtype, dither)
    assert torch.equal(found, arriving(tensor, dtype, dither))
    assert data.numel() * BITS_PER_BYTE == shape[0] * int(wire_bits(math.prod(shape[1:]), dtype))
    assert torch.equal(decoded(data, shape, dtype), found)
    assert bool(torch.isfinite(found).all())
    assert not bool(found[tensor == 0].any())  # a zero stays a zero


@pytest.mark.parametrize("dtype", WIRE_DTYPES)
def test_a_payload_has_as_many_numbers_as_bits_say(dtype: str) -> None:
    numbers = np.array([*range(400), 12_345, 1_000_001], dtype=np.float64)
    found = numbers_on_wire(wire_bits(numbers, dtype), dtype)
    filled = numbers + numbers % 2 if dtype == "int4" else numbers  # half a byte is filled
    assert np.array_equal(found, filled)
    assert np.array_equal(wire_bits(found, dtype), wire_bits(numbers, dtype))


@pytest.mark.parametrize("dtype", WIRE_DTYPES)
def test_nan_arrives_as_nan_and_infinity_as_a_huge_number(dtype: str) -> None:
    """Of NaN, the whole block: whoever receives it must see that training has diverged."""
    tensor = drawn((2, 3 * BLOCK))
    tensor[0, 3], tensor[1, 5] = math.nan, -math.inf
    for found in (arriving(tensor, dtype), decoded(encoded(tensor, dtype), tensor.shape, dtype)):
        assert bool(found[0, 3].isnan())
        assert not bool(found[0, BLOCK:].isnan().any())
        assert not bool(found[1].isnan().any())
        assert float(found[1, 5]) < -60000


@pytest.mark.parametrize("own", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("dtype", WIRE_DTYPES)
def test_a_model_of_another_type_keeps_its_type(dtype: str, own: torch.dtype) -> None:
    tensor = drawn((2, 100), dtype=torch.float64).to(own)
    found = arriving(tensor, dtype, Dither(1, 1))
    assert found.dtype == own
    expected = arriving(tensor.float(), dtype, Dither(1, 1))
    assert torch.allclose(found.float(), expected, rtol=0.01, atol=1e-3)
    assert torch.equal(decoded(encoded(tensor, dtype), tensor.shape, dtype), arriving(tensor.float(), dtype))


def test_sizes_count_scales_and_half_bytes() -> None:
    assert size_of((3, 65), "int8") == 3 * (65 + 2 * 2)
    assert size_of((3, 65), "int4") == 3 * (33 + 2 * 2)
    assert size_of((3, 65), "bfloat16") == 3 * 65 * 2


@pytest.mark.parametrize("shape", [(8, 5), (8, 5, 30), (16, 6, 5, 4)], ids=["rows", "tokens", "images"])
@pytest.mark.parametrize("parts", [2, 4, 8])
@pytest.mark.parametrize("dtype", WIRE_DTYPES)
def test_what_arrives_of_parts_is_what_arrives_of_the_whole(dtype: str, parts: int, shape: tuple[int, ...]) -> None:
    """Activations to the nearest; gradients in int4 with the random numbers of each sample's place."""
    tensor, size = drawn(shape), shape[0] // parts
    tensor = tensor.to(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor
    assert torch.equal(torch.cat([arriving(part, dtype) for part in tensor.chunk(parts)]), arriving(tensor, dtype))
    ways = [Dither(1, 2, first=part * size) for part in range(parts)]
    found = [arriving(part, dtype, way) for part, way in zip(tensor.chunk(parts), ways, strict=True)]
    whole = arriving(tensor, dtype, Dither(1, 2))
    assert torch.equal(torch.cat(found), whole)
    back = drawn(shape, 1)
    crossings = [Crossing(dtype, Dither(1, 2)).of_samples(way.first) for way in ways]
    x = tensor.requires_grad_()
    pieces = zip(x.chunk(parts), back.chunk(parts), crossings, strict=True)
    sums = [(crossing(part) * gradient).sum() for part, gradient, crossing in pieces]
    (gradient,) = torch.autograd.grad(torch.stack(sums).sum(), x)
    assert torch.equal(gradient, arriving(back, dtype, Dither(1, 2)))


@pytest.mark.parametrize(("dtype", "steps"), [("int8", 255), ("int4", 15)])
def test_a_block_without_negative_numbers_uses_all_levels(dtype: str, steps: int) -> None:
    tensor = torch.linspace(0, 1, BLOCK)[None]
    assert float((arriving(tensor, dtype) - tensor).abs().max()) <= 0.51 / steps
    assert float((arriving(tensor - 0.5, dtype) - (tensor - 0.5)).abs().max()) <= 0.51 / (steps - 1)


def test_one_large_number_costs_precision_in_its_own_block_only() -> None:
    tensor = drawn((2, 4 * BLOCK))
    tensor[0, 0] = 1000.0
    error = (arriving(tensor, "int8") - tensor).abs()
    assert float(error[0, BLOCK:].max()) < 0.02
    assert float(error[1].max()) < 0.02


def test_gradients_in_four_bits_are_right_in_the_mean() -> None:
    gradient = drawn((4, 200))
    rounds = 400
    mean = torch.stack([arriving(gradient, "int4", Dither(0, t)) for t in range(rounds)]).mean(0)
    step = gradient.abs().max() / 7
    assert float((mean - gradient).abs().max()) < 4.5 * float(step) / 2 / math.sqrt(rounds)
    assert float((arriving(gradient, "int4") - gradient).abs().max()) > 0.3 * float(step)


def test_random_numbers_differ_by_device_round_and_sample() -> None:
    like = torch.zeros(1)
    numbers = [Dither(*at).numbers(2, 100, like) for at in ((0, 0), (0, 1), (1, 0))]
    rows = [*numbers[0], *numbers[1], *numbers[2]]
    for k, one in enumerate(rows):
        assert 0 <= float(one.min()) <= float(one.max()) < 1
        assert not any(torch.allclose(one, other, atol=0.05) for other in rows[:k])


@pytest.mark.parametrize("dtype", LOSSY)
def test_memory_order_is_kept_and_does_not_matter(dtype: str) -> None:
    tensor = drawn((2, 6, 5, 4))
    other = tensor.contiguous(memory_format=torch.channels_last)
    assert torch.equal(arriving(tensor, dtype), arriving(other, dtype))
    assert arriving(other, dtype).is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("dtype", WIRE_DTYPES)
def test_a_crossing_rounds_forward_and_backward(dtype: str) -> None:
    """Gradients of a device with weight 0.3 are rounded as those of its own loss, then weighted again."""
    x, back, dither = drawn((3, 100)).requires_grad_(), drawn((3, 100), 1), Dither(2, 5)
    y = Crossing(dtype, dither, 0.3)(x)
    assert torch.equal(y.detach(), arriving(x.detach(), dtype))
    (found,) = torch.autograd.grad(y, x, back)
    torch.testing.assert_close(found, arriving(back / 0.3, dtype, dither) * 0.3)
