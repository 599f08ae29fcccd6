"""Traces: a fleet's resources recorded as CSV, and replayed.

A row gives one device's rates from its round on, until the device's next row; an empty cell means "as before". The row
of the device called "server" gives the edge server: its flops, and its links to and from the fed server. Columns of
memory and of fixed seconds are optional.
"""

import csv
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from adaptsfl import checks
from adaptsfl.errors import InvalidInput, naming
from adaptsfl.fleet.fleet import FIXED, RATES, Fleet, Server, memory_limits

TRACE_COLUMNS = ("round", "device", *RATES)
MEMORY = "memory_bytes"  # an optional column; without it there are no limits
SERVER_ROW = "server"
_SERVER_COLUMNS = {"flops": "flops", "fed_uplink_bps": "to_fed_bps", "fed_downlink_bps": "from_fed_bps"}
_SERVER_OPTIONAL = {
    "fed_uplink_s": "to_fed_s",
    "fed_downlink_s": "from_fed_s",
    **{name: name for name in ("turn_s", "averaging_s", "averaging_bps")},
}
OPTIONAL_COLUMNS = (MEMORY, *FIXED, "turn_s", "averaging_s", "averaging_bps")


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
    given: set[str] = set()  # the devices that the current round has a row of
    for where, row in csv_rows(path, TRACE_COLUMNS):
        with naming(where):
            round_, name, values = _parsed(row)
            if not rounds and round_ != 0:
                raise InvalidInput("round", f"starts at {round_}", "Start with round 0")
            if rounds and round_ < rounds[-1]:
                raise InvalidInput("round", f"is {round_} after {rounds[-1]}", "Sort rows by round")
            if round_ > 0 and name not in state:
                raise InvalidInput("device", f"{name!r} is not in round 0", "Give every device in round 0")
            if round_ in rounds[-1:] and name in given:
                raise InvalidInput("device", f"{name!r} has two rows of round {round_}", "Make one row of them")
        if rounds and round_ > rounds[-1]:
            fleets.append(_moment(state, path))
        if not rounds or round_ > rounds[-1]:
            rounds.append(round_)
            given.clear()
        given.add(name)
        state.setdefault(name, {}).update(values)
    if not rounds:
        raise InvalidInput("", "has no rows", "Give at least round 0", source=str(path))
    fleets.append(_moment(state, path))
    return TraceResources(tuple(rounds), tuple(fleets), repeats)


def write_trace(path: Path, fleets: Iterable[Fleet], rounds: Iterable[int] | None = None) -> None:
    """Write fleets as a trace: one per round from round 0 on, or those that hold from these rounds on."""
    servers = (_SERVER_COLUMNS | _SERVER_OPTIONAL).items()
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [*TRACE_COLUMNS, *OPTIONAL_COLUMNS])
        writer.writeheader()
        for round_, fleet in enumerate(fleets) if rounds is None else zip(rounds, fleets, strict=True):
            server = {column: getattr(fleet.server, name) for column, name in servers}
            writer.writerow({"round": round_, "device": SERVER_ROW, **server})
            for device in fleet:
                numbers = {name: getattr(device, name) for name in (*RATES, MEMORY, *FIXED)}
                writer.writerow({"round": round_, "device": device.name, **numbers})


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
    is_server = row["device"] == SERVER_ROW
    wanted = (*_SERVER_COLUMNS, *_SERVER_OPTIONAL) if is_server else (*RATES, MEMORY, *FIXED)
    try:
        round_ = int(row["round"])
        values = {name: float(row[name]) for name in wanted if row.get(name) not in ("", None)}
    except (TypeError, ValueError) as error:
        raise InvalidInput("", f"is not a number: {error}", "Give plain numbers") from None
    for name, value in values.items():
        checks.number(name, value, positive=not name.endswith("_s"))
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
    known = state[SERVER_ROW]
    columns = (_SERVER_COLUMNS | _SERVER_OPTIONAL).items()
    server = Server(**{name: known[column] for column, name in columns if column in known})
    limits = [state[name].get(MEMORY) for name in names]
    rates: dict[str, Any] = {rate: np.array([state[name][rate] for name in names]) for rate in RATES}
    memory = None if all(limit is None for limit in limits) else memory_limits(limits)
    fixed: dict[str, Any] = {name: np.array([state[device].get(name, 0.0) for device in names]) for name in FIXED}
    return Fleet(**rates, **fixed, server=server, memory_bytes=memory, names=tuple(names))
