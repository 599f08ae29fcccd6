"""Boxes of thresholds (see exact.py), and the grid that bounds thousands of cells of one box in one go."""

from dataclasses import dataclass, replace

import numpy as np

from adaptsfl import latency
from adaptsfl.checks import BoolArray, FloatArray, IntArray
from adaptsfl.planner.interval import IntervalRule
from adaptsfl.planner.problem import PlanProblem
from adaptsfl.planner.staircase import grid_sums

BANDS = 64  # rows and columns of the grid over T3 × T4


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
    """A box cut along T3 and T4 into cells, each with a bound and with the time of its upper corner.

    Attributes:
        bound_s: no plan of the cell is faster; infinite where some device has no cut.
        upper_s: what the plan at the cell's upper corner takes at most; infinite where the bound is beyond the goal.
        alive: the cells that could hold something better than the goal.
    """

    def __init__(self, box: Box, corners: Corners, rule: IntervalRule, server: ServerLoad, goal_s: float) -> None:
        self.box, self.rule = box, rule
        cuts = np.arange(1, box.deepest + 1)[:, None]
        useful = corners.fits & (cuts > corners.low_cuts)  # shallower cuts are nobody's deepest in this box
        self.values = [_candidates(low, term[useful]) for low, term in zip(box.low, corners.times, strict=True)]
        self.high = np.array([values[-1] for values in self.values])
        self.rows, self.columns = _Bands(self.values[0]), _Bands(self.values[1])
        sums = grid_sums(
            rows=self.rows.first_admitting(corners.times[0]),
            columns=self.columns.first_admitting(corners.times[1]),
            useful=useful,
            base=corners.low_cuts,
            weights=np.stack((server.flops, server.bits))[:, : box.deepest + 1],
            shape=(self.rows.size, self.columns.size),
        )
        turn_s = server.turn_s(box.settled_flops + sums.totals[0])
        exchanged_s = server.exchanged_s(box.settled_bits + sums.totals[1], box.deepest)
        self.exchange_low_s = np.maximum(exchanged_s, box.low[2:, None, None])
        self.exchange_high_s = np.maximum(exchanged_s, self.high[2:, None, None])
        self.round_low_s = self.rows.low[:, None] + turn_s + self.columns.low
        round_high_s = self.rows.high[:, None] + turn_s + self.columns.high
        self.bound_s = self._times(sums.complete, self.round_low_s, self.exchange_low_s)
        self.alive = self.bound_s < goal_s
        self.upper_s = self._times(self.alive, round_high_s, self.exchange_high_s)

    def most_promising(self) -> FloatArray:
        """Return the upper corner of the cell whose upper corner is the best plan."""
        row, column = np.unravel_index(np.argmin(self.upper_s), self.upper_s.shape)
        return np.array([self.rows.high[row], self.columns.high[column], *self.high[2:]])

    def children(self, goal_s: float) -> list[tuple[float, Box]]:
        """Return boxes that cover every cell that could still beat `goal_s`, each with its bound.

        They are split along the threshold that leaves the best cell least certain. A cell whose corners cost the same
        holds nothing better than the most promising plan, which has been offered before.
        """
        alive = (self.bound_s < goal_s) & (self.bound_s < self.upper_s)
        if not alive.any():
            return []
        row, column = np.unravel_index(np.argmin(np.where(alive, self.bound_s, np.inf)), alive.shape)
        term = int(np.argmax(self._slack(int(row), int(column))))
        return self._split_cells(alive, term) if term < 2 else self._split_exchange(alive, term)

    def _times(self, cells: BoolArray, round_s: FloatArray, exchange_s: FloatArray) -> FloatArray:
        """Return the best times of these cells, and infinity for the others."""
        times = np.full(cells.shape, np.inf)
        times[cells] = self.rule.best_time_s(round_s[cells], exchange_s.sum(axis=0)[cells])
        return times

    def _slack(self, row: int, column: int) -> FloatArray:
        """How many seconds per round lie between the corners of a cell, for each of T3 … T6."""
        interval = self.rule.best(self.round_low_s[row, column], self.exchange_low_s[:, row, column].sum())
        exchange = self.exchange_high_s[:, row, column] - self.exchange_low_s[:, row, column]
        rows = self.rows.high[row] - self.rows.low[row]
        columns = self.columns.high[column] - self.columns.low[column]
        return np.array([rows, columns, *(exchange / interval)])

    def _split_cells(self, alive: BoolArray, term: int) -> list[tuple[float, Box]]:
        """Halve the living cells along T3 (term 0) or T4 (term 1)."""
        lines = np.flatnonzero(alive.any(axis=1 - term))
        boxes = []
        for half in np.array_split(lines, min(2, lines.size)):
            part = np.zeros_like(alive)
            part[(half, slice(None)) if term == 0 else (slice(None), half)] = True
            boxes.append(self._around(alive & part, self.box.low, self.high))
        return boxes

    def _split_exchange(self, alive: BoolArray, term: int) -> list[tuple[float, Box]]:
        """Halve the range of T5 (term 2) or T6 (term 3) at the candidate nearest to its middle."""
        values = self.values[term]
        middle = int(np.clip(np.searchsorted(values, (values[0] + values[-1]) / 2), 1, values.size - 1))
        below, above = self.high.copy(), self.box.low.copy()
        below[term], above[term] = values[middle - 1], values[middle]
        return [self._around(alive, self.box.low, below), self._around(alive, above, self.high)]

    def _around(self, cells: BoolArray, low: FloatArray, high: FloatArray) -> tuple[float, Box]:
        """Return the smallest box that holds these cells, with T5 and T6 from `low` to `high`, and its bound."""
        rows, columns = np.flatnonzero(cells.any(axis=1)), np.flatnonzero(cells.any(axis=0))
        box = replace(
            self.box,
            low=np.array([self.rows.low[rows[0]], self.columns.low[columns[0]], *low[2:]]),
            high=np.array([self.rows.high[rows[-1]], self.columns.high[columns[-1]], *high[2:]]),
        )
        return float(self.bound_s[cells].min()), box


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
