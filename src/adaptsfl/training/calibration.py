"""From measured drift to a convergence model that the planner can use, without anybody knowing what ε is.

Only ratios decide a plan: with D(I, L_c) the progress that drift takes of a round, on average over a block, and c what
a round without drift gains, Θ ∝ (A + B/I) / (1 − D/c). `DriftSample.lost_share` measures that share t rounds after an
averaging, h(t, L_c). The model for it is

    h(t, L_c) = a · S(L_c) · t^p,     S(L_c) = the share of layers 1..L_c in the spread of the devices' gradients,

so a block of I rounds loses D/c = (1/I) Σ_{t<I} h(t) ≈ a · S(L_c) · I^p / (p + 1): the planner's drift with
κ_j = a · (spread_j / Σ spread) / (p + 1) and a budget of 1. a and p are fitted to what was measured lately, from priors
that one measurement cannot throw over.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from adaptsfl.checks import FloatArray
from adaptsfl.convergence import ConvergenceModel
from adaptsfl.training.estimate import DriftSample

# Before anything is measured: half of a round's progress is lost ten rounds after an averaging if every layer drifts,
# growing in proportion to time. It counts as much as one measurement.
PRIOR_AGE, PRIOR_SHARE, PRIOR_POWER = 10, 0.5, 1.0
POWERS = np.linspace(0.5, 2.0, 31)
POWER_DEVIATION = 0.25  # of the prior on p
SHARE_DEVIATION = 0.3  # of one measured share: noise, and that the model is only a model
LARGEST_SHARE = 1.5  # a share beyond this is noise
SMALLEST_SCALE = 1e-6
FORGETTING = 0.75  # how much a measurement counts when the next one has come
REMEMBERED = 12
SMALLEST_PART = 1e-12  # of the spread: less than this is nothing, and too small for the planner's numbers

# Before anything is measured, and the least for a measurement: below this, copies have hardly drifted.
FIRST_INTERVAL = 5
# A plan's interval is at most so many times the longest drift that was measured: beyond, the model only guesses.
REACH = 2


@dataclass(frozen=True)
class Calibration:
    """All that a calibrated plan rests on; `with_sample` gives the next one.

    Attributes:
        layers: L.
        samples: (age, L_c, lost share), the latest last.
        spread: moving average of every layer's share in the spread of gradients.
    """

    layers: int
    samples: tuple[tuple[int, int, float], ...] = ()
    spread: tuple[float, ...] = ()

    def with_sample(self, sample: DriftSample) -> "Calibration":
        """Return what is known with one more measurement."""
        share = sample.lost_share
        samples = self.samples
        if share is not None and sample.age > 0:
            clipped = float(np.clip(share, -LARGEST_SHARE, LARGEST_SHARE))
            samples = (*samples, (sample.age, sample.deepest, clipped))[-REMEMBERED:]
        measured = np.maximum(sample.spread, 0)
        spread = self.spread
        if measured.sum() > 0:
            shares = measured / measured.sum()
            shares = shares if not spread else (np.asarray(spread) + shares) / 2
            spread = tuple(map(float, np.where(shares < SMALLEST_PART, 0.0, shares)))
        return Calibration(self.layers, samples, spread)

    @property
    def shape(self) -> FloatArray:
        """Every layer's part of the drift, summing to 1; before anything is measured it grows with depth."""
        rising = np.arange(1, self.layers + 1, dtype=np.float64)
        return np.asarray(self.spread) if self.spread else rising / rising.sum()

    @property
    def longest_interval(self) -> int:
        """The longest interval that the measurements speak for."""
        ages = [age for age, _, _ in self.samples]
        return max(FIRST_INTERVAL, REACH * (max(ages, default=0) + 1)) if ages else FIRST_INTERVAL

    def fit(self) -> tuple[float, float]:
        """Return a and p: least squares over the samples, the latest counting most, with priors on both."""
        below = np.concatenate(([0.0], np.cumsum(self.shape)))
        ages = np.array([PRIOR_AGE, *(age for age, _, _ in self.samples)], dtype=np.float64)
        depth = np.array([1.0, *(below[deepest] for _, deepest, _ in self.samples)])
        shares = np.array([PRIOR_SHARE, *(share for _, _, share in self.samples)])
        weights = np.array([1.0, *(FORGETTING ** np.arange(len(self.samples))[::-1])])
        best = (np.inf, 0.0, PRIOR_POWER)
        for power in POWERS:
            x = depth * ages**power
            scale = max(SMALLEST_SCALE, float((weights * x) @ shares / ((weights * x) @ x)))
            misfit = float(weights @ (shares - scale * x) ** 2) / SHARE_DEVIATION**2
            misfit += ((power - PRIOR_POWER) / POWER_DEVIATION) ** 2
            best = min(best, (misfit, scale, float(power)))
        return best[1], best[2]

    def model(self, learning_rate: float) -> ConvergenceModel:
        """Return the model to plan with: its rounds are rounds per round's worth of progress without drift."""
        scale, power = self.fit()
        drift = scale * self.shape / (power + 1)
        return ConvergenceModel(learning_rate, learning_rate / 2, drift, power, budget=1.0)

    def to_data(self) -> dict[str, Any]:
        """Return it as JSON-able data; `from_data` takes it back."""
        return {"samples": [list(sample) for sample in self.samples], "spread": list(self.spread)}

    @classmethod
    def from_data(cls, layers: int, data: Mapping[str, Sequence[Any]]) -> "Calibration":
        """Return what `to_data` gave."""
        samples = tuple((int(age), int(deepest), float(share)) for age, deepest, share in data["samples"])
        return cls(layers, samples, tuple(map(float, data["spread"])))
