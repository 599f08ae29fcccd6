"""The best interval for given cuts, for many cases at once and for any rounds model.

With A seconds per round, B seconds per aggregation and fixed L_c, the time is Θ(I) = R(I) · (A + B/I). The few
intervals that can be the best depend on the form of R: Theorem 2 gives them for the bound, a closed form for powers,
and a lower envelope of lines for tables and any other `RoundsModel`.
"""

import math
from abc import ABC, abstractmethod

import numpy as np

from adaptsfl.checks import FloatArray, IntArray
from adaptsfl.convergence import ConvergenceModel, PowerRounds, RoundsModel
from adaptsfl.errors import SolverError
from adaptsfl.planner.problem import PlanProblem, total_s

NEWTON_STEPS = 8
MOST_LINES = 1_000_000  # most intervals of one L_c that an envelope compares
SMALLEST_ROOT = 0.5  # roots below 1 need no more precision


class IntervalRule(ABC):
    """Θ at the best interval, as a function of A and B, for one L_c.

    `best` and `best_time_s` also serve many L_c at once: `deepest` is then an array of the shape of A and B.
    """

    def __init__(self, problem: PlanProblem, model: RoundsModel, deepest: int | IntArray) -> None:
        self.rounds, self.deepest = model.rounds, deepest
        self.shortest: int = problem.intervals[0]
        self.longest: int | IntArray = problem.intervals[1]  # below the shortest: there is no interval to choose

    @abstractmethod
    def candidates(self, round_s: FloatArray, aggregation_s: FloatArray) -> FloatArray:
        """Return intervals of which one is the best for A and B: shape (candidates, …)."""

    @abstractmethod
    def round_cap_candidates(self, limit_s: float, aggregation_s: float) -> FloatArray:
        """Return intervals of which one has the largest limit/R(I) − B/I."""

    @abstractmethod
    def aggregation_cap_candidates(self, limit_s: float, round_s: float) -> FloatArray:
        """Return intervals of which one has the largest I·(limit/R(I) − A)."""

    def best(self, round_s: FloatArray, aggregation_s: FloatArray) -> FloatArray:
        """Return I*, as floats with whole values."""
        return self.choose(round_s, aggregation_s)[0]

    def best_time_s(self, round_s: FloatArray, aggregation_s: FloatArray) -> FloatArray:
        """Return Θ(I*), infinite if there is no interval to choose. It rises with both arguments."""
        return self.choose(round_s, aggregation_s)[1]

    def choose(self, round_s: FloatArray, aggregation_s: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Return I* and Θ(I*)."""
        candidates = self.candidates(round_s, aggregation_s)
        times = total_s(self.rounds(candidates, self.deepest), candidates, round_s, aggregation_s)
        winner = np.argmin(times, axis=0)[None]
        time_s = np.take_along_axis(times, winner, 0)[0]
        interval = np.take_along_axis(candidates, winner, 0)[0]
        return interval, np.where(np.less(self.longest, self.shortest), np.inf, time_s)

    def round_cap_s(self, limit_s: float, aggregation_s: float) -> float:
        """Return the A from which on Θ(I*) is at least `limit_s`, given B: the largest limit/R(I) − B/I."""
        intervals = self.round_cap_candidates(limit_s, aggregation_s)
        return float(np.max(limit_s / self.rounds(intervals, self.deepest) - aggregation_s / intervals))

    def aggregation_cap_s(self, limit_s: float, round_s: float) -> float:
        """Return the B from which on Θ(I*) is at least `limit_s`, given A: the largest I·(limit/R(I) − A)."""
        intervals = self.aggregation_cap_candidates(limit_s, round_s)
        return float(np.max(intervals * (limit_s / self.rounds(intervals, self.deepest) - round_s)))

    def around(self, interval: float) -> FloatArray:
        """Return 1, 2 and the whole numbers around `interval`, within the allowed range."""
        longest = int(self.longest)
        down = int(min(interval, longest))
        return np.array([min(max(i, self.shortest), longest) for i in (1, 2, down, down + 1)], dtype=np.float64)


class BoundRule(IntervalRule):
    """Theorem 2 for the general drift I^p, with P(I) = 1/R(I) = γ (c − 1{I>1} κ I^p) / 2ϑ and κ = Σ_{j≤L_c} κ_j.

    For I ≥ 2 the sign of Θ's derivative is that of Ξ(I) = A κ p I^{p+1} + B κ (p+1) I^p − B c, which rises with I: Θ
    falls until the root I' and rises after it, up to the pole where c = κ I^p. (The paper's Appendix C: p = 2.)

    Paper: I* is ⌊I'⌋ or ⌈I'⌉. Here: also 1 and 2, and none at or beyond the pole. Because: at I = 1 there is no drift,
    so Θ jumps there; and beyond the pole Θ is negative, which would look like the optimum.
    """

    def __init__(self, problem: PlanProblem, model: ConvergenceModel, deepest: int | IntArray) -> None:
        super().__init__(problem, model, deepest)
        self.model = model
        # At most the last interval before the pole.
        self.longest = np.minimum(self.longest, np.vectorize(model.largest_interval)(deepest))
        # A drift below the last digit of the budget counts as zero; its roots would overflow.
        slope = model.cumulative_drift[deepest]
        lost = slope * np.asarray(self.longest, dtype=np.float64) ** model.power < 1e-17 * model.budget
        self.slope = np.where(lost, 0.0, slope)  # κ

    def root(self, round_s: FloatArray, aggregation_s: FloatArray) -> FloatArray:
        """Return I' with Ξ(I') = 0, by Newton–Raphson in log I.

        Ξ/B = κ I^p (p (A/B) I + p + 1) − c. In log I that is a sum of rising exponentials, hence convex for every
        p > 0. The start is where the larger of its two terms alone would reach c: right of the root, so that the steps
        fall towards it without overshoot, and so near (Ξ/B ≤ c there) that eight of them reach the last digit.
        """
        A, B = np.broadcast_arrays(np.asarray(round_s, dtype=np.float64), np.asarray(aggregation_s, dtype=np.float64))
        p, kappa = self.model.power, np.where(self.slope > 0, self.slope, 1.0)
        largest = self.longest + 1.0  # roots beyond the longest interval need no more precision
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            x, c = A / B, self.model.budget / kappa
            interval = np.minimum((c / (p * x)) ** (1 / (p + 1)), (c / (p + 1)) ** (1 / p))
            for _ in range(NEWTON_STEPS):
                interval = np.minimum(np.maximum(interval, SMALLEST_ROOT), largest)
                power, product = interval**p, x * interval
                step = (power * (p * product + (p + 1)) - c) / (power * (product + 1))
                interval = interval * np.exp(step / -(p * (p + 1)))
        return np.where(B > 0, np.where(self.slope > 0, interval, np.inf), 0.0)

    def candidates(self, round_s: FloatArray, aggregation_s: FloatArray) -> FloatArray:
        """Return 1, 2, ⌊I'⌋ and ⌊I'⌋ + 1, limited to intervals before the pole."""
        down = np.maximum(np.floor(self.root(round_s, aggregation_s)), 2.0)
        candidates = np.stack((np.ones_like(down), down, down + 1))
        return np.minimum(np.maximum(candidates, self.shortest), self.longest)

    def round_cap_candidates(self, limit_s: float, aggregation_s: float) -> FloatArray:
        """Return intervals around the peak of limit·P(I) − B/I."""
        slope = limit_s * self.model.pace * float(self.slope)
        power = self.model.power
        return self.around(_root(aggregation_s / (slope * power), power + 1) if slope > 0 else math.inf)

    def aggregation_cap_candidates(self, limit_s: float, round_s: float) -> FloatArray:
        """Return intervals around the peak of I·(limit·P(I) − A)."""
        spare = max(limit_s * self.model.pace * self.model.budget - round_s, 0.0)
        slope = limit_s * self.model.pace * float(self.slope)
        power = self.model.power
        return self.around(_root(spare / (slope * (power + 1)), power) if slope > 0 else math.inf)


class PowerRule(IntervalRule):
    """The closed form for R = I^p: Θ = A I^p + B I^(p−1), whose derivative has the sign of A p I − B (1 − p).

    For p < 1 it falls until I' = (B/A)(1 − p)/p and rises after it, so that ⌊I'⌋ or ⌊I'⌋ + 1 is the best whole number;
    for p ≥ 1 it never falls, and the shortest interval is best. The caps have one peak each, by the same argument.
    """

    def __init__(self, problem: PlanProblem, model: PowerRounds, deepest: int | IntArray) -> None:
        super().__init__(problem, model, deepest)
        self.power = model.powers[np.asarray(deepest) - 1]  # p

    def candidates(self, round_s: FloatArray, aggregation_s: FloatArray) -> FloatArray:
        """Return ⌊I'⌋ and ⌊I'⌋ + 1, within the allowed range."""
        A, B = np.asarray(round_s, dtype=np.float64), np.asarray(aggregation_s, dtype=np.float64)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            turning = B / A * ((1 - self.power) / self.power)
        down = np.floor(np.where((self.power < 1) & (B > 0), turning, 0.0))
        return np.clip(np.stack((down, down + 1)), self.shortest, self.longest)

    def round_cap_candidates(self, limit_s: float, aggregation_s: float) -> FloatArray:
        """Return intervals around the peak of limit·I^(−p) − B/I, where I^(1−p) = B/(p·limit)."""
        p = float(self.power)
        if p >= 1:
            return self.around(0.0)
        return self.around(_root(aggregation_s / (p * limit_s), 1 - p) if p > 0 else math.inf)

    def aggregation_cap_candidates(self, limit_s: float, round_s: float) -> FloatArray:
        """Return intervals around the peak of limit·I^(1−p) − A·I, where I^p = (1 − p)·limit/A."""
        p = float(self.power)
        if p >= 1:
            return self.around(0.0)
        return self.around(_root((1 - p) * limit_s / round_s, p) if p > 0 and round_s > 0 else math.inf)


class EnvelopeRule(IntervalRule):
    """Any R, given as a list of intervals to choose from.

    Θ/A = R(I) + (B/A)·R(I)/I is one line in B/A for each interval. The lowest lines from B/A = 0 on form a lower
    envelope. Its corners are computed once; a binary search then finds the place of B/A among them.
    """

    def __init__(self, problem: PlanProblem, model: RoundsModel, deepest: int | IntArray) -> None:
        super().__init__(problem, model, deepest)
        every = [model.choices(int(m), *problem.intervals) for m in np.ravel(deepest)]
        _refuse_if_many(max((len(choices) for choices in every), default=0))
        self.envelopes = []
        for m, choices in zip(np.ravel(deepest), every, strict=True):
            intervals = np.array(choices if len(choices) else [self.shortest], dtype=np.float64)
            self.envelopes.append(_envelope(intervals, model.rounds(intervals, int(m))))
        last = [choices[-1] if len(choices) else 0 for choices in every]
        self.longest = np.reshape(np.array(last, dtype=np.int64), np.shape(deepest))

    def candidates(self, round_s: FloatArray, aggregation_s: FloatArray) -> FloatArray:
        """Return the interval of the lowest line."""
        A, B = np.asarray(round_s, dtype=np.float64), np.asarray(aggregation_s, dtype=np.float64)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            ratio = B / A
        if np.ndim(self.deepest) == 0:
            ((intervals, corners),) = self.envelopes
            return intervals[np.searchsorted(corners, ratio)][None]
        found = [own[np.searchsorted(corners, x)] for (own, corners), x in zip(self.envelopes, ratio, strict=True)]
        return np.array([found])

    def round_cap_candidates(self, limit_s: float, aggregation_s: float) -> FloatArray:
        """All intervals of the envelope: no other is the best for any A and B."""
        return self.envelopes[0][0]

    def aggregation_cap_candidates(self, limit_s: float, round_s: float) -> FloatArray:
        """All intervals of the envelope: no other is the best for any A and B."""
        return self.envelopes[0][0]


def _refuse_if_many(choices: int) -> None:
    """Raise for lists of intervals that would take minutes: no table has so many, but a custom model may."""
    if choices > MOST_LINES:
        raise SolverError(
            f"the rounds model gives {choices:,} intervals to choose from, and has no closed form to choose by: "
            f"at most {MOST_LINES:,} can be compared. Set planner.max_interval, or let `choices` give fewer."
        )


def _envelope(intervals: FloatArray, rounds: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return the intervals whose lines R + x·R/I are the lowest for some x ≥ 0, and the x where one follows another.

    Lines are sorted by their height at x = 0, which is the order of I, because R does not fall with I. So a line can be
    the lowest only if it is flatter than all lines before it, and only from its intersection with the previous one on.
    """
    slopes = rounds / intervals
    flatter = np.append(True, slopes[1:] < np.minimum.accumulate(slopes)[:-1])
    lines = np.flatnonzero(flatter)
    corners = np.diff(rounds[lines]) / -np.diff(slopes[lines])
    if (np.diff(corners, prepend=0.0) > 0).all():
        return intervals[lines], corners  # every line is the lowest somewhere, as for a smooth R
    kept: list[int] = []
    starts: list[float] = []  # the x from which on each kept line is the lowest
    for line in lines:
        start = 0.0
        while kept:
            start = float((rounds[line] - rounds[kept[-1]]) / (slopes[kept[-1]] - slopes[line]))
            if start > starts[-1]:
                break
            kept.pop()  # the new line is below it everywhere
            starts.pop()
            start = 0.0
        kept.append(int(line))
        starts.append(start)
    return intervals[kept], np.array(starts[1:])


def _root(value: float, degree: float) -> float:
    """Return value^(1/degree), infinite if that is too large for a float."""
    with np.errstate(over="ignore"):
        return float(np.float64(value) ** (1 / degree))


def interval_rule(problem: PlanProblem, deepest: int | IntArray) -> IntervalRule:
    """Return the rule for the problem's rounds model."""
    match problem.convergence:
        case ConvergenceModel() as model:
            return BoundRule(problem, model, deepest)
        case PowerRounds() as model:
            return PowerRule(problem, model, deepest)
        case model:
            return EnvelopeRule(problem, model, deepest)


class Rules:
    """The rules of one problem, each created on first use; its choices of parts and types of numbers share them."""

    def __init__(self, problem: PlanProblem) -> None:
        self.problem = problem
        self._known: dict[int | bytes, IntervalRule] = {}

    def __call__(self, deepest: int | IntArray) -> IntervalRule:
        """Return the rule for one L_c, or for several at once."""
        key = deepest.tobytes() if isinstance(deepest, np.ndarray) else deepest
        if key not in self._known:
            self._known[key] = interval_rule(self.problem, deepest)
        return self._known[key]


def best_interval(problem: PlanProblem, cuts: IntArray) -> int:
    """Return I* for these cuts, by the rule for the rounds model; 1 if no longer interval makes progress."""
    rule = interval_rule(problem, int(np.max(cuts)))
    return int(rule.best(problem.round_s(cuts), problem.aggregation_s(cuts)))
