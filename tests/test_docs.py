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
from adaptsfl.config import FaultsConfig
from adaptsfl.loading import load_problem
from adaptsfl.policies import POLICIES, option_names

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
def test_every_recipe_can_be_planned(recipe):
    answer = CliRunner().invoke(app, ["plan", str(recipe), "--json"])
    assert answer.exit_code == 0, answer.output


def readme_commands() -> list[str]:
    """The `adaptsfl` commands in the README's shell blocks."""
    lines = [line for block in blocks(ROOT / "README.md", "sh") for line in block.splitlines()]
    return [line.split("adaptsfl ", 1)[1].split("#")[0] for line in lines if "adaptsfl " in line and "pip" not in line]


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


@pytest.mark.parametrize("guide", ["models", "training", "policies"])
def test_guides_print_what_they_say(guide):
    """All Python blocks of a page run one after the other; blocks without a language are what they print."""
    page = DOCS / f"{guide}.md"
    printed, said = io.StringIO(), ""
    scope: dict[str, object] = {"__name__": "guide"}
    for language, text in re.findall(r"```(python)?\n(.*?)```", page.read_text(), flags=re.DOTALL):
        if language:
            with contextlib.redirect_stdout(printed):
                exec(compile(text, str(page), "exec"), scope)
        else:
            said += text
    assert said
    assert printed.getvalue() == said


def test_the_page_of_policies_has_every_policy_with_its_options_and_every_key_of_faults():
    text = (DOCS / "policies.md").read_text()
    for name in POLICIES:
        (row,) = re.findall(rf"^\| `{re.escape(name)}` \|.*\|$", text, flags=re.MULTILINE)
        assert set(re.findall(r"`(\w+)`", row.split("|")[-2])) == set(option_names(name)), name
    for key in FaultsConfig.model_fields:
        assert f"`{key}`" in text
