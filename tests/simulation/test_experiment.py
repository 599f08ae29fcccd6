"""Experiments: stopped anywhere they go on to the same end, and one run's failure is its own."""

import json
import math
from pathlib import Path

import pytest

from adaptsfl.config import Recipe, parse
from adaptsfl.errors import InvalidInput, NotWritten, TrainingDiverged
from adaptsfl.policies import Decision
from adaptsfl.policies.split_learning import SplitFedV2
from adaptsfl.runs.folder import RECORD, RUN, read_run
from adaptsfl.simulation.backend import SimulatedBackend
from adaptsfl.simulation.experiment import MODEL, RECIPE, TRAJECTORIES, Experiment
from adaptsfl.simulation.jobs import Job, Watcher
from adaptsfl.simulation.store import Store
from adaptsfl.simulation.world import seeded


def recipe(**run) -> Recipe:
    content = {
        "model": {"name": "vgg_digits", "options": {"norm": "group", "width": 0.25}},
        "training": {"batch_size": 8, "learning_rate": 0.05, "optimizer": "momentum"},
        "fleet": {"devices": 3},
        "run": {
            "policies": ["fixed"],
            "options": {"fixed": {"interval": 4, "cut": 2}},
            "rounds": 10,
            "checkpoint_every": 1,
            "evaluate_every": 2,
            "test_samples": 50,
            **run,
        },
    }
    return parse(Recipe, content)


def record(folder: Path) -> bytes:
    return (folder / "fixed-seed0" / RECORD).read_bytes()


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> bytes:
    folder = tmp_path_factory.mktemp("whole")
    Experiment(recipe(), folder).execute()
    return record(folder)


def stop_after(wanted: int):
    def stop(_job: Job, round_: int, _trained: int) -> None:
        if round_ == wanted:
            raise KeyboardInterrupt

    return stop


@pytest.mark.parametrize("stops", [[1], [4], [6], [7, 8], [6, 6, 10]])
def test_stopped_after_any_round_a_run_goes_on_to_the_same_end(tmp_path, whole, stops):
    """In the middle of a block, too: then the weights are those of no block's end, and must not be taken for such."""
    for round_ in stops:
        with pytest.raises(KeyboardInterrupt):
            Experiment(recipe(), tmp_path).execute(Watcher(on_round=stop_after(round_)))
    (run,) = Experiment(recipe(), tmp_path).execute()
    assert (run.status, run.ended_by) == ("done", "rounds")
    assert record(tmp_path) == whole


def test_what_was_torn_by_a_crash_is_trained_again_and_nothing_else(tmp_path, whole):
    with pytest.raises(KeyboardInterrupt):
        Experiment(recipe(), tmp_path).execute(Watcher(on_round=stop_after(9)))
    (file,) = (tmp_path / TRAJECTORIES).iterdir()
    kept = file.read_text()
    file.write_text(kept[:-10])
    Experiment(recipe(), tmp_path).execute()
    assert record(tmp_path) == whole
    assert len(Store(file).known) == 3


def test_a_recipe_that_cannot_be_run_claims_no_folder(tmp_path):
    made = recipe().model_copy(update={"data": None, "model": recipe().model.model_copy(update={"name": "vgg16"})})
    with pytest.raises(InvalidInput, match="data: has samples of shape"):
        Experiment(made, tmp_path / "out").execute()
    assert not (tmp_path / "out").exists()


def test_a_failure_is_raised_unless_somebody_takes_it(tmp_path):
    broken = recipe(options={"fixed": {"interval": 4, "cut": 99}})
    with pytest.raises(InvalidInput, match=r"policy\.cut"):
        Experiment(broken, tmp_path).execute()
    taken = []
    (run,) = Experiment(broken, tmp_path).execute(Watcher(fails=lambda job, error: taken.append((job, error))))
    assert (run.status, run.blocks) == ("failed", ())
    ((job, error),) = taken
    assert job == Job("fixed", 0)
    assert isinstance(error, InvalidInput)


def test_fleets_may_have_any_name(tmp_path):
    made = recipe(rounds=1, fleets={"../a/b": {}, "c d": {}})
    names = [job.folder_name for job in Experiment(made, tmp_path).jobs]
    assert names == ["fixed-..-a-b-seed0", "fixed-c-d-seed0"]
    with pytest.raises(InvalidInput, match=r"run\.fleets: has names that lead to one folder"):
        Experiment(recipe(fleets={"a/b": {}, "a b": {}}), tmp_path)


def test_more_seeds_and_policies_may_be_asked_for_later(tmp_path):
    Experiment(recipe(rounds=1), tmp_path).execute()
    ends = []
    more = Experiment(recipe(rounds=1), tmp_path, policies=["fixed", "psl"], seeds=2)
    more.execute(Watcher(begins=lambda job, _rounds: ends.append(job.folder_name)))
    assert ends == ["psl-seed0", "fixed-seed1", "psl-seed1"]
    assert "policies" not in json.loads((tmp_path / RECIPE).read_text())["run"]


def test_a_runs_seed_is_added_to_every_sections_own():
    made = seeded(parse(Recipe, {"model": {"name": "vgg_digits"}, "faults": {"seed": 2}, "fleet": {"seed": 1}}), 5)
    assert (made.faults.seed, made.fleet.seed, made.data.seed, made.data.partition.seed) == (7, 6, 5, 5)


def test_a_mistake_that_stopped_every_run_may_be_mended_in_its_folder(tmp_path, whole):
    with pytest.raises(InvalidInput, match=r"policy\.cut"):
        Experiment(recipe(options={"fixed": {"interval": 4, "cut": 99}}), tmp_path).execute()
    Experiment(recipe(), tmp_path).execute()
    assert record(tmp_path) == whole
    with pytest.raises(InvalidInput, match=r"run\.rounds: is another"):
        Experiment(recipe(rounds=2), tmp_path).execute()


@pytest.mark.parametrize(
    ("name", "content"),
    [(RUN, b"{"), (RUN, b'{"format": 1}'), (RECORD, b""), (RECORD, None), (RECORD, b"{}\n"), (RECORD, ...)],
)
def test_a_done_run_whose_files_are_damaged_is_done_again_without_training(tmp_path, whole, name, content):
    """The last case is a record that lost its last block with the power."""
    Experiment(recipe(), tmp_path).execute()
    file = tmp_path / "fixed-seed0" / name
    if content is None:
        file.unlink()
    else:
        file.write_bytes(b"".join(whole.splitlines(keepends=True)[:-1]) if content is ... else content)
    trained = []
    (run,) = Experiment(recipe(), tmp_path).execute(Watcher(on_round=lambda _job, t, _trained: trained.append(t)))
    assert (run.status, record(tmp_path), trained) == ("done", whole, [])


def test_another_versions_run_is_not_written_over(tmp_path):
    Experiment(recipe(rounds=1), tmp_path).execute()
    file = tmp_path / "fixed-seed0" / RUN
    file.write_text(json.dumps({**json.loads(file.read_text()), "format": 99}))
    with pytest.raises(InvalidInput, match="format: is 99"):
        Experiment(recipe(rounds=1), tmp_path).execute()
    assert json.loads(file.read_text())["format"] == 99


def test_weights_that_are_no_numbers_are_no_result(tmp_path, monkeypatch):
    """The loss of a round is that before its update: the last update's harm shows in the weights alone."""
    original = SimulatedBackend.state
    monkeypatch.setattr(
        SimulatedBackend, "state", lambda self: {name: x * math.inf for name, x in original(self).items()}
    )
    with pytest.raises(TrainingDiverged, match=r"round 1: .* has weights that are not finite. Lower the learning rate"):
        Experiment(recipe(rounds=1), tmp_path).execute()
    assert read_run(tmp_path / "fixed-seed0").status == "failed"
    assert not (tmp_path / "fixed-seed0" / MODEL).exists()


def test_a_damaged_recipe_is_said_to_be_damaged(tmp_path):
    Experiment(recipe(rounds=1), tmp_path).execute()
    (tmp_path / RECIPE).write_text("{")
    with pytest.raises(InvalidInput, match=r"recipe\.json: is damaged: not valid JSON"):
        Experiment(recipe(rounds=1), tmp_path).execute()


def test_a_named_fleets_noise_is_named(tmp_path):
    with pytest.raises(InvalidInput, match=r"run\.fleets\.a\.noise\.uplink_cv: is -1"):
        Experiment(recipe(fleets={"a": {"noise": {"uplink_cv": -1.0}}}), tmp_path)


class Moving(SplitFedV2):
    """Moves the cut, which those who take turns cannot follow."""

    def decide(self, seen):
        return Decision((1 + seen.block,) * seen.devices, 2)


def test_who_takes_turns_keeps_the_cut(tmp_path):
    with pytest.raises(InvalidInput, match=r"decision\.cuts: is \(2, 2, 2\).*kept for the whole run"):
        Experiment(recipe(), tmp_path, policies=["simulation.test_experiment:Moving"]).execute()


def test_stopping_stops_all_runs_also_where_no_checkpoint_can_be_written(tmp_path, monkeypatch):
    def save(self):
        raise NotWritten("the disk is full")

    made = Experiment(recipe(checkpoint_every=99), tmp_path, policies=["fixed", "psl"])
    monkeypatch.setattr(SimulatedBackend, "save", save)
    with pytest.raises(KeyboardInterrupt):
        made.execute(Watcher(on_round=stop_after(2), fails=lambda _job, _error: None))
    assert read_run(tmp_path / "fixed-seed0").status == "stopped"
    assert not (tmp_path / "psl-seed0").exists()
