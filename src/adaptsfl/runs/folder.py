"""The folder of a run: run.json says what ran and how it ended, record.jsonl has one line per block.

EXPERIMENT/
  adaptsfl-seed0/   run.json  record.jsonl  …
  rma+rms-seed0/    …
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TextIO

import numpy as np
import pydantic
from pydantic import InstanceOf, Strict

from adaptsfl.checks import FloatArray, IntArray, short
from adaptsfl.config.parsing import explained
from adaptsfl.costs import CutCosts
from adaptsfl.errors import InvalidInput, naming
from adaptsfl.files import replace_file
from adaptsfl.fleet import Server
from adaptsfl.runs.record import Block, Whole, block_line, block_of, plain

FORMAT = 1  # increased when the meaning of run.json or record.jsonl changes
RUN, RECORD = "run.json", "record.jsonl"


class Evaluations(NamedTuple):
    """Every evaluation of a run, in order: entry k of each array belongs to the k-th."""

    rounds: IntArray
    seconds: FloatArray
    accuracies: FloatArray
    losses: FloatArray


@dataclass(frozen=True)
class Run:
    """One policy with one seed: what its run.json says, and the blocks of its record.

    Attributes:
        folder: where it was read from.
        name: of the experiment.
        policy, title: the policy's name in recipes, and its name in reports.
        recipe: the resolved recipe, nested.
        devices, layers: names.
        targets: accuracies for which times are compared.
        status: running, done, stopped or failed.
        ended_by: what ended it: rounds, seconds, target, converged, …; empty while it runs.
        wall_s: seconds of real time that it took.
        trainer: its name (see `policies.policy`); if devices take turns, there is no round in which all work at once.
        rounds_done: the rounds of a finished run, from run.json; None before the end, and for older runs.
        fleet: its name, where the experiment has several.
        epoch_rounds: rounds in which the device with the most samples sees all of them once; None for older runs.
        real: whether its seconds are those of a deployment, and not virtual.
        identity: all that it depended on, by name (see `simulation.validity`); None for older runs.
    """

    folder: Path
    name: str
    policy: str
    title: str
    seed: Whole
    recipe: dict[str, Any]
    versions: dict[str, str]
    devices: tuple[str, ...]
    layers: tuple[str, ...]
    batch_size: Whole
    costs: InstanceOf[CutCosts]
    server: InstanceOf[Server]
    targets: tuple[Annotated[float, Strict()], ...]
    status: str
    ended_by: str
    wall_s: Annotated[float, Strict()]
    blocks: tuple[Block, ...]
    trainer: str = "engine"
    rounds_done: int | None = None
    fleet: str = ""
    epoch_rounds: int | None = None
    real: bool = False
    identity: dict[str, str | None] | None = None

    @property
    def whole(self) -> bool:
        """Whether it is done and its record is complete: a power failure can truncate a file."""
        return self.status == "done" and bool(self.blocks) and self.rounds_done in (None, self.rounds)

    @cached_property
    def evaluations(self) -> Evaluations:
        """Rounds, virtual seconds, test accuracies and test losses."""
        rows = [row for block in self.blocks for row in block.evaluations]
        columns = np.array(rows, dtype=np.float64).reshape(-1, 4).T
        return Evaluations(columns[0].astype(np.int64), columns[1], columns[2], columns[3])

    @property
    def rounds(self) -> int:
        """Rounds done."""
        return self.blocks[-1].first_round + self.blocks[-1].rounds - 1 if self.blocks else 0

    @property
    def time_s(self) -> float:
        """Virtual seconds done."""
        return self.blocks[-1].time_s if self.blocks else 0.0

    @property
    def bits(self) -> float:
        """Bits sent over all links."""
        return sum(block.bits for block in self.blocks)

    @property
    def final_accuracy(self) -> float | None:
        """The last evaluation's accuracy, None before the first."""
        accuracies = self.evaluations.accuracies
        return float(accuracies[-1]) if accuracies.size else None

    @property
    def best_accuracy(self) -> float | None:
        """The highest accuracy of all evaluations, None before the first."""
        accuracies = self.evaluations.accuracies
        known = accuracies[~np.isnan(accuracies)]
        return float(known.max()) if known.size else None

    def time_to(self, target: float) -> float | None:
        """Return the virtual seconds at the first evaluation with at least that accuracy, None if there is none."""
        first = self._first(target)
        return None if first is None else float(self.evaluations.seconds[first])

    def rounds_to(self, target: float) -> int | None:
        """Return the round of the first evaluation with at least that accuracy, None if there is none."""
        first = self._first(target)
        return None if first is None else int(self.evaluations.rounds[first])

    def _first(self, target: float) -> int | None:
        reached = np.flatnonzero(self.evaluations.accuracies >= target)
        return int(reached[0]) if reached.size else None


_READER = pydantic.TypeAdapter(Run)


def find_runs(paths: Iterable[str | Path]) -> list[Run]:
    """Read the runs in `paths`: folders of single runs, and of experiments with several; each run once."""
    folders: dict[Path, Path] = {}
    for path in map(Path, paths):
        found = [path] if (path / RUN).is_file() else _runs_inside(path)
        folders.update({folder.resolve(): folder for folder in found})
    return [read_run(folder) for folder in folders.values()]


def _runs_inside(path: Path) -> list[Path]:
    """Return the folders in `path` that hold a run, sorted with numbers by value: seed2 before seed10."""
    if not path.is_dir():
        raise InvalidInput("", "is not a folder", "Give the folder of an experiment or of a run", source=str(path))
    found = [folder for folder in path.iterdir() if (folder / RUN).is_file()]
    if not found:
        raise InvalidInput(
            "", f"holds no run: no {RUN} in it or in its folders", "Give what simulate wrote", source=str(path)
        )
    return sorted(found, key=_natural)


def _natural(folder: Path) -> list[tuple[str, int]]:
    return [(text, int(number or 0)) for text, number in re.findall(r"(\D*)(\d*)", folder.name)]


def read_run(folder: str | Path) -> Run:
    """Read one run: finished, still running, or interrupted."""
    folder = Path(folder)
    source = folder / RUN
    try:
        info = json.loads(source.read_bytes())
    except OSError as error:
        raise InvalidInput("", f"cannot be read: {error.strerror}", "Check the path", source=str(source)) from None
    except ValueError as error:
        line = getattr(error, "lineno", 1)
        raise _damaged(source, line, str(error)) from None
    with naming(str(source)):
        return _run(folder, info, read_blocks(folder / RECORD))


def _run(folder: Path, info: Any, blocks: tuple[Block, ...]) -> Run:
    if not isinstance(info, dict) or info.get("format") != FORMAT:
        found = info.get("format") if isinstance(info, dict) else None
        raise InvalidInput(
            "format", f"is {short(found)}, this version reads {FORMAT}", "Use the version of AdaptSFL that wrote it"
        )
    given = {"ended_by": "", "wall_s": 0.0, **{key: value for key, value in info.items() if value is not None}}
    given |= {"folder": folder, "blocks": blocks, "rounds_done": info.get("rounds")}
    try:
        given["costs"] = CutCosts(**{**given.get("costs", {}), "names": tuple(given.get("layers", ()))})
        given["server"] = Server(**given.get("server", {}))
    except TypeError as error:
        raise InvalidInput("costs", f"do not fit: {error}", "Give the fields of CutCosts and of Server") from None
    try:
        run: Run = _READER.validate_python(given)
    except pydantic.ValidationError as error:
        raise explained(error) from None
    _check_cuts(folder, blocks, len(run.devices), run.costs.layers)
    return run


def _check_cuts(folder: Path, blocks: tuple[Block, ...], devices: int, layers: int) -> None:
    """Refuse a record that was copied from another run, before it leads to wrong figures."""
    for line, block in enumerate(blocks, 1):
        source = f"{folder / RECORD}, line {line}"
        if len(block.cuts) != devices:
            raise InvalidInput("cuts", f"has {len(block.cuts)} entries for {devices} devices", _ANOTHER, source=source)
        if not all(0 <= cut <= layers for cut in block.cuts):
            raise InvalidInput("cuts", f"goes beyond the model's {layers} layers", _ANOTHER, source=source)


_ANOTHER = "Is this another run's record?"


def read_blocks(path: Path) -> tuple[Block, ...]:
    """Read a record. An incomplete last line, written when the run was interrupted, does not count."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return ()  # nothing was recorded yet
    except OSError as error:
        raise InvalidInput("", f"cannot be read: {error.strerror}", "Check the path", source=str(path)) from None
    blocks = []
    lines = content.split(b"\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            blocks.append(block_of(json.loads(line)))
        except ValueError as error:
            if number == len(lines):
                break
            raise _damaged(path, number, str(error)) from None
        except InvalidInput as error:
            raise error.from_file(f"{path}, line {number}") from None
    return tuple(blocks)


def _damaged(path: Path, line: int, why: str) -> InvalidInput:
    return InvalidInput("", f"is damaged: {why}", "Restore the file or run again", source=f"{path}, line {line}")


def append_block(file: TextIO, block: Block) -> None:
    """Write one block to an open record, so that a crash right after does not lose it."""
    file.write(block_line(block) + "\n")
    file.flush()


def write_run(folder: str | Path, info: Mapping[str, Any]) -> None:
    """Write run.json, creating its folder; readers see the old file or the new one, never a part."""
    folder = Path(folder)
    text = json.dumps(plain({"format": FORMAT, **info}), allow_nan=False, indent=1, ensure_ascii=False)

    def fill(file: Path) -> None:
        file.write_text(text + "\n", encoding="utf-8")
        file.chmod(0o644)  # otherwise only its owner could read it

    replace_file(folder / RUN, fill)
