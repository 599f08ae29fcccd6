"""`adaptsfl simulate`, `report` and `retime`, as people call them."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import adaptsfl
import warm
from adaptsfl.cli import app
from adaptsfl.errors import TrainingDiverged
from adaptsfl.policies.fixed import ParallelSplit
from adaptsfl.report import progress
from adaptsfl.runs.folder import RECORD, RUN, find_runs
from adaptsfl.training import Engine
from simulation.beside import PATIENCE_S

RECIPE = """
name = "small run"
[model]
name = "vgg_digits"
options = { norm = "group", width = 0.25 }
[training]
batch_size = 8
learning_rate = 0.05
optimizer = "momentum"
[data]
name = "digits"
[fleet]
base = "heterogeneous"
devices = 4
[run]
policies = ["fixed", "rma+rms"]
options = { fixed = { interval = 3, cut = 2 } }
rounds = 6
evaluate_every = 2
test_samples = 40
targets = [0.05]
"""


@pytest.fixture
def recipe(tmp_path, monkeypatch) -> str:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    (tmp_path / "small.toml").write_text(RECIPE)
    return "small.toml"


def call(*arguments: str):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def records(folder: Path) -> dict[str, bytes]:
    return {run.folder.name: (run.folder / RECORD).read_bytes() for run in find_runs([folder])}


def test_runs_end_with_a_table_figures_and_a_page(recipe, monkeypatch):
    monkeypatch.setattr(progress, "LINE_EVERY_S", math.inf)  # else a slow machine says how far it is
    answer = call("simulate", recipe, "--seeds", "2")
    assert answer.exit_code == 0, answer.output
    folder = Path("runs/small-run")
    assert sorted(records(folder)) == ["fixed-seed0", "fixed-seed1", "rma+rms-seed0", "rma+rms-seed1"]
    assert "speed-up is that of fixed" in answer.stdout
    assert "RMA+RMS" in answer.stdout
    assert f"figures: {folder / 'figures'}" in answer.stdout
    assert f"report:  {folder / 'report.html'}" in answer.stdout
    assert (folder / "report.html").read_text().startswith("<!DOCTYPE html>")
    assert {file.suffix for file in (folder / "figures").iterdir()} == {".png", ".svg"}
    lines = answer.stderr.splitlines()
    assert len(lines) == 4
    assert lines[0].startswith("[1/4] fixed, seed 0: done, 6 rounds, virtual ")


def test_what_is_done_is_not_done_again(recipe, monkeypatch):
    assert call("simulate", recipe, "--policies", "fixed", "--quiet").exit_code == 0
    before = records(Path("runs/small-run"))

    def broken(self, *given):
        raise AssertionError("trained again")

    monkeypatch.setattr(Engine, "round", broken)
    answer = call("simulate", recipe, "--policies", "fixed", "--quiet")
    assert answer.exit_code == 0, answer.output
    assert answer.stderr == ""
    assert records(Path("runs/small-run")) == before


def test_keys_can_be_set_on_the_command_line(recipe):
    changes = ["run.rounds=2", "data.partition.kind=shards", "data.partition.shard_size=50", 'name = "other"']
    options = ["run.options.rma+rms.longest=1", "run.options={fixed={interval=1,cuts=[1,2,1,2]}}"]
    sets = [part for change in [*changes, *reversed(options)] for part in ("--set", change)]
    answer = call("simulate", recipe, "--quiet", *sets)
    assert answer.exit_code == 0, answer.output
    fixed, drawn = find_runs(["runs/other"])
    assert (fixed.rounds, fixed.recipe["data"]["partition"]["kind"]) == (2, "shards")
    assert (fixed.blocks[0].cuts, [block.interval for block in drawn.blocks]) == ((1, 2, 1, 2), [1, 1])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policies", "adaptfsl"], "small.toml: run.policy: 'adaptfsl' is unknown. Did you mean 'adaptsfl'?"),
        (["--policies", "fixed,fixed"], "run.policies: is ['fixed', 'fixed']. Give at least one policy, each once"),
        (
            ["--set", "run.roundz=5"],
            "small.toml: run.roundz: is not a known key (its value is 5). Did you mean 'rounds'",
        ),
        (["--set", "run.rounds=5O"], "run.rounds: is '5O'. Give a whole number"),
        (["--set", "run.rounds"], "--set: is 'run.rounds'. Give section.key=value, for example"),
        (["--set", "run.rounds.most=5"], "--set: is 'run.rounds.most=5', but 'rounds' holds no keys"),
        (["--set", "=5"], "--set: is '=5'"),
        (["--set", "run.targets=[1.2]"], "run.targets[0]: is 1.2. Give a number above zero and at most 1"),
        (["--set", "run.target_accuracy=90"], "run.target_accuracy: is 90. Give a number above zero and at most 1"),
        (["--set", "training.device=gpu"], "training.device: is 'gpu', which torch cannot use"),
        (["--set", "training.learning_rate=1e40"], "training.learning_rate: is 1e+40. Give at most 1e+30"),
        (["--set", "training.batch_size=0"], "training.batch_size: is 0"),
        (["--set", "training.momentum=2"], "training.momentum: is 2. Give a number ≥ 0 and below 1"),
        (["--policies", "nowhere:x:"], "nowhere:x:: importing 'nowhere' raised ModuleNotFoundError"),
        (["--policies", "fixed@a/b,fixed@a-b"], "run.policies: has names that lead to one folder"),
        (["--set", "run.options.fixed.intervall=3"], "run.policy.intervall: 'intervall' is unknown"),
        (["--set", "run={}"], "small.toml: run: has no end. Give rounds, samples or seconds, or converged = true"),
        (["--set", "run.fleets.a.base=moon"], "run.fleets.a.base: is 'moon'"),
        (["--set", "run.fleets.a.bse=paper"], "run.fleets.a.bse: is not a known key"),
        (["--set", "faults.participation=0"], "faults.participation: is 0"),
        (["--set", "data.name=digitz"], "data.name: 'digitz' is unknown"),
        (["--set", "model.name=vgg16"], "data: has samples of shape"),
    ],
)
def test_mistakes_are_explained_and_leave_nothing_behind(recipe, arguments, message):
    answer = call("simulate", recipe, *arguments)
    assert answer.exit_code == 1
    assert message in answer.stderr
    assert answer.stdout == ""
    assert not Path("runs").exists()


def test_a_missing_recipe_is_explained(recipe):
    answer = call("simulate", "nowhere.toml")
    assert answer.exit_code == 1
    assert answer.stderr == "error: nowhere.toml: cannot be read: No such file or directory. Check the path\n"


def test_a_file_in_place_of_the_folder_is_explained(recipe):
    Path("taken").write_text("")
    answer = call("simulate", recipe, "--out", "taken")
    assert answer.exit_code == 1
    assert "error: taken: cannot be written (File exists). Free some space or give another folder" in answer.stderr


def test_another_experiments_folder_is_refused(recipe):
    assert call("simulate", recipe, "--quiet", "--policies", "fixed", "--set", "run.rounds=1").exit_code == 0
    answer = call("simulate", recipe, "--quiet")
    assert answer.exit_code == 1
    file = Path("runs/small-run/recipe.json")
    assert f"{file}: run.rounds: is another than in the experiment in this folder. Give another" in answer.stderr


def test_a_run_that_fails_does_not_lose_the_others(recipe, monkeypatch):
    original = ParallelSplit.decide

    def decide(self, seen):
        if seen.block == 1:
            raise TrainingDiverged("round 3: the loss is nan")
        return original(self, seen)

    options = ["--set", "run.options.psl.rounds=2", "--policies", "psl,rma+rms"]
    with monkeypatch.context() as broken:
        broken.setattr(ParallelSplit, "decide", decide)
        answer = call("simulate", recipe, *options)
    assert answer.exit_code == 1
    failed, done = find_runs(["runs/small-run"])
    assert (failed.status, failed.rounds, done.status, done.rounds) == ("failed", 2, "done", 6)
    assert json.loads((failed.folder / RUN).read_text())["error"] == "round 3: the loss is nan"
    assert f"error: {failed.folder}: round 3: the loss is nan" in answer.stderr
    assert "[1/2] psl, seed 0: failed, TrainingDiverged" in answer.stderr
    assert "report: " in answer.stdout
    assert call("simulate", recipe, *options).exit_code == 0
    assert [run.status for run in find_runs(["runs/small-run"])] == ["done", "done"]


def test_runs_side_by_side_are_the_same_runs(recipe):
    answer = call("simulate", recipe, "--out", "alone")
    beside = call("simulate", recipe, "--out", "beside", "--jobs", "2")
    assert beside.exit_code == 0, beside.output
    assert records(Path("beside")) == records(Path("alone"))
    assert beside.stdout.replace("beside", "alone") == answer.stdout
    lines = [line for line in beside.stderr.splitlines() if line.startswith("[")]  # else how far it was after 10 s
    assert [line.split()[0] for line in lines] == ["[1/2]", "[2/2]"]
    assert {line.split(":")[0].split()[1] for line in lines} == {"fixed,", "rma+rms,"}


def test_a_run_that_fails_beside_others_is_explained(recipe):
    broken = ["--set", "run.options.fixed.cut=99", "--jobs", "2"]
    with warm.instead_of_spawn():
        answer = call("simulate", recipe, *broken)
    assert answer.exit_code == 1
    done, failed = sorted(find_runs(["runs/small-run"]), key=lambda run: run.status)
    assert (done.status, failed.status) == ("done", "failed")
    assert "fixed, seed 0: failed, InvalidInput" in answer.stderr
    assert f"error: {failed.folder}: policy.cut[0]: is 99. Give" in answer.stderr
    assert "report: " in answer.stdout


@pytest.mark.parametrize(
    ("decides", "message"),
    [
        (
            "1 / 0",
            "policy: odd one raised ZeroDivisionError in own_one.py, line 5: division by zero. Correct its decide",
        ),
        ("None", "policy: odd one decided None. Return a Decision from decide"),
    ],
)
def test_a_mistake_in_a_policy_of_ones_own_is_not_called_ours(recipe, monkeypatch, decides, message):
    monkeypatch.delitem(sys.modules, "own_one", raising=False)
    lines = ["from adaptsfl.policies import BasePolicy", "class Mine(BasePolicy):", "    title = 'odd one'"]
    Path("own_one.py").write_text("\n".join([*lines, "    def decide(self, seen):", f"        return {decides}", ""]))
    answer = call("simulate", recipe, "--quiet", "--policies", "own_one:Mine,fixed")
    assert answer.exit_code == 1
    assert message in answer.stderr
    assert [run.status for run in find_runs(["runs/small-run"])] == ["done", "failed"]


def test_without_matplotlib_there_is_a_page_and_a_hint(recipe, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    answer = call("simulate", recipe, "--quiet", "--policies", "fixed")
    assert answer.exit_code == 0, answer.output
    assert "figures: need matplotlib. Install it: pip install 'adaptsfl[plots]'" in answer.stderr
    assert Path("runs/small-run/report.html").exists()


# ── stopped ─────────────────────────────────────────────────────────────────────────────────────────────────────────

HELD = {"adaptsfl": "HeldAdaptSFL", "dama+rms": "HeldDepthAware"}  # so that no run ends before it is stopped
LONG = [
    "--policies",
    ",".join(f"simulation.beside:{name}" for name in HELD.values()),
    "--set",
    "run.rounds=120",
    "--set",
    "run.checkpoint_every=4",
    "--quiet",
]
LONG += ["--set", "faults.dropout_rate=0.05", "--set", "planner.max_interval=8", "--seeds", "1"]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("whole")
    (folder / "small.toml").write_text(RECIPE)
    assert call("simulate", folder / "small.toml", *LONG, "--out", folder / "out").exit_code == 0
    return records(folder / "out")


def started(arguments: list[str], hold: str, *, anew: bool = False) -> Any:
    """Start a command whose policies of these names wait near their end."""
    paths = [Path(adaptsfl.__file__).parents[1], Path(__file__).parents[1]]
    environment = {**os.environ, "HOLD": hold, "PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1"}
    if not anew:
        return warm.Command(arguments, environment, apart=True)
    command, pipe = [sys.executable, "-m", "adaptsfl", *arguments], subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment)


def record_of(policy: str, uninterrupted: dict[str, bytes]) -> Path:
    (folder,) = (name for name in uninterrupted if HELD[policy] in name)
    return Path("runs/small-run") / folder / RECORD


@pytest.mark.parametrize(
    ("policy", "stop", "anew"),
    [
        ("adaptsfl", signal.SIGINT, True),
        ("dama+rms", signal.SIGINT, False),
        ("adaptsfl", signal.SIGKILL, False),
    ],
)
def test_a_run_that_was_stopped_goes_on_to_the_same_end(recipe, uninterrupted, stop, policy, anew):
    """The first in an interpreter of its own, the others in processes whose imports are done."""
    record = record_of(policy, uninterrupted)
    process = started(["simulate", recipe, *LONG], HELD[policy], anew=anew)
    while process.poll() is None and not (record.exists() and record.read_bytes().count(b"\n") >= 5):
        time.sleep(0.005)
    process.send_signal(stop)
    printed, complaint = process.communicate(timeout=PATIENCE_S)
    assert printed == ""
    stopped_at = record.read_bytes()
    assert len(stopped_at) < len(uninterrupted[record.parent.name])
    if stop == signal.SIGINT:
        assert process.returncode == 130
        assert complaint == "stopped. What was done is in runs/small-run; the same command goes on from there.\n"
        assert json.loads((record.parent / RUN).read_text())["status"] == "stopped"
    answer = call("simulate", recipe, *LONG)
    assert answer.exit_code == 0, answer.output
    assert records(Path("runs/small-run")) == uninterrupted


@pytest.mark.parametrize("stop", ["Ctrl-C", "the caller is killed"])
def test_runs_side_by_side_that_were_stopped_go_on_to_the_same_end(recipe, uninterrupted, stop):
    """Ctrl-C reaches the whole group of processes. Those whose caller is killed stop by themselves, soon after."""
    process = started(["simulate", recipe, *LONG, "--jobs", "2"], ",".join(HELD.values()))
    files = [record_of(policy, uninterrupted) for policy in HELD]
    while process.poll() is None and not all(file.exists() and file.read_bytes().count(b"\n") >= 2 for file in files):
        time.sleep(0.005)
    if stop == "Ctrl-C":
        os.killpg(process.pid, signal.SIGINT)
    else:
        process.kill()
    printed, complaint = process.communicate(timeout=PATIENCE_S)  # until nobody is left who could write
    assert printed == ""
    if stop == "Ctrl-C":
        assert process.returncode == 130
        assert complaint == "stopped. What was done is in runs/small-run; the same command goes on from there.\n"
    assert [json.loads((file.parent / RUN).read_text())["status"] for file in files] == ["stopped", "stopped"]
    answer = call("simulate", recipe, *LONG)
    assert answer.exit_code == 0, answer.output
    assert records(Path("runs/small-run")) == uninterrupted


# ── report and retime ───────────────────────────────────────────────────────────────────────────────────────────────


def test_report_and_retime_need_no_training(recipe, monkeypatch):
    assert call("simulate", recipe, "--quiet", "--out", "mine").exit_code == 0
    Path("mine/report.html").unlink()
    answer = call("report", "mine")
    assert answer.exit_code == 0, answer.output
    assert "report:  mine/report.html" in answer.stdout
    answer = call("report", "mine/fixed-seed0", "mine/rma+rms-seed0", "--out", "pages/two.html")
    assert answer.exit_code == 0, answer.output
    assert Path("pages/two.html").exists()
    Path("paper.toml").write_text("[fleet]\ndevices = 4\n")
    answer = call("retime", "mine", "--fleet", "paper.toml", "--set", "fleet.server_tflops=1")
    assert answer.exit_code == 0, answer.output
    assert "report:  mine-paper/report.html" in answer.stdout
    before, after = find_runs(["mine"]), find_runs(["mine-paper"])
    for old, new in zip(before, after, strict=True):
        assert new.server.flops == 1e12
        assert (new.rounds, new.final_accuracy, new.folder.name) == (old.rounds, old.final_accuracy, old.folder.name)
        assert new.time_s != old.time_s


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["report", "nowhere"], "nowhere: is not a folder. Give the folder of an experiment or of a run"),
        (["report", "."], ".: holds no run: no run.json in it or in its folders"),
        (["retime", ".", "--fleet", "nowhere.toml"], "nowhere.toml: cannot be read"),
        (
            ["retime", ".", "--fleet", "small.toml", "--set", "fleet.devises=3"],
            "small.toml: fleet.devises: is not a known",
        ),
        (["retime", ".", "--fleet", "empty.toml"], "empty.toml: fleet: is missing. Add it"),
    ],
)
def test_mistakes_of_report_and_retime_are_explained(recipe, command, message):
    Path("empty.toml").write_text("")
    answer = call(*command)
    assert answer.exit_code == 1
    assert message in answer.stderr
