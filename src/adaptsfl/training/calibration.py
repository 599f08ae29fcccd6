"""From measured drift to a convergence model that the planner can use, without anybody knowing what ε is.

Only ratios decide a plan: with D(I, L_c) the progress that drift takes of a round, on average over a block, and c what
a round without drift gains, Θ ∝ (A + B/I) / (1 − D/c). `DriftSample.lost_share` measures what is lost t rounds after an
averaging. It saturates at 1, so the model for it is

    share(t, L_c) = 1 − exp(−y),   y(t, L_c) = a · S(L_c) · t^p,

with S(L_c) the share of layers 1..L_c in the spread of the devices' gradients. a and p are fitted to what was measured
lately, from priors that one noisy measurement cannot throw over. Over a block of I rounds the mean of y is about
a · S · I^p / (p + 1). What that costs in the end depends on how noisy the gradients are: where the mean gradient is
clear, part of what the copies' common gradient missed turns out to be done when they are averaged; where it drowns in
the devices' spread, drift adds to the noise. So D/c = HARM · ν · a · S(L_c) · I^p / (p + 1), with the ratio of noise to
signal ν = spread / (N ‖∇f‖²): the planner's drift, with a budget of 1. ‖∇f‖² falls as training goes on, so plans
average more often towards its end.

Where measurements say nothing, the priors hold: for layers that never drifted, and beyond twice the longest drift
nothing is planned on trust.
"""

from dataclasses import dataclass

import numpy as np

from adaptsfl.checks import FloatArray
from adaptsfl.convergence import ConvergenceModel
from adaptsfl.training.estimate import DriftSample

# What fixed plans lost in truth, over what their measured shares say and over ν, with 20 devices: 0.75 on digits IID
# (ν = 0.2) and on CIFAR-10 IID (ν = 1.6), 1.1 on digits with two label shards each (ν = 0.4).
HARM = 0.75
NOISES = (0.1, 10.0)  # what ν may be: beyond, it is hardly known
NOISE_WEIGHT = 2 / 3  # of a new measurement of ν

# Before anything is measured: y = 2 ten rounds after an averaging if every layer drifts; a may well be three times
# that, or a third.
PRIOR_AGE, PRIOR_LOSS, PRIOR_FACTOR = 10, 2.0, 3.0
PRIOR_POWER, POWER_DEVIATION = 1.0, 0.2
PRIOR_NOISE = 0.5
SHARE_DEVIATION = 0.15  # of one reliable measurement: noise, and that the model is only a model
SHARES = (-1.0, 1.5)  # what lies beyond is noise
FORGETTING = 0.75  # how much a measurement counts when the next one has come
REMEMBERED = 12
FACTORS = np.exp(np.linspace(-6.0, 4.0, 101))[:, None, None]  # of the prior's a, in the search for the best
POWERS = np.linspace(0.4, 1.6, 13)[None, :, None]
SMALLEST_PART = 1e-12  # of the spread: less than this is nothing, and too small for the planner's numbers

# Before anything is measured, and the least for a measurement: below this, copies have hardly drifted.
FIRST_INTERVAL = 5
# A plan's interval is at most so many times the longest drift that was measured: beyond, the model only guesses.
REACH = 2
# Beyond this many times what was measured, a plan is new ground, and measured.
NEW_GROUND = 1.5
RELIABLE = 0.2  # measurements below this say nothing about how far to trust


@dataclass(frozen=True)
class Seen:
    """One measurement: the lost share, `age` rounds after layers 1..`deepest` were averaged, and how reliable it is."""

    age: int
    deepest: int
    share: float
    reliability: float


@dataclass(frozen=True)
class Calibration:
    """All that a calibrated plan rests on; `with_sample` gives the next one.

    Attributes:
        layers: L.
        seen: what was measured, the latest last.
        spread: moving average of every layer's share in the spread of gradients.
        noise_to_signal: moving (geometric) average of ν.
    """

    layers: int
    seen: tuple[Seen, ...] = ()
    spread: tuple[float, ...] = ()
    noise_to_signal: float = PRIOR_NOISE

    def with_sample(self, sample: DriftSample) -> "Calibration":
        """Return what is known with one more measurement."""
        seen, spread, noise = self.seen, self.spread, self.noise_to_signal
        if sample.age > 0:
            share, reliability = sample.lost_share, sample.reliability
            if share is None:
                share, reliability = 0.0, 0.0
            seen = (*seen, Seen(sample.age, sample.deepest, float(np.clip(share, *SHARES)), reliability))[-REMEMBERED:]
        measured = np.maximum(sample.spread, 0)
        if measured.sum() > 0:
            measured_noise = float(np.clip(sample.noise_to_signal, *NOISES))
            noise = noise ** (1 - NOISE_WEIGHT) * measured_noise**NOISE_WEIGHT
            shares = measured / measured.sum()
            shares = shares if not spread else (np.asarray(spread) + shares) / 2
            spread = tuple(map(float, np.where(shares < SMALLEST_PART, 0.0, shares)))
        return Calibration(self.layers, seen, spread, noise)

    @property
    def shape(self) -> FloatArray:
        """Every layer's part of the drift, summing to 1; before anything is measured it grows with depth."""
        rising = np.arange(1, self.layers + 1, dtype=np.float64)
        return np.asarray(self.spread) if self.spread else rising / rising.sum()

    @property
    def longest_interval(self) -> int:
        """The longest interval that the measurements speak for."""
        return max(FIRST_INTERVAL, REACH * (max((one.age for one in self._reliable), default=0) + 1))

    def is_new_ground(self, interval: int, deepest: int) -> bool:
        """Whether a plan lets copies drift much further than was ever measured."""
        _, power = self.fit()
        depth = np.cumsum(self.shape)
        known = max((depth[one.deepest - 1] * (one.age + 1) ** power for one in self._reliable), default=0.0)
        return bool(depth[deepest - 1] * interval**power > NEW_GROUND * known)

    def fit(self) -> tuple[float, float]:
        """Return the most probable a and p, given the priors and what was seen, the latest counting most."""
        below = np.concatenate(([0.0], np.cumsum(self.shape)))
        ages = np.array([one.age for one in self.seen], dtype=np.float64)
        depth = np.array([below[one.deepest] for one in self.seen])
        shares = np.array([one.share for one in self.seen])
        recency = FORGETTING ** np.arange(len(self.seen))[::-1]
        weights = recency * [one.reliability for one in self.seen]
        scales = FACTORS * PRIOR_LOSS / PRIOR_AGE**POWERS
        expected = 1 - np.exp(-scales * depth * ages**POWERS)  # (factors, powers, seen)
        misfit = (weights * ((shares - expected) / SHARE_DEVIATION) ** 2).sum(-1)
        misfit += (np.log(FACTORS) / np.log(PRIOR_FACTOR))[..., 0] ** 2
        misfit += ((POWERS - PRIOR_POWER) / POWER_DEVIATION)[..., 0] ** 2
        factor, power = np.unravel_index(np.argmin(misfit), misfit.shape)
        return float(scales[factor, power, 0]), float(POWERS[0, power, 0])

    def model(self, learning_rate: float) -> ConvergenceModel:
        """Return the model to plan with: its rounds are rounds per round's worth of progress without drift."""
        scale, power = self.fit()
        prior = PRIOR_LOSS / PRIOR_AGE**power
        known = max((one.deepest for one in self._reliable), default=0)
        scales = np.where(np.arange(self.layers) < known, scale, max(scale, prior))
        drift = HARM * self.noise_to_signal * scales * self.shape / (power + 1)
        return ConvergenceModel(learning_rate, learning_rate / 2, drift, power, budget=1.0)

    @property
    def _reliable(self) -> list[Seen]:
        return [one for one in self.seen if one.reliability >= RELIABLE]
