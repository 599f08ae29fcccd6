"""The interface of a model of R(I, L_c), the rounds that a plan needs, as the planner uses it."""

from collections.abc import Sequence
from typing import ClassVar, Literal, Protocol

from adaptsfl.checks import FloatArray, IntArray

Intervals = int | FloatArray  # one interval, or many as floats with whole values
Form = Literal["bound", "growth", "powers", "table"]

# The longest interval, in effect "never": without drift, a longer interval is always slightly better.
LONGEST_INTERVAL = 10**9

# Larger powers of the interval are input errors, and products of a few would overflow.
LARGEST_POWER = 10


class RoundsModel(Protocol):
    """R(I, L_c): positive, and falling neither with I nor with L_c. The planner's proofs rest on that alone.

    Attributes:
        form: the paper's bound, a growth or a power of I per L_c, or a table.
        title: the form in words.
        achieved: what R rounds achieve, in words. Only ratios of R decide a plan, so R may have any unit.
        scale: the quantity that `scaled` multiplies, in words.
    """

    form: ClassVar[Form]
    title: ClassVar[str]
    achieved: ClassVar[str]
    scale: ClassVar[str]

    @property
    def layers(self) -> int:
        """L."""
        ...

    def rounds(self, interval: Intervals, deepest: int | IntArray) -> FloatArray:
        """R(I, L_c); infinite where the interval must not be chosen."""
        ...

    def choices(self, deepest: int, shortest: int, longest: int) -> Sequence[int]:
        """Return the intervals from `shortest` to `longest` that may be chosen with this L_c, in ascending order."""
        ...

    def check_feasible(self, interval: int = 1, deepest: int = 1) -> None:
        """Raise `InfeasiblePlan` if R(I, L_c) is infinite; with the defaults, if every plan has an infinite R."""
        ...

    def scaled(self, factor: float) -> "RoundsModel":
        """Return a model in which longer intervals cost `factor` times as much, measured as `scale` says."""
        ...
