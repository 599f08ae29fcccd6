"""Ghost batches: batch-norm normalises every part of a mini-batch by itself, in the engine as in the reference."""

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from adaptsfl.costs import WIRE_DTYPES
from adaptsfl.decisions import Decision
from adaptsfl.errors import InvalidInput
from adaptsfl.models import SplitModel, split
from adaptsfl.training import Engine, OptimizerSettings, Reference, TrainingWarning, load_checkpoint, save_checkpoint
from training.cases import largest_difference, make_batches, make_model, make_norm_twice, make_odd_norms
from training.test_engine import DIGITS, PLANS, compare

EXACT = 1e-10
SIZES = (4, 8, 4, 12)
LENGTHS = (3, 4, 2)


def divided(*parts: int, plans: Any = PLANS, wire_dtype: str | None = None) -> list[Decision]:
    """Return the plans, one after the other with these numbers of parts."""
    return [replace(plan, micro_batches=k, wire_dtype=wire_dtype) for plan, k in zip(plans, parts, strict=True)]


def with_batch_norm() -> SplitModel:
    return make_model("vgg_digits", width=0.25, norm="batch")


@pytest.mark.parametrize("statistics", ["pooled", "device"])
@pytest.mark.parametrize("rule", ["average", "reset", "keep"])
@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
def test_the_engine_trains_parts_as_the_reference_does(optimizer: str, rule: str, statistics: str) -> None:
    rate = 1e-3 if optimizer == "adam" else 0.05
    settings = OptimizerSettings(optimizer, rate, 2 * rate, weight_decay=0.01, at_averaging=rule)
    options: dict[str, Any] = {"plans": divided(2, 4, 2), "lengths": LENGTHS, "sizes": SIZES}
    compare(with_batch_norm(), DIGITS, settings, weights=(1, 5, 2, 3), statistics=statistics, **options)


@pytest.mark.parametrize("statistics", ["pooled", "device"])
@pytest.mark.parametrize("wire_dtype", WIRE_DTYPES)
def test_parts_are_rounded_on_the_wire(wire_dtype: str, statistics: str) -> None:
    options: dict[str, Any] = {"plans": divided(4, 2, 4, wire_dtype=wire_dtype), "lengths": LENGTHS, "sizes": SIZES}
    compare(with_batch_norm(), DIGITS, OptimizerSettings("sgd", 0.05), statistics=statistics, **options)


@pytest.mark.parametrize("chunk", [1, None])
@pytest.mark.parametrize("statistics", ["pooled", "device"])
def test_plans_change_between_whole_mini_batches_and_parts(statistics: str, chunk: int | None) -> None:
    options: dict[str, Any] = {"plans": divided(1, 4, 1), "lengths": LENGTHS, "sizes": SIZES, "chunk": chunk}
    compare(with_batch_norm(), DIGITS, OptimizerSettings("momentum", 0.05), statistics=statistics, **options)


@pytest.mark.parametrize("statistics", ["pooled", "device"])
def test_batch_norm_of_every_kind(statistics: str) -> None:
    plans = [Decision((1, 1, 1, 1), 2), Decision((2, 1, 2, 1), 2), Decision((1, 1, 1, 1), 1)]
    options: dict[str, Any] = {"plans": divided(2, 4, 2, plans=plans), "lengths": (2, 4, 2), "sizes": SIZES}
    compare(make_odd_norms(), DIGITS, OptimizerSettings("sgd", 0.05), statistics=statistics, **options)


class Cumulative(nn.Module):
    """Its running statistics are plain means over all batches, so that the number of parts counts."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8, momentum=None), nn.Tanh(), nn.Linear(8, 6)),
            *(nn.BatchNorm1d(6, momentum=None), nn.Tanh(), nn.Linear(6, 10)),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


@pytest.mark.parametrize("statistics", ["pooled", "device"])
def test_every_part_counts_as_a_batch_in_running_statistics(statistics: str) -> None:
    torch.manual_seed(0)
    model = split(Cumulative().double(), torch.zeros(2, *DIGITS, dtype=torch.float64))
    deep = next(n for n, piece in enumerate(model.pieces, 1) if any("tracked" in name for name in piece.state_dict()))
    plans = [Decision((deep, 1, deep, 1), 2), Decision((1,) * 4, 3), Decision((model.layers, deep, 1, 2), 2)]
    options: dict[str, Any] = {"plans": divided(2, 1, 2, plans=plans), "lengths": (2, 3, 2), "sizes": SIZES}
    compare(model, DIGITS, OptimizerSettings("sgd", 0.05), statistics=statistics, **options)
    engine = Engine(model, divided(2, plans=plans[:1])[0], OptimizerSettings())
    engine.round(make_batches(model, DIGITS, SIZES)(1))
    counts = [int(value) for name, value in engine.state().items() if name.endswith("num_batches_tracked")]
    assert counts == [2, 2]


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("statistics", ["pooled", "device"])
def test_a_batch_norm_that_is_used_twice(statistics: str, parts: int) -> None:
    plans = [Decision((1, 1, 1, 1), 2), Decision((3, 1, 2, 1), 2), Decision((1, 1, 1, 1), 1)]
    options: dict[str, Any] = {"plans": divided(parts, parts, parts, plans=plans), "lengths": (2, 2, 2), "chunk": 1}
    settings = OptimizerSettings("sgd", 0.05)
    compare(make_norm_twice(), DIGITS, settings, statistics=statistics, sizes=SIZES, **options)


def test_parts_are_mini_batches_of_their_own_whose_gradients_are_summed() -> None:
    """One device, in plain torch."""
    model = with_batch_norm()
    net = make_model("vgg_digits", width=0.25, norm="batch").module
    engine = Engine(model, Decision((3,), 1, micro_batches=4), OptimizerSettings("sgd", 0.1))
    descent = torch.optim.SGD(net.parameters(), 0.1)
    batches = make_batches(model, DIGITS, (8,))
    for t in (1, 2, 3):
        engine.round(batches(t))
        ((x, y),) = batches(t)
        descent.zero_grad()
        for part, labels in zip(x.chunk(4), y.chunk(4), strict=True):
            (cross_entropy(net(part), labels) / 4).backward()
        descent.step()
    assert largest_difference(engine.state(), net.state_dict()) < EXACT
    assert largest_difference(trained(model, Decision((3,), 1), (8,)), net.state_dict()) > 1e-3


def trained(model: SplitModel, plan: Decision, sizes: tuple[int, ...], rounds: int = 3) -> dict[str, torch.Tensor]:
    engine, batches = Engine(model, plan, OptimizerSettings("sgd", 0.1)), make_batches(model, DIGITS, sizes)
    for t in range(1, rounds + 1):
        engine.round(batches(t))
    return engine.state()


@pytest.mark.parametrize("statistics", ["pooled", "device"])
def test_devices_come_and_go(statistics: str) -> None:
    model, plan = with_batch_norm(), Decision((1, 3, 2, 3), 2, micro_batches=2, wire_dtype="int4")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TrainingWarning)
        slow, fast = (
            kind(model, plan, OptimizerSettings("momentum", 0.05), weights=(1, 2, 3, 4), statistics=statistics)
            for kind in (Reference, Engine)
        )
    batches = make_batches(model, DIGITS, SIZES)
    for t, present in enumerate(((0, 1, 3), (2,), (0, 1, 2, 3), (1, 3)), start=1):
        given = [batches(t)[k] for k in present]
        assert torch.allclose(slow.round(given, present), fast.round(given, present), atol=EXACT)
    assert largest_difference(fast.state(), slow.state()) < EXACT


def test_a_run_that_stops_goes_on_with_as_many_parts(tmp_path) -> None:
    model, plan, settings = with_batch_norm(), Decision((1, 3, 2, 3), 4, micro_batches=4), OptimizerSettings()
    batches = make_batches(model, DIGITS, SIZES)
    engine = Engine(model, plan, settings)
    engine.round(batches(1))
    save_checkpoint(tmp_path, engine.snapshot(), extra={}, identity={})
    later = Engine(model, replace(plan, micro_batches=1), settings)
    later.restore(load_checkpoint(tmp_path, identity={}).state)
    assert later.schedule.plan == plan
    for trainer in (engine, later):
        trainer.round(batches(2))
    assert largest_difference(later.state(), engine.state()) == 0


def test_mini_batches_that_cannot_be_divided_are_refused() -> None:
    model = with_batch_norm()
    engine = Engine(model, Decision((1, 2, 3, 1), 1, micro_batches=8), OptimizerSettings())
    with pytest.raises(InvalidInput, match="micro_batches: is 8, but a mini-batch has 4 samples"):
        engine.round(make_batches(model, DIGITS, SIZES)(1))
