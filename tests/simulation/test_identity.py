"""Finished runs are served only while they are true: what they depended on has to be what is there now."""

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from typer.testing import CliRunner

from adaptsfl.cli import app
from adaptsfl.config import Recipe
from adaptsfl.factories import importing_from_here
from adaptsfl.fleet import FLEETS, RedrawnResources
from adaptsfl.fleet.trace import write_trace
from adaptsfl.reproduce.runner import Reproduction
from adaptsfl.runs.folder import RECORD, RUN, find_runs
from adaptsfl.simulation import world as worlds
from adaptsfl.simulation.experiment import MODEL, TRAJECTORIES, Experiment
from adaptsfl.simulation.jobs import Job, Watcher
from adaptsfl.simulation.retime import retime
from adaptsfl.simulation.side_by_side import execute_side_by_side
from adaptsfl.simulation.world import make_world
from adaptsfl.training.ranks import ALONE, Ranks
from simulation.tiny import recipe

DATA = """
import torch
from torch.utils.data import TensorDataset

def make():
    return tuple(TensorDataset(x, torch.arange(len(x)) % 3) for x in torch.load("pixels.pt"))
"""
NET = """
from torch import nn, zeros
from own_parts import activation

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.third(activation(self.second(activation(self.first(x)))))

def make():
    return Net(), zeros(1, 4)
"""
PARTS = "from torch import nn\n\nactivation = nn.functional.relu\n"
POLICY = """
from adaptsfl.policies.fixed import Fixed

class Mine(Fixed):
    def __init__(self):
        super().__init__(interval=2, cut=CUT)
"""


class Place:
    """A folder with code and data of somebody's own; `edit` is followed by what a new process would see."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.remarks, self.trained = folder, [], 0

    def edit(self, name: str, source: str) -> None:
        (self.folder / f"{name}.py").write_text(source)
        self.forget()

    def forget(self) -> None:
        for name in [name for name in sys.modules if name.startswith("own_")]:
            del sys.modules[name]
        importlib.invalidate_caches()

    def pixels(self, *, shift: float) -> None:
        """Write the samples; the labels are the same ones whatever the shift."""
        torch.manual_seed(1)
        torch.save([torch.randn(size, 4) + shift for size in (60, 20)], self.folder / "pixels.pt")

    def watcher(self) -> Watcher:
        def on_round(_job: Job, _round: int, _trained: int) -> None:
            self.trained += 1

        return Watcher(on_round=on_round, remarks=lambda job, remark: self.remarks.append((job.folder_name, remark)))

    def run(self, given: Recipe, policy: str = "psl", out: str = "out", **options) -> bytes:
        """Execute the experiment; return the record, and keep what was remarked and how many rounds were trained."""
        self.remarks, self.trained = [], 0
        (run,) = Experiment(given, self.folder / out, policies=[policy], **options).execute(self.watcher())
        assert run.status == "done"
        return (run.folder / RECORD).read_bytes()


@pytest.fixture
def place(tmp_path, monkeypatch) -> Place:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # a stale one of the same size and second would be believed
    made = Place(tmp_path)
    made.edit("own_data", DATA)
    made.edit("own_net", NET)
    made.edit("own_parts", PARTS)
    made.edit("own_policy", POLICY.replace("CUT", "1"))
    made.pixels(shift=0.0)
    yield made
    made.forget()


def own(**changes) -> Recipe:
    return recipe(
        **{
            "model": {"name": "own_net:make", "options": {}},
            "data": {"name": "own_data:make", "partition": {"kind": "iid"}},
            "fleet": {"devices": 3},
            "run": {"rounds": 4, "evaluate_every": 2},
            **changes,
        }
    )


def flip_pixels(place: Place) -> None:
    place.pixels(shift=2.0)


def edit_forward(place: Place) -> None:
    place.edit("own_net", NET.replace("activation(self.second(", "activation(2 * self.second("))


def edit_what_the_model_uses(place: Place) -> None:
    place.edit("own_parts", PARTS.replace("relu", "tanh"))


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (flip_pixels, "the data has"),
        (edit_forward, "the code of the model has"),
        (edit_what_the_model_uses, "the code of the model has"),
    ],
)
def test_a_run_on_other_inputs_or_another_model_is_done_again(place: Place, change: Callable, part: str) -> None:
    before = place.run(own())
    change(place)
    after = place.run(own())
    assert place.remarks == [("psl-seed0", f"{part} changed since it ran; running it again")]
    assert place.trained == 4  # what was learned before is not what would be learned now
    assert after == place.run(own(), out="elsewhere") != before
    place.forget()
    assert place.run(own()) == after
    assert (place.remarks, place.trained) == ([], 0)


def test_an_edited_policy_runs_again_with_what_was_learned(place: Place) -> None:
    """An edit that changes no decision trains nothing; one that does is followed."""
    before = place.run(own(), "own_policy:Mine")
    place.edit("own_policy", "# the shallowest cut" + POLICY.replace("CUT", "1"))
    assert place.run(own(), "own_policy:Mine") == before
    said = "the code of the policy has changed since it ran; running it again"
    assert (place.remarks, place.trained) == ([("own_policy.Mine-seed0", said)], 0)
    place.edit("own_policy", POLICY.replace("CUT", "2"))
    after = place.run(own(), "own_policy:Mine")
    assert place.trained == 4
    assert json.loads(after.splitlines()[0])["cuts"] == [2, 2, 2]


@pytest.mark.parametrize("trace", ["fleet", "faults"])
def test_a_run_under_another_trace_is_done_again(place: Place, trace: str) -> None:
    fleet, faults = place.folder / "fleet.csv", place.folder / "faults.csv"
    resources = RedrawnResources(FLEETS["paper"], 3, 0, ())
    write_trace(fleet, [resources.at(0)])
    names = [resources.at(0).name(k) for k in range(3)]
    faults.write_text(f"round,device,present\n1,{names[0]},0\n")
    given = own(fleet={"devices": 3}, faults={"trace": str(faults)})
    given = given.model_copy(update={"fleet": type(given.fleet)(trace=str(fleet))})
    before = place.run(given)
    if trace == "fleet":
        write_trace(fleet, [RedrawnResources(FLEETS["heterogeneous"], 3, 0, ()).at(0)])
    else:
        faults.write_text(f"round,device,present\n1,{names[1]},0\n")
    after = place.run(given)
    assert place.remarks == [("psl-seed0", f"the trace of the {trace} has changed since it ran; running it again")]
    assert after == place.run(given, out="elsewhere") != before


def test_what_is_still_true_is_served_without_splitting_or_training(place: Place, monkeypatch) -> None:
    before = place.run(own(), "own_policy:Mine")
    monkeypatch.setattr(worlds, "split_model", None)
    place.forget()
    assert place.run(own(), "own_policy:Mine") == before
    assert (place.remarks, place.trained) == ([], 0)


def test_files_count_by_what_they_hold_not_where_they_lie(place: Place) -> None:
    """A comment in the code of a dataset changes no sample."""
    before = place.run(own())
    place.edit("own_data", f"# by me\n{DATA}")
    assert place.run(own()) == before
    assert place.remarks == []


def test_a_file_that_is_edited_while_its_code_is_loaded_changes_nothing_yet(place: Place) -> None:
    before = place.run(own())
    (place.folder / "own_net.py").write_text(NET.replace("activation(self.second(", "activation(2 * self.second("))
    assert place.run(own()) == before
    assert place.remarks == []
    place.forget()  # the next process
    assert place.run(own()) != before
    assert len(place.remarks) == 1


def test_weights_that_a_factory_reads_from_a_file_count(place: Place) -> None:
    reading = NET.replace("return Net()", 'net = Net()\n    net.third.bias.data.fill_(load("bias.pt"))\n    return net')
    place.edit("own_net", reading.replace("import nn", "import load, nn"))
    torch.save(0.0, place.folder / "bias.pt")
    before = place.run(own())
    torch.save(5.0, place.folder / "bias.pt")
    assert place.run(own()) != before
    assert [remark.partition(" has")[0] for _, remark in place.remarks] == ["the model that its factory gives"]


def interactive(source: str, name: str) -> None:
    """Define a module as one does at a prompt: no file has its source."""
    module = ModuleType(name)
    with importing_from_here():
        exec(source, vars(module))
    sys.modules[name] = module


def test_code_that_nobody_can_read_is_run_again_and_shared_with_nobody(place: Place) -> None:
    """The same name for another model, and nothing to tell them apart by."""
    interactive(NET, "own_typed")
    typed = own(model={"name": "own_typed:make", "options": {}})
    before = place.run(typed)
    interactive(NET.replace("activation(self.second(", "activation(2 * self.second("), "own_typed")
    after = place.run(typed)
    assert after != before
    said = "the code of the model cannot be read as a file, so a change would not be noticed"
    assert place.remarks == [("psl-seed0", f"{said}; running it again")]
    assert place.trained == 4
    assert not (place.folder / "out" / TRAJECTORIES).exists()


def test_a_policy_that_nobody_can_read_is_run_again(place: Place) -> None:
    interactive(POLICY.replace("CUT", "1"), "own_typed")
    before = place.run(own(), "own_typed:Mine")
    interactive(POLICY.replace("CUT", "2"), "own_typed")
    assert place.run(own(), "own_typed:Mine") != before
    assert len(place.remarks) == 1


def test_run_json_says_what_a_run_depended_on(place: Place) -> None:
    place.run(own())
    file = place.folder / "out" / "psl-seed0" / RUN
    info = json.loads(file.read_text())
    assert set(info["identity"]) == {
        "versions",
        "recipe",
        "data",
        "initial_weights",
        "model_code",
        "policy_code",
        "fleet_trace",
        "faults_trace",
    }
    file.write_text(json.dumps({name: value for name, value in info.items() if name != "identity"}))
    place.run(own())
    assert place.remarks == [
        ("psl-seed0", "its run.json does not say what code and data it ran with; running it again")
    ]
    assert place.trained == 0


def test_a_model_of_other_code_does_not_stay_beside_a_run_that_keeps_none(place: Place) -> None:
    place.run(own())
    assert (place.folder / "out" / "psl-seed0" / MODEL).exists()
    edit_forward(place)
    place.run(own(), keep_models=False)
    assert not (place.folder / "out" / "psl-seed0" / MODEL).exists()


def test_a_retimed_run_is_not_served_as_a_simulated_one(place: Place) -> None:
    place.run(own())
    given = own(fleet={"devices": 3, "uplink_mbps": 1.0})
    retime(find_runs([place.folder / "out"]), given.fleet, place.folder / "other")
    place.run(own(), out="other")
    assert len(place.remarks) == 1


def test_people_are_told_where_nobody_watches(place: Place) -> None:
    place.run(own())
    flip_pixels(place)
    with pytest.warns(UserWarning, match="psl-seed0: the data has changed since it ran; running it again"):
        Experiment(own(), place.folder / "out", policies=["psl"]).execute()


# ── other ways to run ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("processes", [1, 2])
def test_runs_side_by_side_are_checked_too(place: Place, monkeypatch, processes: int) -> None:
    """Processes of their own import the edited code."""
    monkeypatch.setenv("PYTHONPATH", str(place.folder), prepend=":")
    first = place.run(own())
    edit_forward(place)
    remarks: list[str] = []
    watcher = Watcher(remarks=lambda job, remark: remarks.append(f"{job.policy}: {remark}"))
    made = Experiment(own(), place.folder / "out", policies=["psl", "sfl"])
    ((again, _),) = execute_side_by_side([made], processes, watcher)
    assert remarks == ["psl: the code of the model has changed since it ran; running it again"]
    assert (again.folder / RECORD).read_bytes() != first


def test_figures_are_drawn_from_runs_that_are_still_true(place: Place) -> None:
    (place.folder / "recipes").mkdir()
    text = """
    figure = "Fig. 1"
    title = "Mine"
    [recipe]
    model.name = "own_net:make"
    training.batch_size = 4
    data.name = "own_data:make"
    fleet.devices = 3
    run = { rounds = 2, evaluate_every = 1, policies = ["psl"] }
    [panels.time]
    title = "Time"
    draw = "time"
    """
    (place.folder / "recipes" / "mine.toml").write_text(text)
    remarks: list[str] = []
    watcher = Watcher(remarks=lambda job, remark: remarks.append(remark))

    def reproduced() -> float | None:
        made = Reproduction(["mine"], "paper", place.folder / "out", recipes=place.folder / "recipes")
        (run,) = made.execute(1, watcher).of("mine/time")
        return float(run.evaluations.losses[-1])

    before = reproduced()
    flip_pixels(place)
    assert reproduced() != before
    assert remarks == ["the data has changed since it ran; running it again"]


def test_the_command_says_what_has_changed(place: Place) -> None:
    text = """
    [model]
    name = "own_net:make"
    [training]
    batch_size = 4
    [data]
    name = "own_data:make"
    [fleet]
    devices = 3
    [run]
    rounds = 2
    """
    (place.folder / "mine.toml").write_text(text)
    call = ["simulate", "mine.toml", "--policies", "own_policy:Mine", "--quiet"]
    assert CliRunner().invoke(app, call).exit_code == 0
    place.edit("own_policy", POLICY.replace("CUT", "2"))
    answer = CliRunner().invoke(app, call)
    assert answer.exit_code == 0, answer.output
    said = "own_policy.Mine-seed0: the code of the policy has changed since it ran; running it again\n"
    assert answer.stderr == said


def test_all_ranks_give_one_identity_to_samples_that_none_of_them_holds_alone(place: Place) -> None:
    def names() -> list[str]:
        return [make_world(own(), 0, ranks=ranks).learning_identity for ranks in (ALONE, Ranks(0, 2), Ranks(1, 2))]

    before = names()
    flip_pixels(place)
    after = names()
    assert len(set(before)) == len(set(after)) == 1
    assert before != after
