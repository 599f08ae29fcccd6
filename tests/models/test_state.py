"""Buffers that forward changes, modes that a model keeps for itself, batch sizes it asks for: nothing is lost."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from adaptsfl.errors import InvalidInput
from adaptsfl.models import split

Forward = Callable[["Net", Tensor], Tensor]


class Net(nn.Module):
    """Four linear layers and buffers, called as a test says."""

    mean: Tensor
    variance: Tensor
    steps: Tensor

    def __init__(self, run: Forward) -> None:
        super().__init__()
        self.run = run
        self.a, self.b, self.c, self.d = (nn.Linear(4, 4) for _ in range(4))
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("variance", torch.ones(4))
        self.register_buffer("steps", torch.tensor(10.0))
        self.calls = 0
        self.features: Tensor | None = None
        self.history: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def samples(count: int = 3) -> Tensor:
    return torch.randn(count, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def net(run: Forward) -> Net:
    torch.manual_seed(0)
    return Net(run).double()


def counts(n: Net, x: Tensor) -> Tensor:
    n.steps.add_(1)
    return n.d(n.c(n.b(n.a(x)) * n.steps))


def counts_by_operator(n: Net, x: Tensor) -> Tensor:
    n.steps += 1
    return n.d(n.c(n.b(n.a(x))))


def written_early_read_late(n: Net, x: Tensor) -> Tensor:
    x = n.a(x)
    if n.training:
        n.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
    return n.d(n.c(n.b(x)) - n.mean)


def read_before_written(n: Net, x: Tensor) -> Tensor:
    x = n.a(x)
    old = n.mean * 1.0
    n.mean.add_(1)
    return n.d(n.c(n.b(x * old + old)))


def written_through_a_view(n: Net, x: Tensor) -> Tensor:
    x = n.a(x)
    n.mean[:2].add_(1)
    return n.d(n.c(n.b(x)) + n.mean)


def norm_by_function(n: Net, x: Tensor) -> Tensor:
    x = functional.batch_norm(n.a(x), n.mean, n.variance, training=n.training)
    x = n.b(x).relu()
    x = functional.batch_norm(n.c(x), running_mean=n.mean, running_var=n.variance, training=n.training)
    return n.d(x)


def instance_norm_by_function(n: Net, x: Tensor) -> Tensor:
    x = functional.instance_norm(n.a(x).unsqueeze(2).expand(-1, -1, 3), n.mean, n.variance).mean(2)
    return n.d(n.c(n.b(x)) + n.mean)


def exported(run: Forward) -> Forward:
    """Return the same behind a question that torch.fx cannot answer."""
    return lambda n, x: run(n, x if x.dim() == 2 else x[0])


UPDATES: dict[Forward, tuple[str, ...]] = {
    counts: ("a", "c", "d"),
    counts_by_operator: ("a", "b", "c", "d"),
    written_early_read_late: ("a", "b", "d"),
    read_before_written: ("a", "b", "c", "d"),
    written_through_a_view: ("a", "b", "d"),
    norm_by_function: ("a", "b", "d"),
    instance_norm_by_function: ("a", "b", "d"),
}


@pytest.mark.parametrize("run", UPDATES)
def test_changed_buffers_stay_on_one_side_and_are_kept(run: Forward, every_cut: Any) -> None:
    model = split(net(run), samples())
    assert model.names == UPDATES[run]
    every_cut(model, samples())


@pytest.mark.parametrize("run", [counts, written_early_read_late, read_before_written])
def test_changed_buffers_of_exported_models(run: Forward, every_cut: Any) -> None:
    every_cut(split(net(exported(run)), samples()), samples())


def remembers(n: Net, x: Tensor) -> Tensor:
    n.calls += 1
    n.features = n.a(x)
    n.history.append(n.features)
    return n.b(n.features)


@pytest.mark.parametrize("run", [counts, written_early_read_late, remembers])
def test_split_leaves_buffers_and_attributes_alone(run: Forward) -> None:
    module = net(run)
    buffers = dict(module.named_buffers())
    values = {name: tensor.clone() for name, tensor in buffers.items()}
    split(module, samples())
    assert all(tensor is buffers[name] for name, tensor in module.named_buffers())
    assert all(torch.equal(tensor, values[name]) for name, tensor in module.named_buffers())
    assert (module.calls, module.features, module.history) == (0, None, [])


def test_a_buffer_that_is_replaced_is_refused_and_left_alone() -> None:
    def run(n: Net, x: Tensor) -> Tensor:
        x = n.a(x)
        n.mean = 0.9 * n.mean + 0.1 * x.detach().mean(0)
        return n.b(x)

    module = net(run)
    with pytest.raises(InvalidInput, match=r"buffer 'mean' in training mode\. Change buffers in place"):
        split(module, samples())
    assert torch.equal(module.mean, torch.zeros(4, dtype=torch.float64))
    module(samples())
    assert float(module.mean.abs().sum()) > 0


def test_a_buffer_that_is_only_written_is_not_forgotten() -> None:
    def run(n: Net, x: Tensor) -> Tensor:
        x = n.a(x)
        n.mean = x.detach().mean(0)
        return n.b(x)

    with pytest.raises(InvalidInput, match="buffer 'mean'"):
        split(net(run), samples())


def test_what_a_model_remembers_outside_its_buffers_is_refused() -> None:
    def run(n: Net, x: Tensor) -> Tensor:
        n.calls += 1
        return n.b(n.a(x) * n.calls)

    with pytest.raises(InvalidInput, match="do not have the model's outputs in training mode with a batch of 5"):
        split(net(run), samples())


def test_lazy_modules_are_refused() -> None:
    with pytest.raises(InvalidInput, match="lazy"):
        split(nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 4)), samples())


class Frozen(nn.Module):
    """Keeps its normalisation in evaluation mode, as fine-tuning does."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.norm(self.a(x)))

    def train(self, mode: bool = True) -> "Frozen":
        super().train(mode)
        self.norm.eval()
        return self


def test_a_model_that_keeps_a_part_in_evaluation_mode(every_cut: Any) -> None:
    module = Frozen().double()
    with torch.no_grad():
        module.norm.get_buffer("running_mean").add_(0.5)
    model = split(module, samples())
    every_cut(model, samples())
    assert not model.client(1).train().norm.training
    model.train()
    assert (module.training, module.a.training, module.norm.training) == (True, True, False)
    assert not model.eval().module.training


class ActsFirst(nn.Module):
    """Begins with an operation that changes its input in place."""

    def __init__(self) -> None:
        super().__init__()
        self.relu, self.linear = nn.ReLU(inplace=True), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.relu(x))


def test_no_cut_before_a_module_that_changes_its_input(every_cut: Any) -> None:
    with pytest.raises(InvalidInput, match="no legal cut: '1' changes its input in place"):
        split(nn.Sequential(nn.Linear(4, 4), ActsFirst(), ActsFirst()).double(), samples())
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), ActsFirst(), nn.Linear(4, 2)).double()
    model = split(module, samples())
    assert model.names == ("0", "1", "3")
    every_cut(model, samples())


class DropsFirst(nn.Module):
    """Changes its input in place in training mode only."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.mul_(2) if self.training else x * 2)


def test_no_cut_before_a_module_that_changes_its_input_in_training() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), DropsFirst(), nn.Linear(4, 2)).double()
    assert split(module.train(), samples()).names == ("0", "1", "3")
    assert split(module.eval(), samples()).names == ("0", "1", "3")


def test_splitting_draws_no_random_numbers() -> None:
    module = net(lambda n, x: n.b(n.a(x) * torch.rand(4)))
    state = torch.get_rng_state()
    split(module, samples())
    assert torch.equal(torch.get_rng_state(), state)


def at_five(n: Net, x: Tensor) -> Tensor:
    return n.b(n.a(-x if x.shape[0] > 4 else x))


def at_seventy(n: Net, x: Tensor) -> Tensor:
    return n.b(n.a(-x if x.shape[0] > 70 else x))


def at_one(n: Net, x: Tensor) -> Tensor:
    return n.b(n.a(-x if x.shape[0] == 1 else x))


@pytest.mark.parametrize(
    ("run", "message"),
    [(at_five, "batch sizes from 2 to 4"), (at_seventy, "from 2 to 70"), (at_one, "with a batch of 1")],
)
def test_branches_on_the_batch_size_are_refused(run: Forward, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        split(net(run), samples())


def test_an_example_of_zeros_hides_nothing() -> None:
    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x).relu())

    module = Chain()
    with pytest.raises(InvalidInput, match="do not have the model's outputs"):
        split(module, torch.zeros(1, 4), layers=[module.b, module.a])


def test_samples_that_the_model_cannot_take_are_not_used() -> None:
    def run(n: Net, x: Tensor) -> Tensor:
        return n.b(n.a(x.log()))

    assert split(net(run), samples().abs() + 1).names == ("a", "b")


def test_a_model_that_torch_fx_traces_wrongly_is_exported(every_cut: Any) -> None:
    def run(n: Net, x: Tensor) -> Tensor:
        return n.d(n.c(n.b(n.a(x * 2 if isinstance(x, Tensor) else x))))

    model = split(net(run), samples())
    assert model.names == ("a", "b", "c", "d")
    every_cut(model, samples())


def test_what_a_model_itself_cannot_do_is_told() -> None:
    with pytest.raises(InvalidInput, match="model: returns complex numbers"):
        split(net(lambda n, x: torch.fft.fft(n.b(n.a(x)))), samples())

    def run(n: Net, x: Tensor) -> Tensor:
        x = n.a(x).exp()
        y = n.b(x)
        x.add_(1)
        return n.d(n.c(x + y))

    with pytest.raises(InvalidInput, match="model: Net itself fails in training mode, forward or backward: one of the"):
        split(net(run), samples())
