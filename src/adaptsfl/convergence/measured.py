"""Measured rounds, relative to those of I = 1: a growth or a power of I per L_c, or a table of any shape.

These models have no target: R is the number of rounds for one unit of progress, and the time of a plan is the time for
one unit. Every interval makes progress; p ≥ 1 means that no interval above 1 is worth its rounds.
"""

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from adaptsfl import checks
from adaptsfl.checks import FloatArray, IntArray
from adaptsfl.convergence.rounds import LARGEST_POWER, LONGEST_INTERVAL, Form, Intervals
from adaptsfl.errors import InfeasiblePlan, InvalidInput

# Every interval above 32 is within 5 % of one of these, which makes a plan less than 0.1 % slower.
SOME_INTERVALS: list[int] = sorted({*range(1, 33), *(round(one) for one in np.geomspace(32, LONGEST_INTERVAL, 185))})


@dataclass(frozen=True)
class GrowthRounds:
    """R(I, L_c) = 1 + c(L_c) (I^q − 1): nothing is lost at I = 1, and more at longer intervals.

    Attributes:
        factors: c of every L_c; none below 0, and none below the one before it.
        power: q.
    """

    factors: FloatArray
    power: float

    form: ClassVar[Form] = "growth"
    title: ClassVar[str] = "growth with the interval"
    achieved: ClassVar[str] = "As far as one round of I = 1 goes"
    scale: ClassVar[str] = "c"

    def __post_init__(self) -> None:
        object.__setattr__(self, "factors", _rising("growth.factors", self.factors))
        checks.number("growth.power", self.power, positive=True)
        if self.power > LARGEST_POWER:
            raise InvalidInput("growth.power", f"is {self.power:g}", f"Give a power of at most {LARGEST_POWER}")

    @property
    def layers(self) -> int:
        """L."""
        return self.factors.size

    def rounds(self, interval: Intervals, deepest: int | IntArray) -> FloatArray:
        """R(I, L_c) = 1 + c (I^q − 1)."""
        grown = np.asarray(interval, dtype=np.float64) ** self.power - 1
        return 1 + self.factors[np.asarray(deepest) - 1] * grown

    def choices(self, deepest: int, shortest: int, longest: int) -> Sequence[int]:
        """Return intervals up to 32, then those of `SOME_INTERVALS`, and both ends: R hardly differs between them."""
        if shortest >= longest:
            return range(shortest, longest + 1)
        between = SOME_INTERVALS[bisect_right(SOME_INTERVALS, shortest) : bisect_left(SOME_INTERVALS, longest)]
        return [shortest, *between, longest]

    def check_feasible(self, interval: int = 1, deepest: int = 1) -> None:
        """Do nothing: every interval makes progress."""

    def scaled(self, factor: float) -> "GrowthRounds":
        """Return the model with every c multiplied by `factor`."""
        return GrowthRounds(self.factors * factor, self.power)


@dataclass(frozen=True)
class PowerRounds:
    """R(I, L_c) = I^p(L_c): a block of I rounds is worth I^(1−p) rounds of I = 1.

    Attributes:
        powers: p of every L_c; none below 0, and none below the one before it.
    """

    powers: FloatArray

    form: ClassVar[Form] = "powers"
    title: ClassVar[str] = "powers of the interval"
    achieved: ClassVar[str] = "As far as one round of I = 1 goes"
    scale: ClassVar[str] = "p"

    def __post_init__(self) -> None:
        powers = _rising("powers", self.powers)
        for index in np.flatnonzero(powers > LARGEST_POWER)[:1]:
            raise InvalidInput(f"powers[{index}]", f"is {powers[index]:g}", f"Give powers of at most {LARGEST_POWER}")
        object.__setattr__(self, "powers", powers)

    @property
    def layers(self) -> int:
        """L."""
        return self.powers.size

    def rounds(self, interval: Intervals, deepest: int | IntArray) -> FloatArray:
        """R(I, L_c) = I^p."""
        return np.asarray(interval, dtype=np.float64) ** self.powers[np.asarray(deepest) - 1]

    def choices(self, deepest: int, shortest: int, longest: int) -> Sequence[int]:
        """Return every interval of the range."""
        return range(shortest, longest + 1)

    def check_feasible(self, interval: int = 1, deepest: int = 1) -> None:
        """Do nothing: every interval makes progress."""

    def scaled(self, factor: float) -> "PowerRounds":
        """Return the model with every p multiplied by `factor`."""
        return PowerRounds(self.powers * factor)


@dataclass(frozen=True)
class RoundsTable:
    """R(I, L_c) of some intervals, in any unit; R falls neither with I nor with L_c.

    Only these intervals may be chosen: R of the intervals between is unknown.

    Attributes:
        intervals: in ascending order; the first is 1, and the others are compared with it.
        table: R, with one row per L_c and one column per interval.
    """

    intervals: IntArray
    table: FloatArray

    form: ClassVar[Form] = "table"
    title: ClassVar[str] = "a table"
    achieved: ClassVar[str] = "As far as the table's rounds go"
    scale: ClassVar[str] = "log R"

    def __post_init__(self) -> None:
        intervals = _intervals(self.intervals)
        object.__setattr__(self, "intervals", intervals)
        object.__setattr__(self, "table", _table(self.table, intervals))

    @property
    def layers(self) -> int:
        """L."""
        return len(self.table)

    def rounds(self, interval: Intervals, deepest: int | IntArray) -> FloatArray:
        """R(I, L_c); infinite for intervals that are not in the table."""
        column = np.minimum(np.searchsorted(self.intervals, interval), self.intervals.size - 1)
        found = self.table[np.asarray(deepest) - 1, column]
        return np.where(self.intervals[column] == interval, found, np.inf)

    def choices(self, deepest: int, shortest: int, longest: int) -> Sequence[int]:
        """Return the table's intervals within the range."""
        return [int(interval) for interval in self.intervals if shortest <= interval <= longest]

    def check_feasible(self, interval: int = 1, deepest: int = 1) -> None:
        """Raise `InfeasiblePlan` if the table does not have this interval."""
        if interval in self.intervals:
            return
        above = int(np.searchsorted(self.intervals, interval))
        nearest = " and ".join(str(one) for one in self.intervals[above - 1 : above + 1])
        nearest = f"are {nearest}" if above < self.intervals.size else f"is {nearest}"
        raise InfeasiblePlan(
            f"planner.interval: is {interval}, which convergence.table.intervals does not have; the nearest "
            f"{nearest}. Choose an interval of the table, or add {interval} to it."
        )

    def scaled(self, factor: float) -> "RoundsTable":
        """Return the table with R(I, L_c) / R(1, 1) raised to the power `factor`.

        For a table of powers this multiplies p by `factor`. The table still rises in both directions; multiplying
        R(I, L_c) − R(1, L_c) in each row would not ensure that.
        """
        least = self.table[0, 0]
        raised = least * (self.table / least) ** factor
        # Rounding may swap the order of powers of neighbouring numbers.
        raised = np.maximum.accumulate(np.maximum.accumulate(raised, axis=0), axis=1)
        return RoundsTable(self.intervals, raised)


def _rising(field: str, values: Any) -> FloatArray:
    """Return one number per L_c; raise if one is negative or they fall with L_c."""
    array = checks.vector(field, values, of="one per L_c")
    for index in np.flatnonzero(np.diff(array) < 0)[:1] + 1:
        raise InvalidInput(
            f"{field}[{index}]",
            f"is {array[index]:g}, below {array[index - 1]:g} before it",
            "Give numbers that do not fall with L_c: more layers that drift never need fewer rounds",
        )
    return array


def _intervals(values: Any) -> IntArray:
    """Return the intervals of a table, checked."""
    field = "table.intervals"
    intervals = [
        checks.whole_number(f"{field}[{k}]", value, at_most=LONGEST_INTERVAL) for k, value in enumerate(values)
    ]
    if not intervals or intervals[0] != 1:
        raise InvalidInput(
            f"{field}[0]" if intervals else field,
            f"is {intervals[0]}" if intervals else "is empty",
            "Begin with 1, averaging after every round: the rounds of the others are compared with it",
        )
    for index, (before, after) in enumerate(itertools.pairwise(intervals), start=1):
        if after <= before:
            remedy = "Give each interval once, in rising order, and the columns of rounds in the same order"
            raise InvalidInput(f"{field}[{index}]", f"is {after}, after {before}", remedy)
    array = np.array(intervals, dtype=np.int64)
    array.setflags(write=False)
    return array


def _table(values: Any, intervals: IntArray) -> FloatArray:
    """Return the rounds of a table, checked: positive, and rising or level along rows and columns."""
    field, of = "table.rounds", "one per interval"
    if len(values) == 0:
        raise InvalidInput(field, "is empty", "Give one row per L_c")
    table = np.array(
        [
            checks.vector(f"{field}[{k}]", row, length=intervals.size, of=of, positive=True)
            for k, row in enumerate(values)
        ]
    )
    smooth = "Where measurements say so, smooth them: a running maximum will do"
    for row, before in np.argwhere(np.diff(table, axis=1) < 0)[:1]:
        column = before + 1
        raise InvalidInput(
            f"{field}[{row}][{column}]",
            f"is {table[row, column]:g}, below {table[row, before]:g} of the shorter interval {intervals[before]}",
            f"Give rounds that do not fall with the interval. {smooth}",
        )
    for above, column in np.argwhere(np.diff(table, axis=0) < 0)[:1]:
        row = above + 1
        raise InvalidInput(
            f"{field}[{row}][{column}]",
            f"is {table[row, column]:g}, below {table[above, column]:g} of the shallower L_c {row}",
            f"Give rounds that do not fall with L_c. {smooth}",
        )
    table.setflags(write=False)
    return table
