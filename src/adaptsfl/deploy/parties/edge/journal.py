"""The edge server's files: the record of its blocks, in the format of simulated runs, and one checkpoint."""

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from adaptsfl.deploy.layers_file import LayerStates, by_layer, named
from adaptsfl.deploy.terms import Terms
from adaptsfl.errors import InvalidInput, first_line
from adaptsfl.files import about_tensors, replace_file, write_tensors, writing
from adaptsfl.runs.folder import RECORD, RUN, append_block, read_blocks, write_run
from adaptsfl.runs.record import Block, block_line

CHECKPOINT = "edge.safetensors"
ANEW = "Begin anew in an empty folder"


@dataclass
class RunProgress:
    """The progress of a run.

    Attributes:
        version: the version of the averaged layers at the fed server.
        deepest: L_c, above which layers are common.
        evaluated_at: the last round after which the model was evaluated.
        seconds: since the run began, without the time in which the server was down or waited for the first devices.
        divergence: of every client-specific layer when it was last averaged, if it is measured.
    """

    rounds: int = 0
    blocks: int = 0
    version: int = 0
    deepest: int = 0
    evaluated_at: int = 0
    seconds: float = 0.0
    divergence: tuple[float, ...] = ()


class Journal:
    """The folder of a run."""

    def __init__(self, folder: Path, terms: Terms) -> None:
        self.folder, self.terms = folder, terms

    def begin(self) -> tuple[RunProgress, LayerStates, list[Block]] | None:
        """Return the progress, common layers and blocks of an earlier process; None if there was none."""
        place = self.folder / CHECKPOINT
        if not place.exists():
            self._write_record([])
            return None
        try:
            about = json.loads(about_tensors(place)["state"])
            states = by_layer(load_file(place))
            terms, progress = about["terms"], RunProgress(**about["progress"])
        except (KeyError, ValueError, TypeError, OSError, SafetensorError) as error:
            raise InvalidInput("checkpoint", f"cannot be read ({first_line(error)})", ANEW, source=str(place)) from None
        if terms != self.terms.to_json():
            problem = "is of a run with another recipe"
            raise InvalidInput("checkpoint", problem, "Give a folder of its own to every run", source=str(place))
        states.pop(0, None)
        record = self.folder / RECORD
        # Blocks after the checkpoint are trained again.
        blocks = [block for block in read_blocks(record) if block.last_round <= progress.rounds]
        if len(blocks) != progress.blocks:
            problem = f"has {len(blocks)} of the {progress.blocks} blocks before the checkpoint"
            raise InvalidInput("record", problem, f"Restore it. {ANEW}, if you cannot", source=str(record))
        self._write_record(blocks)
        return progress, states, blocks

    @property
    def done(self) -> bool:
        """Whether the run has ended, and everything is written."""
        return self._run().get("status") == "done"

    @property
    def ended_by(self) -> str:
        """What ended the run, once it is done."""
        return str(self._run().get("ended_by", ""))

    def add(self, block: Block) -> None:
        """Write the line of a block; it is on the disk before a checkpoint says that the block is done."""
        with self._writing(RECORD), (self.folder / RECORD).open("a", encoding="utf-8") as file:
            append_block(file, block)
            os.fsync(file.fileno())

    def evaluated(self, round_: int, accuracy: float, loss: float) -> None:
        """Add the last evaluation of a run to its last block."""
        *blocks, last = read_blocks(self.folder / RECORD)
        row = (round_, last.time_s, accuracy, loss)
        self._write_record([*blocks, dataclasses.replace(last, evaluations=(*last.evaluations, row))])

    def save(self, progress: RunProgress, common: LayerStates) -> None:
        """Write the checkpoint: all that a restarted server needs, in one file that is replaced atomically."""
        about = {"terms": self.terms.to_json(), "progress": asdict(progress)}
        tensors = named(common) or {"0.nothing": torch.zeros(1)}
        with self._writing(CHECKPOINT):
            replace_file(
                self.folder / CHECKPOINT, lambda path: write_tensors(path, tensors, {"state": json.dumps(about)})
            )

    def write_run(self, info: Mapping[str, Any]) -> None:
        """Write run.json, in the format of simulated runs."""
        with self._writing(RUN):
            write_run(self.folder, info)

    def _run(self) -> dict[str, Any]:
        """Return the content of run.json; an empty dictionary if it cannot be read."""
        with suppress(OSError, ValueError):
            content = json.loads((self.folder / RUN).read_text(encoding="utf-8"))
            if isinstance(content, dict):
                return content
        return {}

    def _write_record(self, blocks: Sequence[Block]) -> None:
        text = "".join(f"{block_line(block)}\n" for block in blocks)
        with self._writing(RECORD):
            replace_file(self.folder / RECORD, lambda path: path.write_text(text, encoding="utf-8"))

    def _writing(self, name: str) -> AbstractContextManager[None]:
        remedy = "Free some space, or give a folder that can be written; the last checkpoint is still there"
        return writing(self.folder / name, remedy)
