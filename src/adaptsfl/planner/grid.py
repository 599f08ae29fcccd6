"""Boxes of thresholds (see exact.py), and the grid that bounds thousands of cells of one box at once."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from adaptsfl import latency
from adaptsfl.checks import BoolArray, FloatArray, IntArray
from adaptsfl.planner.charges import Threshold, charged_flops
from adaptsfl.planner.interval import IntervalRule
from adaptsfl.planner.problem import PlanProblem
from adaptsfl.planner.staircase import Climb, climbs, grid_sums, merged, own_sums
from adaptsfl.planner.terms import CAPPED, ROUND, ROUNDING, UNDIVIDED, Terms

BANDS = 64  # rows and columns of a grid, at most
MERGED_UP_TO = 50_000  # up to this many useful cuts, a grid keeps all climbs in memory and can charge
APART = 1e-9  # candidates of A whose difference is a smaller share are in one band
LAST = 1e-9  # the weight of effects of maxima that A limits: boxes are cut along them where nothing else is left


@dataclass(frozen=True)
class Box:
    """Plans with deepest cut `deepest` whose maxima (T3 … T6, see terms.py) lie between `low` and `high`.

    Devices outside `active` take the same cut everywhere in the box; the box stores only the sums of their cuts.
    """

    deepest: int
    low: FloatArray
    high: FloatArray
    active: IntArray
    settled_flops: float = 0.0
    settled_bits: float = 0.0
    round_s: tuple[float, float] = (0.0, np.inf)  # the least and the largest A; only boxes with k > 1 are cut along A


@dataclass(frozen=True)
class Corners:
    """The active devices of a box: n devices and m cuts."""

    times: FloatArray  # (terms, m, n): the time of each cut for every maximum
    fits: BoolArray  # (m, n): the cut is within the upper corner
    low_cuts: IntArray  # (n,): the deepest cut within the lower corner, 0 for none


class ServerLoad:
    """The load that the cuts of all devices put on the edge server, with mini-batches in `micro_batches` parts.

    Attributes:
        flops: the work that cut j leaves to the server per data sample; entry 0 is for "no cut".
        bits: size of the layers on a device with cut j; entry 0 is for "no cut".
    """

    def __init__(self, problem: PlanProblem, micro_batches: int = 1) -> None:
        server, devices = problem.fleet.server, problem.devices
        remaining = latency.remaining_flops(problem.costs)
        self.flops = np.append(0.0, _summable(remaining, devices))
        self.flops_unit = _unit(remaining, devices)
        self.bits = np.append(0.0, -_summable(-problem.costs.client_model_bits, devices))
        self._all_bits = np.append(0.0, problem.costs.client_model_bits * devices)
        self.terms = Terms(micro_batches)
        self._turn_s, self._seconds_per_flop = server.turn_s, problem.batch_size // micro_batches / server.flops
        self._seconds_per_bit = np.array([1 / server.to_fed_bps, 1 / server.from_fed_bps])
        self._transfer_s = np.array([server.to_fed_s, server.from_fed_s])
        every_cut = np.arange(1, problem.layers + 1)
        self._averaging_s = latency.averaging_s(problem.costs, problem.fleet, every_cut)

    def turn_s(self, flops: FloatArray | float) -> FloatArray:
        """T_s^F + T_s^B of one part, if the devices leave `flops` per data sample to the server."""
        return np.asarray(self._turn_s + self._seconds_per_flop * flops)

    @property
    def flops_per_s(self) -> float:
        """The `flops` of one second of the server's turn."""
        return 1 / self._seconds_per_flop

    def exchanged_s(self, bits: FloatArray | float, deepest: int) -> FloatArray:
        """T_s^U and T_s^D, if the devices hold `bits` together and the deepest cut is `deepest`: shape (2, …)."""
        exchanged = np.maximum(self._all_bits[deepest] - bits, 0.0)
        seconds: FloatArray = np.multiply.outer(self._seconds_per_bit, exchanged)
        if self._transfer_s.any():
            seconds += np.multiply.outer(self._transfer_s, exchanged > 0)
        return seconds

    def averaging_s(self, deepest: int) -> float:
        """B2, if the deepest cut is `deepest`."""
        return float(self._averaging_s[deepest - 1])


class Grid:
    """A box cut along two of its thresholds into cells, each with a bound and with the time of its upper corner.

    Attributes:
        axes: the two of the maxima along which it is cut: those with the largest effect on the time.
        bound_s: no plan of the cell is faster; infinite where some device has no cut.
        upper_s: upper bound on the time of the plan at the cell's upper corner, up to rounding (see `_summable`);
            infinite where the bound is not below the goal.
        alive: the cells that could contain a plan faster than the goal.
    """

    def __init__(
        self, box: Box, corners: Corners, rule: IntervalRule, server: ServerLoad, goal_s: float, *, charged: bool
    ) -> None:
        self.box, self.corners, self.rule, self.server = box, corners, rule, server
        self.averaging_s, self.maxima = server.averaging_s(box.deepest), server.terms
        cuts = np.arange(1, box.deepest + 1)[:, None]
        self.useful = corners.fits & (cuts > corners.low_cuts)  # shallower cuts are no device's deepest in this box
        every = np.where(self.useful, corners.times, 0.0).max(axis=(1, 2))
        self.high = np.maximum(box.low, every)
        self.least_turn_s = self._turn_s(deepest_cuts(corners.fits))
        self.round_s = max(box.round_s[0], float(self.maxima.round_s(box.low[:-2], self.least_turn_s)))
        if self.maxima.micro_batches > 1:
            self.needed_s = self.maxima.needed_s(corners.times, box.low, self.least_turn_s)
        self.axes = self._axes()
        self.bands = [(_RoundBands if term == ROUND else _Bands)(self._values(term)) for term in self.axes]
        self.shape = (self.bands[0].size, self.bands[1].size)
        small = np.count_nonzero(self.useful) <= MERGED_UP_TO
        rising: Iterable[Climb] = [merged(self._climbs())] if small else self._climbs()
        weights = np.stack((server.flops, server.bits))[:, : box.deepest + 1]
        sums = grid_sums(rising, corners.low_cuts, weights, self.shape)
        self.turn_s = server.turn_s(box.settled_flops + sums.totals[0])
        self.exchanged_s = server.exchanged_s(box.settled_bits + sums.totals[1], box.deepest)
        self.low_s, self.high_s = self._terms(upper=False), self._terms(upper=True)
        self.least_round_s = self._least_rounds()
        self.bound_s = self._times(sums.complete, self.turn_s, self.low_s, self.maxima, self.least_round_s)
        if charged and small:
            self._charge(rising, goal_s)
        self.alive = self.bound_s < goal_s
        self.upper_s = self._times(self.alive, self.turn_s, self.high_s, self.maxima)

    def _turn_s(self, cuts: IntArray) -> float:
        """Return the server's turn if the active devices take these cuts."""
        return float(self.server.turn_s(self.box.settled_flops + float(self.server.flops[cuts].sum())))

    def _needed(self, term: int) -> FloatArray:
        """Return the value of a threshold that each cut needs: shape (m, n)."""
        return self.needed_s if term == ROUND else self.corners.times[term]

    def _values(self, term: int) -> FloatArray:
        """Return the values of a threshold at which some cut becomes available in this box, after the least one."""
        return _candidates(self.round_s if term == ROUND else self.box.low[term], self._needed(term)[self.useful])

    def _axes(self) -> tuple[int, int]:
        """Return the two thresholds with the largest effect on the time; A stands for those that it alone limits."""
        effects = self._effects(self.box.low, self.high)
        if self.maxima.micro_batches > 1:
            effects = np.append(effects, max(float(self.needed_s[self.useful].max()) - self.round_s, 0.0))
            effects[CAPPED] *= LAST  # they are cut only where nothing else is left to cut
        first, second = np.argsort(-effects)[:2]
        return int(first), int(second)

    def _climbs(self) -> Iterator[Climb]:
        rows, columns = (
            bands.first_admitting(self._needed(term)) for term, bands in zip(self.axes, self.bands, strict=True)
        )
        return climbs(rows, columns, self.useful, self.corners.low_cuts, never=self.shape[1])

    def _charge(self, rising: Iterable[Climb], goal_s: float) -> None:
        """Raise the bounds of cells by charging devices for the thresholds that are not axes (see charges.py).

        The charges are tuned for the cell with the least bound, at its best interval I', and are valid for all cells.
        S is the server's turn without charges, M with them. Seconds of aggregation have weight 1/I. At I ≤ I' charges
        are worth at least as much as at I', so that A + M and B bound the time. At I > I' the turn with charges is at
        least S + (M − S)·I'/I, because it is concave in 1/I: A + S and B + (M − S)·I' bound the time.

        With k > 1 parts, S is k turns and only the path through all of them is charged, A ≥ X_1 + S + Y_1.
        """
        cells = self.bound_s < goal_s
        if not cells.any():
            return
        rows, parts = self.maxima.charged, self.maxima.micro_batches
        row, column = self._least(self.bound_s)
        terms, turns_s = self.low_s[rows], parts * self.turn_s
        base = terms[:, row, column]
        aggregation_s = base[2] + self.averaging_s + base[3]
        interval = float(self.rule.best(base[0] + base[1] + turns_s[row, column], aggregation_s))
        others = [term for term in range(4) if rows[term] not in self.axes]
        worth = self.server.flops_per_s / parts / np.array([1.0, 1.0, interval, interval])
        thresholds = [Threshold(self.corners.times[rows[term]], base[term], worth[term]) for term in others]
        charged_s = self.server.turn_s(self._charged_flops(rising, (row, column), thresholds)) * parts
        # For any base: max(T, exchange) ≥ min(max(low, exchange), base) + max(T − base, 0), and the last is charged.
        terms[others] = np.minimum(terms[others], base[others][:, None, None])
        bound_s = self._times(cells, charged_s, terms, UNDIVIDED, self.least_round_s)
        if others[-1] >= 2:  # T5 or T6
            terms[2] += np.maximum(charged_s - turns_s, 0.0) * interval
            bound_s = np.minimum(bound_s, self._times(cells, turns_s, terms, UNDIVIDED))
        self.bound_s[cells] = np.maximum(self.bound_s, bound_s)[cells]

    def _charged_flops(self, rising: Iterable[Climb], cell: tuple[int, int], thresholds: list[Threshold]) -> FloatArray:
        """Return the server's work and the charges in every cell; the cuts of `cell` compete for the thresholds."""
        fits = self.useful
        for term, bands, band in zip(self.axes, self.bands, cell, strict=True):
            fits = fits & (self._needed(term) <= bands.high[band])
        base, flops = self.corners.low_cuts, self.server.flops[: self.box.deepest + 1]
        weights = charged_flops(flops, self.useful, base, deepest_cuts(fits), thresholds, self.server.flops_unit)
        return self.box.settled_flops + own_sums(rising, base, weights, self.shape)

    def most_promising(self) -> FloatArray:
        """Return the upper corner of the cell whose upper corner is the best plan."""
        return self._upper_corner(*self._least(self.upper_s))

    def answered(self, goal_s: float) -> Iterator[FloatArray]:
        """Yield the upper corners of cells whose two corners take the same time, so that no search in them is needed.

        With exact sums there is no such cell below the goal once the most promising plan is known. With rounded sums
        there may be some, and each must be evaluated.
        """
        for row, column in np.argwhere((self.bound_s < goal_s) & (self.bound_s >= self.upper_s)):
            yield self._upper_corner(int(row), int(column))

    def children(self, goal_s: float) -> list[tuple[float, Box]]:
        """Return boxes that cover every cell that could still beat `goal_s`, each with its bound.

        They are split along the threshold with the largest effect on the time of the best cell.
        """
        alive = (self.bound_s < goal_s) & (self.bound_s < self.upper_s)
        if not alive.any():
            return []
        term = self._widest(*self._least(np.where(alive, self.bound_s, np.inf)))
        return self._split_cells(alive, self.axes.index(term)) if term in self.axes else self._split_range(alive, term)

    def _widest(self, row: int, column: int) -> int:
        """Return the threshold with the largest effect on the time within a cell."""
        low, high = self.low_s[:, row, column], self.high_s[:, row, column]
        effects = self._effects(low, high)
        if ROUND in self.axes:
            band = (row, column)[self.axes.index(ROUND)]
            least_s = max(
                self.least_round_s[row, column], float(self.maxima.round_s(low[:-2], self.turn_s[row, column]))
            )
            effects = np.append(effects, max(self.bands[self.axes.index(ROUND)].high[band] - least_s, 0.0))
            effects[CAPPED] *= LAST
        return int(np.argmax(effects))

    def _least(self, times: FloatArray) -> tuple[int, int]:
        """Return the row and the column of the cell with the least time."""
        row, column = divmod(int(np.argmin(times)), self.shape[1])
        return row, column

    def _upper_corner(self, row: int, column: int) -> FloatArray:
        thresholds = self.high.copy()
        for term, bands, band in zip(self.axes, self.bands, (row, column), strict=True):
            if term != ROUND:
                thresholds[term] = bands.high[band]
        if ROUND in self.axes:
            room_s = self._room_s(self.bands[self.axes.index(ROUND)].high[[row, column][self.axes.index(ROUND)]])
            thresholds[CAPPED] = np.minimum(thresholds[CAPPED], room_s)
        return thresholds

    def _room_s(self, round_s: FloatArray | float) -> FloatArray:
        return self.maxima.room_s(self.box.low, self.least_turn_s, round_s)

    def _effects(self, low: FloatArray, high: FloatArray) -> FloatArray:
        """Return by how much a round takes longer if one maximum rises from `low` to `high`, at the best interval."""
        turn_s = self.least_turn_s
        round_s = self.maxima.round_s(low[:-2], turn_s)
        interval = float(self.rule.best(round_s, low[-2] + self.averaging_s + low[-1]))
        return np.append(self.maxima.effects_s(low[:-2], high[:-2], turn_s), (high[-2:] - low[-2:]) * (1 / interval))

    def _terms(self, *, upper: bool) -> FloatArray:
        """Return the contribution of each maximum in every cell at one corner: shape (terms, rows, columns)."""
        edge = self.high if upper else self.box.low
        terms = np.empty((len(edge), *self.shape))
        terms[:] = edge[:, None, None]
        for axis, (term, bands) in enumerate(zip(self.axes, self.bands, strict=True)):
            if term != ROUND:
                terms[term] = np.expand_dims(bands.high if upper else bands.low, 1 - axis)
        if upper and ROUND in self.axes:
            axis = self.axes.index(ROUND)
            room_s = np.expand_dims(self._room_s(self.bands[axis].high), 2 - axis)
            terms[CAPPED] = np.minimum(terms[CAPPED], room_s)
        terms[-2:] = np.maximum(terms[-2:], self.exchanged_s)
        return terms

    def _least_rounds(self) -> FloatArray:
        """Return a lower bound of A in every cell, apart from that by its maxima."""
        least_s = np.full(self.shape, self.round_s)
        if ROUND in self.axes:
            axis = self.axes.index(ROUND)
            least_s = np.maximum(least_s, np.expand_dims(self.bands[axis].low, 1 - axis))
        return least_s

    def _times(
        self, cells: BoolArray, turn_s: FloatArray, terms: FloatArray, maxima: Terms, least_s: FloatArray | None = None
    ) -> FloatArray:
        """Return the best times of these cells, where A is at least `least_s`, and infinity for the others."""
        times = np.full(cells.shape, np.inf)
        *of_round, upload, download = terms[:, cells]
        aggregation_s = upload + self.averaging_s + download
        round_s = maxima.round_s(of_round, turn_s[cells])
        round_s = round_s if least_s is None else np.maximum(round_s, least_s[cells])
        times[cells] = self.rule.best_time_s(round_s, aggregation_s)
        return times

    def _split_cells(self, alive: BoolArray, axis: int) -> list[tuple[float, Box]]:
        """Halve the cells in `alive` along one axis of the grid."""
        lines = np.flatnonzero(alive.any(axis=1 - axis))
        boxes = []
        for half in np.array_split(lines, min(2, lines.size)):
            part = np.zeros_like(alive)
            part[(half, slice(None)) if axis == 0 else (slice(None), half)] = True
            boxes.append(self._around(alive & part, self.box.low, self.high))
        return boxes

    def _split_range(self, alive: BoolArray, term: int) -> list[tuple[float, Box]]:
        """Halve the range of a threshold that is not an axis, at the candidate nearest to its middle."""
        values = self._values(term)
        middle = int(np.clip(np.searchsorted(values, (values[0] + values[-1]) / 2), 1, values.size - 1))
        below, above = self.high.copy(), self.box.low.copy()
        below[term], above[term] = values[middle - 1], values[middle]
        return [self._around(alive, self.box.low, below), self._around(alive, above, self.high)]

    def _around(self, cells: BoolArray, low: FloatArray, high: FloatArray) -> tuple[float, Box]:
        """Return the smallest box between `low` and `high` that contains these cells, and its bound."""
        low, high, round_s = low.copy(), high.copy(), (self.round_s, self.box.round_s[1])
        for axis, (term, bands) in enumerate(zip(self.axes, self.bands, strict=True)):
            lines = np.flatnonzero(cells.any(axis=1 - axis))
            if isinstance(bands, _RoundBands):
                round_s = float(bands.low[lines[0]]), min(round_s[1], float(bands.until[lines[-1]]))
            else:
                low[term], high[term] = bands.low[lines[0]], bands.high[lines[-1]]
        return float(self.bound_s[cells].min()), replace(self.box, low=low, high=high, round_s=round_s)


class _Bands:
    """Candidate values in at most `BANDS` consecutive bands; `low` and `high` are each band's least and largest."""

    def __init__(self, values: FloatArray) -> None:
        starts = np.unique(np.linspace(0, values.size, BANDS + 1).astype(np.int64)[:-1])
        self._set(values, starts)

    def _set(self, values: FloatArray, starts: IntArray) -> None:
        self.low = values[starts]
        self.high = values[np.append(starts[1:], values.size) - 1]
        self.size = starts.size

    def first_admitting(self, values: FloatArray) -> IntArray:
        """Return the first band whose upper end admits each value."""
        return np.searchsorted(self.high, values)


class _RoundBands(_Bands):
    """Bands of A, which is not one of its candidates: it takes any value from one band to the next.

    Attributes:
        until: the end of each band. It is a little above the next band's `low`, so that rounding loses no plan between
            two bands, and below its least candidate. Candidates that are too near each other are in one band.
    """

    def __init__(self, values: FloatArray) -> None:
        apart = np.flatnonzero(np.append(True, np.diff(values) > APART * values[1:]))
        chosen = np.unique(np.linspace(0, apart.size, BANDS + 1).astype(np.int64)[:-1])
        self._set(values, apart[chosen])
        self.low[1:] *= 1 - 4 * ROUNDING
        self.until = np.append(self.low[1:] * (1 + ROUNDING), np.inf)


def fitting(times: FloatArray, thresholds: FloatArray) -> BoolArray:
    """Return which cuts of which devices are allowed and within all thresholds: shape (m, n)."""
    fits = np.isfinite(times[0])
    for term, threshold in zip(times, thresholds, strict=True):
        fits &= term <= threshold
    return fits


def least_within(times: FloatArray, fits: BoolArray) -> FloatArray:
    """Return, for each maximum, the largest of the devices' minimal times among the cuts that fit."""
    excluded = np.where(fits, 0.0, np.inf)
    own = np.empty_like(excluded)  # one array for all terms: large ones take longer to get than to fill
    return np.array([np.add(term, excluded, out=own).min(axis=0).max(initial=0.0) for term in times])


def deepest_cuts(fits: BoolArray) -> IntArray:
    """Return every device's deepest cut that fits, 0 if none does."""
    last = fits.shape[0] - np.argmax(fits[::-1], axis=0)
    return np.where(fits.any(axis=0), last, 0)


def _candidates(low: float, values: FloatArray) -> FloatArray:
    """Return the values that a plan's own maximum can take within the box, in ascending order."""
    return np.unique(np.append(values[values > low], low))


def _summable(values: FloatArray, devices: int) -> FloatArray:
    """Round down, if necessary, so that sums over devices are exact in any order: integers do not change.

    The grid's cumulative sums rise and fall; with rounding errors a lower bound could exceed the true time.
    """
    unit = _unit(values, devices)
    return np.floor(values / unit) * unit


def _unit(values: FloatArray, devices: int) -> float:
    """Return the power of two whose multiples can be added up over devices without rounding."""
    largest = float(np.abs(values).max()) * devices
    return float(2.0 ** (np.ceil(np.log2(largest)) - 52)) if largest > 0 else 1.0
