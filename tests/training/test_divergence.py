"""How far apart the copies of a layer are, against numbers made by hand."""

import math

import pytest
import torch
from torch import nn

from adaptsfl.decisions import Decision
from adaptsfl.models import SplitModel, split
from adaptsfl.training import Engine, OptimizerSettings
from training.cases import largest_difference, make_batches, make_model


def squared(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return ((outputs - targets) ** 2 / 2).flatten(1).sum(1)


@pytest.fixture
def line() -> SplitModel:
    """Two linear layers of one weight each: y = b a x, with a = 1 and b = 2."""
    net = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)).double()
    net.load_state_dict({"0.weight": torch.tensor([[1.0]]), "1.weight": torch.tensor([[2.0]])})
    return split(net, torch.zeros(2, 1, dtype=torch.float64))


def samples(*pairs: tuple[float, float]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.tensor([[x]], dtype=torch.float64), torch.tensor([[y]], dtype=torch.float64)) for x, y in pairs]


def test_divergence_of_copies_worked_by_hand(line: SplitModel) -> None:
    """With the loss (b a x - y)² / 2, da = (b a x - y) b x. At x = 1 and y = 2 it is 0; at x = 1 and y = 0 it is 4.

    With the rate 0.1, a_1 = 1 and a_2 = 0.6. Equal weights: ā = 0.8, and both are 0.2 from it: 0.2 / 0.8 = 0.25.
    Weights 3 to 1: ā = 0.9, (0.75 · 0.1 + 0.25 · 0.3) / 0.9 = 1 / 6.
    """
    batches, plan = samples((1, 2), (1, 0)), Decision((1, 1), 3)
    for weights, expected in (((1, 1), 0.25), ((3, 1), 1 / 6)):
        engine = Engine(line, plan, OptimizerSettings("sgd", 0.1), loss=squared, weights=weights)
        assert engine.divergence() == [0.0]
        engine.round(batches)
        assert engine.divergence() == pytest.approx([expected])


def test_divergence_counts_only_devices_that_are_present(line: SplitModel) -> None:
    """As above, with a third device: it is away, at a = 1, and does not count. The same device alone is not apart."""
    batches = samples((1, 2), (1, 0))
    engine = Engine(line, Decision((1, 1, 1), 5), OptimizerSettings("sgd", 0.1), loss=squared)
    engine.round(batches, (0, 1))
    assert engine.divergence() == pytest.approx([0.25])
    engine.round(batches[:1], (2,))
    assert engine.divergence() == [0.0]


def test_a_mean_of_zero_is_infinitely_far(line: SplitModel) -> None:
    """Rate 0.5 and y = 0 take a_2 from 1 to -1, so that ā = 0."""
    engine = Engine(line, Decision((1, 1), 3), OptimizerSettings("sgd", 0.5), loss=squared)
    engine.round(samples((1, 2), (1, 0)))
    assert engine.divergence() == [math.inf]


@pytest.mark.parametrize("interval", [1, 2])
def test_it_is_recorded_just_before_an_averaging(line: SplitModel, interval: int) -> None:
    """With I = 1 too, where there would be no copies otherwise."""
    batches, settings = samples((1, 2), (1, 0)), OptimizerSettings("sgd", 0.1)
    plan = Decision((1, 1), interval)
    engine = Engine(line, plan, settings, loss=squared, record_divergence=True)
    other = Engine(line, Decision((1, 1), 9), settings, loss=squared)
    assert engine.last_divergence == {}
    for t in range(interval):
        assert t == 0 or engine.last_divergence == {}
        engine.round(batches)
        other.round(batches)
    assert engine.divergence() == [0.0]
    assert engine.last_divergence == {1: pytest.approx(other.divergence()[0])}
    assert engine.last_divergence[1] > 0.2


def test_recording_changes_no_weight() -> None:
    model = make_model("vgg_digits", width=0.25, norm="batch")
    batches, plan = make_batches(model, (1, 8, 8)), Decision((1, 3, 2, 2), 2, {3: 4})
    engines = [Engine(model, plan, OptimizerSettings("adam"), record_divergence=flag) for flag in (True, False)]
    for t in (1, 2):
        for engine in engines:
            engine.round(batches(t))
    assert largest_difference(*(engine.state() for engine in engines)) == 0
    assert engines[0].last_divergence.keys() == {1, 2}
    assert engines[1].last_divergence == {}


def test_layers_that_cannot_part_are_not_apart() -> None:
    """Frozen copies of three devices: a mean by thirds would differ from them by rounding."""
    model = make_model("vgg_digits", torch.float32, width=0.25)
    for key in model.keys(1):
        model.module.get_parameter(key).requires_grad_(False)
    engine = Engine(model, Decision((2, 2, 2), 5), OptimizerSettings())
    engine.round(make_batches(model, (1, 8, 8), (2, 3, 2))(1))
    first, second = engine.divergence()
    assert first == 0
    assert second > 0
