"""Every cut of the zoo, and of networks built to be awkward, gives the unsplit model's numbers bit for bit."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from adaptsfl.models import build, split

SMALL: list[tuple[str, dict[str, Any]]] = [
    ("vgg11", {"width": 0.125, "norm": "group"}),
    ("vgg16", {"width": 0.125, "norm": "none", "dropout": 0.5}),
    ("vgg16", {"width": 0.125, "norm": "batch", "classes": 100}),
    ("vgg16", {"width": 0.125, "norm": "group"}),
    ("resnet18", {"width": 0.125, "norm": "none"}),
    ("resnet18", {"width": 0.125, "norm": "batch", "classes": 100}),
    ("resnet18", {"width": 0.125, "norm": "group"}),
    ("vgg_digits", {"width": 0.5, "norm": "batch", "dropout": 0.3}),
    ("vit", {"width": 0.25, "depth": 2, "dropout": 0.2}),
    ("gpt", {"width": 0.25, "depth": 2, "context": 16, "dropout": 0.2}),
]


def samples(example: Tensor, count: int = 3) -> Tensor:
    shape = (count, *example.shape[1:])
    generator = torch.Generator().manual_seed(1)
    if example.is_floating_point():
        return torch.randn(shape, generator=generator, dtype=torch.float64)
    return torch.randint(0, 200, shape, generator=generator)


@pytest.mark.parametrize(("name", "options"), SMALL, ids=[f"{name}-{k}" for k, (name, _) in enumerate(SMALL)])
def test_every_cut_of_the_zoo(name: str, options: dict[str, Any], every_cut: Any) -> None:
    torch.manual_seed(0)
    built = build(name, **options)
    assert built.example_input is not None
    x = samples(built.example_input)
    module = built.module.double()
    every_cut(split(module, x[:1]), x)


class Awkward(nn.Module):
    """Sizes read at the top and used at the end, functional dropout, a branch on the mode, buffers of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.second = nn.Conv2d(4, 4, 3, padding=1)
        self.third = nn.Linear(4 * 16, 6)
        self.fourth = nn.Linear(6, 5)
        self.register_buffer("scale", torch.linspace(0.5, 1, 4).view(1, 4, 1, 1))
        self.register_buffer("offset", torch.ones(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, _, height, width = x.shape
        x = functional.dropout(functional.relu(self.norm(self.first(x))), 0.4, self.training)
        if self.training:
            x = x * torch.rand_like(x[:, :1, :1, :1]).round()
        x = self.second(x) * self.scale
        x = self.third(x.view(batch, 4 * height * width) + self.offset)
        return self.fourth(functional.relu(x, inplace=True))


class ByShape(Awkward):
    """The same behind a question that torch.fx cannot answer and torch.export can.

    Before it, numbers made in forward, other ones in either mode, and a weight that gets no gradient where it is used.
    """

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() == 3:
            x = x.unsqueeze(0)
        factor = torch.tensor([2.0 if self.training else 3.0], dtype=x.dtype, device=x.device)
        with torch.no_grad():
            shift = self.first.weight.sum() * torch.arange(3, device=x.device).view(3, 1, 1)
        return super().forward(factor * x + shift)


class PreActivation(nn.Module):
    """Batch-norm before the convolution, around a residual: its counter must go with it."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 1)
        self.norm = nn.BatchNorm2d(4)
        self.conv = nn.Conv2d(4, 4, 1)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + self.conv(functional.relu(self.norm(x)))
        return self.head(x.mean((2, 3)))


class PreActivationByShape(PreActivation):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.dim() == 4 else x


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (Awkward, ("first", "second", "third", "fourth")),
        (ByShape, ("first", "second", "third", "fourth")),
        (PreActivation, ("stem", "conv", "head")),
        (PreActivationByShape, ("stem", "conv", "head")),
    ],
)
def test_every_cut_of_awkward_models(kind: type[nn.Module], names: tuple[str, ...], every_cut: Any) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 3, 4, 4, dtype=torch.float64)
    model = split(kind().double(), x)
    assert model.names == names
    every_cut(model, x)


def test_batch_norm_and_its_counter_are_in_one_piece() -> None:
    model = split(PreActivationByShape(), torch.randn(2, 3, 4, 4))
    assert {"norm.weight", "norm.running_mean", "norm.num_batches_tracked"} <= set(model.keys(2))


def test_a_module_that_appears_twice_runs_twice(every_cut: Any) -> None:
    relu = nn.ReLU()
    module = nn.Sequential(nn.Linear(3, 4), relu, nn.Linear(4, 4), relu, nn.Linear(4, 2)).double()
    x = torch.randn(5, 3, dtype=torch.float64)
    model = split(module, x)
    assert model.layers == 3
    every_cut(model, x)


def test_splitting_changes_nothing_in_the_model() -> None:
    module = build("vgg_digits", norm="batch", dropout=0.5).module
    module.get_submodule("conv1_2").eval()  # a user may have frozen one layer's statistics
    before = {key: value.clone() for key, value in module.state_dict().items()}
    modes = [part.training for part in module.modules()]
    x = torch.randn(2, 1, 8, 8)
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    split(module, x)
    assert torch.equal(torch.rand(1), expected)
    assert [part.training for part in module.modules()] == modes
    assert all(torch.equal(before[key], value) for key, value in module.state_dict().items())


def test_train_and_eval_reach_every_layer() -> None:
    module = build("vit", width=0.25, depth=1, dropout=0.5).module
    x = torch.randn(2, 3, 32, 32)
    model = split(module, x)

    def seeded(run: Callable[[Tensor], Tensor]) -> Tensor:
        torch.manual_seed(0)
        return run(x)

    training, evaluating = seeded(model.train()), seeded(model.eval())
    assert torch.equal(training, seeded(module.train()))
    assert torch.equal(evaluating, seeded(module.eval()))
    assert not torch.equal(training, evaluating)
