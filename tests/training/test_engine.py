"""The engine has the reference's weights, buffers and losses after any number of rounds."""

import warnings
from typing import Any

import pytest
import torch

from adaptsfl.models import SplitModel
from adaptsfl.training import Engine, OptimizerSettings, Reference, TrainingPlan, TrainingWarning
from training.cases import SIZES, largest_difference, make_batches, make_model

EXACT = 1e-10
DIGITS, IMAGES = (1, 8, 8), (3, 32, 32)

PLANS = [TrainingPlan((1, 3, 2, 1), 3), TrainingPlan((4, 2, 1, 2), 4, {4: 6}), TrainingPlan((2, 1, 1, 2), 1)]
LENGTHS = (6, 8, 6)


def compare(model: SplitModel, shape: tuple[int, ...], settings: OptimizerSettings, **options: Any) -> None:
    """Train both for 20 rounds, with a deeper and a shallower plan on the way, and compare as they go."""
    plans, lengths = options.pop("plans", PLANS), options.pop("lengths", LENGTHS)
    chunk = options.pop("chunk", 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TrainingWarning)
        slow = Reference(model, plans[0], settings, **options)
        fast = Engine(model, plans[0], settings, chunk=chunk, **options)
    batches, t = make_batches(model, shape), 0
    for plan, rounds in zip(plans, lengths, strict=True):
        if t:
            slow.change_plan(plan)
            fast.change_plan(plan)
        for _ in range(rounds):
            t += 1
            expected, found = slow.round(batches(t)), fast.round(batches(t))
            assert torch.allclose(found, expected, atol=EXACT, rtol=EXACT)
        assert largest_difference(fast.state(), slow.state()) < EXACT


@pytest.mark.parametrize("statistics", ["pooled", "device"])
@pytest.mark.parametrize("norm", ["none", "batch", "group"])
def test_vgg(norm: str, statistics: str) -> None:
    model = make_model("vgg_digits", width=0.25, norm=norm)
    compare(model, DIGITS, OptimizerSettings("momentum", 0.05), statistics=statistics)


@pytest.mark.parametrize(("norm", "statistics"), [("none", "pooled"), ("batch", "pooled"), ("batch", "device")])
def test_resnet(norm: str, statistics: str) -> None:
    model = make_model("resnet18", width=0.125, norm=norm)
    compare(model, IMAGES, OptimizerSettings("sgd", 0.02), statistics=statistics)


def test_transformer() -> None:
    model = make_model("vit", width=0.25, depth=2, patch=8, dropout=0.0)
    compare(model, IMAGES, OptimizerSettings("adam", 1e-3))


@pytest.mark.parametrize("rule", ["average", "reset", "keep"])
@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
@pytest.mark.parametrize("weights", [None, SIZES], ids=["equal", "weighted"])
def test_optimizers(optimizer: str, rule: str, weights: Any) -> None:
    model = make_model("vgg_digits", width=0.25)
    rate = 1e-3 if optimizer == "adam" else 0.05
    settings = OptimizerSettings(optimizer, rate, 2 * rate, weight_decay=0.01, at_averaging=rule)
    compare(model, DIGITS, settings, weights=weights)


@pytest.mark.parametrize("statistics", ["pooled", "device"])
def test_weights_and_batch_norm(statistics: str) -> None:
    model = make_model("vgg_digits", width=0.25, norm="batch")
    compare(model, DIGITS, OptimizerSettings("momentum", 0.05), statistics=statistics, weights=(1, 5, 2, 3))


@pytest.mark.parametrize("chunk", [1, 2, 4, None])
def test_the_chunk_does_not_matter(chunk: int | None) -> None:
    model = make_model("vgg_digits", width=0.25)
    compare(model, DIGITS, OptimizerSettings("sgd", 0.05), chunk=chunk)


@pytest.mark.parametrize(
    "plan",
    [TrainingPlan((6,) * 4, 3), TrainingPlan((2,) * 4, None), TrainingPlan((1, 6, 2, 3), 1)],
    ids=["FedAvg", "PSL", "I = 1"],
)
@pytest.mark.parametrize("norm", ["none", "batch"])
def test_special_cases(plan: TrainingPlan, norm: str) -> None:
    model = make_model("vgg_digits", width=0.25, norm=norm)
    compare(model, DIGITS, OptimizerSettings("sgd", 0.05), plans=[plan], lengths=[9])
