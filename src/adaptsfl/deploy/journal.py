"""What the edge server keeps on disk: the record of its blocks, as simulated runs have it, and one checkpoint."""

import dataclasses
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

import adaptsfl
from adaptsfl.costs import CutCosts
from adaptsfl.deploy.layers_file import LayerStates, by_layer, named
from adaptsfl.deploy.terms import Terms
from adaptsfl.errors import InvalidInput, NotWritten, first_line
from adaptsfl.files import about_tensors, replace_file, write_tensors
from adaptsfl.simulation.folder import RECORD, RUN, append_block, write_run
from adaptsfl.simulation.record import Block, block_line, block_of

CHECKPOINT = "edge.safetensors"
ANEW = "Begin anew in an empty folder"


@dataclass
class Progress:
    """How far a run is.

    Attributes:
        version: of the averaged layers at the fed server.
        deepest: L_c, above which layers are common.
        evaluated_at: the last round after which the model was evaluated.
        seconds: since the run began, without the time in which the server was down or waited for the first devices.
        ended_by: what ended it; empty while it goes on.
    """

    rounds: int = 0
    blocks: int = 0
    version: int = 0
    deepest: int = 0
    evaluated_at: int = 0
    seconds: float = 0.0
    ended_by: str = ""


class Journal:
    """The folder of a run."""

    def __init__(self, folder: Path, terms: Terms) -> None:
        self.folder, self.terms = folder, terms
        self._last: Block | None = None  # not written yet: its evaluation is still to come

    def begin(self) -> tuple[Progress, LayerStates] | None:
        """Return where an earlier life of this run ended, and the common layers then; None if it had none."""
        place = self.folder / CHECKPOINT
        if not place.exists():
            self._write_record([])
            return None
        try:
            about = json.loads(about_tensors(place)["state"])
            states = by_layer(load_file(place))
            told, last, progress = about["terms"], about["last"], Progress(**about["progress"])
        except (KeyError, ValueError, TypeError, OSError, SafetensorError) as error:
            raise InvalidInput("checkpoint", f"cannot be read ({first_line(error)})", ANEW, source=str(place)) from None
        if told != self.terms.to_json():
            problem = "is of a run with another recipe"
            raise InvalidInput("checkpoint", problem, "Give a folder of its own to every run", source=str(place))
        states.pop(0, None)
        self._last = None if last is None else block_of(json.loads(last))
        self._drop_later_blocks(progress)
        return progress, states

    @property
    def done(self) -> bool:
        """Whether the run has ended, and everything is written."""
        try:
            return bool(json.loads((self.folder / RUN).read_text(encoding="utf-8"))["status"] == "done")
        except (OSError, ValueError, KeyError, TypeError):
            return False

    def note(self, block: Block) -> None:
        """Take in a block that is done; the one before it is written."""
        self.flush()
        self._last = block

    def evaluated(self, round_: int, accuracy: float, loss: float) -> None:
        """Add an evaluation to the last block."""
        if self._last is not None:
            row = (round_, self._last.time_s, accuracy, loss)
            self._last = dataclasses.replace(self._last, evaluations=(*self._last.evaluations, row))

    def flush(self) -> None:
        """Write what is still to be written."""
        if self._last is not None:
            with self._writing(RECORD), (self.folder / RECORD).open("a", encoding="utf-8") as file:
                append_block(file, self._last)
            self._last = None

    def save(self, progress: Progress, common: LayerStates) -> None:
        """Write the checkpoint: all that a restarted server needs, in one file that is there whole or not at all."""
        last = None if self._last is None else block_line(self._last)
        about = {"terms": self.terms.to_json(), "progress": asdict(progress), "last": last}
        tensors = named(common) or {"0.nothing": torch.zeros(1)}
        with self._writing(CHECKPOINT):
            replace_file(
                self.folder / CHECKPOINT, lambda path: write_tensors(path, tensors, {"state": json.dumps(about)})
            )

    def write_run(self, status: str, progress: Progress, ended_by: str, facts: dict[str, Any], costs: CutCosts) -> None:
        """Write run.json, as simulated runs have it."""
        recipe, run = self.terms.recipe, self.terms.run
        with self._writing("run.json"):
            write_run(
                self.folder,
                {
                    "name": recipe.name,
                    "seed": self.terms.seed,
                    "recipe": recipe.model_dump(mode="json"),
                    "versions": {"adaptsfl": adaptsfl.__version__, "torch": torch.__version__},
                    "batch_size": self.terms.batch_size,
                    "costs": {name: value for name, value in asdict(costs).items() if name != "names"},
                    "targets": run.targets,
                    "status": status,
                    "ended_by": ended_by,
                    "wall_s": progress.seconds,
                    "rounds": progress.rounds if status == "done" else None,
                    "real": True,
                    **facts,
                },
            )

    def _drop_later_blocks(self, progress: Progress) -> None:
        """Remove the lines of blocks that are trained again, or that are still to be written."""
        first = self._last.first_round if self._last is not None else progress.rounds + 1
        record = self.folder / RECORD
        lines = record.read_text(encoding="utf-8").splitlines() if record.exists() else []
        self._write_record([line for line in lines if _first_round(line) < first])

    def _write_record(self, lines: list[str]) -> None:
        text = "".join(f"{line}\n" for line in lines)
        with self._writing(RECORD):
            replace_file(self.folder / RECORD, lambda path: path.write_text(text, encoding="utf-8"))

    def _writing(self, name: str) -> "_Writing":
        return _Writing(self.folder / name)


class _Writing:
    """Say in words that a file cannot be written."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __enter__(self) -> None:
        return

    def __exit__(self, _kind: Any, error: BaseException | None, _trace: Any) -> None:
        if isinstance(error, OSError):
            remedy = "Free some space, or give a folder that can be written; the last checkpoint is still there"
            raise NotWritten(f"{self.place}: cannot be written ({first_line(error)}). {remedy}.") from error


def _first_round(line: str) -> float:
    try:
        return float(json.loads(line)["first_round"])
    except (ValueError, KeyError, TypeError):
        return float("inf")  # torn by a crash
