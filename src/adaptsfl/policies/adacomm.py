"""AdaComm: long intervals first, shorter ones as the loss falls (Wang & Joshi, 2019)."""

import math
from collections.abc import Sequence

import numpy as np

from adaptsfl import checks
from adaptsfl.policies.interval_rule import LONGEST, IntervalRule
from adaptsfl.policies.policy import Observation

LOSS_ROUNDS = 10  # over which a loss is averaged: one round's is noisy


class AdaComm(IntervalRule):
    """τ = ⌈τ₀ √(η₀/η · F/F₀)⌉, computed anew every `every` rounds.

    F₀ is the loss of the first round and F the mean over the last ten, both over the mini-batches of training; η₀ and η
    are the learning rates of then and now. Where neither has shortened τ since it was last computed, it is halved, as
    the paper does: on a plateau of the loss it would else stay long. A learning rate that has changed is followed.

    Paper: τ is computed every T₀ seconds. Here: every `every` rounds, after an averaging. Because: seconds differ from
    fleet to fleet, and what is learned should not.
    """

    title = "AdaComm"

    def __init__(
        self, tau0: int = 10, every: int = 50, cut: int | None = None, cuts: Sequence[int] | None = None
    ) -> None:
        super().__init__(cut, cuts)
        self.tau0 = self.tau = checks.whole_number("tau0", tau0, at_most=LONGEST)
        self.every = checks.whole_number("every", every)
        self.first_rate: float | None = None  # η₀
        self.rate, self.computed_at = 0.0, 0  # η, and the rounds done, when τ was last computed

    def interval(self, seen: Observation) -> int:
        """Return τ, computed anew where it is time."""
        if self.first_rate is None:
            self.first_rate = self.rate = seen.learning_rate
        if seen.losses.size and seen.round - self.computed_at >= self.every:
            tau = self._by_formula(seen, self.first_rate)
            if tau >= self.tau and seen.learning_rate == self.rate:
                tau = math.ceil(self.tau / 2)
            self.tau, self.rate, self.computed_at = tau, seen.learning_rate, seen.round
        return self.tau

    def _by_formula(self, seen: Observation, first_rate: float) -> int:
        first, now = float(seen.losses[0]), float(np.mean(seen.losses[-LOSS_ROUNDS:]))
        if first <= 0:  # a loss of the user's own: the ratio says nothing
            return self.tau0
        rates = first_rate / seen.learning_rate if seen.learning_rate else math.inf
        squared = rates * max(now / first, checks.SMALLEST)
        return max(1, math.ceil(min(self.tau0 * math.sqrt(squared), LONGEST)))
