"""Theorem 2: the best interval for given cuts, for the general drift I^p and for many cases at once.

With A seconds a round and B seconds an aggregation, and L_c fixed, the time to target is

    Θ(I) = (A + B/I) / P(I),     P(I) = γ (c − 1{I>1} κ I^p) / 2ϑ,     κ = Σ_{j≤L_c} κ_j.

For I ≥ 2 the sign of its derivative is that of Ξ(I) = A κ p I^{p+1} + B κ (p+1) I^p − B c, which rises with I: Θ falls
until the root I' and rises after it, up to the pole where c = κ I^p. (The paper's Appendix C is the case p = 2.)

Paper: I* is ⌊I'⌋ or ⌈I'⌉. Here: also 1 and 2, and none at or beyond the pole. Because: at I = 1 there is no drift, so
Θ jumps there; and beyond the pole Θ is negative, which would look best of all.
"""

import math

import numpy as np

from adaptsfl.checks import FloatArray, IntArray
from adaptsfl.convergence import Intervals
from adaptsfl.planner.problem import PlanProblem

NEWTON_STEPS = 8
SMALLEST_ROOT = 0.5  # a root below 1 need not be known any better


class IntervalRule:
    """Θ as a function of A and B alone, the interval chosen at its best, for one L_c.

    `best` and `best_time_s` also serve many L_c at once: `deepest` is then an array that goes with A and B.
    """

    def __init__(self, problem: PlanProblem, deepest: int | IntArray) -> None:
        self.model, self.deepest = problem.convergence, deepest
        self.shortest, longest = problem.intervals
        # At most the last interval before the pole; where that is below the shortest, there is no choice.
        self.longest = np.minimum(longest, np.vectorize(self.model.largest_interval)(deepest))
        # A drift that stays below the last digit of the budget is none; its roots would overflow.
        slope = self.model.cumulative_drift[deepest]
        lost = slope * np.asarray(self.longest, dtype=np.float64) ** self.model.power < 1e-17 * self.model.budget
        self.slope = np.where(lost, 0.0, slope)  # κ

    def best(self, round_s: FloatArray, aggregation_s: FloatArray) -> FloatArray:
        """Return I*, as floats with whole values."""
        return self.choose(round_s, aggregation_s)[0]

    def best_time_s(self, round_s: FloatArray, aggregation_s: FloatArray) -> FloatArray:
        """Return Θ(I*), infinite if there is no interval to choose. It rises with both arguments."""
        return self.choose(round_s, aggregation_s)[1]

    def round_cap_s(self, limit_s: float, aggregation_s: float) -> float:
        """Return the A from which on Θ(I*) is at least `limit_s`, given B: the largest limit·P(I) − B/I."""
        slope = limit_s * self.model.pace * float(self.slope)
        peak = _root(aggregation_s / (slope * self.model.power), self.model.power + 1) if slope > 0 else math.inf
        return max(limit_s * float(self._progress(i)) - aggregation_s / i for i in self._around(peak))

    def aggregation_cap_s(self, limit_s: float, round_s: float) -> float:
        """Return the B from which on Θ(I*) is at least `limit_s`, given A: the largest I·(limit·P(I) − A)."""
        spare = max(limit_s * self.model.pace * self.model.budget - round_s, 0.0)
        slope = limit_s * self.model.pace * float(self.slope)
        peak = _root(spare / (slope * (self.model.power + 1)), self.model.power) if slope > 0 else math.inf
        return max(i * (limit_s * float(self._progress(i)) - round_s) for i in self._around(peak))

    def root(self, round_s: FloatArray, aggregation_s: FloatArray) -> FloatArray:
        """Return I' with Ξ(I') = 0, by Newton–Raphson in log I.

        Ξ/B = κ I^p (p (A/B) I + p + 1) − c. In log I that is a sum of rising exponentials, hence convex for every
        p > 0. The start is where the larger of its two terms alone would reach c: right of the root, so that the steps
        fall towards it without overshoot, and so near (Ξ/B ≤ c there) that eight of them reach the last digit.
        """
        A, B = np.broadcast_arrays(np.asarray(round_s, dtype=np.float64), np.asarray(aggregation_s, dtype=np.float64))
        p, kappa = self.model.power, np.where(self.slope > 0, self.slope, 1.0)
        largest = self.longest + 1.0  # a root beyond the longest interval need not be known any better
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            x, c = A / B, self.model.budget / kappa
            interval = np.minimum((c / (p * x)) ** (1 / (p + 1)), (c / (p + 1)) ** (1 / p))
            for _ in range(NEWTON_STEPS):
                interval = np.minimum(np.maximum(interval, SMALLEST_ROOT), largest)
                power, product = interval**p, x * interval
                step = (power * (p * product + (p + 1)) - c) / (power * (product + 1))
                interval = interval * np.exp(step / -(p * (p + 1)))
        return np.where(B > 0, np.where(self.slope > 0, interval, np.inf), 0.0)

    def choose(self, round_s: FloatArray, aggregation_s: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Return I* and Θ(I*)."""
        down = np.maximum(np.floor(self.root(round_s, aggregation_s)), 2.0)
        candidates = np.stack((np.ones_like(down), down, down + 1))
        candidates = np.minimum(np.maximum(candidates, self.shortest), self.longest)
        times = (round_s + aggregation_s / candidates) / self._progress(candidates)
        winner = np.argmin(times, axis=0)[None]
        time_s = np.take_along_axis(times, winner, 0)[0]
        return np.take_along_axis(candidates, winner, 0)[0], np.where(self.longest < self.shortest, np.inf, time_s)

    def _around(self, interval: float) -> list[int]:
        """1, 2 and the whole numbers around `interval`, within the allowed range."""
        longest = int(self.longest)
        down = int(min(interval, longest))
        return [min(max(i, self.shortest), longest) for i in (1, 2, down, down + 1)]

    def _progress(self, interval: Intervals) -> FloatArray:
        """P(I): positive for every interval in the allowed range."""
        return self.model.progress(interval, self.deepest)


def _root(value: float, degree: float) -> float:
    """value^(1/degree), infinite where that is too large for a float."""
    with np.errstate(over="ignore"):
        return float(np.float64(value) ** (1 / degree))


def best_interval(problem: PlanProblem, cuts: IntArray) -> int:
    """Theorem 2: I* for these cuts; 1 where no longer interval makes progress."""
    rule = IntervalRule(problem, int(np.max(cuts)))
    return int(rule.best(problem.round_s(cuts), problem.aggregation_s(cuts)))
