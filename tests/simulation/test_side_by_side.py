"""Runs in several processes: the same files as in one, and nobody's end is another's."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import warm
from adaptsfl.config import Recipe
from adaptsfl.errors import InvalidInput, RunFailed, kind_of
from adaptsfl.report.summary import summary_data
from adaptsfl.runs.folder import RECORD, Run, read_run
from adaptsfl.simulation.experiment import MODEL, RECIPE, Experiment
from adaptsfl.simulation.jobs import Job, Watcher
from adaptsfl.simulation.side_by_side import execute_side_by_side
from adaptsfl.training.checkpoint import has_checkpoint
from simulation.beside import wait_for
from simulation.tiny import recipe


@pytest.fixture(scope="module", autouse=True)
def _started_at_once() -> Iterator[None]:
    with warm.instead_of_spawn():
        yield


HELD, DEADLY = "simulation.beside:Held", "simulation.beside:Deadly"


@dataclass
class Heard:
    """What a watcher was told."""

    begun: list[tuple[Job, int | None]] = field(default_factory=list)
    trained: dict[Job, int] = field(default_factory=dict)
    ended: list[Job] = field(default_factory=list)
    failed: dict[Job, Exception] = field(default_factory=dict)

    def watcher(self) -> Watcher:
        def on_round(job: Job, _round: int, count: int) -> None:
            self.trained[job] = self.trained.get(job, 0) + count

        return Watcher(
            begins=lambda job, rounds: self.begun.append((job, rounds)),
            on_round=on_round,
            ends=lambda job, _run: self.ended.append(job),
            fails=self.failed.__setitem__,
        )


@contextmanager
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def records(experiment: Experiment) -> dict[str, bytes]:
    return {file.parent.name: file.read_bytes() for file in experiment.folder.glob(f"*/{RECORD}")}


# ── the same as in one process ──────────────────────────────────────────────────────────────────────────────────────


def mixed() -> Recipe:
    options = {"fixed@bad": {"interval": 4, "cut": 99}, "rma+rms": {"longest": 3}}
    return recipe(run={"options": options, "fleets": {"a": {}, "b": {"base": "paper"}}, "targets": [0.1]})


POLICIES = ["adaptsfl", "fixed@bad", "rma+rms"]


@dataclass
class Done:
    """An experiment and what came of it."""

    experiment: Experiment
    runs: list[Run]
    heard: Heard


@pytest.fixture(scope="module")
def beside(tmp_path_factory: pytest.TempPathFactory) -> Done:
    folder, heard = tmp_path_factory.mktemp("beside"), Heard()
    experiment = Experiment(mixed(), folder / "out", policies=POLICIES, trajectories=folder / "learned")
    with one_thread():
        (runs,) = execute_side_by_side([experiment], 2, heard.watcher())
    return Done(experiment, runs, heard)


@pytest.fixture(scope="module", params=["execute", "one process"])
def alone(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Done:
    folder, heard = tmp_path_factory.mktemp("alone"), Heard()
    experiment = Experiment(mixed(), folder, policies=POLICIES)
    with one_thread():
        if request.param == "execute":
            fails = {}
            runs = experiment.execute(Watcher(fails=lambda job, error: fails.update({job: error})))
            heard.failed = fails
        else:
            (runs,) = execute_side_by_side([experiment], 1, heard.watcher())
    return Done(experiment, runs, heard)


def test_records_are_those_of_one_process(beside: Done, alone: Done) -> None:
    assert len(records(beside.experiment)) == 6
    assert records(beside.experiment) == records(alone.experiment)
    assert [run.folder.name for run in beside.runs] == [run.folder.name for run in alone.runs]
    assert [run.status for run in beside.runs] == [run.status for run in alone.runs]
    assert summary_data([run for run in beside.runs if run.blocks]) == summary_data(
        [run for run in alone.runs if run.blocks]
    )


def test_failures_are_those_of_one_process(beside: Done, alone: Done) -> None:
    assert set(beside.heard.failed) == {Job("fixed@bad", 0, fleet) for fleet in "ab"}
    for job, error in alone.heard.failed.items():
        assert isinstance(beside.heard.failed[job], RunFailed)
        assert str(beside.heard.failed[job]) == str(error)
        assert kind_of(beside.heard.failed[job]) == kind_of(error) == "InvalidInput"


def test_the_caller_is_told_of_every_run(beside: Done) -> None:
    """A policy that does not look at the fleet is trained for the first one only."""
    tasks = list(beside.experiment.jobs)
    assert sorted(beside.heard.begun, key=repr) == sorted([(job, 8) for job in tasks], key=repr)
    assert set(beside.heard.ended) | set(beside.heard.failed) == set(tasks)
    assert len(beside.heard.ended) == 4
    assert beside.heard.trained[Job("rma+rms", 0, "a")] == 8
    assert Job("rma+rms", 0, "b") not in beside.heard.trained


def test_what_other_processes_learned_is_not_learned_again(beside: Done, tmp_path: Path) -> None:
    """Another experiment shares it, and keeps no models: nothing is left to train."""
    assert not (beside.experiment.folder / "trajectories").exists()
    policies = ["adaptsfl", "rma+rms"]
    learned, trained = beside.experiment.trajectories, []
    other = Experiment(mixed(), tmp_path, policies=policies, trajectories=learned, keep_models=False)
    runs = other.execute(Watcher(on_round=lambda _job, t, _trained: trained.append(t)))
    assert trained == []
    assert [run.status for run in runs] == ["done"] * 4
    expected = records(beside.experiment)
    assert records(other) == {name: expected[name] for name in records(other)}
    assert list(tmp_path.glob(f"**/{MODEL}")) == []


def test_what_is_done_needs_no_process(beside: Done, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiprocessing, "get_context", None)
    heard = Heard()
    again = Experiment(mixed(), beside.experiment.folder, policies=["adaptsfl", "rma+rms"])
    ((*runs,),) = execute_side_by_side([again], 2, heard.watcher())
    assert [run.folder.name for run in runs] == [job.folder_name for job in again.jobs]
    assert heard.ended == list(again.jobs)


# ── several experiments ─────────────────────────────────────────────────────────────────────────────────────────────


def test_experiments_may_share_what_they_learn(tmp_path: Path) -> None:
    """The second has another fleet, at which its policy does not look; as it keeps no model, it trains nothing."""
    heard = Heard()
    made = [
        Experiment(
            recipe(fleet={"base": base}),
            tmp_path / base,
            policies=["rma+rms"],
            trajectories=tmp_path / "learned",
            keep_models=False,
        )
        for base in ("heterogeneous", "paper")
    ]
    first, second = execute_side_by_side(made, 1, heard.watcher())
    assert heard.trained == {Job("rma+rms", 0): 8}
    assert [run.rounds for run in (*first, *second)] == [8, 8]
    assert first[0].time_s != second[0].time_s


def test_two_experiments_in_one_folder_are_refused(tmp_path: Path) -> None:
    made = [Experiment(recipe(), place, policies=["psl"]) for place in (tmp_path / "a", tmp_path / "b" / ".." / "a")]
    with pytest.raises(InvalidInput, match=r"experiments: two have the folder .*Give each its own"):
        execute_side_by_side(made, 2)
    assert not (tmp_path / "a").exists()


def test_an_experiment_that_cannot_run_claims_no_folder_nor_do_the_others(tmp_path: Path) -> None:
    made = [
        Experiment(recipe(model={"name": name}), tmp_path / name, policies=["psl"]) for name in ("vgg_digits", "vgg11")
    ]
    with pytest.raises(InvalidInput, match="data: has samples of shape"):
        execute_side_by_side(made, 2)
    assert list(tmp_path.iterdir()) == []


def test_models_are_kept_only_if_wanted(tmp_path: Path) -> None:
    """One that is wanted later is trained then."""
    for keep_models in (False, True):
        made = Experiment(recipe(), tmp_path, policies=["psl"], keep_models=keep_models)
        made.execute()
        assert (tmp_path / "psl-seed0" / MODEL).exists() == keep_models
        (tmp_path / "psl-seed0" / RECORD).unlink()


def test_what_experiments_share_does_not_keep_a_mistake_from_being_mended(tmp_path: Path) -> None:
    shared = {"policies": ["fixed"], "trajectories": tmp_path / "learned"}
    Experiment(recipe(run={"options": {"fixed": {"interval": 2, "cut": 2}}}), tmp_path / "good", **shared).execute()
    with pytest.raises(InvalidInput, match=r"policy\.cut"):
        Experiment(recipe(run={"options": {"fixed": {"interval": 2, "cut": 99}}}), tmp_path / "bad", **shared).execute()
    mended = Experiment(recipe(run={"options": {"fixed": {"interval": 4, "cut": 2}}}), tmp_path / "bad", **shared)
    assert [run.status for run in mended.execute()] == ["done"]


# ── ended and stopped ───────────────────────────────────────────────────────────────────────────────────────────────


def test_a_process_that_is_killed_loses_its_run_alone(tmp_path: Path) -> None:
    """Two fleets that are the same: whoever ran to its end has the same record."""
    (tmp_path / "deadly").touch()
    options = {DEADLY: {"file": str(tmp_path / "deadly")}, "fixed": {"interval": 2, "cut": 2}}
    content = recipe(run={"options": options, "fleets": {"a": {}, "b": {}}})
    made, heard = Experiment(content, tmp_path / "out", policies=[DEADLY, "fixed"]), Heard()
    (runs,) = execute_side_by_side([made], 2, heard.watcher())
    assert list(heard.failed) == [Job(DEADLY, 0, "a")]
    (error,) = heard.failed.values()
    assert kind_of(error) == "ProcessEnded"
    assert str(error).startswith("its process was ended by SIGKILL. If memory is short, run fewer at once")
    assert [run.status for run in runs] == ["running", "done", "done", "done"]  # a killed one cannot say so
    assert len(heard.ended) == 3
    Experiment(content, tmp_path / "out", policies=[DEADLY, "fixed"]).execute()
    assert len(records(made)) == 4
    assert len(set(records(made).values())) == 1


def test_a_process_that_is_killed_before_its_first_word_loses_its_run_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for lack of memory, while it loads torch: processes that import nothing while a file exists."""
    made, heard = Experiment(recipe(), tmp_path / "out", policies=["psl", "sfl"]), Heard()
    hold, folder = tmp_path / "hold", tmp_path / "imported"
    hold.touch()
    folder.mkdir()
    waiting = ["import pathlib, sys, time", "while '--multiprocessing-fork' in sys.orig_argv and hold.exists():"]
    waiting[1:1] = [f"hold = pathlib.Path({str(hold)!r})"]
    (folder / "sitecustomize.py").write_text("\n".join([*waiting, "    time.sleep(0.01)", ""]))
    before = os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), *([before] if before else [])]))
    monkeypatch.setattr(multiprocessing, "get_context", multiprocessing.context._default_context.get_context)

    def kill_one() -> None:
        wait_for(lambda: bool(multiprocessing.active_children()))
        multiprocessing.active_children()[0].kill()
        hold.unlink()

    killer = threading.Thread(target=kill_one)
    killer.start()
    (runs,) = execute_side_by_side([made], 2, heard.watcher())
    killer.join()
    assert [str(error).partition(".")[0] for error in heard.failed.values()] == ["its process was ended by SIGKILL"]
    assert [run.status for run in runs] == ["done"]


def held(folder: Path) -> Experiment:
    """Two runs of eight rounds, both waiting after round 4 while a file exists; checkpoints only where they stop.

    Their cuts differ, so that neither finds what it needs among the steps of the other.
    """
    options = {f"{HELD}@{cut}": {"file": str(folder / "hold"), "cut": cut} for cut in (2, 3)}
    content = recipe(run={"options": options, "checkpoint_every": 99})
    return Experiment(content, folder / "out", policies=list(options))


@pytest.fixture(scope="module")
def unheld(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    made = held(tmp_path_factory.mktemp("unheld"))
    with one_thread():
        made.execute()
    return records(made)


def interrupt_all() -> None:
    """What Ctrl-C on a terminal does."""
    for child in multiprocessing.active_children():
        assert child.pid is not None
        os.kill(child.pid, signal.SIGINT)
    signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("stop", ["everybody", "SIGINT", "SIGTERM"])
def test_stopped_all_runs_go_on_to_the_same_end(tmp_path: Path, unheld: dict[str, bytes], stop: str) -> None:
    (tmp_path / "hold").touch()
    made, begun = held(tmp_path), set()
    folders = [made.folder / job.folder_name for job in made.jobs]

    def both_wait() -> bool:
        return all(
            (folder / RECORD).exists() and (folder / RECORD).read_bytes().count(b"\n") == 2 for folder in folders
        )

    def stop_when_both_wait(job: Job, _rounds: int | None) -> None:
        begun.add(job)
        if len(begun) == 2:
            wait_for(both_wait)
            interrupt_all() if stop == "everybody" else signal.raise_signal(signal.Signals[stop])

    with pytest.raises(KeyboardInterrupt):
        execute_side_by_side([made], 2, Watcher(begins=stop_when_both_wait))
    assert multiprocessing.active_children() == []
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert [read_run(folder).status for folder in folders] == ["stopped"] * 2
    assert all(has_checkpoint(folder) for folder in folders)
    (tmp_path / "hold").unlink()
    heard = Heard()
    (runs,) = execute_side_by_side([held(tmp_path)], 2 if stop == "everybody" else 1, heard.watcher())
    assert [run.status for run in runs] == ["done"] * 2
    assert records(made) == unheld
    assert heard.trained == dict.fromkeys(made.jobs, 4)


def test_an_error_that_nobody_takes_stops_all(tmp_path: Path) -> None:
    (tmp_path / "hold").touch()
    options: dict[str, Any] = {HELD: {"file": str(tmp_path / "hold"), "cut": 2}, "fixed": {"interval": 2, "cut": 99}}
    made = Experiment(recipe(run={"options": options}), tmp_path / "out", policies=[HELD, "fixed"])
    with pytest.raises(RunFailed, match=r"policy\.cut"):
        execute_side_by_side([made], 2)
    assert multiprocessing.active_children() == []
    assert (tmp_path / "out" / RECIPE).exists()
