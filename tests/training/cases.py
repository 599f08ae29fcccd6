"""Small models and batches in float64, where two ways of computing the same weights agree to rounding."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

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


class OddNorms(nn.Module):
    """Batch-norm without running statistics, with another momentum, without weights, and over a moved axis."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 4, 3)
        self.untracked = nn.BatchNorm2d(4, track_running_stats=False)
        self.second = nn.Conv2d(4, 6, 3)
        self.slow = nn.BatchNorm2d(6, momentum=0.01)
        self.third = nn.Linear(16, 5)
        self.plain = nn.BatchNorm1d(5, affine=False)
        self.last = nn.Linear(30, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.untracked(self.first(x)).relu()
        x = self.slow(self.second(x)).relu()
        x = self.third(x.flatten(2).flatten(0, 1))  # the channels become samples
        return self.last(self.plain(x).view(-1, 30))


def make_odd_norms() -> SplitModel:
    """Return them split, for digits, the same every time."""
    torch.manual_seed(0)
    return split(OddNorms().double(), torch.zeros(2, 1, 8, 8, dtype=torch.float64))


class NormTwice(nn.Module):
    """Uses one batch-norm for two layers, so that every batch updates its running statistics twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10)
        self.second, self.third = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x.flatten(1)).tanh()
        x = self.norm(self.second(x)).tanh()
        return self.last(self.norm(self.third(x)).tanh())


def make_norm_twice() -> SplitModel:
    """Return it split, for digits, the same every time."""
    torch.manual_seed(0)
    return split(NormTwice().double(), torch.zeros(2, 1, 8, 8, dtype=torch.float64))


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
