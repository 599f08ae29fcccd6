"""With a schedule: torch's own schedulers, the reference, the engine and those who take turns have the same weights."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, MultiStepLR

from adaptsfl.decisions import Decision
from adaptsfl.rate_schedule import RateSchedule
from adaptsfl.training import Engine, OptimizerSettings, Reference, Sequential, load_checkpoint, save_checkpoint
from training.cases import largest_difference, make_batches, make_model
from training.test_engine import DIGITS, EXACT, compare

COSINE = RateSchedule("cosine", 14, floor=0.1, warmup_rounds=3)
STEPS = RateSchedule("steps", (4, 11), factor=0.2)
RATES = {"sgd": 0.05, "momentum": 0.05, "adam": 1e-3}


def settings_of(optimizer: str, schedule: RateSchedule, **more: Any) -> OptimizerSettings:
    rate = RATES[optimizer]
    return OptimizerSettings(optimizer, rate, 2 * rate, weight_decay=0.01, schedule=schedule, **more)


def descent_of(optimizer: str, net: torch.nn.Module) -> torch.optim.Optimizer:
    if optimizer == "adam":
        return torch.optim.Adam(net.parameters(), 0.01)
    return torch.optim.SGD(net.parameters(), 0.1, momentum=0.9 if optimizer == "momentum" else 0.0)


@pytest.mark.parametrize("kind", [Reference, Engine, Sequential])
@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
@pytest.mark.parametrize("schedule", [RateSchedule("cosine", 5, floor=0.2), RateSchedule("steps", (2, 4), factor=0.5)])
def test_one_device_follows_torchs_scheduler(schedule: RateSchedule, optimizer: str, kind: Any) -> None:
    """One device that is averaged with nobody is plain training; five rounds, in which torch's cosine does not rise."""
    model = make_model("vgg_digits", width=0.25, norm="group")
    batches, net = make_batches(model, DIGITS, sizes=(4,)), deepcopy(model.module)
    descent = descent_of(optimizer, net)
    rate = descent.param_groups[0]["lr"]
    scheduler: LRScheduler = (
        CosineAnnealingLR(descent, T_max=4, eta_min=0.2 * rate)
        if schedule.kind == "cosine"
        else MultiStepLR(descent, [2, 4], gamma=0.5)
    )
    settings = OptimizerSettings(optimizer, rate, schedule=schedule)
    trainer = (
        Sequential(model, 2, 1, settings, interval=2)
        if kind is Sequential
        else kind(model, Decision((2,), 2), settings)
    )
    for t in range(1, 6):
        trainer.round(batches(t))
        descent.zero_grad()
        ((x, y),) = batches(t)
        cross_entropy(net(x), y).backward()
        descent.step()
        scheduler.step()
    assert largest_difference(trainer.state(), net.state_dict()) < EXACT


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
@pytest.mark.parametrize("schedule", [COSINE, STEPS], ids=["cosine", "steps"])
def test_the_engine_is_the_reference(schedule: RateSchedule, optimizer: str) -> None:
    model = make_model("vgg_digits", width=0.25)
    compare(model, DIGITS, settings_of(optimizer, schedule))


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_restored_engine_is_in_the_round_in_which_it_stopped(optimizer: str) -> None:
    """Stopped in the warm-up, in the middle of an interval, and in the decay; a fresh engine would warm up again."""
    model = make_model("vgg_digits", torch.float32, width=0.25)
    batches, plan, settings = make_batches(model, DIGITS), Decision((1, 3, 2, 2), 2), settings_of(optimizer, COSINE)
    for stop in (2, 5, 8):
        whole, other = (Engine(model, plan, settings) for _ in range(2))
        for t in range(1, 11):
            if t == stop + 1:
                other.restore(whole.snapshot())
            whole.round(batches(t))
            if t > stop:
                other.round(batches(t))
        assert largest_difference(other.state(), whole.state()) == 0


@pytest.mark.parametrize("relayed", [False, True])
def test_devices_that_take_turns_go_on_with_their_learning_rate(relayed: bool, tmp_path: Path) -> None:
    model = make_model("vgg_digits", torch.float32, width=0.25)
    batches, settings = make_batches(model, DIGITS), settings_of("momentum", COSINE)
    whole, other = (Sequential(model, 2, 4, settings, interval=2, relayed=relayed) for _ in range(2))
    for t in range(1, 8):
        whole.round(batches(t))
        if t == 3:
            save_checkpoint(tmp_path, whole.snapshot(), extra={}, identity={})
    load_checkpoint(tmp_path, identity={}).resume(other)
    for t in range(4, 8):
        other.round(batches(t))
    assert largest_difference(other.state(), whole.state()) == 0


def test_a_learning_rate_of_zero_changes_no_weight() -> None:
    model = make_model("vgg_digits", width=0.25)
    batches, settings = make_batches(model, DIGITS), OptimizerSettings("adam", 0.01, schedule=RateSchedule("cosine", 2))
    engine = Engine(model, Decision((2,) * 4, 1), settings)
    engine.round(batches(1))
    before = engine.state()
    engine.round(batches(2))
    assert largest_difference(engine.state(), before) < 1e-15
