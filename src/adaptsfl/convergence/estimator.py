"""Estimate the rounds that longer intervals need, R = 1 + c (I^q − 1), from the training losses of a run.

When copies that drifted for I rounds are averaged, the training loss jumps: y is the logarithm of the loss of the first
round after the averaging (the mean model, fresh mini-batches) over that of the last round before it (every device at
its own copy). y is positive if copies had specialised on their own data, and negative if the mean is better than its
noisy copies. Its size, relative to the progress of training at the same time, shows how much the averaging loses:

    R − 1 = w |y| / β,

with β = −d ln f / d ln t, the fall of the mean model's loss f per e-fold of rounds t. One number per run, κ, extends
this to all intervals and depths: c(L_c) = κ (L_c/L)^a. docs/calibration.md has the measurements behind each of these.

κ has a log-normal prior. The averagings in the last part of the run are one observation of it, with an error made of
the noise of the losses and of the rule's own error; `CalibrationConfig` has the constants and their reasons.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from adaptsfl.checks import SMALLEST, FloatArray, IntArray
from adaptsfl.config import CalibrationConfig
from adaptsfl.convergence.measured import GrowthRounds

# The grid of ln κ, from negligible drift to copies whose average learns nothing.
LOG_KAPPAS = np.linspace(np.log(0.001), np.log(300.0), 241)
KAPPAS = np.exp(LOG_KAPPAS)
LEAST_DEPTH = 0.01  # share of (L_c/L)^a kept if a recipe says that drift costs nothing: losses may disagree
LEAST_FRESH = 4  # fewest losses of the mean model for the fit of β, if there are as many
LEAST_NOISE = 1e-6  # of a jump, to avoid the logarithm of zero
MOST_ROUNDS = 5000  # rounds to remember: enough for any window, and bounds the time of an estimate


@dataclass(frozen=True)
class RoundsEstimate:
    """The posterior of κ: a weight for each of `KAPPAS`.

    Attributes:
        depths: c/κ of every L_c; (L_c/L)^a by default.
        power: q.
        weights: the probability of each of `KAPPAS`.
        averagings: number of averagings used; 0 for the prior alone.
    """

    depths: FloatArray
    power: float
    weights: FloatArray
    averagings: int

    @property
    def kappa(self) -> float:
        """The median of κ."""
        return self.quantile(0.5)

    def quantile(self, share: float) -> float:
        """Return the κ that is not exceeded with a probability of `share`."""
        return float(np.exp(np.interp(share, np.cumsum(self.weights) - self.weights / 2, LOG_KAPPAS)))

    @cached_property
    def model(self) -> GrowthRounds:
        """The model to plan with: the rounds of the median κ."""
        return self.model_at(0.5)

    def model_at(self, share: float) -> GrowthRounds:
        """Return the rounds that are not exceeded with a probability of `share`."""
        return GrowthRounds(self.quantile(share) * self.depths, self.power)

    def rounds(self, interval: int, deepest: int, share: float) -> float:
        """Return R(I, L_c) relative to I = 1 that is not exceeded with a probability of `share`."""
        return float(self.model_at(share).rounds(interval, deepest))


class RoundsEstimator:
    """Collects the losses of a run, block by block, and estimates κ.

    Args:
        layers: L.
        given: the prior, before any losses; by default c and q of the settings. The estimate keeps q, and how c rises
            with L_c.
    """

    def __init__(
        self, layers: int, settings: CalibrationConfig | None = None, given: GrowthRounds | None = None
    ) -> None:
        self.settings = settings or CalibrationConfig()
        self.depths = (np.arange(1, layers + 1) / layers) ** self.settings.depth_power
        self.power = self.settings.power
        middle, deviation = self.settings.prior_kappa, self.settings.prior_deviation
        if given is not None:
            middle = float(np.clip(np.median(given.factors / self.depths), KAPPAS[0], KAPPAS[-1]))
            self.depths = np.maximum(given.factors / middle, LEAST_DEPTH * self.depths)
            self.power, deviation = given.power, self.settings.given_deviation
        weights = np.exp(-0.5 * ((LOG_KAPPAS - np.log(middle)) / deviation) ** 2)
        self._prior = np.maximum(weights / weights.sum(), SMALLEST)
        self._forgotten = 0  # rounds before those in the lists below
        self._losses: list[float] = []
        self._fresh: list[bool] = []  # whether the round started with equal copies
        self._block: list[int] = []  # length of the block that was averaged after the round, or 0
        self._deepest: list[int] = []
        self._averaged = True  # whether the next round starts with equal copies

    def learn(self, losses: Sequence[float], interval: int | None, deepest: int) -> None:
        """Add a block: the mean training loss of every round; copies were averaged after every `interval` rounds.

        An interval of None means that layers were not averaged together. An interrupted block ends without averaging.
        """
        for k, loss in enumerate(losses, start=1):
            self._losses.append(float(loss))
            self._fresh.append(self._averaged)
            self._averaged = interval is not None and k % interval == 0
            self._block.append(interval or 0 if self._averaged else 0)
            self._deepest.append(deepest)
        self._forget(len(self._losses) - MOST_ROUNDS)

    def skip(self, rounds: int) -> None:
        """Add a block without losses: the rounds before it cannot be compared with those after it."""
        self._forget(len(self._losses))
        self._forgotten += rounds
        self._averaged = False

    def _forget(self, rounds: int) -> None:
        if rounds > 0:
            self._forgotten += rounds
            for kept in (self._losses, self._fresh, self._block, self._deepest):
                del kept[:rounds]

    @property
    def long_blocks(self) -> int:
        """How many long blocks were averaged within the window, including the last one, whose jump is not known yet."""
        return int(np.sum(np.array(self._block)[self._window()] >= self.settings.long_block))

    def _window(self) -> slice:
        """Return the remembered rounds whose averagings count."""
        first = (1 - self.settings.window) * (self._forgotten + len(self._losses)) - 1
        return slice(max(0, math.ceil(first) - self._forgotten), None)

    def estimate(self) -> RoundsEstimate:
        """Return the current estimate; if a loss is not positive or not finite, it is the prior."""
        losses = np.array(self._losses)
        log_weights, count = np.log(self._prior), 0
        if losses.size and np.isfinite(losses).all() and losses.min() > 0:
            logs = np.log(losses)
            for ends, own_error in self._known_averagings():
                count += ends.size
                log_weights += -0.5 * (self._surprise(logs, ends) / own_error) ** 2
        weights = np.exp(log_weights - log_weights.max())
        return RoundsEstimate(self.depths, self.power, weights / weights.sum(), count)

    def _known_averagings(self) -> Iterator[tuple[IntArray, float]]:
        """Yield the last rounds of long blocks, then of short ones, that count, with the rule's own error for them.

        Blocks in the window count, and always the last `probes` long ones: a block may fill the whole window while its
        own jump is not known yet.
        """
        known, block = self.settings, np.array(self._block[:-1])
        first = self._window().start
        long, short = block >= known.long_block, (block >= known.short_block) & (block < known.long_block)
        for kind, own_error, least in ((long, known.long_error, known.probes), (short, known.short_error, 0)):
            ends = np.flatnonzero(kind)
            recent = ends >= first
            recent[ends.size - min(least, ends.size) :] = True
            if recent.any():
                yield ends[recent], own_error

    def _surprise(self, logs: FloatArray, ends: IntArray) -> FloatArray:
        """Return by how much, in ln κ, the jumps after the rounds at `ends` differ from what each of `KAPPAS` predicts.

        If both are within the noise of losses, the difference is near zero.
        """
        known = self.settings
        rounds = np.array(self._block)[ends]
        jump = abs(float(np.average(logs[ends + 1] - logs[ends], weights=rounds)))
        noise = self._noise(logs) * math.sqrt(float(rounds @ rounds)) / float(rounds.sum())
        growth = self.depths[np.array(self._deepest)[ends] - 1] * (rounds**self.power - 1)
        lost = KAPPAS * float(np.average(growth, weights=rounds))  # R − 1
        expected = lost * self._fall(logs[: ends[-1] + 2]) / known.jump_weight
        return np.log((jump + noise) / (expected + noise))

    def _fall(self, logs: FloatArray) -> float:
        """Return β at the end of these losses: minus the slope of a log-log fit to the mean model's losses."""
        known, fresh = self.settings, np.flatnonzero(self._fresh[: logs.size])
        late = fresh[fresh + self._forgotten >= (self._forgotten + logs.size) / 4]
        fresh = late if late.size >= LEAST_FRESH else fresh[-LEAST_FRESH:]
        x, y = np.log(fresh + self._forgotten + 1.0), logs[fresh]
        # The prior has the weight of one point that is one e-fold away from the middle.
        slope = ((x - x.mean()) @ (y - y.mean()) - known.prior_fall) / ((x - x.mean()) @ (x - x.mean()) + 1)
        return max(-float(slope), known.least_fall)

    def _noise(self, logs: FloatArray) -> float:
        """Return the noise of a jump: the deviation of differences between rounds without an averaging."""
        inside = np.flatnonzero(np.array(self._block[:-1]) == 0)
        inside = inside[inside >= logs.size // 4] if inside.size > LEAST_FRESH else inside
        differences = logs[inside + 1] - logs[inside]
        return max(float(np.std(differences)), LEAST_NOISE) if inside.size > 1 else 1.0
