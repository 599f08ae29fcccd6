"""One folder, several calls: what leaves its runs true may be added, and never two processes at a time."""

import fcntl
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from adaptsfl.errors import InvalidInput
from adaptsfl.files import LOCK
from adaptsfl.report.summary import summary_data
from adaptsfl.runs.folder import RECORD, find_runs, read_run
from adaptsfl.simulation.claim import RECIPE
from adaptsfl.simulation.experiment import Experiment
from adaptsfl.simulation.jobs import Job, Watcher
from adaptsfl.simulation.side_by_side import execute_side_by_side
from simulation.tiny import recipe

FIXED = {"fixed": {"interval": 2, "cut": 2}}


def made(folder: Path, policies: list[str], seeds: int = 1, **run: Any) -> Experiment:
    given = {"rounds": 2, "evaluate_every": 1, "options": FIXED, **run}
    return Experiment(recipe(run=given), folder, policies=policies, seeds=seeds)


def begun_by(experiment: Experiment) -> list[str]:
    """Execute it; return which of its runs were not done before."""
    begun: list[str] = []
    runs = experiment.execute(Watcher(begins=lambda job, _rounds: begun.append(job.folder_name)))
    assert [run.status for run in runs] == ["done"] * len(experiment.jobs)
    return begun


def held_recipe(folder: Path) -> dict[str, Any]:
    return json.loads((folder / RECIPE).read_text())["run"]


# ── what may be added ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made(tmp_path, ["fixed"]).execute()
    return tmp_path


@pytest.mark.parametrize(
    ("policies", "changes", "begun"),
    [
        (["fixed", "rma+rms"], {"options": {**FIXED, "rma+rms": {"longest": 1}}}, ["rma+rms-seed0"]),
        (["rma+rms"], {"options": {"rma+rms": {"longest": 1}}}, ["rma+rms-seed0"]),
        (
            ["fixed", "fixed@deep"],
            {"options": {**FIXED, "fixed@deep": {"interval": 2, "cut": 3}}},
            ["fixed@deep-seed0"],
        ),
        (["fixed"], {"fleets": {"slow": {"server_tflops": 1.0}}}, ["fixed-slow-seed0"]),
        (["fixed"], {"checkpoint_every": 1}, []),
        (["fixed"], {"seed": 4}, ["fixed-seed4"]),
    ],
    ids=["policy", "other policy", "variant", "fleet", "checkpoints", "first seed"],
)
def test_what_leaves_runs_true_may_be_added(folder, policies, changes, begun) -> None:
    before = (folder / "fixed-seed0" / RECORD).read_bytes()
    assert begun_by(made(folder, policies, **changes)) == begun
    assert (folder / "fixed-seed0" / RECORD).read_bytes() == before
    assert held_recipe(folder)["options"] == {**FIXED, **changes.get("options", {})}
    assert held_recipe(folder)["fleets"] == changes.get("fleets", {})
    assert begun_by(made(folder, ["fixed"])) == []


@pytest.mark.parametrize(
    ("policies", "changes", "key"),
    [
        (["fixed"], {"rounds": 3}, r"run\.rounds"),
        (["fixed"], {"target_accuracy": 0.9}, r"run\.target_accuracy"),
        (["fixed"], {"options": {"fixed": {"interval": 2, "cut": 3}}}, r"run\.options\.fixed\.cut"),
        (["rma+rms"], {"options": {"fixed": {"interval": 2, "cut": 3}}}, r"run\.options\.fixed\.cut"),
        (["fixed"], {"options": {}}, r"run\.options\.fixed\.(interval|cut)"),
        (["fixed"], {"fleets": {"a": {"base": "paper"}}}, r"run\.fleets\.a\.base"),
        (["rma+rms"], {"fleets": {"a": {}, "b": {}}}, r"run\.fleets\.a\.server_tflops"),
    ],
    ids=str,
)
def test_what_would_make_runs_untrue_is_refused_by_its_key(folder, policies, changes, key) -> None:
    made(folder, ["fixed"], fleets={"a": {"server_tflops": 1.0}}).execute()
    before = held_recipe(folder)
    with pytest.raises(InvalidInput, match=rf"recipe\.json: {key}: is another than in the experiment in this folder"):
        made(folder, policies, **changes).execute()
    assert held_recipe(folder) == before


def test_options_of_a_policy_that_only_failed_may_be_mended(folder) -> None:
    """Nothing of it was recorded."""
    with pytest.raises(InvalidInput, match=r"policy\.cut"):
        made(folder, ["fixed@deep"], options={**FIXED, "fixed@deep": {"interval": 2, "cut": 99}}).execute()
    options = {**FIXED, "fixed@deep": {"interval": 2, "cut": 3}}
    assert begun_by(made(folder, ["fixed@deep"], options=options)) == ["fixed@deep-seed0"]
    assert held_recipe(folder)["options"] == options


def test_other_targets_are_reported_of_runs_that_were_done_before(folder) -> None:
    made(folder, ["psl"]).execute()
    assert begun_by(made(folder, ["fixed", "psl"], targets=[0.01, 0.02])) == []
    found = find_runs([folder])
    assert [run.targets for run in found] == [(0.01, 0.02)] * 2
    assert found[0].recipe["run"]["targets"] == [0.01, 0.02]
    assert summary_data(found)["targets"] == [0.01, 0.02]
    assert held_recipe(folder)["targets"] == [0.01, 0.02]


# ── one process at a time ───────────────────────────────────────────────────────────────────────────────────────────

IN_USE = r"out: is in use by another process\. Wait until it ends or stop it, or give another folder by --out"


def ways(folder: Path) -> list[Callable[[], object]]:
    """Return all ways to execute an experiment in a folder."""
    return [
        made(folder, ["psl"]).execute,
        partial(execute_side_by_side, [made(folder, ["psl"])], 1),
        partial(execute_side_by_side, [made(folder, ["psl"])], 2),
    ]


def refused_meanwhile(folder: Path, refused: list[str]) -> None:
    for way in ways(folder):
        with pytest.raises(InvalidInput, match=IN_USE) as error:
            way()
        refused.append(str(error.value))


def test_a_folder_that_another_call_writes_to_is_refused(tmp_path: Path) -> None:
    folder, refused = tmp_path / "out", []
    watcher = Watcher(on_block=lambda _job, _block: refused_meanwhile(folder, refused))
    (run,) = made(folder, ["fixed"]).execute(watcher)
    assert (run.status, len(refused)) == ("done", 3)
    assert not (folder / "psl-seed0").exists()
    assert begun_by(made(folder, ["fixed", "psl"])) == ["psl-seed0"]


@pytest.mark.parametrize("processes", [1, 2])
def test_side_by_side_every_folder_is_held(tmp_path: Path, processes: int) -> None:
    folders, refused = [tmp_path / name / "out" for name in "ab"], []
    shared = tmp_path / "learned"  # which experiments may share at any time
    both = [Experiment(recipe(), folder, policies=["psl"], trajectories=shared) for folder in folders]

    def begins(_job: Job, _rounds: int | None) -> None:
        for folder in folders if not refused else ():
            refused_meanwhile(folder, refused)
        Experiment(recipe(), tmp_path / "c", policies=["psl"], trajectories=shared).execute()

    execute_side_by_side(both, processes, Watcher(begins=begins))
    assert len(refused) == 6


def test_a_refused_call_changes_nothing_and_a_killed_one_leaves_the_folder_free(tmp_path: Path) -> None:
    """Whoever is killed cannot clean up: its lock goes with it."""
    folder = tmp_path / "out"
    made(folder, ["fixed"]).execute()
    call = f"import time, pathlib\nfrom adaptsfl.files import held\nwith held(pathlib.Path({str(folder)!r})):\n"
    process = subprocess.Popen(
        [sys.executable, "-c", call + "    print('held', flush=True)\n    time.sleep(600)\n"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        before = {file: file.stat().st_mtime_ns for file in folder.rglob("*") if file.name != LOCK}
        with pytest.raises(InvalidInput, match=IN_USE):
            made(folder, ["fixed"], checkpoint_every=9).execute()
        assert {file: file.stat().st_mtime_ns for file in folder.rglob("*") if file.name != LOCK} == before
    finally:
        process.kill()
        process.communicate()
    assert begun_by(made(folder, ["fixed"], checkpoint_every=9)) == []


def test_who_worked_for_a_call_that_was_killed_is_waited_for(tmp_path: Path) -> None:
    """It still writes to the folder of its run, which it has locked."""
    run = tmp_path / "fixed-seed0"
    run.mkdir()
    handle = os.open(run, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    begun = threading.Event()
    other = threading.Thread(
        target=made(tmp_path, ["fixed"]).execute, args=[Watcher(begins=lambda _job, _rounds: begun.set())]
    )
    other.start()
    assert begun.wait(300)
    time.sleep(0.2)  # in which it would write
    assert list(run.iterdir()) == []
    os.close(handle)
    other.join(300)
    assert read_run(run).status == "done"
