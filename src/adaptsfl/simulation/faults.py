"""Devices that drop out and return, that are slow for a round, or that sit out a block.

Rounds are counted from 0, as in the fleet's resources. Faults depend on the seed and the round alone, in whatever order
rounds are queried.

A block begins with the devices that are present. A device that drops out during a block is absent until the next one,
which sends out the current model of all layers that were averaged. The fleet is never empty: if no device can begin a
block, the first to return train it as if they were already back, and the last to leave a block stay until its end. So a
run always goes on, and the virtual clock never stands still.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from adaptsfl import checks
from adaptsfl.config import FaultsConfig
from adaptsfl.errors import InvalidInput, unknown
from adaptsfl.fleet import FIXED, RATES, Fleet
from adaptsfl.fleet.trace import csv_rows

# Numbers of random streams, different from those of the fleet's resources.
PRESENCE, STRAGGLERS, PARTICIPATION = 10, 11, 12

COLUMNS = ("round", "device", "present")
_WORDS = {"1": True, "true": True, "0": False, "false": False}


class Presence(Protocol):
    """When devices come and go: rounds at which they leave, return, leave, … in rising order."""

    def changes(self, device: int, beyond: int) -> Sequence[int]:
        """Return the rounds of the device's changes, at least up to the first one after round `beyond`, if any."""
        ...


@dataclass(frozen=True)
class Recorded:
    """Known changes, one list per device; empty for a device that is always present."""

    rounds: tuple[tuple[int, ...], ...]

    def changes(self, device: int, beyond: int) -> Sequence[int]:
        """Return all changes of the device."""
        return self.rounds[device]


class ComesAndGoes:
    """In every round a present device leaves with one probability, and an absent one returns with another.

    The times between changes are then geometric. Each device has its own random stream; changes are drawn on demand.
    """

    def __init__(self, devices: int, dropout_rate: float, return_rate: float, seed: int) -> None:
        self.rates = (dropout_rate, return_rate)
        self._streams = [np.random.default_rng([seed, PRESENCE, device]) for device in range(devices)]
        self._changes: list[list[int]] = [[] for _ in range(devices)]

    def changes(self, device: int, beyond: int) -> Sequence[int]:
        """Return the changes drawn so far, after drawing as many as are needed."""
        drawn = self._changes[device]
        while not drawn or drawn[-1] <= beyond:
            rate = self.rates[len(drawn) % 2]
            drawn.append((drawn[-1] if drawn else 0) + int(self._streams[device].geometric(rate)))
        return drawn


class Faults:
    """Which devices are present, take part and are slow, in every round."""

    def __init__(
        self,
        devices: int,
        presence: Presence | None = None,
        *,
        straggler_rate: float = 0.0,
        straggler_factor: float = 2.0,
        participation: float = 1.0,
        seed: int = 0,
    ) -> None:
        self.devices = devices
        self.presence = Recorded(((),) * devices) if presence is None else presence
        self.straggler_rate, self.straggler_factor = straggler_rate, straggler_factor
        self.participation, self.seed = participation, seed

    @property
    def active(self) -> bool:
        """Whether a device may ever be absent."""
        return self.participation < 1 or not (isinstance(self.presence, Recorded) and not any(self.presence.rounds))

    def present_at(self, round_: int) -> tuple[int, ...]:
        """Return the devices that are present, which may be none."""
        return tuple(device for device in range(self.devices) if self._is_there(device, round_))

    def taking_part(self, first_round: int) -> tuple[int, ...]:
        """Return the devices that begin a block in `first_round`: a share of those present, at least one."""
        there = self.present_at(first_round) or self._first_to_return(first_round)
        wanted = max(1, round(self.participation * len(there)))
        if wanted == len(there):
            return there
        rng = np.random.default_rng([self.seed, PARTICIPATION, first_round])
        return tuple(int(device) for device in np.sort(rng.choice(there, wanted, replace=False)))

    def still_there(self, first_round: int, round_: int) -> tuple[int, ...]:
        """Return the devices that began the block of `first_round` and take part in `round_`: at least one."""
        members = self.taking_part(first_round)
        leaving = {device: self._leaves_after(device, first_round) for device in members}
        last = max(leaving.values())
        return tuple(device for device in members if leaving[device] > round_ or leaving[device] == last)

    def slowed(self, fleet: Fleet, round_: int) -> Fleet:
        """Return the whole fleet with the stragglers of that round slowed down, in computing and on all links."""
        if self.straggler_rate == 0:
            return fleet
        rng = np.random.default_rng([self.seed, STRAGGLERS, round_])
        factors = np.where(rng.random(self.devices) < self.straggler_rate, self.straggler_factor, 1.0)
        rates = {rate: getattr(fleet, rate) / factors for rate in RATES}
        return fleet.with_rates(rates | {name: getattr(fleet, name) * factors for name in FIXED})

    def _is_there(self, device: int, round_: int) -> bool:
        return bisect_right(self.presence.changes(device, round_), round_) % 2 == 0

    def _next_change(self, device: int, round_: int) -> float:
        """The round of the first change after `round_`; infinite if there is none."""
        changes = self.presence.changes(device, round_)
        following = bisect_right(changes, round_)
        return changes[following] if following < len(changes) else float("inf")

    def _leaves_after(self, device: int, round_: int) -> float:
        """The round of the device's next departure after `round_`; an absent device returns before it leaves."""
        change = self._next_change(device, round_)
        if self._is_there(device, round_) or change == float("inf"):
            return change
        return self._next_change(device, int(change))

    def _first_to_return(self, round_: int) -> tuple[int, ...]:
        returns = [self._next_change(device, round_) for device in range(self.devices)]
        soonest = min(returns)
        if soonest == float("inf"):
            problem = f"leaves no device from round {round_} on, and none returns"
            raise InvalidInput("faults.trace", problem, "Let a device return, or train fewer rounds")
        return tuple(device for device, back in enumerate(returns) if back == soonest)


def faults_from(config: FaultsConfig, names: Sequence[str]) -> Faults:
    """Return the faults that a recipe's [faults] describes, for devices of those names."""
    return Faults(
        len(names),
        _presence(config, names),
        straggler_rate=config.straggler_rate,
        straggler_factor=config.straggler_factor,
        participation=config.participation,
        seed=config.seed,
    )


def _presence(config: FaultsConfig, names: Sequence[str]) -> Presence | None:
    if config.trace is not None:
        if config.dropout_rate > 0:
            raise InvalidInput("dropout_rate", "is given beside trace, which says who is there", "Remove one of them")
        return read_presence(Path(config.trace), names)
    if config.dropout_rate == 0:
        return None
    if config.return_rate == 0:
        problem = "is 0, and with dropouts the fleet would run empty"
        raise InvalidInput("return_rate", problem, "Give a number above 0, or say in a trace who leaves for good")
    return ComesAndGoes(len(names), config.dropout_rate, config.return_rate, config.seed)


def read_presence(path: Path, names: Sequence[str]) -> Recorded:
    """Read the presence of devices from CSV: columns round, device and present (0 or 1), sorted by round.

    A row holds from its round on, until the device's next row. Before its first row a device is present.
    """
    changes: dict[str, list[int]] = {name: [] for name in names}
    last = 0
    for where, row in csv_rows(path, COLUMNS):
        device, word = row["device"] or "", (row["present"] or "").strip().lower()
        try:
            round_ = checks.whole_number("round", int(row["round"] or ""), at_least=0)
        except ValueError:
            raise InvalidInput("round", f"is {row['round']!r}", "Give a whole number", source=where) from None
        except InvalidInput as error:
            raise error.from_file(where) from None
        if round_ < last:
            raise InvalidInput("round", f"is {round_} after {last}", "Sort rows by round", source=where)
        if device not in changes:
            raise unknown("device", device, names, "Give a device of the fleet").from_file(where)
        if word not in _WORDS:
            raise InvalidInput("present", f"is {row['present']!r}", "Give 0 or 1", source=where)
        last = round_
        if changes[device] and changes[device][-1] == round_:
            raise InvalidInput("device", f"{device!r} changes twice in round {round_}", "Keep one row", source=where)
        was_there = len(changes[device]) % 2 == 0
        if was_there != _WORDS[word]:
            changes[device].append(round_)
    return Recorded(tuple(tuple(changes[name]) for name in names))
