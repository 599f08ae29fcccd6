"""Read recipes and fleets (TOML) and planning problems (JSON) from files."""

import json
import tomllib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from adaptsfl.config.parsing import parse
from adaptsfl.config.sections import FleetConfig, FleetFile, ProblemFile, Recipe
from adaptsfl.errors import InvalidInput

# Keys whose values are paths, relative to the file that contains them; * matches any key.
PATHS = (
    ("fleet", "trace"),
    ("faults", "trace"),
    ("data", "path"),
    ("data", "cache"),
    ("data", "partition", "files"),
    ("run", "fleets", "*", "trace"),
)


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe; paths in it are relative to its folder.

    Args:
        overrides: values that replace those of the file, as section.key=value.
    """
    return parse(Recipe, _read_beside(path, overrides), source=str(path))


def load_fleet(path: Path, overrides: Sequence[str] = ()) -> FleetConfig:
    """Read the [fleet] of a recipe, or of a TOML file that contains only a fleet."""
    content = _read_beside(path, overrides)
    section: type[Recipe | FleetFile] = Recipe if "model" in content else FleetFile
    return parse(section, content, source=str(path)).fleet


def load_problem_file(path: Path) -> ProblemFile:
    """Read a planning problem."""
    try:
        content = json.loads(_read(path), object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        raise InvalidInput("", f"is not valid JSON: {error}", "Correct the syntax", source=str(path)) from None
    return parse(ProblemFile, content, source=str(path))


def read_toml(path: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Return the content of a TOML file with the overrides applied."""
    try:
        content = tomllib.loads(_read(path))
    except (ValueError, RecursionError) as error:
        raise InvalidInput("", f"is not valid TOML: {error}", "Correct the syntax", source=str(path)) from None
    for override in overrides:
        override_key(content, override)
    return content


def override_key(content: dict[str, Any], override: str) -> None:
    """Set a key of nested tables, given as section.key=value: a value that is not valid TOML is text."""
    dotted, equals, text = override.partition("=")
    *tables, key = _key_parts(dotted.strip())
    if not equals or not key:
        raise InvalidInput("--set", f"is {override!r}", "Give section.key=value, for example --set run.rounds=50")
    for name in tables:
        content = content.setdefault(name, {})
        if not isinstance(content, dict):
            raise InvalidInput("--set", f"is {override!r}, but {name!r} holds no keys", "Give a key of a section")
    try:
        content[key] = tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, RecursionError):
        content[key] = text.strip()


def _key_parts(dotted: str) -> list[str]:
    """Return the names in a dotted key; quotes protect a name that contains a dot."""
    try:
        content: Any = tomllib.loads(f"{dotted} = 0")
    except tomllib.TOMLDecodeError:  # such as rma+rms, which TOML would want in quotes
        return dotted.split(".")
    parts = []
    while isinstance(content, dict):
        (name, content) = next(iter(content.items()))
        parts.append(name)
    return parts


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise InvalidInput(twice, "appears twice in one table", "Keep one of them")
    return content


def _read_beside(path: Path, overrides: Sequence[str]) -> dict[str, Any]:
    content = read_toml(path, overrides)
    for keys in PATHS:
        content = _beside(path.parent, content, keys)
    return content


def _beside(folder: Path, content: Any, keys: Sequence[str]) -> Any:
    """Return `content` with the paths under these keys relative to `folder`; `parse` reports wrong types."""
    if keys and isinstance(content, dict):
        first, *others = keys
        names = list(content) if first == "*" else {first} & set(content)
        return {**content, **{name: _beside(folder, content[name], others) for name in names}}
    if not keys and isinstance(content, list):
        return [_beside(folder, item, ()) for item in content]
    return str(folder / content) if not keys and isinstance(content, str) else content


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        reason = error.strerror or str(error)
        raise InvalidInput("", f"cannot be read: {reason}", "Check the path", source=str(path)) from None
    except UnicodeDecodeError:
        raise InvalidInput("", "is not UTF-8 text", "Save it as UTF-8", source=str(path)) from None
