"""Fleets change the clock alone: charging a record anew is running anew, wherever the policy does not look."""

import json
import shutil
from pathlib import Path

import pytest

from adaptsfl.config import FleetConfig, Recipe, parse
from adaptsfl.errors import InvalidInput
from adaptsfl.report.series import time_word
from adaptsfl.runs.folder import RECORD, RUN, find_runs
from adaptsfl.simulation.experiment import MODEL, Experiment
from adaptsfl.simulation.retime import retime
from adaptsfl.training import Engine

FLEET_A = {"base": "paper", "devices": 4, "seed": 3}
FLEET_B = {"base": "heterogeneous", "devices": 4, "seed": 8, "noise": {"uplink_cv": 0.2}}
BLIND = {
    "fixed": {"interval": 3, "cuts": [1, 2, 3, 2]},
    "rma+rms": {"longest": 4},
    "dama+rms": {"first": 1, "longest": 2},
    "psl": {"cut": 2, "rounds": 4},
    "fedavg": {"interval": 3},
    "splitfed-v1": {"cut": 2},
    "splitfed-v2": {"cut": 2},
    "vanilla-sl": {"cut": 2, "rounds": 4},
    "centralized": {"rounds": 4},
}


def recipe(fleet: dict, policies: dict, *, rounds: int = 7, seed: int = 1, faults: dict | None = None, **run) -> Recipe:
    content = {
        "name": "small",
        "model": {"name": "vgg_digits", "options": {"norm": "group", "width": 0.25}},
        "training": {"batch_size": 8, "learning_rate": 0.05},
        "data": {"name": "digits"},
        "fleet": fleet,
        "faults": faults or {},
        "run": {
            "policies": list(policies),
            "options": policies,
            "rounds": rounds,
            "seed": seed,
            "evaluate_every": 3,
            "test_samples": 50,
            **run,
        },
    }
    return parse(Recipe, content)


def records(folder: Path) -> dict[str, bytes]:
    return {run.folder.name: (run.folder / RECORD).read_bytes() for run in find_runs([folder])}


@pytest.mark.parametrize("faults", [{}, {"dropout_rate": 0.2, "straggler_rate": 0.3}], ids=["calm", "faults"])
def test_a_record_charged_anew_is_the_record_of_a_new_run(tmp_path, faults):
    Experiment(recipe(FLEET_A, BLIND, faults=faults), tmp_path / "a").execute()
    Experiment(recipe(FLEET_B, BLIND, faults=faults), tmp_path / "b").execute()
    runs = retime(find_runs([tmp_path / "a"]), parse(FleetConfig, FLEET_B), tmp_path / "retimed", name="b")
    assert records(tmp_path / "retimed") == records(tmp_path / "b") != records(tmp_path / "a")
    assert len(runs) == len(BLIND)
    for run in runs:
        info = json.loads((run.folder / RUN).read_text())
        other = json.loads((tmp_path / "b" / run.folder.name / RUN).read_text())
        assert info["retimed_from"] == str(tmp_path / "a" / run.folder.name)
        assert (info["recipe"], info["server"], info["status"]) == (other["recipe"], other["server"], "done")


def test_the_same_fleet_gives_the_same_record_also_for_policies_that_look(tmp_path):
    policies = {"adaptsfl": {}, "rma+ms": {"longest": 4}, "ma+rms": {}, "sfl": {}, "psl": {"rounds": 4}}
    policies["adaptsfl@paper"] = {"mode": "paper", "target": 0.5}  # sees the rates of the moment
    made = recipe(FLEET_B, policies, rounds=12, faults={"participation": 0.7, "straggler_rate": 0.2})
    free = {"model": made.model.model_copy(update={"wire_dtype": "auto"})}
    free["planner"] = made.planner.model_copy(update={"micro_batches": "auto"})
    runs = Experiment(made.model_copy(update=free), tmp_path / "a").execute()
    assert runs[0].blocks[0].wires
    assert (
        {block.wire_dtype for block in runs[0].blocks} != {"float32"} == {block.wire_dtype for block in runs[1].blocks}
    )
    assert any(block.measuring for block in runs[-1].blocks)
    retime(runs, parse(FleetConfig, FLEET_B), tmp_path / "same")
    assert records(tmp_path / "same") == records(tmp_path / "a")


def test_two_fleets_train_once(tmp_path, monkeypatch):
    rounds = []
    original = Engine.round
    monkeypatch.setattr(Engine, "round", lambda self, *given: (rounds.append(1), original(self, *given))[1])
    fixed = {"fixed": BLIND["fixed"]}
    both = recipe({"devices": 4}, fixed, fleets={"a": FLEET_A, "b": FLEET_B})
    runs = Experiment(both, tmp_path / "both").execute()
    assert [run.folder.name for run in runs] == ["fixed-a-seed1", "fixed-b-seed1"]
    assert len(rounds) == 7
    for name, fleet in (("a", FLEET_A), ("b", FLEET_B)):
        (alone,) = Experiment(recipe(fleet, fixed), tmp_path / name).execute()
        for file in (RECORD, MODEL):
            written = (tmp_path / "both" / f"fixed-{name}-seed1" / file).read_bytes()
            assert written == (alone.folder / file).read_bytes()
    assert len(rounds) == 3 * 7


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("experiment")
    (found,) = Experiment(recipe(FLEET_A, {"fixed": BLIND["fixed"]}, rounds=1), folder / "a").execute()
    return found


def test_a_fleet_of_another_size_is_refused_and_nothing_written(tmp_path, run):
    with pytest.raises(InvalidInput, match=r"fleet: has 5 devices, the run 4\. Give a fleet of the same size"):
        retime([run], parse(FleetConfig, {**FLEET_B, "devices": 5}), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_is_no_retimed_run_is_not_written_over(tmp_path, run):
    fleet = parse(FleetConfig, FLEET_B)
    with pytest.raises(InvalidInput, match="holds another run"):
        retime([run], fleet, run.folder.parent)
    retime([run], fleet, tmp_path)
    (again,) = retime([run], parse(FleetConfig, {**FLEET_B, "seed": 9}), tmp_path)
    assert again.recipe["fleet"]["seed"] == 10


def test_two_runs_of_one_name_are_refused(tmp_path, run):
    with pytest.raises(InvalidInput, match="two of the runs are called 'fixed-seed1'"):
        retime([run, run], parse(FleetConfig, FLEET_B), tmp_path)


def test_a_deployment_charged_anew_is_none_any_more(tmp_path, run):
    """Its seconds are virtual, what was foreseen there says nothing about them, and no server goes on from it."""
    deployed = shutil.copytree(run.folder, tmp_path / "edge")
    info, block = (json.loads((deployed / name).read_text()) for name in (RUN, RECORD))
    block |= {"evaluations": [[0, 0.0, 0.1, 2.3]], "restart": {"asked": True}}
    block["estimates"] = {"predicted": {"a1": 1.0}, "measured": {"a1": 2.0}, "scale": 3.0}
    (deployed / RUN).write_text(json.dumps({**info, "real": True}))
    (deployed / RECORD).write_text(json.dumps(block) + "\n")
    (real,) = find_runs([deployed])
    (virtual,) = retime([real], parse(FleetConfig, FLEET_B), tmp_path / "out")
    assert (real.real, virtual.real) == (True, False)
    assert (time_word([real]), time_word([virtual])) == ("time", "virtual time")
    assert virtual.blocks[0].estimates == {"scale": 3.0}
    assert virtual.blocks[0].restart == {}
    assert virtual.blocks[0].evaluations == ((0, 0.0, 0.1, 2.3),)
