"""Every trainer that a policy may name is there, and says what it needs of a decision."""

from typing import get_args

import pytest
import torch

from adaptsfl.decisions import Decision
from adaptsfl.errors import InvalidInput
from adaptsfl.policies import TrainerName
from adaptsfl.simulation.trainers import TRAINERS, trainer_kind
from adaptsfl.training import Trainer
from simulation.tiny import world

FIRST = Decision((2,) * 4, 3)


def test_every_name_has_a_trainer_that_trains():
    assert set(TRAINERS) == set(get_args(TrainerName))
    here = world()
    for kind in TRAINERS.values():
        trainer = kind.make(here, FIRST, False)
        assert isinstance(trainer, Trainer)
        losses = trainer.round(here.batches(1, trainer.batch_devices))
        assert len(losses) == len(trainer.present)
        trainer.change_plan(FIRST)  # the same plan changes nothing
        trainer.restore(trainer.snapshot())


@pytest.mark.parametrize(("name", "measured"), [("engine", 4), ("centralized", 1)])
def test_constants_are_measured_on_the_batches_of_a_round(name, measured):
    here, kind = world(), TRAINERS[name]
    one, other = (kind.make(here, FIRST, False) for _ in range(2))
    losses, sample = kind.measured_round(one, here.batches(1), None)
    assert len(sample.squared_norms) == measured
    assert sample.smoothness > 0
    assert torch.equal(losses, other.round(here.batches(1)))
    assert TRAINERS["relay"].measured_round is TRAINERS["turns"].measured_round is None


@pytest.mark.parametrize("name", ["turns", "relay"])
@pytest.mark.parametrize("other", [Decision((2, 1, 2, 2), 3), Decision((1,) * 4, 3), Decision((2,) * 4, 2)])
def test_who_takes_turns_keeps_one_cut_and_one_interval(name, other):
    kind = TRAINERS[name]
    kind.check(FIRST, FIRST)
    kind.check(Decision((2,) * 3, 3), FIRST)  # fewer devices are there
    with pytest.raises(InvalidInput, match=f"Trainer '{name}' needs one cut for all and one interval"):
        kind.check(other, FIRST)
    TRAINERS["engine"].check(other, FIRST)


def test_the_trainer_of_a_record_that_this_version_does_not_know_is_named():
    assert trainer_kind("relay") is TRAINERS["relay"]
    with pytest.raises(InvalidInput, match=r"trainer: .*'magic'"):
        trainer_kind("magic")
