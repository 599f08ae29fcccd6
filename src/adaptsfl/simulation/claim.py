"""The recipe of an experiment's folder, and what further calls may add to it.

A folder holds one experiment. A call may add anything that leaves its runs valid: policies, options of those that have
not run, fleets, seeds. A change that would make one of its runs invalid is refused.
"""

import json
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from adaptsfl.config import Recipe
from adaptsfl.errors import InvalidInput
from adaptsfl.files import replace_file
from adaptsfl.runs.folder import RECORD, RUN
from adaptsfl.runs.record import plain

RECIPE, TRAJECTORIES = "recipe.json", "trajectories"

FREE = ("seed", "targets", "checkpoint_every")  # keys of [run] that change no result: the last call's are stored
TABLES = ("options", "fleets")  # keys of [run] with one entry per policy or fleet, used by its runs only


def claim(folder: Path, recipe: Recipe, policies: Collection[str]) -> None:
    """Write the recipe to the folder, or refuse a folder whose runs would not be valid under this recipe.

    Args:
        policies: the policies that this call will run.
    """
    file = folder / RECIPE
    folder.mkdir(parents=True, exist_ok=True)
    mine: dict[str, Any] = plain(recipe.model_dump(mode="json", exclude={"run": {"policies"}}))
    theirs = _read(file)
    if file.exists() and _holds_results(folder):
        if theirs is None:
            problem, remedy = "is damaged: not valid JSON", "Restore it, or give another folder by --out"
            raise InvalidInput("", problem, remedy, source=str(file))
        mine = _joined(theirs, mine, _runs_in(folder), policies, file)
    if theirs != mine:
        replace_file(file, lambda path: path.write_text(json.dumps(mine, indent=1) + "\n"))


def _read(file: Path) -> dict[str, Any] | None:
    with suppress(OSError, ValueError):
        content = json.loads(file.read_text())
        if isinstance(content, dict) and isinstance(content.get("run"), dict):
            return content
    return None


def _holds_results(folder: Path) -> bool:
    """Whether the folder has trajectories or records; it has none if an error stopped every run at its start.

    Trajectories that experiments share are stored elsewhere, one file per recipe, and do not count.
    """
    files = [*folder.glob(f"{TRAJECTORIES}/*"), *folder.glob(f"*/{RECORD}")]
    return any(file.stat().st_size for file in files)


def _runs_in(folder: Path) -> list[tuple[str, str]]:
    """Return policy and fleet of every run with a record, except damaged ones, which are repeated anyway."""
    found = []
    for record in folder.glob(f"*/{RECORD}"):
        with suppress(OSError, ValueError, KeyError, TypeError):
            if record.stat().st_size:
                info = json.loads((record.parent / RUN).read_text())
                found.append((str(info["policy"]), str(info.get("fleet") or "")))
    return found


def _joined(
    theirs: dict[str, Any],
    mine: dict[str, Any],
    runs: Collection[tuple[str, str]],
    policies: Collection[str],
    file: Path,
) -> dict[str, Any]:
    """Return the merged recipe, or refuse the first key of `mine` that makes a run of the folder invalid."""
    key = _first_difference(_strict(theirs), _strict(mine))
    have_run = {"options": {policy for policy, _ in runs}, "fleets": {fleet for _, fleet in runs}}
    about_to_run = {"options": set(policies), "fleets": set(mine["run"]["fleets"])}
    tables: dict[str, dict[str, Any]] = {}
    for table in TABLES:
        old, new = theirs["run"].get(table) or {}, mine["run"][table]
        for name in sorted(have_run[table] & {*new, *about_to_run[table]}):
            key = key or _first_difference(old.get(name, {}), new.get(name, {}), f"run.{table}.{name}")
        # Entries that this call does not run are kept: another call may need them.
        kept = {name: value for name, value in old.items() if name not in about_to_run[table]}
        tables[table] = {**kept, **new}
    if key:
        remedy = "Give another folder by --out, or remove this one to begin anew"
        raise InvalidInput(key, "is another than in the experiment in this folder", remedy, source=str(file))
    return {**mine, "run": {**mine["run"], **tables}}


def _strict(recipe: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a recipe that must be equal for all runs of a folder."""
    return {**recipe, "run": {key: value for key, value in recipe["run"].items() if key not in (*FREE, *TABLES)}}


def _first_difference(theirs: Any, mine: Any, field: str = "") -> str:
    """Return the key at which two recipes first differ; empty if they are equal."""
    if theirs == mine:
        return ""
    if isinstance(theirs, Mapping) and isinstance(mine, Mapping):
        key = next(key for key in [*mine, *theirs] if theirs.get(key) != mine.get(key))
        return _first_difference(theirs.get(key), mine.get(key), f"{field}.{key}" if field else key)
    return field or "recipe"
