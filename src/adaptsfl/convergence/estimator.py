"""The powers p of R(I, L_c) = I^p, estimated from the training losses that every run has.

When copies that drifted for I rounds are averaged, the training loss jumps: J is the loss of the first round after the
averaging (the mean model, fresh mini-batches) minus that of the last round before it (every device at its own copy). J
is positive where copies had specialised on their own data and negative where the mean beats its noisy copies. Its size,
relative to what training gains at the same time, tells how much the averaging loses:

    x = |J| / (f √β),   p = 1 − exp(−w x),

with f the loss of the mean model and β = −d ln f / d ln t, its fall per e-fold of rounds t. One number per run carries
this to all depths, because measured powers follow p(L_c) = 1 − exp(−κ L_c/L). docs/calibration.md has the measurements.

κ has a log-normal prior. The averagings in the last part of the run are one observation of it, with an error made of
the noise of the losses and of the rule's own error; `CalibrationConfig` has the constants, with a reason each.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from adaptsfl.checks import SMALLEST, FloatArray, IntArray
from adaptsfl.config import CalibrationConfig
from adaptsfl.convergence.measured import PowerRounds

# ln κ, from no drift that anybody would notice to copies that learn nothing together.
LOG_KAPPAS = np.linspace(np.log(0.01), np.log(30.0), 161)
KAPPAS = np.exp(LOG_KAPPAS)
LARGEST_KNOWN = 0.999  # a power that a recipe gives; from here on no interval above 1 is worth its rounds anyway
LEAST_DEPTH = 0.01  # of L_c/L, where a recipe says that drift costs nothing: jumps of the loss may say otherwise
LEAST_FRESH = 4  # losses of the mean model that f and β are fitted to, where there are as many
MOST_ROUNDS = 5000  # that are remembered: enough for any window, and the time of an estimate stays bounded


@dataclass(frozen=True)
class PowerEstimate:
    """What is believed about κ: a weight for each of `KAPPAS`.

    Attributes:
        depths: what κ is multiplied with in the exponent, one per L_c; L_c/L if nobody knows better.
        averagings: that the belief rests on; 0 for the prior alone.
    """

    depths: FloatArray
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
    def model(self) -> PowerRounds:
        """What to plan with: the rounds of the median κ."""
        return self.model_at(0.5)

    def model_at(self, share: float) -> PowerRounds:
        """Return the rounds that are not exceeded with a probability of `share`."""
        return PowerRounds(1 - np.exp(-self.quantile(share) * self.depths))

    def rounds(self, interval: int, deepest: int, share: float) -> float:
        """Return R(I, L_c) relative to I = 1 that is not exceeded with a probability of `share`."""
        return float(self.model_at(share).rounds(interval, deepest))


class PowerEstimator:
    """Sees the losses of a run, block by block, and estimates κ.

    Args:
        layers: L.
        powers: what is believed before anything is seen, one per L_c; by default those of `prior_kappa`. The estimate
            keeps how they rise with L_c.
    """

    def __init__(
        self, layers: int, settings: CalibrationConfig | None = None, powers: FloatArray | None = None
    ) -> None:
        self.layers, self.settings = layers, settings or CalibrationConfig()
        self.depths = np.arange(1, layers + 1) / layers
        middle, deviation = self.settings.prior_kappa, self.settings.prior_deviation
        if powers is not None:
            exponents = -np.log1p(-np.minimum(powers, LARGEST_KNOWN))
            middle = float(np.clip(np.median(exponents / self.depths), KAPPAS[0], KAPPAS[-1]))
            self.depths = np.maximum(exponents / middle, LEAST_DEPTH * self.depths)
            deviation = self.settings.given_deviation
        weights = np.exp(-0.5 * ((LOG_KAPPAS - np.log(middle)) / deviation) ** 2)
        self._prior = np.maximum(weights / weights.sum(), SMALLEST)
        self._forgotten = 0  # rounds before those in the lists below
        self._losses: list[float] = []
        self._fresh: list[bool] = []  # whether the round began with equal copies
        self._block: list[int] = []  # rounds of the block that was averaged after the round; 0 where none was
        self._deepest: list[int] = []
        self._averaged = True  # whether the next round begins with equal copies

    def learn(self, losses: Sequence[float], interval: int | None, deepest: int) -> None:
        """Take in a block: the mean training loss of every round, averaged after every `interval` of them.

        None: its layers were not averaged together. A block that was cut short ends without an averaging.
        """
        for k, loss in enumerate(losses, start=1):
            self._losses.append(float(loss))
            self._fresh.append(self._averaged)
            self._averaged = interval is not None and k % interval == 0
            self._block.append(interval or 0 if self._averaged else 0)
            self._deepest.append(deepest)
        self._forget(len(self._losses) - MOST_ROUNDS)

    def skip(self, rounds: int) -> None:
        """Take in a block whose losses nobody knows: what was before it cannot be compared with what comes after."""
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
        """How many long blocks were averaged within the window, also if nobody has seen yet where that led."""
        return int(np.sum(np.array(self._block)[self._window()] >= self.settings.long_block))

    def _window(self) -> slice:
        """Return the rounds, among those remembered, whose averagings count."""
        first = (1 - self.settings.window) * (self._forgotten + len(self._losses)) - 1
        return slice(max(0, math.ceil(first) - self._forgotten), None)

    def estimate(self) -> PowerEstimate:
        """Return what is believed now; losses that are not positive have no logarithm, and say nothing."""
        known, losses = self.settings, np.array(self._losses)
        log_weights, count = np.log(self._prior), 0
        if losses.size and np.isfinite(losses).all() and losses.min() > 0:
            block = np.zeros(losses.size - 1, dtype=np.int64)
            block[self._window()] = self._block[:-1][self._window()]
            kinds = ((block >= known.long_block, known.long_error), (block < known.long_block, known.short_error))
            for kind, own_error in kinds:
                ends = np.flatnonzero(kind & (block >= known.short_block))
                count += ends.size
                if ends.size:
                    kappa, error = self._observed(losses, ends)
                    deviation = np.sqrt(error**2 + (own_error * KAPPAS) ** 2)
                    log_weights += -0.5 * ((kappa - KAPPAS) / deviation) ** 2 - np.log(deviation)
        weights = np.exp(log_weights - log_weights.max())
        return PowerEstimate(self.depths, weights / weights.sum(), count)

    def _observed(self, losses: FloatArray, ends: IntArray) -> tuple[float, float]:
        """Return the κ that the jumps after the rounds at `ends` say, and its error from the noise of losses."""
        level, fall = self._level(losses, ends + 1)
        scale = self.settings.jump_weight / (level * np.sqrt(fall))
        depth = self.depths[np.array(self._deepest)[ends] - 1]
        jumps = (losses[ends + 1] - losses[ends]) * scale
        # Least squares for jump = κ · depth.
        kappa = abs(float(depth @ jumps / (depth @ depth)))
        return kappa, self._noise(losses) * float(np.mean(scale)) / float(np.sqrt(depth @ depth))

    def _level(self, losses: FloatArray, at: IntArray) -> tuple[FloatArray, float]:
        """Return f in the rounds at these places, and β: a line through the losses of the mean model, in logarithms."""
        known, fresh = self.settings, np.flatnonzero(self._fresh)
        late = fresh[fresh + self._forgotten >= (self._forgotten + losses.size) / 4]
        fresh = late if late.size >= LEAST_FRESH else fresh[-LEAST_FRESH:]
        x, y = np.log(fresh + self._forgotten + 1.0), np.log(losses[fresh])
        middle = x.mean()
        # The prior counts as much as one point that is one e-fold away from the middle.
        slope = ((x - middle) @ (y - y.mean()) - known.prior_fall) / ((x - middle) @ (x - middle) + 1)
        fall = max(-float(slope), known.least_fall)
        return np.exp(y.mean() - fall * (np.log(at + self._forgotten + 1.0) - middle)), fall

    def _noise(self, losses: FloatArray) -> float:
        """Return the deviation that a jump has by chance: of differences between rounds without an averaging."""
        inside = np.flatnonzero(np.array(self._block[:-1]) == 0)
        inside = inside[inside >= len(losses) // 4] if inside.size > LEAST_FRESH else inside
        differences = losses[inside + 1] - losses[inside]
        return float(np.std(differences)) if inside.size > 1 else float(np.mean(losses))


def powers_of(kappa: float, layers: int) -> FloatArray:
    """p = 1 − exp(−κ L_c/L) of every L_c."""
    return 1 - np.exp(-kappa * np.arange(1, layers + 1) / layers)
