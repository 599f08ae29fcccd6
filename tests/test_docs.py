"""What the documentation says must be so."""

import contextlib
import dataclasses
import importlib
import io
import json
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from adaptsfl.cli import app
from adaptsfl.config import (
    AdaptConfig,
    DeployConfig,
    FaultsConfig,
    FleetConfig,
    RunConfig,
    ScheduleConfig,
    TrainingConfig,
    load_fleet,
    load_recipe,
    read_toml,
)
from adaptsfl.fleet import resources_from
from adaptsfl.loading import load_problem
from adaptsfl.policies import POLICIES, option_names
from adaptsfl.simulation.experiment import Experiment

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


def blocks(path: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", path.read_text(), re.DOTALL)


def symbol_names() -> list[str]:
    return re.findall(r"`(adaptsfl[\w.]+)`", (DOCS / "symbols.md").read_text())


@pytest.mark.parametrize("name", symbol_names())
def test_every_name_in_the_symbol_table_exists(name):
    parts = name.split(".")
    for split in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:split]))
        except ModuleNotFoundError:
            continue
        break
    for part in parts[split:]:
        fields = {field.name for field in dataclasses.fields(found)} if dataclasses.is_dataclass(found) else set()
        assert hasattr(found, part) or part in fields, f"{name}: {found} has no {part}"
        found = getattr(found, part, None)


def test_the_symbol_table_is_not_empty():
    assert len(symbol_names()) > 40


@pytest.mark.parametrize(("language", "suffix"), [("json", ".json"), ("toml", ".toml")])
def test_example_files_in_the_formats_page_can_be_planned(tmp_path, language, suffix):
    (example,) = blocks(DOCS / "formats.md", language)
    file = tmp_path / f"example{suffix}"
    file.write_text(example)
    answer = CliRunner().invoke(app, ["plan", str(file), "--json"])
    assert answer.exit_code == 0, answer.output
    assert json.loads(answer.stdout)["status"] == "optimal"


def test_example_trace_in_the_formats_page_can_be_planned(tmp_path):
    (trace,) = blocks(DOCS / "formats.md", "csv")
    (tmp_path / "trace.csv").write_text(trace)
    recipe = (ROOT / "recipes" / "vgg16-paper.toml").read_text()
    (tmp_path / "recipe.toml").write_text(re.sub(r"\[fleet\](\n.+)+", '[fleet]\ntrace = "trace.csv"', recipe))
    assert load_problem(tmp_path / "recipe.toml").fleet.names == ("phone", "board")


@pytest.mark.parametrize("recipe", sorted((ROOT / "recipes").glob("*.toml")), ids=lambda path: path.stem)
def test_every_recipe_can_be_planned_or_simulated(recipe, tmp_path):
    if "model" not in read_toml(recipe):  # a fleet alone, for `up --links`
        assert resources_from(load_fleet(recipe)).at(0).size
        return
    if load_recipe(recipe).run is not None:
        Experiment(load_recipe(recipe), tmp_path)  # with all its checks but those of the data
        return
    answer = CliRunner().invoke(app, ["plan", str(recipe), "--json"])
    assert answer.exit_code == 0, answer.output


def readme_commands() -> list[str]:
    """The `adaptsfl` commands in the README's shell blocks, but for those that train: guides of their own run these."""
    lines = [line for block in blocks(ROOT / "README.md", "sh") for line in block.splitlines()]
    commands = [line.split("adaptsfl ", 1)[1].split("#")[0] for line in lines if "bin/adaptsfl " in line]
    elsewhere = ("simulate", "reproduce", "report", "retime", "up")
    return [command for command in commands if command.split()[0] not in elsewhere]


@pytest.mark.parametrize("command", readme_commands())
def test_readme_commands_run(command, monkeypatch):
    monkeypatch.chdir(ROOT)
    answer = CliRunner().invoke(app, shlex.split(command))
    assert answer.exit_code == 0, answer.output


def test_the_readme_shows_commands():
    assert len(readme_commands()) >= 2


def test_relative_links_lead_somewhere():
    for page in [ROOT / "README.md", *DOCS.rglob("*.md")]:
        for link in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
            assert (page.parent / link).exists(), f"{page}: {link}"


def test_the_readme_shows_what_the_command_prints(monkeypatch):
    """But for the time that the solver took."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "80")
    printed = CliRunner().invoke(app, ["plan", "recipes/vgg16-paper.toml"]).stdout
    (shown,) = blocks(ROOT / "README.md", "text")
    assert without_solve_time(shown) == without_solve_time(printed)


def without_solve_time(text: str) -> list[str]:
    lines = re.sub(r"(proven optimal, in) [\d.]+ \w+", r"\1 …", text).splitlines()
    return [line.rstrip() for line in lines if line.strip()]


@pytest.mark.parametrize("guide", ["models", "training", "policies", "simulation", "scale"])
def test_guides_print_what_they_say(guide, tmp_path, monkeypatch):
    """All Python blocks of a page run one after the other; blocks without a language are what they print."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    page = DOCS / f"{guide}.md"
    printed, said = io.StringIO(), ""
    scope: dict[str, object] = {"__name__": "guide"}
    for language, text in re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE):
        if language == "python":
            with contextlib.redirect_stdout(printed):
                exec(compile(text, str(page), "exec"), scope)
        elif not language:
            said += text
    assert said
    assert printed.getvalue() == said


def test_the_example_of_links_on_the_page_of_deployment_can_be_used(tmp_path):
    (example,) = (text for text in blocks(DOCS / "deploy.md", "toml") if "redraw" in text)
    (tmp_path / "links.toml").write_text(example)
    fleet = resources_from(load_fleet(tmp_path / "links.toml")).at(0)
    assert (fleet.uplink_s > 0).all()
    assert fleet.server.to_fed_bps == 500e6


def test_the_page_of_deployment_has_every_key():
    text = (DOCS / "deploy.md").read_text()
    for key in DeployConfig.model_fields:
        assert re.search(rf"\b{key}\b", text), key


def test_the_page_of_policies_has_every_policy_with_its_options_and_every_key_of_faults():
    text = (DOCS / "policies.md").read_text()
    for name in POLICIES:
        (row,) = re.findall(rf"^\| `{re.escape(name)}` \|.*\|$", text, flags=re.MULTILINE)
        assert set(re.findall(r"`(\w+)`", row.split("|")[-2])) == set(option_names(name)), name
    for key in FaultsConfig.model_fields:
        assert f"`{key}`" in text


def test_the_commands_of_the_simulation_page_run(tmp_path, monkeypatch):
    """One after the other, on the page's own recipe, shortened."""
    monkeypatch.chdir(tmp_path)
    page = DOCS / "simulation.md"
    recipe, fleets, *_ = blocks(page, "toml")
    (tmp_path / "mine.toml").write_text(recipe.replace("rounds = 100", "rounds = 4"))
    (tmp_path / "phones.toml").write_text(fleets)
    commands = [line for block in blocks(page, "sh") for line in block.splitlines()]
    assert len(commands) >= 5
    for command in commands:
        answer = CliRunner().invoke(app, shlex.split(command.split("#")[0])[1:])
        assert answer.exit_code == 0, (command, answer.output)


def test_the_commands_of_the_security_page_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    commands = [line for block in blocks(DOCS / "security.md", "sh") for line in block.splitlines()]
    assert len(commands) >= 3
    for command in commands:
        answer = CliRunner().invoke(app, shlex.split(command.split("#")[0])[1:])
        assert answer.exit_code == 0, (command, answer.output)
        assert "made in certs" in answer.stdout, command


@pytest.mark.parametrize("section", [RunConfig, AdaptConfig, TrainingConfig, ScheduleConfig, FleetConfig, FaultsConfig])
def test_the_page_of_formats_has_every_key_of_a_recipe(section):
    text = (DOCS / "formats.md").read_text()
    for key in section.model_fields:
        assert re.search(rf"`{key}`|^{key} = ", text, flags=re.MULTILINE), key
