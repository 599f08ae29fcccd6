"""Small models and batches in float64, where two ways of computing the same weights agree to rounding."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from adaptsfl.models import SplitModel, build, split
from adaptsfl.training import Batch

SIZES = (3, 2, 4, 3)  # samples per device: unequal, so that weights matter


def make_model(name: str, dtype: torch.dtype = torch.float64, **options: Any) -> SplitModel:
    """Return a split model of the zoo, the same every time."""
    torch.manual_seed(0)
    built = build(name, **options)
    assert built.example_input is not None
    example = built.example_input
    return split(built.module.to(dtype), example.to(dtype) if example.is_floating_point() else example)


def make_batches(model: SplitModel, shape: Sequence[int], sizes: Sequence[int] = SIZES) -> Callable[[int], list[Batch]]:
    """Return what gives every round its batches, the same for the same round."""
    dtype = next(model.module.parameters()).dtype

    def batches(t: int) -> list[Batch]:
        generator = torch.Generator().manual_seed(t)
        inputs = [torch.randn(size, *shape, generator=generator, dtype=dtype) for size in sizes]
        return [(x, torch.randint(0, 10, (len(x),), generator=generator)) for x in inputs]

    return batches


def largest_difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the largest absolute difference between two states with the same keys."""
    assert found.keys() == expected.keys()
    return max(float((found[key].double() - expected[key].double()).abs().max()) for key in expected)
