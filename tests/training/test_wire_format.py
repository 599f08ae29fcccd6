"""What arrives of activations and gradients: the same in training and on the wire, and as near as its bits allow."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adaptsfl.costs import WIRE_DTYPES
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


def test_sizes_count_scales_and_half_bytes() -> None:
    assert size_of((3, 65), "int8") == 3 * (65 + 2 * 2)
    assert size_of((3, 65), "int4") == 3 * (33 + 2 * 2)
    assert size_of((3, 65), "bfloat16") == 3 * 65 * 2


@pytest.mark.parametrize("dtype", LOSSY)
def test_a_sample_arrives_the_same_whoever_travels_with_it(dtype: str) -> None:
    tensor = drawn((8, 5, 30))
    whole = arriving(tensor, dtype, Dither(1, 2))
    parts = [arriving(tensor[k : k + 2], dtype, Dither(1, 2, first=k)) for k in range(0, 8, 2)]
    assert torch.equal(torch.cat(parts), whole)


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
