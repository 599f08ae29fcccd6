"""A file of training results, block by block: blocks that recur are looked up instead of trained again."""

import errno
import json
import os
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from adaptsfl.runs.backend import Learned
from adaptsfl.runs.record import plain
from adaptsfl.training.estimate import ConstantsSample


class Store:
    """The results of blocks by key, in a file to which any number of runs and processes may append.

    Attributes:
        known: the results that this process has read or added; `find` also reads what others have added since.
    """

    def __init__(self, file: Path | None = None) -> None:
        self.file = file
        self.known: dict[str, Learned] = {}
        self._read_bytes = 0  # of the file, complete lines only
        self._read_on()

    def find(self, key: str) -> Learned | None:
        """Return the stored outcome of a block, or None."""
        if key not in self.known:
            self._read_on()
        return self.known.get(key)

    def add(self, key: str, learned: Learned) -> None:
        """Keep the outcome of a block, in memory and in the file."""
        self.known[key] = learned
        if self.file is not None:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            data = plain(learned)
            _append_line(self.file, json.dumps({"key": key, "learned": data, "check": _check(key, data)}))

    def _read_on(self) -> None:
        """Read what was added to the file since it was last read."""
        if self.file is None or not self.file.exists():
            return
        with self.file.open("rb") as file:
            file.seek(self._read_bytes)
            lines = file.read().split(b"\n")
        self._read_bytes += sum(len(line) + 1 for line in lines[:-1])  # the last line may be incomplete
        for line in lines:
            try:
                entry = json.loads(line)
                if entry["check"] == _check(entry["key"], entry["learned"]):
                    self.known.setdefault(entry["key"], _from_data(entry["learned"]))
            except (ValueError, KeyError, TypeError):
                continue  # incomplete after a crash, or damaged: the block is trained again


def _append_line(place: Path, line: str) -> None:
    """Append by one single write, so that lines of several processes do not mix."""
    handle = os.open(place, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        size = os.fstat(handle).st_size
        # The last line is incomplete after a crash, or is being written right now: then an empty line does no harm.
        torn = size > 0 and os.pread(handle, 1, size - 1) != b"\n"
        content = (("\n" if torn else "") + line + "\n").encode()
        if os.write(handle, content) < len(content):  # readers skip the incomplete line
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(place))
    finally:
        os.close(handle)


def _check(key: str, data: Any) -> str:
    """Return a checksum that detects damaged lines."""
    return sha256(f"{key} {json.dumps(data)}".encode()).hexdigest()[:16]


def _from_data(data: dict[str, Any]) -> Learned:
    constants = data["constants"]
    if constants is not None:
        constants = ConstantsSample(
            constants["smoothness"],
            tuple(constants["devices"]),
            np.array(constants["squared_norms"], dtype=np.float64),
            np.array(constants["variance"], dtype=np.float64),
        )
    evaluations = tuple((int(t), float(accuracy), float(loss)) for t, accuracy, loss in data["evaluations"])
    wires = data.get("wires", {})  # missing in older stores
    return Learned(tuple(data["losses"]), evaluations, tuple(data["divergence"]), constants, wires)
