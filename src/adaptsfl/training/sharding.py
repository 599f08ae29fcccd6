"""Which rank holds the copies of which devices; the common layers are equal on all ranks."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from adaptsfl.errors import InvalidInput
from adaptsfl.training.ranks import ALONE, Ranks


def assigned(work: Sequence[float], speeds: Sequence[float]) -> tuple[tuple[int, ...], ...]:
    """Assign devices to ranks greedily: the most work first, each to the rank that would finish it first.

    Cuts do not matter: a rank runs its devices' samples through all layers, whatever the cut.
    """
    loads = [0.0] * len(speeds)
    parts: list[list[int]] = [[] for _ in speeds]
    for device in sorted(range(len(work)), key=lambda k: (-work[k], k)):
        rank = min(range(len(speeds)), key=lambda r: ((loads[r] + work[device]) / speeds[r], len(parts[r]), r))
        parts[rank].append(device)
        loads[rank] += work[device]
    return tuple(tuple(sorted(part)) for part in parts)


@dataclass(frozen=True)
class Sharding:
    """The devices of every rank, as one rank sees them.

    Attributes:
        ranks: the processes that train together.
        parts: the devices of every rank, in rising order.
    """

    ranks: Ranks
    parts: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, devices: int, ranks: Ranks = ALONE, parts: Sequence[Sequence[int]] | None = None) -> "Sharding":
        """Return a sharding of `devices` devices, by default in proportion to the ranks' speeds."""
        if parts is None:
            return cls(ranks, assigned([1.0] * devices, ranks.speeds))
        found = tuple(tuple(sorted(part)) for part in parts)
        if len(found) != ranks.size or sorted(device for part in found for device in part) != list(range(devices)):
            problem = f"is {[list(part) for part in found]} for {ranks.size} ranks and {devices} devices"
            raise InvalidInput("parts", problem, "Give every rank a list of devices, and every device to one rank")
        return cls(ranks, found)

    @property
    def local(self) -> tuple[int, ...]:
        """The devices of this rank."""
        return self.parts[self.ranks.rank]

    @property
    def shard(self) -> tuple[int, ...] | None:
        """The devices whose copies this rank holds; None for all of them, in one process."""
        return None if self.ranks.size == 1 else self.local

    @cached_property
    def row_of(self) -> dict[int, int]:
        """The row of each of this rank's devices in stacked copies."""
        return {device: row for row, device in enumerate(self.local)}

    @property
    def rows(self) -> int:
        """How many rows a stack has while copies differ.

        On several ranks it is at least two, so that a single row means on every rank that all copies are equal.
        """
        return len(self.local) if self.ranks.size == 1 else max(2, len(self.local))

    def here(self, devices: Iterable[int]) -> list[int]:
        """Return those of `devices` that this rank holds."""
        return [device for device in devices if device in self.row_of]

    def row_shares(self, shares: Sequence[float]) -> list[float]:
        """Return the shares of this rank's rows, given those of all devices."""
        local = [shares[device] for device in self.local]
        return local + [0.0] * (self.rows - len(local))

    def rank_of(self, device: int) -> int:
        """Return the rank that holds a device."""
        return next(rank for rank, part in enumerate(self.parts) if device in part)

    def all_losses(self, losses: Sequence[Tensor], devices: Sequence[int]) -> Tensor:
        """Return the losses of `devices`, given the losses of this rank's devices, in order."""
        if self.ranks.size == 1:
            return torch.cat(list(losses))
        known = dict(zip(self.here(devices), [loss for part in losses for loss in part.tolist()], strict=True))
        total = self.ranks.sum_numbers([known.get(device, 0.0) for device in devices])
        return torch.tensor(total, dtype=torch.float64)
