"""Rules for the interval that ignore the fleet: AdaComm, post-local SGD, QSR. Cuts are given or the fastest."""

import math
from collections.abc import Sequence

import numpy as np

from adaptsfl import checks
from adaptsfl.decisions import Decision
from adaptsfl.errors import InvalidInput
from adaptsfl.policies.cuts import CutOptions
from adaptsfl.policies.policy import Observation, decision

LONGEST = 1000  # the largest interval, for learning rates near zero
LOSS_ROUNDS = 10  # AdaComm averages the loss over these: a single round is noisy
ROUNDING = 1e-9  # a learning rate of 0.1 · η is not exactly a tenth


class IntervalPolicy(CutOptions):
    """A policy whose rule sets the next interval: subclasses implement `interval`.

    Without `cut` or `cuts`, the cuts with the least seconds per round for that interval are taken, anew after every
    averaging.
    """

    def decide(self, seen: Observation) -> Decision:
        """Return one block of the interval that the rule gives, within the recipe's limits."""
        interval = within_limits(seen, self.interval(seen))
        return decision(self.cuts_for(seen, interval), interval)

    def interval(self, seen: Observation) -> int:
        """Return the interval that the rule gives."""
        raise NotImplementedError


def within_limits(seen: Observation, interval: int) -> int:
    """Return an interval as the recipe's [planner] allows it: a fixed one holds, and none is above max_interval."""
    if seen.limits.interval is not None:
        return seen.limits.interval
    return min(interval, seen.limits.max_interval or interval)


class AdaComm(IntervalPolicy):
    """Long intervals first, shorter ones as the loss falls (Wang & Joshi, 2019).

    τ = ⌈τ₀ √(η₀/η · F/F₀)⌉, computed anew every `every` rounds.

    F₀ is the loss of the first round and F the mean over the last ten, both over the mini-batches of training; η₀ and η
    are the learning rates of then and now. If the formula does not shorten τ and the learning rate is the same, τ is
    halved, as in the paper: it would otherwise stay long on a plateau of the loss.

    Paper: τ is computed every T₀ seconds. Here: every `every` rounds, after an averaging. Because: seconds differ
    between fleets, and the training result should not.
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
        """Return τ, recomputed if `every` rounds have passed."""
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
        if first <= 0:  # possible with a user's loss: the ratio is meaningless
            return self.tau0
        rates = first_rate / seen.learning_rate if seen.learning_rate else math.inf
        squared = rates * max(now / first, checks.SMALLEST)
        return max(1, math.ceil(min(self.tau0 * math.sqrt(squared), LONGEST)))


class PostLocal(IntervalPolicy):
    """Averaged after every round up to `switch_round`, and every `interval` rounds later (Lin et al., 2020).

    The paper switches where the learning rate first falls: give the first of `[training.schedule]`'s steps.
    """

    title = "post-local SGD"

    def __init__(
        self,
        interval: int = 8,
        switch_round: int | None = None,
        cut: int | None = None,
        cuts: Sequence[int] | None = None,
    ) -> None:
        super().__init__(cut, cuts)
        self.later = checks.whole_number("interval", interval)
        if switch_round is None:
            remedy = "Give the last round that is averaged by itself, such as that before the learning rate falls"
            raise InvalidInput("switch_round", "is missing", remedy)
        self.switch_round = checks.whole_number("switch_round", switch_round, at_least=0)

    def interval(self, seen: Observation) -> int:
        """Return 1 before the switch, and the interval given after it."""
        return 1 if seen.round < self.switch_round else self.later


class QuadraticSynchronisation(IntervalPolicy):
    """The quadratic synchronisation rule: longer intervals as the learning rate falls (Gu et al., 2024).

    H = max(base, ⌊(α/η)²⌋), where η is the learning rate of the next round.

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
        """Return H for the current learning rate, at most 1000."""
        if self.alpha is None:
            self.alpha = math.sqrt(self.base) * seen.learning_rate
        if seen.learning_rate <= self.alpha / math.sqrt(LONGEST):  # also if it is zero
            return LONGEST
        return max(self.base, math.floor((self.alpha / seen.learning_rate) ** 2 * (1 + ROUNDING)))
