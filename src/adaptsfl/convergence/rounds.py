"""What the planner asks of a model of R(I, L_c), the rounds that a plan needs, whatever form it has."""

from collections.abc import Sequence
from typing import ClassVar, Literal, Protocol

from adaptsfl.checks import FloatArray, IntArray

Intervals = int | FloatArray  # one interval, or many as floats with whole values
Form = Literal["bound", "growth", "powers", "table"]

# Beyond this many rounds an interval means "never": without drift, longer is always a little better.
LONGEST_INTERVAL = 10**9

# Larger powers of the interval are a mistake, and products of a few would overflow.
LARGEST_POWER = 10


class RoundsModel(Protocol):
    """R(I, L_c): positive, and falling neither with I nor with L_c. The planner's proofs rest on that alone.

    Attributes:
        form: how it is given: the paper's bound, a growth or a power of I per L_c, or a table.
        title: the same in words.
        achieved: what is done after R rounds, in words. Only ratios of R decide a plan, so any unit will do.
        scale: what `scaled` multiplies, in words.
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
        """Return the intervals from `shortest` to `longest` that may be chosen with this L_c, in rising order."""
        ...

    def check_feasible(self, interval: int = 1, deepest: int = 1) -> None:
        """Raise `InfeasiblePlan` if R is infinite there. With the defaults: if no plan at all has a finite R."""
        ...

    def scaled(self, factor: float) -> "RoundsModel":
        """Return the model by which longer intervals cost `factor` times as much, in the form's own measure."""
        ...
