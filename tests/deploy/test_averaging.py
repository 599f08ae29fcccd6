"""The fed server's mean of tensors is the mean that the reference puts into its modules."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from adaptsfl.config import load_recipe
from adaptsfl.deploy import layers_file
from adaptsfl.deploy import wire_pb2 as wire
from adaptsfl.deploy.layers_file import LayerStates, Template, to_bytes, without_optimizer
from adaptsfl.deploy.parties.fed import server as fed_module
from adaptsfl.deploy.parties.fed.server import FedServer
from adaptsfl.deploy.security.identity import Party
from adaptsfl.deploy.terms import Terms
from adaptsfl.deploy.transfer import chunks
from adaptsfl.models import split
from adaptsfl.training import OptimizerSettings
from adaptsfl.training.layers import average, run
from deploy.in_process import RECIPE

SHARES = [0.5, 0.2, 0.3]


class Odd(nn.Module):
    """A layer with a parameter that is not trained, and buffers of which there is no mean."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.frozen = nn.Parameter(torch.ones(6), requires_grad=False)
        self.register_buffer("used", torch.tensor([True, True, False, True, True, False]))
        self.register_buffer("mask", torch.tensor([0.0, 0.0, float("-inf"), 0.0, 0.0, 0.0]))
        self.register_buffer("waves", torch.polar(torch.ones(6), torch.arange(6.0)))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x) * self.frozen + self.waves.real
        return torch.where(self.used, y + self.mask.clamp(-1.0), y)


def template(optimizer: str, rule: str = "average", dtype: torch.dtype = torch.float64) -> Template:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 6), Odd())
    layers._apply(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)  # not the complex ones
    model = split(layers, torch.randn(8, 1, 4, 4, dtype=dtype))
    return Template(model, OptimizerSettings(optimizer, at_averaging=rule))  # type: ignore[arg-type]


def trained(made: Template, steps: int, dtype: torch.dtype = torch.float64) -> LayerStates:
    """Return all layers after some steps of training on samples of their own."""
    layers = [made.layer(number) for number in range(1, made.model.layers + 1)]
    for _ in range(steps):
        loss = run(layers, torch.randn(8, 1, 4, 4, dtype=dtype)).square().mean()
        for layer in layers:
            gradients = torch.autograd.grad(loss, layer.parameters, retain_graph=True) if layer.parameters else []
            layer.update(gradients, 0.1)
    return {number: layer.state() for number, layer in enumerate(layers, start=1)}


def expected(made: Template, copies: list[LayerStates], shares: list[float]) -> LayerStates:
    """Return the reference's mean: modules with optimisers, averaged; state that an optimiser lacks is zero."""
    found: LayerStates = {}
    for number in copies[0]:
        every = {name: torch.zeros_like(t) for copy in copies for name, t in copy[number].items()}
        modules = [made.layer(number, every | copy[number]) for copy in copies]
        average(modules, shares, made.settings.at_averaging)
        found[number] = modules[0].state()
    return found


def assert_close(found: LayerStates, wanted: LayerStates, **tolerance: float) -> None:
    assert found.keys() == wanted.keys()
    for number, state in wanted.items():
        assert found[number].keys() == state.keys()
        for name, tensor in state.items():
            torch.testing.assert_close(found[number][name], tensor, **tolerance)  # the type too


@pytest.mark.parametrize("rule", ["average", "reset"])
@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
def test_it_is_the_references(optimizer: str, rule: str) -> None:
    """Batch-norm's statistics among it; steps that differ, so that counters do."""
    made = template(optimizer, rule)
    copies = [trained(made, steps) for steps in (2, 4, 3)]
    for k, copy in enumerate(copies):  # what is not trained is the first copy's
        changed = [state[name].add_(k) for state in copy.values() for name in state if "frozen" in name]
        assert len(changed) == 1
    found = made.mean(copies, SHARES)
    assert_close(found, expected(made, copies, SHARES), rtol=1e-14, atol=1e-15)
    names = {name for state in found.values() for name in state}
    (counter,) = (state[name] for state in found.values() for name in state if "num_batches" in name)
    assert (int(counter), counter.dtype) == (4, torch.int64)
    assert any(name.startswith(("exp_avg", "momentum")) for name in names) == (optimizer != "sgd" and rule == "average")
    made.check(found)


def test_in_single_precision() -> None:
    made = template("adam", dtype=torch.float32)
    copies = [trained(made, steps, torch.float32) for steps in (1, 2, 3)]
    assert_close(made.mean(copies, SHARES), expected(made, copies, SHARES), rtol=1e-6, atol=1e-7)


def test_sums_in_half_precision_do_not_stall() -> None:
    """A thousand copies of 1 with a thousandth each: summed in bfloat16 they stay at 0.25 or so."""
    made = template("sgd", dtype=torch.bfloat16)
    ones = {1: {name: torch.ones_like(tensor) for name, tensor in made.layer(1).state().items()}}
    for name, tensor in made.mean([ones] * 1000, [0.001] * 1000)[1].items():
        assert torch.equal(tensor, ones[1][name])


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
@pytest.mark.parametrize("first", [0, 2])
def test_optimiser_state_that_a_copy_lacks_is_zero(optimizer: str, first: int) -> None:
    """A device that was restarted has taken no step, be it the first or the last in the order of names."""
    made = template(optimizer)
    copies = [trained(made, steps) for steps in (1, 2, 3)]
    copies[first] = {number: without_optimizer(state) for number, state in copies[first].items()}
    assert_close(made.mean(copies, SHARES), expected(made, copies, SHARES), rtol=1e-14, atol=1e-15)


def test_a_copy_without_a_share_does_no_harm() -> None:
    """A weight may be so small that its share is zero, and zero times the mask's infinity is not a number."""
    made = template("adam")
    copies = [trained(made, steps) for steps in (1, 2, 3)]
    assert_close(made.mean(copies, [0.4, 0.6, 0.0]), made.mean(copies[:2], [0.4, 0.6]), rtol=0, atol=0)


def test_the_mean_shares_no_memory_with_the_copies() -> None:
    made = template("adam")
    one, other = trained(made, 1), trained(made, 2)
    for copies, shares in (([one], [1.0]), ([one, other], [0.5, 0.5])):
        found = made.mean(copies, shares)
        kept = {tensor.data_ptr() for copy in copies for state in copy.values() for tensor in state.values()}
        assert not kept & {tensor.data_ptr() for state in found.values() for tensor in state.values()}


# --- the calls ---


async def parts(*messages: Any) -> Any:
    for message in messages:
        yield message


def test_deliveries_and_averaging_build_no_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those named at the end are averaged, with what they delivered last, in whatever order they did."""
    (tmp_path / "recipe.toml").write_text(RECIPE)
    fed = FedServer(Terms.of(load_recipe(tmp_path / "recipe.toml", ["fleet.devices=3"])), tmp_path / "fed")
    one = {number: fed.template.layer(number).state() for number in (1, 2)}
    party = Party("edge", "edge")

    async def caller(_context: Any, _role: Any) -> Party:
        return party

    def refuse(*_: Any) -> None:
        raise AssertionError("a module was built")

    monkeypatch.setattr(fed_module, "require", caller)
    monkeypatch.setattr(layers_file, "Layer", refuse)
    names = ["device-1", "device-2", "device-3"]
    fed.block = fed_module.FedBlock(7, 0, 2, dict.fromkeys(names, 2), one)
    for name, factor in (("device-3", 5.0), ("device-1", 7.0), ("device-2", 9.0), ("device-1", 1.0)):
        party = Party("device", name)
        data = to_bytes({n: {key: factor * t for key, t in state.items()} for n, state in one.items()})
        header = wire.Layers(attempt=7, device=name, first=1, last=2, size=len(data))
        asyncio.run(fed.deliver(parts(wire.LayersPart(header=header), *chunks(data)), None))
    party = Party("edge", "edge")
    asyncio.run(fed.close(wire.Closing(attempt=7, weights={"device-3": 1.0, "device-1": 3.0}), None))
    wanted = {n: {key: (3 * 1 + 5) / 4 * t for key, t in state.items()} for n, state in one.items()}
    assert_close(fed.versions[1], wanted, rtol=1e-6, atol=0)
