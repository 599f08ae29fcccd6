"""Records of rounds, and the end of a run that diverges."""

import pytest
import torch

from adaptsfl.decisions import Decision
from adaptsfl.errors import TrainingDiverged
from adaptsfl.training import Engine, OptimizerSettings, train
from training.cases import make_batches, make_model


class Scripted:
    """A trainer whose losses were written down before."""

    def __init__(self, *losses: list[float]) -> None:
        self.losses = iter(losses)

    def round(self, batches):
        return torch.tensor(next(self.losses))

    def state(self):
        return {}


def test_every_round_is_recorded() -> None:
    model = make_model("vgg_digits", width=0.25)
    engine = Engine(model, Decision((1, 3, 2, 2), 2), OptimizerSettings("sgd", 0.05))
    records = list(train(engine, make_batches(model, (1, 8, 8)), 3))
    assert [record.round for record in records] == [1, 2, 3]
    assert records[0].loss == pytest.approx(sum(records[0].losses) / 4)


def test_the_plan_changes_between_rounds() -> None:
    model = make_model("vgg_digits", width=0.25)
    engine = Engine(model, Decision((1, 3, 2, 2), 2), OptimizerSettings("sgd", 0.05))
    for record in train(engine, make_batches(model, (1, 8, 8)), 4):
        if record.round == 2:
            engine.change_plan(Decision((4, 4, 1, 1), 1))
    assert engine.schedule.plan.deepest == 4
    assert engine.schedule.round == 4


def test_a_loss_that_is_no_number_stops_the_run() -> None:
    with pytest.raises(TrainingDiverged, match=r"round 8: the loss of device 1 is nan. Lower the learning rate"):
        list(train(Scripted([2.0, 2.0], [2.0, float("nan")]), lambda t: [], 5, start=7))


def test_an_exploding_loss_stops_the_run() -> None:
    with pytest.raises(TrainingDiverged, match=r"round 2: the loss is 5e\+03, it began at 2"):
        list(train(Scripted([2.0, 2.0], [9.0, 9991.0]), lambda t: [], 5))


def test_a_real_run_diverges() -> None:
    model = make_model("vgg_digits", width=0.25)
    engine = Engine(model, Decision((1, 1, 1, 1), 2), OptimizerSettings("sgd", 1e4))
    with pytest.raises(TrainingDiverged, match="round"):
        list(train(engine, make_batches(model, (1, 8, 8)), 20))
