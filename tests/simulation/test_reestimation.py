"""Statistics of batch-norm are re-estimated for evaluations and the final model, charged, and change nothing else."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from adaptsfl.config import FleetConfig, Recipe, parse
from adaptsfl.decisions import Decision
from adaptsfl.runs.backend import Order
from adaptsfl.runs.folder import RUN, find_runs
from adaptsfl.runs.record import Block, block_line, block_of
from adaptsfl.simulation.clock import Clock, parallel_time, reestimation_time
from adaptsfl.simulation.experiment import MODEL, Experiment
from adaptsfl.simulation.faults import Faults
from adaptsfl.simulation.jobs import Watcher
from adaptsfl.simulation.retime import retime
from adaptsfl.simulation.store import Store
from problems import by_hand
from simulation.test_retime import FLEET_B, records
from simulation.test_run import StoppedHere, stop_after
from simulation.tiny import learning, recipe, record_of, simulation, step, world

BATCH: dict[str, Any] = {"model": {"options": {"width": 0.25, "norm": "batch"}}}
OFF: dict[str, Any] = {"training": {"reestimate_statistics": False}}
ON: dict[str, Any] = {}
POLICIES: dict[str, dict[str, Any]] = {
    "fixed": {"interval": 3, "cuts": [1, 2, 3, 2]},
    "sfl": {},
    "psl": {"cut": 2, "rounds": 4},
    "dama+rms": {"first": 1, "longest": 2},
    "splitfed-v2": {"cut": 2},
    "vanilla-sl": {"cut": 2, "rounds": 4},
    "centralized": {"rounds": 4},
}
ONE_MODEL = ("vanilla-sl", "centralized")  # which there are no copies of


def blocks_of(policy: str, *changes: dict[str, Any], **options: Any) -> list[Block]:
    return list(
        simulation(world(**{**BATCH, **{k: v for change in changes for k, v in change.items()}}), policy, **options)
    )


@pytest.mark.parametrize("policy", [policy for policy in POLICIES if policy not in ONE_MODEL])
def test_it_is_charged_and_training_does_not_notice(policy: str) -> None:
    """One mini-batch per device forward after rounds 4 and 8, with the rates that devices have all the time."""
    on, off = (blocks_of(policy, change, **POLICIES[policy]) for change in (ON, OFF))
    here = world(**BATCH)
    assert [block.loss for block in on] == [block.loss for block in off]
    extra_s = extra_bits = 0.0
    for with_it, without in zip(on, off, strict=True):
        assert (with_it.reestimated, without.reestimated) == (bool(with_it.evaluations), False)
        for evaluated, shown in zip(with_it.evaluations, without.evaluations, strict=True):
            more = reestimation_time(with_it.cuts, here.fleet_at(1), here.costs, here.batch_size)
            extra_s, extra_bits = extra_s + more.total_s, extra_bits + more.bits
            assert 0 < more.total_s < parallel_time(with_it.cuts, here.fleet_at(1), here.costs, 4).total_s
            assert evaluated[0] == shown[0]
            assert evaluated[1] - shown[1] == pytest.approx(extra_s, rel=1e-9)
            assert evaluated[3] != shown[3]
        assert with_it.time_s - without.time_s == pytest.approx(extra_s, rel=1e-9)
        assert sum(with_it.seconds.values()) == pytest.approx(with_it.length_s)
        assert with_it.predicted_s == pytest.approx(without.predicted_s, rel=1e-9)  # evaluating is nobody's plan
    assert extra_s > 0
    assert sum(block.bits for block in on) - sum(block.bits for block in off) == pytest.approx(extra_bits, rel=1e-9)


@pytest.mark.parametrize(
    ("policy", "norm"), [*((policy, "batch") for policy in ONE_MODEL), ("fixed", "group"), ("fixed", "none")]
)
def test_nothing_changes_where_nothing_is_to_be_estimated(policy: str, norm: str) -> None:
    model = {"model": {"options": {"width": 0.25, "norm": norm}}}
    on, off = (blocks_of(policy, model, change, **POLICIES[policy]) for change in (ON, OFF))
    assert [block_line(block) for block in on] == [block_line(block) for block in off]


def test_a_single_device_has_nothing_to_merge() -> None:
    alone = {"fleet": {"devices": 1}, "data": {"partition": {"kind": "iid"}}}
    on, off = (blocks_of("fixed", alone, change, interval=3, cut=2) for change in (ON, OFF))
    assert [block_line(block) for block in on] == [block_line(block) for block in off]


# --- the clock ---


def test_the_clock_charges_after_the_evaluated_rounds_and_before_the_first() -> None:
    """A deployment evaluates the model with which a block begins: its first round begins later then."""
    problem = by_hand()
    costs = replace(problem.costs, statistics_bits=np.array([8.0, 24.0, 24.0]))
    order = Order(Decision((1, 2), None, rounds=3), 3, first_round=5)

    def charged(*rounds: int) -> Any:
        clock = Clock(lambda _round: problem.fleet, costs, problem.batch_size, Faults(2), parallel_time)
        return clock.charge(order, (0, 1), 0, rounds)

    plain, after, before = charged(), charged(6, 7), charged(4)
    assert np.diff(plain.ends_s) == pytest.approx([26.8] * 3)
    assert np.diff(after.ends_s) == pytest.approx([26.8, 26.8 + 18.1, 26.8 + 18.1])
    assert before.ends_s == pytest.approx([18.1 + end for end in plain.ends_s])
    assert before.elapsed.total_s == pytest.approx(18.1 + plain.elapsed.total_s)
    # Activations of both devices, 2·(50 + 20), and statistics there and back, 2·(8 + 24 + 16).
    assert before.elapsed.bits - plain.elapsed.bits == 140 + 96
    assert after.elapsed.bits - plain.elapsed.bits == 2 * (140 + 96)


def with_policies(fleet: dict[str, Any], faults: dict[str, Any]) -> Recipe:
    blind = {name: options for name, options in POLICIES.items() if name != "sfl"}  # which looks at the fleet
    run = {"policies": list(blind), "options": blind, "rounds": 7, "evaluate_every": 3, "test_samples": 50}
    return recipe(**BATCH, fleet={**fleet, "redraw": None}, faults=faults, run=run, adapt=None)


@pytest.mark.parametrize("faults", [{}, {"dropout_rate": 0.2, "straggler_rate": 0.3}], ids=["calm", "faults"])
def test_a_record_charged_anew_is_the_record_of_a_new_run(tmp_path: Path, faults: dict[str, Any]) -> None:
    fleets = {"a": {"base": "paper", "devices": 4, "seed": 3}, "b": FLEET_B}
    for name, fleet in fleets.items():
        Experiment(with_policies(fleet, faults), tmp_path / name).execute()
    retime(find_runs([tmp_path / "a"]), parse(FleetConfig, FLEET_B), tmp_path / "retimed")
    assert records(tmp_path / "retimed") == records(tmp_path / "b") != records(tmp_path / "a")


def test_a_record_from_before_says_nothing_about_it() -> None:
    (block, *_) = blocks_of("fixed", interval=3, cut=2)
    data = json.loads(block_line(block))
    del data["reestimated"]
    assert block_of(data).reestimated is False


# --- the model that a run hands over ---


def test_the_model_that_is_written_is_the_one_that_was_evaluated_last(tmp_path: Path) -> None:
    given = recipe(**BATCH, run={"options": {"fixed": POLICIES["fixed"]}, "rounds": 7})
    (run,) = Experiment(given, tmp_path, policies=["fixed"]).execute()
    here = world(**BATCH)
    accuracy, loss = here.evaluate(load_file(run.folder / MODEL))
    assert run.blocks[-1].evaluations[-1][0] == 7
    assert run.blocks[-1].evaluations[-1][2:] == pytest.approx((accuracy, loss), rel=1e-6)


def test_a_run_in_pieces_hands_over_the_same(tmp_path: Path) -> None:
    """Stopped after a block and gone on: record and model are the same, byte for byte."""
    given = recipe(**BATCH, run={"options": {"fixed": POLICIES["fixed"]}, "rounds": 10, "checkpoint_every": 1})
    whole, pieces = (Experiment(given, tmp_path / name, policies=["fixed"]) for name in ("whole", "pieces"))
    whole.execute()
    with pytest.raises(StoppedHere):
        pieces.execute(stop_after(2))
    pieces.execute()
    assert record_of(pieces) == record_of(whole)
    folder = whole.jobs[0].folder_name
    assert (tmp_path / "pieces" / folder / MODEL).read_bytes() == (tmp_path / "whole" / folder / MODEL).read_bytes()


def test_a_restored_learner_has_the_same_model(tmp_path: Path) -> None:
    """In the middle of an interval, with devices that were absent in the last round."""
    orders = [step(2, 4, 3, present=((0, 1, 2, 3), (0, 2))), step(2, 4, 3, present=((1, 2, 3), (1, 2, 3)))]
    here, store = world(**BATCH), Store()
    whole = learning(here, "engine", store, folder=tmp_path)
    for order in orders:
        whole.learn(order)
    whole.save()
    again = learning(here, "engine", store, folder=tmp_path)
    for order in orders:
        again.learn(order)  # looked up, then restored
    expected, found = whole.state(), again.state()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


# --- a remark ---


def test_whoever_has_shards_and_batch_norm_is_told_of_group_norm_once(tmp_path: Path) -> None:
    def remarks(folder: str, norm: str, kind: str) -> list[str]:
        data = {"partition": {"kind": kind, **({"shard_size": 40} if kind == "shards" else {})}}
        model = {"options": {"width": 0.25, "norm": norm}}
        given = recipe(model=model, data=data, run={"rounds": 1, "options": {"fixed": {"interval": 1, "cut": 1}}})
        told: list[str] = []
        watcher = Watcher(remarks=lambda _job, remark: told.append(remark))
        Experiment(given, tmp_path / folder, policies=["fixed", "sfl"], seeds=2).execute(watcher)
        assert (tmp_path / folder / "sfl-seed1" / RUN).exists()
        return told

    (told,) = remarks("a", "batch", "shards")
    assert "Group-norm would learn several times faster" in told
    assert remarks("b", "group", "shards") == remarks("c", "batch", "iid") == []
