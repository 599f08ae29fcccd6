"""Boxes of thresholds (see exact.py), and the grid that bounds thousands of cells of one box in one go."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from adaptsfl import latency
from adaptsfl.checks import BoolArray, FloatArray, IntArray
from adaptsfl.planner.interval import IntervalRule
from adaptsfl.planner.problem import PlanProblem
from adaptsfl.planner.staircase import grid_sums

BANDS = 64  # rows and columns of a grid, at most


@dataclass(frozen=True)
class Box:
    """Plans with deepest cut `deepest` whose maxima T3 … T6 lie between `low` and `high`.

    Devices outside `active` take the same cut everywhere in the box; sums of theirs are kept instead of them.
    """

    deepest: int
    low: FloatArray
    high: FloatArray
    active: IntArray
    settled_flops: float = 0.0
    settled_bits: float = 0.0


@dataclass(frozen=True)
class Corners:
    """The active devices of a box: n devices and m cuts."""

    times: FloatArray  # (4, m, n): what each cut needs for T3 … T6
    fits: BoolArray  # (m, n): the cut is within the upper corner
    low_cuts: IntArray  # (n,): the deepest cut within the lower corner, 0 for none


class ServerLoad:
    """What the cuts of all devices together ask of the edge server.

    Attributes:
        flops: what cut j leaves to the server per data sample; entry 0 is for "no cut".
        bits: what a device with cut j holds; entry 0 is for "no cut".
    """

    def __init__(self, problem: PlanProblem) -> None:
        server, devices = problem.fleet.server, problem.devices
        self.flops = np.append(0.0, _summable(latency.remaining_flops(problem.costs), devices))
        self.bits = np.append(0.0, -_summable(-problem.costs.client_model_bits, devices))
        self._all_bits = np.append(0.0, problem.costs.client_model_bits * devices)
        self._seconds_per_flop = problem.batch_size / server.flops
        self._seconds_per_bit = np.array([1 / server.to_fed_bps, 1 / server.from_fed_bps])

    def turn_s(self, flops: FloatArray | float) -> FloatArray:
        """T_s^F + T_s^B, if the devices leave `flops` to the server."""
        return np.asarray(self._seconds_per_flop * flops)

    def exchanged_s(self, bits: FloatArray | float, deepest: int) -> FloatArray:
        """T_s^U and T_s^D, if the devices hold `bits` together and the deepest cut is `deepest`: shape (2, …)."""
        exchanged = np.maximum(self._all_bits[deepest] - bits, 0.0)
        return np.multiply.outer(self._seconds_per_bit, exchanged)


class Grid:
    """A box cut along two of its thresholds into cells, each with a bound and with the time of its upper corner.

    Attributes:
        axes: the two of T3 … T6 (0 … 3) along which it is cut: those that leave the time least certain.
        bound_s: no plan of the cell is faster; infinite where some device has no cut.
        upper_s: what the plan at the cell's upper corner takes at most, but for rounding of sums (see `_summable`);
            infinite where the bound is beyond the goal.
        alive: the cells that could hold something better than the goal.
    """

    def __init__(self, box: Box, corners: Corners, rule: IntervalRule, server: ServerLoad, goal_s: float) -> None:
        self.box, self.rule = box, rule
        cuts = np.arange(1, box.deepest + 1)[:, None]
        useful = corners.fits & (cuts > corners.low_cuts)  # shallower cuts are nobody's deepest in this box
        self.values = [_candidates(low, term[useful]) for low, term in zip(box.low, corners.times, strict=True)]
        self.high = np.array([values[-1] for values in self.values])
        self.axes = tuple(int(term) for term in np.argsort(-self._weight(box.low) * (self.high - box.low))[:2])
        self.bands = [_Bands(self.values[term]) for term in self.axes]
        sums = grid_sums(
            rows=self.bands[0].first_admitting(corners.times[self.axes[0]]),
            columns=self.bands[1].first_admitting(corners.times[self.axes[1]]),
            useful=useful,
            base=corners.low_cuts,
            weights=np.stack((server.flops, server.bits))[:, : box.deepest + 1],
            shape=(self.bands[0].size, self.bands[1].size),
        )
        turn_s = server.turn_s(box.settled_flops + sums.totals[0])
        exchanged_s = server.exchanged_s(box.settled_bits + sums.totals[1], box.deepest)
        self.low_s = self._terms(box.low, [bands.low for bands in self.bands], exchanged_s)
        self.high_s = self._terms(self.high, [bands.high for bands in self.bands], exchanged_s)
        self.bound_s = self._times(sums.complete, turn_s, self.low_s)
        self.alive = self.bound_s < goal_s
        self.upper_s = self._times(self.alive, turn_s, self.high_s)

    def most_promising(self) -> FloatArray:
        """Return the upper corner of the cell whose upper corner is the best plan."""
        row, column = np.unravel_index(np.argmin(self.upper_s), self.upper_s.shape)
        return self._upper_corner(int(row), int(column))

    def answered(self, goal_s: float) -> Iterator[FloatArray]:
        """Yield the upper corners of cells whose corners cost the same, so that nothing is left to search in them.

        With exact sums there is none below the goal once the most promising plan is known. With rounded sums there may
        be, and each of them must be looked at for itself.
        """
        for row, column in np.argwhere((self.bound_s < goal_s) & (self.bound_s >= self.upper_s)):
            yield self._upper_corner(int(row), int(column))

    def children(self, goal_s: float) -> list[tuple[float, Box]]:
        """Return boxes that cover every cell that could still beat `goal_s`, each with its bound.

        They are split along the threshold that leaves the best cell least certain.
        """
        alive = (self.bound_s < goal_s) & (self.bound_s < self.upper_s)
        if not alive.any():
            return []
        row, column = np.unravel_index(np.argmin(np.where(alive, self.bound_s, np.inf)), alive.shape)
        low, high = self.low_s[:, row, column], self.high_s[:, row, column]
        term = int(np.argmax(self._weight(low) * (high - low)))
        return self._split_cells(alive, self.axes.index(term)) if term in self.axes else self._split_range(alive, term)

    def _upper_corner(self, row: int, column: int) -> FloatArray:
        thresholds = self.high.copy()
        thresholds[list(self.axes)] = self.bands[0].high[row], self.bands[1].high[column]
        return thresholds

    def _weight(self, terms: FloatArray) -> FloatArray:
        """How much a second of T3 … T6 weighs in a round, at the interval that suits these terms best."""
        interval = float(self.rule.best(terms[0] + terms[1], terms[2] + terms[3]))
        return np.array([1.0, 1.0, 1 / interval, 1 / interval])

    def _terms(self, edge: FloatArray, bands: list[FloatArray], exchanged_s: FloatArray) -> FloatArray:
        """What each of T3 … T6 contributes in every cell at one corner: shape (4, rows, columns)."""
        terms = np.empty((4, *exchanged_s.shape[1:]))
        terms[:] = edge[:, None, None]
        terms[self.axes[0]] = bands[0][:, None]
        terms[self.axes[1]] = bands[1]
        terms[2:] = np.maximum(terms[2:], exchanged_s)
        return terms

    def _times(self, cells: BoolArray, turn_s: FloatArray, terms: FloatArray) -> FloatArray:
        """Return the best times of these cells, and infinity for the others."""
        times = np.full(cells.shape, np.inf)
        to_server, from_server, upload, download = terms[:, cells]
        times[cells] = self.rule.best_time_s(to_server + turn_s[cells] + from_server, upload + download)
        return times

    def _split_cells(self, alive: BoolArray, axis: int) -> list[tuple[float, Box]]:
        """Halve the living cells along one axis of the grid."""
        lines = np.flatnonzero(alive.any(axis=1 - axis))
        boxes = []
        for half in np.array_split(lines, min(2, lines.size)):
            part = np.zeros_like(alive)
            part[(half, slice(None)) if axis == 0 else (slice(None), half)] = True
            boxes.append(self._around(alive & part, self.box.low, self.high))
        return boxes

    def _split_range(self, alive: BoolArray, term: int) -> list[tuple[float, Box]]:
        """Halve the range of a threshold that is not an axis, at the candidate nearest to its middle."""
        values = self.values[term]
        middle = int(np.clip(np.searchsorted(values, (values[0] + values[-1]) / 2), 1, values.size - 1))
        below, above = self.high.copy(), self.box.low.copy()
        below[term], above[term] = values[middle - 1], values[middle]
        return [self._around(alive, self.box.low, below), self._around(alive, above, self.high)]

    def _around(self, cells: BoolArray, low: FloatArray, high: FloatArray) -> tuple[float, Box]:
        """Return the smallest box between `low` and `high` that holds these cells, and its bound."""
        low, high = low.copy(), high.copy()
        for axis, (term, bands) in enumerate(zip(self.axes, self.bands, strict=True)):
            lines = np.flatnonzero(cells.any(axis=1 - axis))
            low[term], high[term] = bands.low[lines[0]], bands.high[lines[-1]]
        return float(self.bound_s[cells].min()), replace(self.box, low=low, high=high)


class _Bands:
    """Candidate values in at most `BANDS` consecutive bands; `low` and `high` are each band's least and largest."""

    def __init__(self, values: FloatArray) -> None:
        starts = np.unique(np.linspace(0, values.size, BANDS + 1).astype(np.int64)[:-1])
        self.low = values[starts]
        self.high = values[np.append(starts[1:], values.size) - 1]
        self.size = starts.size

    def first_admitting(self, values: FloatArray) -> IntArray:
        """Return the first band whose upper end admits each value."""
        return np.searchsorted(self.high, values)


def fitting(times: FloatArray, thresholds: FloatArray) -> BoolArray:
    """Which cuts, of which devices, are allowed and within all four thresholds: shape (m, n)."""
    fits = np.isfinite(times[0])
    for term, threshold in zip(times, thresholds, strict=True):
        fits &= term <= threshold
    return fits


def deepest_cuts(fits: BoolArray) -> IntArray:
    """Every device's deepest cut that fits, 0 for none."""
    last = fits.shape[0] - np.argmax(fits[::-1], axis=0)
    return np.where(fits.any(axis=0), last, 0)


def _candidates(low: float, values: FloatArray) -> FloatArray:
    """The values that a plan's own maximum can take within the box, in rising order."""
    return np.unique(np.append(values[values > low], low))


def _summable(values: FloatArray, devices: int) -> FloatArray:
    """Round down, if need be, so that sums over devices are exact in any order: whole numbers stay as they are.

    The grid's cumulative sums go up and down; with rounding errors in them a bound could exceed what it bounds.
    """
    largest = float(np.abs(values).max()) * devices
    unit = 2.0 ** (np.ceil(np.log2(largest)) - 52) if largest > 0 else 1.0
    return np.floor(values / unit) * unit
