"""Figures as files: laid over each other in a stated order, thinned and changed by scale, refused with reasons."""

import re
from pathlib import Path

import pytest

from adaptsfl.errors import InvalidInput
from adaptsfl.reproduce.study import SCALES, load_studies, recipes_folder, study_names

BASE = """
[recipe.model]
name = "vgg_digits"
options = { width = 1.0, norm = "group" }
[recipe.run]
rounds = 100
[scales.smoke]
changes = "Short."
seeds = 3
recipe.run.rounds = 4
"""
FIGURE = """
extends = "base.toml"
figure = "Fig. 1"
title = "One"
[recipe.run]
policies = ["sfl"]
[panels.a]
title = "A"
draw = "time"
recipe.run.rounds = 50
[panels.b]
title = "B"
draw = "sweep"
extends = "other.toml"
scales.smoke.recipe.training.batch_size = 2
[panels.b.sweep]
axis = "x"
points = [
  { x = 4, fleet = { server_tflops = 4.0 } },
  { x = 1, fleet = { server_tflops = 1.0 } },
  { x = 2, fleet = { server_tflops = 2.0 } },
]
[scales.smoke]
sweep_points = 2
recipe.model.options.width = 0.25
"""
SHOWN = "[panels.c]\ntitle = 'C'\n"
OTHER = 'recipe.model.options.norm = "none"\nscales.smoke.seeds = 2\n'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in {"base": BASE, "one": FIGURE, "other": OTHER}.items():
        (tmp_path / f"{name}.toml").write_text(text)
    return tmp_path


def panels(folder: Path, scale: str, *overrides: str):
    (study,) = load_studies(["one"], scale, folder=folder, overrides=overrides)
    return {panel.name: panel for panel in study.panels}


def test_only_files_with_a_figure_are_figures(folder):
    assert study_names(folder) == ["one"]


def test_the_paper_scale_is_what_the_files_say_without_their_scales(folder):
    both = panels(folder, "paper")
    assert both["a"].recipe.run.rounds == 50
    assert both["b"].recipe.run.rounds == 100
    assert both["a"].recipe.model.options == {"width": 1.0, "norm": "group"}
    assert both["b"].recipe.model.options == {"width": 1.0, "norm": "none"}
    assert both["b"].sweep.xs == (1, 2, 4)
    assert both["a"].differences == ()
    assert both["a"].seeds == 1


def test_a_scale_goes_over_all_that_is_printed_and_says_what_it_changes(folder):
    both = panels(folder, "smoke")
    assert both["a"].recipe.run.rounds == both["b"].recipe.run.rounds == 4
    assert both["a"].differences == (("model.options.width", 1.0, 0.25), ("run.rounds", 50, 4))
    assert ("training.batch_size", None, 2) in both["b"].differences
    assert (both["a"].seeds, both["b"].seeds) == (3, 2)


def test_a_sweep_becomes_fleets_of_the_run_thinned_to_its_ends(folder):
    sweep = panels(folder, "smoke")["b"].sweep
    assert sweep.xs == (1, 4)
    assert panels(folder, "smoke")["b"].recipe.run.fleets == {"4": {"server_tflops": 4.0}, "1": {"server_tflops": 1.0}}
    assert sweep.fleets == ("1", "4")


def test_overrides_go_over_everything(folder):
    assert panels(folder, "smoke", "run.rounds=9")["a"].recipe.run.rounds == 9


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("base", "extends = 'one.toml'\n", "extends: goes in a circle: one.toml → base.toml → one.toml"),
        ("one", FIGURE.replace('draw = "time"', 'draw = "pie"'), r"one\.toml: panels\.a\.draw"),
        ("one", FIGURE.replace('draw = "time"', 'draw = "sweep"'), r"panel a: draw: is 'sweep'"),
        ("one", FIGURE.replace("rounds = 50", "laps = 50"), r"one\.toml, panel a: run\.laps"),
        ("one", 'figure = "Fig. 1"\n', "panels: are none"),
        ("one", "figure = \n", "is not valid TOML"),
        ("one", FIGURE.replace("x = 2", "x = 1"), r"panel b: sweep\.points: has 1\.0 beside 1\.0"),
        ("one", FIGURE.replace("x = 2", "x = 1.0000001"), r"sweep\.points: has 1\.0000001 beside 1\.0"),
        ("one", FIGURE.replace("x = 2", "x = nan"), r"sweep\.points: .* not finite"),
        ("one", re.sub(r"points = \[.*?\n\]", "points = []", FIGURE, flags=re.S), r"sweep\.points: are none"),
        ("one", FIGURE + "[recipe.run.fleets]\nrich = {}\n", r"panel a: run\.fleets: has some that no sweep shows"),
        ("one", FIGURE.replace("[panels.a]", "[panels.'../../a']"), r"panel \.\./\.\./a: cannot be the name"),
        ("one", FIGURE.replace("[panels.a]", "[panels.'..']"), r"panel \.\.: cannot be the name of a folder"),
        ("one", FIGURE.replace("sweep_points = 2", "seeds = 0"), r"panel a: seeds: is 0"),
        ("one", FIGURE.replace("sweep_points = 2", "sweep_points = 1"), r"panel b: sweep_points: is 1"),
        ("one", f"{FIGURE}{SHOWN}draw = 'time'\nruns = 'one/b'\n", r"panel c: draw: is 'time'"),
        ("one", f"{FIGURE}{SHOWN}draw = 'sweep'\nruns = 'one/a'\n", r"panel c: draw: is 'sweep'"),
        ("one", f"{FIGURE}{SHOWN}draw = 'overhead'\nruns = 'one/a'\n", r"panel c: draw: is 'overhead', which shows no"),
        ("one", f"{FIGURE}{SHOWN}draw = 'time'\nruns = 'one/c'\n", r"panel c: runs: is 'one/c', which has no runs"),
        (
            "one",
            f"{FIGURE}{SHOWN}draw = 'time'\nruns = 'one/a'\nrecipe.run.rounds = 9\n",
            r"panel c: recipe: is given beside the runs of another panel",
        ),
    ],
)
def test_mistakes_are_named_with_their_place(folder, name, text, message):
    (folder / f"{name}.toml").write_text(text)
    with pytest.raises(InvalidInput, match=message):
        load_studies(["one"], "smoke", folder=folder)


def test_a_mistake_in_what_is_set_is_blamed_on_no_file(folder):
    with pytest.raises(InvalidInput, match=r"^--set: is 'run\.rounds'"):
        panels(folder, "paper", "run.rounds")


def test_seeds_may_be_given_instead_of_the_files(folder):
    (study,) = load_studies(["one"], "smoke", folder=folder, seeds=1)
    assert [panel.seeds for panel in study.panels] == [1, 1]


def test_a_folder_without_figures_is_refused(tmp_path):
    (tmp_path / "base.toml").write_text(BASE)
    with pytest.raises(InvalidInput, match="has no figure"):
        load_studies([], "paper", folder=tmp_path)


def test_an_unknown_figure_is_refused_with_the_known_ones(folder):
    with pytest.raises(InvalidInput, match=r"figure: 'two' is unknown\. .*one"):
        load_studies(["two"], "paper", folder=folder)


@pytest.mark.parametrize("scale", SCALES)
def test_the_papers_figures_are_all_there_at_every_scale(scale):
    folder = recipes_folder()
    names = study_names(folder)
    assert [study.figure for study in load_studies(names, scale, folder=folder)] == [
        f"Fig. {number}" for number in (2, 3, 5, 6, 7, 8, 9, 10, 11, 12)
    ]


def test_the_paper_scale_is_the_papers_table_of_parameters():
    studies = load_studies(study_names(recipes_folder()), "paper", folder=recipes_folder())
    for panel in (panel for study in studies for panel in study.panels):
        recipe = panel.recipe
        assert (recipe.training.batch_size, recipe.training.learning_rate, recipe.training.optimizer) == (
            16,
            5e-4,
            "sgd",
        )
        assert (recipe.fleet.base, recipe.fleet.devices) == ("paper", 20)
        assert recipe.model.charged_as is None
        assert (recipe.model.name, recipe.data.name) in (("vgg16", "cifar10"), ("resnet18", "cifar100"))
