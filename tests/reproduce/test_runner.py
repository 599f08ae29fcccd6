"""Figures run: trained once for all that ask, and by the command from recipes to claims."""

import csv
from pathlib import Path

import pytest
import torch

from adaptsfl import cli
from adaptsfl.errors import InvalidInput
from adaptsfl.reproduce.runner import Reproduction
from adaptsfl.reproduce.study import recipes_folder
from adaptsfl.runs.folder import RECORD
from adaptsfl.simulation.experiment import Experiment
from adaptsfl.simulation.jobs import Watcher

BASE = """
[recipe.model]
name = "vgg_digits"
options = { width = 0.25, norm = "batch" }
[recipe.training]
batch_size = 4
learning_rate = 0.05
[recipe.data]
name = "digits"
[recipe.fleet]
devices = 3
[recipe.run]
rounds = 12
evaluate_every = 3
test_samples = 40
policies = ["adaptsfl", "rma+rms", "dama+rms"]
"""
FIRST = """
extends = "base.toml"
figure = "Fig. 1"
title = "Uplinks"
[panels.uplink]
title = "Uplinks"
draw = "sweep"
[panels.uplink.sweep]
axis = "Mbps"
points = [{ x = 5, fleet = { uplink_mbps = 5.0 } }, { x = 50, fleet = { uplink_mbps = 50.0 } }]
"""
SECOND = """
extends = "base.toml"
figure = "Fig. 2"
title = "Over time"
[panels.time]
title = "Time"
draw = "time"
recipe.fleet.uplink_mbps = 5.0
[panels.bars]
title = "Converged"
draw = "converged"
runs = "second/time"
"""


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def recipes(tmp_path: Path) -> Path:
    folder = tmp_path / "recipes"
    folder.mkdir()
    for name, text in {"base": BASE, "first": FIRST, "second": SECOND}.items():
        (folder / f"{name}.toml").write_text(text)
    return folder


def trained_in(reproduction: Reproduction) -> dict[tuple[str, str], int]:
    """Run it; return how many rounds were trained, by policy and fleet."""
    rounds: dict[tuple[str, str], int] = {}

    def on_round(job, _round, trained):
        key = (job.policy, job.fleet)
        rounds[key] = rounds.get(key, 0) + trained

    reproduction.execute(1, Watcher(on_round=on_round))
    return rounds


def test_a_resource_sweep_reuses_what_was_learned_and_equals_full_runs(recipes, tmp_path):
    sweep = Reproduction(["first"], "paper", tmp_path / "shared", recipes=recipes)
    trained = trained_in(sweep)
    assert trained["rma+rms", "5"] == trained["dama+rms", "5"] == 12
    assert ("rma+rms", "50") not in trained
    assert ("dama+rms", "50") not in trained
    (experiment,) = sweep.experiments.values()
    for k, job in enumerate(experiment.jobs):
        alone = Experiment(experiment.recipe, tmp_path / f"alone{k}", policies=[job.policy])
        alone.jobs = [job]
        alone.execute()
        shared, full = ((one.folder / job.folder_name / RECORD).read_bytes() for one in (experiment, alone))
        assert shared == full


def test_what_one_figure_learned_serves_the_others(recipes, tmp_path):
    out = tmp_path / "out"
    assert trained_in(Reproduction(["first"], "paper", out, recipes=recipes))
    assert not trained_in(Reproduction(["second"], "paper", out, recipes=recipes))


def test_runs_that_two_panels_show_are_one_experiment(recipes, tmp_path):
    assert list(Reproduction(["second"], "paper", tmp_path, recipes=recipes).experiments) == ["second/time"]


@pytest.mark.parametrize("setting", ["run.rounds=0", "fleet.devices=2000"])
def test_a_setting_that_breaks_a_figure_names_it(recipes, tmp_path, setting):
    with pytest.raises(InvalidInput, match=r"first(/|\.toml, panel )uplink: (run\.rounds|data)"):
        Reproduction([], "paper", tmp_path / "out", recipes=recipes, overrides=[setting]).execute()
    assert not (tmp_path / "out").exists()


def test_the_command_leaves_figures_numbers_claims_and_a_page(recipes, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    call = ["reproduce", "--scale", "paper", "--recipes", str(recipes), "--seeds", "2", "--results", "results"]
    run(call, monkeypatch)
    shown = capsys.readouterr()
    assert "12/12" not in shown.out
    assert "[18/18]" in shown.err
    for name in ("claims.md", "figures/first.png", "figures/second.svg", "figures/second-bars.csv"):
        assert (tmp_path / "results" / name).stat().st_size
    page = (tmp_path / "runs/paper-paper/report.html").read_text()
    assert "Uplinks" in page
    assert (tmp_path / "runs/paper-paper/second/time/report.html").exists()
    with (tmp_path / "results/figures/first-uplink.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["seed"] != "mean"]
    assert {(row["policy"], row["x"], row["seed"]) for row in rows} == {
        (policy, x, seed)
        for policy in ("adaptsfl", "rma+rms", "dama+rms")
        for x in ("5.0", "50.0")
        for seed in ("0", "1")
    }
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob(RECORD)}
    run(call, monkeypatch)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob(RECORD)} == before


def run(arguments: list[str], monkeypatch) -> int:
    """Call the command as a shell does, and return its exit code."""
    monkeypatch.setattr("sys.argv", ["adaptsfl", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


def test_an_unknown_figure_and_a_missing_folder_are_said_in_words(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run(["reproduce", "acuracy"], monkeypatch) == 1
    assert "figure: 'acuracy' is unknown" in capsys.readouterr().err
    assert run(["reproduce", "all", "acuracy"], monkeypatch) == 1
    assert "figure: 'acuracy' is unknown" in capsys.readouterr().err
    assert run(["reproduce", "--recipes", "nowhere"], monkeypatch) == 1
    assert "nowhere is not a folder" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "figures",
    [
        ["motivation-interval"],
        pytest.param(["motivation-cut", "converged", "uncertainty", "ablation-interval"], marks=pytest.mark.slow),
    ],
    ids=["one figure", "every other kind"],
)
def test_the_papers_figures_run_in_a_smaller_form(figures, tmp_path, monkeypatch, capsys):
    """Every kind of figure at the smoke scale, with few rounds and the narrowest network."""
    monkeypatch.chdir(tmp_path)
    assert set(figures) <= {path.stem for path in recipes_folder().glob("*.toml")}
    less = ["run.rounds=2", "run.evaluate_every=1", "run.test_samples=20", "training.batch_size=2"]
    call = ["reproduce", *figures, "--out", "out", *(part for text in less for part in ("--set", text))]
    assert run(call, monkeypatch) == 0
    assert "not tried" in capsys.readouterr().out
    assert {path.stem for path in (tmp_path / "out/figures").glob("*.png")} == set(figures)
