"""QSR, the quadratic synchronisation rule: longer intervals as the learning rate falls (Gu et al., 2024)."""

import math
from collections.abc import Sequence

from adaptsfl import checks
from adaptsfl.policies.interval_rule import LONGEST, IntervalRule
from adaptsfl.policies.policy import Observation

ROUNDING = 1e-9  # a learning rate of 0.1 · η is not exactly a tenth


class QuadraticSynchronisation(IntervalRule):
    """H = max(base, ⌊(α/η)²⌋), where η is the learning rate of the next round.

    In a warm-up η is the rate to which it rises, as in the paper. Without `alpha` it is √base · η of the first round:
    then H is `base` at first, and grows as soon as the learning rate falls. The paper tunes it.
    """

    title = "QSR"

    def __init__(
        self,
        base: int = 4,
        alpha: float | None = None,
        cut: int | None = None,
        cuts: Sequence[int] | None = None,
    ) -> None:
        super().__init__(cut, cuts)
        self.base = checks.whole_number("base", base, at_most=LONGEST)
        self.alpha = None if alpha is None else checks.number("alpha", alpha, positive=True)

    def interval(self, seen: Observation) -> int:
        """Return H for the learning rate of the moment, and at most 1000."""
        if self.alpha is None:
            self.alpha = math.sqrt(self.base) * seen.learning_rate
        if seen.learning_rate <= self.alpha / math.sqrt(LONGEST):  # and where it is zero
            return LONGEST
        return max(self.base, math.floor((self.alpha / seen.learning_rate) ** 2 * (1 + ROUNDING)))
