"""An engine restored from a snapshot goes on bit for bit."""

from dataclasses import replace

import pytest
import torch

from adaptsfl.decisions import Decision
from adaptsfl.errors import InvalidInput
from adaptsfl.training import Engine, OptimizerSettings
from training.cases import make_batches, make_model

SHAPE = (1, 8, 8)
PLAN, NEXT = Decision((1, 3, 2, 2), 2, {3: 4}), Decision((2, 1, 4, 1), 3)


def advance(engine: Engine, batches, rounds: range) -> None:
    for t in rounds:
        if t == 5:
            engine.change_plan(NEXT)
        engine.round(batches(t))


@pytest.mark.parametrize("rule", ["average", "keep"])
@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize("stop", [0, 3, 4, 6])
def test_training_from_a_snapshot_equals_training_without_a_stop(stop: int, norm: str, rule: str) -> None:
    """In single precision, where every other order of summation would show; tensors come back in another layout."""
    model = make_model("vgg_digits", torch.float32, width=0.25, norm=norm)
    batches, settings = make_batches(model, SHAPE), OptimizerSettings("adam", 0.01, at_averaging=rule)
    whole = Engine(model, PLAN, settings)
    advance(whole, batches, range(1, stop + 1))
    state = whole.snapshot()
    tensors = tuple({key: value.contiguous() for key, value in layer.items()} for layer in state.tensors)
    other = Engine(model, Decision((1,) * 4, 1), settings)
    other.restore(replace(state, tensors=tensors))
    for engine in (whole, other):
        advance(engine, batches, range(stop + 1, 10))
    expected, found = whole.snapshot(), other.snapshot()
    assert (found.round, found.ages, found.steps) == (expected.round, expected.ages, expected.steps)
    for mine, theirs in zip(found.tensors, expected.tensors, strict=True):
        assert all(torch.equal(mine[key], theirs[key]) for key in theirs)


def test_a_snapshot_does_not_change_with_the_engine() -> None:
    model = make_model("vgg_digits", width=0.25)
    engine, batches = Engine(model, PLAN, OptimizerSettings()), make_batches(model, SHAPE)
    state = engine.snapshot()
    before = state.tensors[0]["parameters.conv1_1.0.weight"].clone()
    engine.round(batches(1))
    assert torch.equal(state.tensors[0]["parameters.conv1_1.0.weight"], before)


def test_a_foreign_snapshot_is_refused() -> None:
    model = make_model("vgg_digits", width=0.25)
    engine = Engine(model, PLAN, OptimizerSettings())
    wide = Engine(make_model("vgg_digits", width=0.5), PLAN, OptimizerSettings())
    with pytest.raises(InvalidInput, match=r"layer 1.tensors\['parameters.conv1_1.0.weight'\]: has the shape"):
        engine.restore(wide.snapshot())
    with pytest.raises(InvalidInput, match=r"layer 1.tensors: lack or add state.mean.conv1_1.0.bias"):
        engine.restore(Engine(model, PLAN, OptimizerSettings("adam")).snapshot())
    with pytest.raises(InvalidInput, match="state: holds 10 layers, the model has 6"):
        engine.restore(Engine(make_model("resnet18", width=0.125), PLAN, OptimizerSettings()).snapshot())
    with pytest.raises(InvalidInput, match=r"decision.cuts: has 2 entries. Give 4"):
        engine.restore(Engine(model, Decision((1, 2), 1), OptimizerSettings()).snapshot())
