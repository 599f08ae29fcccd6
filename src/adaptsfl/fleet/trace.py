"""Traces: a fleet's resources recorded as CSV, and replayed.

A row gives one device's rates from its round on, until the device's next row; an empty cell means "as before". The row
of the device called "server" gives the edge server: its flops, and its links to and from the fed server.
"""

import csv
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from adaptsfl import checks
from adaptsfl.errors import InvalidInput, naming
from adaptsfl.fleet.fleet import RATES, Fleet, Server, memory_limits

TRACE_COLUMNS = ("round", "device", *RATES)
MEMORY = "memory_bytes"  # an optional column; without it there are no limits
SERVER_ROW = "server"
_SERVER_COLUMNS = {"flops": "flops", "fed_uplink_bps": "to_fed_bps", "fed_downlink_bps": "from_fed_bps"}


@dataclass(frozen=True)
class TraceResources:
    """A replayed fleet: after the trace's end its last entry stays valid, or the trace starts again if it `repeats`."""

    rounds: tuple[int, ...]
    fleets: tuple[Fleet, ...]
    repeats: bool = False

    def at(self, round_: int) -> Fleet:
        """Return the fleet as recorded for that round."""
        if self.repeats:
            round_ %= self.rounds[-1] + 1
        return self.fleets[int(np.searchsorted(self.rounds, round_, side="right")) - 1]


def read_trace(path: Path, *, repeats: bool = False) -> TraceResources:
    """Read a trace from CSV (see docs/formats.md). Round 0 must give every value."""
    state: dict[str, dict[str, float]] = {}
    rounds: list[int] = []
    fleets: list[Fleet] = []
    for where, row in csv_rows(path, TRACE_COLUMNS):
        with naming(where):
            round_, name, values = _parsed(row)
            if not rounds and round_ != 0:
                raise InvalidInput("round", f"starts at {round_}", "Start with round 0")
            if rounds and round_ < rounds[-1]:
                raise InvalidInput("round", f"is {round_} after {rounds[-1]}", "Sort rows by round")
            if round_ > 0 and name not in state:
                raise InvalidInput("device", f"{name!r} is not in round 0", "Give every device in round 0")
        if rounds and round_ > rounds[-1]:
            fleets.append(_moment(state, path))
        if not rounds or round_ > rounds[-1]:
            rounds.append(round_)
        state.setdefault(name, {}).update(values)
    if not rounds:
        raise InvalidInput("", "has no rows", "Give at least round 0", source=str(path))
    fleets.append(_moment(state, path))
    return TraceResources(tuple(rounds), tuple(fleets), repeats)


def write_trace(path: Path, fleets: Iterable[Fleet]) -> None:
    """Write one fleet per round, from round 0 on, as a trace."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow([*TRACE_COLUMNS, MEMORY])
        for round_, fleet in enumerate(fleets):
            server = fleet.server
            writer.writerow([round_, SERVER_ROW, server.flops, "", "", server.to_fed_bps, server.from_fed_bps, ""])
            for device in fleet:
                writer.writerow([round_, device.name, *(getattr(device, name) for name in (*RATES, MEMORY))])


def csv_rows(path: Path, columns: Sequence[str]) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield every row of a CSV file that has at least these columns, as (place in the file, row)."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            missing = [column for column in columns if column not in (reader.fieldnames or ())]
            if missing:
                raise InvalidInput(missing[0], "is missing from the header", "Add the column", source=str(path))
            for row in reader:
                yield f"{path}, line {reader.line_num}", row
    except OSError as error:
        raise InvalidInput("", f"cannot be read: {error.strerror}", "Check the path", source=str(path)) from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise InvalidInput("", f"is not a CSV text in UTF-8: {error}", "Save it as such", source=str(path)) from None


def _parsed(row: Mapping[str, str]) -> tuple[int, str, dict[str, float]]:
    """Return the round of a row, its device, and the rates that it gives."""
    if not row["device"]:
        raise InvalidInput("device", "is empty", "Name the device")
    wanted = _SERVER_COLUMNS if row["device"] == SERVER_ROW else (*RATES, MEMORY)
    try:
        round_ = int(row["round"])
        values = {name: float(row[name]) for name in wanted if row.get(name) not in ("", None)}
    except (TypeError, ValueError) as error:
        raise InvalidInput("", f"is not a number: {error}", "Give plain numbers") from None
    for name, value in values.items():
        checks.number(name, value, positive=True)
    return round_, row["device"], values


def _moment(state: dict[str, dict[str, float]], path: Path) -> Fleet:
    """Return the fleet that the rows so far describe."""
    names = [name for name in state if name != SERVER_ROW]
    if SERVER_ROW not in state or not names:
        what = "server" if SERVER_ROW not in state else "device"
        raise InvalidInput("device", f"round 0 has no {what}", f"Add a row for the {what}", source=str(path))
    for name, values in state.items():
        for column in _SERVER_COLUMNS if name == SERVER_ROW else RATES:
            if column not in values:
                raise InvalidInput(column, f"is empty for {name!r} in round 0", "Give a value", source=str(path))
    server = Server(**{ours: state[SERVER_ROW][theirs] for theirs, ours in _SERVER_COLUMNS.items()})
    limits = [state[name].get(MEMORY) for name in names]
    rates: dict[str, Any] = {rate: np.array([state[name][rate] for name in names]) for rate in RATES}
    memory = None if all(limit is None for limit in limits) else memory_limits(limits)
    return Fleet(**rates, server=server, memory_bytes=memory, names=tuple(names))
