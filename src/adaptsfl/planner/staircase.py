"""Sums over devices of "the weight of the deepest cut that fits", at every point of a grid of thresholds.

As the two thresholds of a grid grow, one device's deepest cut climbs a two-dimensional staircase. A staircase is the
double cumulative sum of a few spikes at its corners, so the spikes of all devices are added into one grid, and one
cumulative sum serves any number of devices.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields

import numpy as np

from adaptsfl.checks import BoolArray, FloatArray, IntArray


@dataclass(frozen=True)
class GridSums:
    """For every grid point: the summed weights, and whether every device has a cut there."""

    totals: FloatArray  # (weights, rows, columns)
    complete: BoolArray


@dataclass(frozen=True)
class Climb:
    """In grid row `row`, from column `start` up to but not including `end`, a device's deepest cut rises."""

    device: IntArray
    row: IntArray
    start: IntArray
    end: IntArray
    before: IntArray
    after: IntArray


def grid_sums(climbs: Iterable[Climb], base: IntArray, weights: FloatArray, shape: tuple[int, int]) -> GridSums:
    """Add up, over devices, the weights of the deepest cut available at each grid point.

    `climbs` has those of all devices; cut `base[i]` is available everywhere (0: no cut). `weights[k, j]` is weight k
    of cut j, zero for j = 0.
    """
    counted = bool((base == 0).any())  # otherwise every device has a cut everywhere
    count = np.append(0.0, np.ones(weights.shape[1] - 1))
    tracked = np.vstack((weights, count)) if counted else weights
    spikes = np.zeros((len(tracked), shape[0] * (shape[1] + 1)))
    for climb in climbs:
        places = _places(climb, shape)
        for index, weight in enumerate(tracked):
            gain = weight[climb.after] - weight[climb.before]
            spikes[index] += np.bincount(places, weights=np.concatenate((gain, -gain)), minlength=spikes.shape[1])
    totals = _summed(spikes, shape) + tracked[:, base].sum(axis=1)[:, None, None]
    complete = totals[-1] == base.size if counted else np.ones(shape, dtype=bool)
    return GridSums(totals[: len(weights)], complete)


def own_sums(climbs: Iterable[Climb], base: IntArray, weights: FloatArray, shape: tuple[int, int]) -> FloatArray:
    """Like `grid_sums`, with weights `weights[j, i]` of cut j on device i (j = 0: no cut): shape (rows, columns)."""
    spikes = np.zeros(shape[0] * (shape[1] + 1))
    for climb in climbs:
        gain = weights[climb.after, climb.device] - weights[climb.before, climb.device]
        places = _places(climb, shape)
        spikes += np.bincount(places, weights=np.concatenate((gain, -gain)), minlength=spikes.size)
    return _summed(spikes, shape)[0] + weights[base, np.arange(base.size)].sum()


def merged(climbs: Iterable[Climb]) -> Climb:
    """Return all climbs as one: faster for few devices, but all of them are in memory at once."""
    every = list(climbs)
    return Climb(*(np.concatenate([getattr(climb, field.name) for climb in every]) for field in fields(Climb)))


def _places(climb: Climb, shape: tuple[int, int]) -> IntArray:
    """Return where climbs start and where they end, in a grid with one more column for those that never end."""
    first = climb.row * (shape[1] + 1)
    return np.concatenate((first + climb.start, first + climb.end))


def _summed(spikes: FloatArray, shape: tuple[int, int]) -> FloatArray:
    return spikes.reshape(-1, shape[0], shape[1] + 1).cumsum(axis=1).cumsum(axis=2)[:, :, :-1]


def climbs(rows: IntArray, columns: IntArray, useful: BoolArray, base: IntArray, never: int) -> Iterator[Climb]:
    """Yield, step by step, where the staircases rise and from which cut to which.

    Cut j of device i (entry [j-1, i] of `rows`, `columns` and `useful`) is available from its row and column on, if
    useful; cut `base[i]` is available everywhere. A grid has columns up to but not including `never`.

    A device's useful cuts are put into slots in order of their column, and then made available one after the other in
    order of their row. When a cut becomes available, the deepest cut changes in its own slot and in those after it that
    held a shallower one, each reaching from its own column to that of the next slot.
    """
    number = useful.sum(axis=0)
    devices = np.argsort(-number, kind="stable")  # most useful cuts first: later steps need the first devices only
    number, most = number[devices], int(number.max())
    x = np.where(useful, rows, np.iinfo(np.int64).max)[:, devices]
    y = np.where(useful, columns, never)[:, devices]
    by_row = np.argsort(x, axis=0, kind="stable")[:most]
    by_column = np.argsort(y, axis=0, kind="stable")
    slot_of = np.empty_like(by_column)
    np.put_along_axis(slot_of, by_column, np.arange(len(by_column))[:, None], axis=0)
    edges = np.full((most + 1, devices.size), never)  # slot s reaches from edges[s] to edges[s + 1]
    edges[:-1] = np.take_along_axis(y, by_column[:most], axis=0)
    slots = np.arange(most)[:, None]
    deepest = np.broadcast_to(base[devices], (most, devices.size)).copy()
    for step in range(most):
        still = int(np.searchsorted(-number, -step))  # number of devices with more than `step` useful cuts
        cut_index = by_row[step, :still]
        first_slot = slot_of[cut_index, np.arange(still)]
        before = deepest[:, :still]
        rising = (slots >= first_slot) & (before <= cut_index) & (edges[:-1, :still] < edges[1:, :still])
        slot, device = np.nonzero(rising)
        after = cut_index[device] + 1
        row = x[cut_index[device], device]
        start, end = edges[slot, device], edges[slot + 1, device]
        yield Climb(devices[device], row, start, end, before[slot, device], after)
        deepest[slot, device] = after
