"""Seconds of a phase as fixed seconds plus an amount over a rate, estimated from what was measured.

A link takes seconds = fixed_s + bits / rate, a machine seconds = fixed_s + FLOPs / rate. `AffineTime` is a Kalman
filter over (fixed_s, slowness), where slowness = 1 / rate. An observation of a small amount is mostly fixed seconds, so
it moves these and leaves the rate alone: latency is not booked as rate.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from adaptsfl import checks
from adaptsfl.checks import FloatArray

FIXED, SLOWNESS = 0, 1  # indices of the two states

Observation = tuple[float, float]  # amount, seconds


@dataclass(frozen=True)
class AffineSettings:
    """The constants of the filter.

    Attributes:
        noise: standard deviation of an observation, relative to its seconds. Transfers over a quiet network vary by a
            tenth, on a busy machine by a third.
        floor_s: standard deviation of the shortest observation: timers, and a turn of an event loop.
        memory: observations over which noise is averaged. A random walk whose step is `noise` / `memory` makes the
            gain of the filter settle at about 1 / `memory`.
        wide: standard deviation of the initial states, and the most that any state is uncertain by later, relative to
            its value. Without a limit, a rate that small messages do not measure would become arbitrary.
        wide_fixed_s: the same for fixed seconds near 0: a round trip across a country.
        surprising: an observation further from its prediction than this many standard deviations is a surprise. Noise
            alone causes one in 20 observations.
        patience: so many surprises in a row, all longer or all shorter, are a change; fewer are stalls. Noise alone
            causes 3 in fewer than one of 10,000 observations.
        alike: amounts within this factor are about the same: the cuts of a model are usually further apart.
        hopeless: so many surprises among the last `memory` observations restart the estimate from these alone: both
            parts are wrong, so that neither alone explains them.
        young: so many observations at first are believed at once: the initial states are guesses.
        clearly: a less likely explanation of a change has to fit past observations better by this factor.
        fastest_fall: one observation divides slowness at most by this: a subtraction that leaves almost 0 says little.
        longest_s: longer observations count as this long: 12 days.
        range: slowness stays within this factor of the initial one, and amounts within it of one second's, so that no
            product overflows.
    """

    noise: float = 0.2
    floor_s: float = 5e-5
    memory: int = 20
    wide: float = 3.0
    wide_fixed_s: float = 0.01
    surprising: float = 2.0
    patience: int = 3
    alike: float = 2.0
    hopeless: int = 10
    young: int = 3
    clearly: float = 2.0
    fastest_fall: float = 10.0
    longest_s: float = 1e6
    range: float = 1e12

    @property
    def tolerance(self) -> float:
        """The largest |log(predicted / observed)| of an observation that fits."""
        return self.surprising * self.noise


class AffineTime:
    """Estimates fixed seconds and rate from observations (amount, seconds).

    The noise of an observation is relative to the larger of its seconds and the predicted ones. So a stall has noise of
    its own size and moves little; only several surprises in a row are a change. A change is explained by the part that
    was most of the predicted seconds, unless past observations of other amounts clearly fit the other part better.

    Args:
        rate: the initial guess, amounts per second.
        fixed_s: the initial guess of the seconds that an amount of 0 takes.
    """

    def __init__(self, rate: float, fixed_s: float = 0.0, settings: AffineSettings | None = None) -> None:
        self.settings: Final = settings or AffineSettings()
        # Amounts are counted in what the initial rate moves in a second: initial slowness is 1, whatever the unit.
        self._per_s = checks.number("rate", rate, positive=True)
        fixed_s = checks.number("fixed_s", fixed_s, at_most=self.settings.longest_s)
        mean = np.array([fixed_s, 1.0])
        self._state = _State(self.settings, mean, np.diag(_widest(self.settings, mean) ** 2))
        self._count = 0
        self._past: deque[Observation] = deque(maxlen=self.settings.memory)
        self._surprises: list[Observation] = []
        self._recent: deque[tuple[Observation, bool]] = deque(maxlen=self.settings.memory)  # and whether it surprised

    @property
    def fixed_s(self) -> float:
        """The seconds that even the smallest amount takes."""
        return float(self._state.mean[FIXED])

    @property
    def rate(self) -> float:
        """Amount per second, beside the fixed seconds."""
        return self._per_s / float(self._state.mean[SLOWNESS])

    def predict_s(self, amount: float) -> float:
        """Return the seconds that an amount is expected to take."""
        return self._state.predict_s(self._scaled(amount))

    def uncertainty_s(self, amount: float) -> float:
        """Return the standard deviation of `predict_s`; single observations scatter by their noise as well."""
        return math.sqrt(self._state.variance(self._scaled(amount)))

    def add(self, amount: float, seconds: float) -> None:
        """Add an observation; negative numbers, NaN and infinity are ignored."""
        if not (0 <= amount < math.inf and 0 <= seconds < math.inf):
            return
        observation = self._scaled(amount), min(seconds, self.settings.longest_s)
        self._count += 1
        state = self._state.after_a_step()
        # Surprises in a row are those of about one amount: a small message that took as long as predicted is no
        # evidence against a change of the rate.
        alike = [before for before in self._surprises if self._are_alike(before[0], observation[0])]
        others = [before for before in self._surprises if before not in alike]
        surprised = state.is_surprised_by(*observation)
        self._recent.append((observation, surprised))
        if sum(missed for _, missed in self._recent) >= self.settings.hopeless:
            self._restart()
            return
        if surprised:
            late = state.error_s(*observation) > 0
            alike = [*(before for before in alike if (state.error_s(*before) > 0) == late), observation]
        else:
            alike = []
            self._past.append(observation)
        patience = 1 if self._count <= self.settings.young else self.settings.patience
        if len(alike) < patience:
            self._state, self._surprises = state.updated(*observation), [*others, *alike]
            return
        self._state, self._surprises = _explained(state, alike, self._past), others
        kept = [before for before in self._past if self._state.misfit([before]) <= self.settings.tolerance]
        self._past = deque([*kept, *alike], maxlen=self.settings.memory)

    def _restart(self) -> None:
        """Draw the line through the smallest and the largest amount of the last observations, and begin with it."""
        recent = [observation for observation, _ in self._recent]
        (small, short_s), (large, long_s) = min(recent), max(recent)
        slope = (long_s - short_s) / (large - small) if large > small else 0.0
        slowness = min(max(slope, 1 / self.settings.range), self.settings.range)
        mean = np.array([max(0.0, short_s - small * slowness), slowness])
        self._state = _State(self.settings, mean, np.diag(_widest(self.settings, mean) ** 2))
        self._past = deque(recent, maxlen=self.settings.memory)
        self._count, self._surprises = 0, []
        self._recent.clear()

    def _are_alike(self, one: float, other: float) -> bool:
        return max(one, other) <= self.settings.alike * min(one, other) + 1 / self.settings.range

    def _scaled(self, amount: float) -> float:
        return min(amount / self._per_s, self.settings.range)


@dataclass(frozen=True)
class _State:
    """Mean and covariance of (fixed seconds, slowness)."""

    settings: AffineSettings
    mean: FloatArray
    covariance: FloatArray

    def predict_s(self, amount: float) -> float:
        return float(self.mean[FIXED] + amount * self.mean[SLOWNESS])

    def error_s(self, amount: float, seconds: float) -> float:
        return seconds - self.predict_s(amount)

    def variance(self, amount: float) -> float:
        row = np.array([1.0, amount])
        return max(0.0, float(row @ self.covariance @ row))

    def larger_part(self, amount: float) -> int:
        """Return the part of the predicted seconds that is larger; what is below the floor is fixed seconds."""
        fixed_s = max(float(self.mean[FIXED]), self.settings.floor_s)
        return SLOWNESS if amount * self.mean[SLOWNESS] >= fixed_s else FIXED

    def noise(self, amount: float, seconds: float) -> float:
        """Return the variance of an observation around its true value."""
        size_s = max(seconds, self.predict_s(amount))
        return (self.settings.noise * size_s) ** 2 + self.settings.floor_s**2

    def is_surprised_by(self, amount: float, seconds: float) -> bool:
        variance = self.variance(amount) + self.noise(amount, seconds)
        return abs(self.error_s(amount, seconds)) > self.settings.surprising * math.sqrt(variance)

    def misfit(self, observations: Sequence[Observation]) -> float:
        """Return the mean |log(predicted / observed)|; times below the floor are equal."""
        floor_s = self.settings.floor_s
        errors = [abs(math.log((self.predict_s(a) + floor_s) / (seconds + floor_s))) for a, seconds in observations]
        return sum(errors) / max(1, len(errors))

    def after_a_step(self) -> "_State":
        """Return the state after a step of the random walk; uncertainty is limited."""
        step = self.settings.noise / self.settings.memory
        walk = step * np.array([max(self.mean[FIXED], self.settings.floor_s), self.mean[SLOWNESS]])
        covariance = self.covariance + np.diag(walk**2)
        for part, widest in enumerate(_widest(self.settings, self.mean)):
            variance = covariance[part, part]
            if variance > widest**2:  # as if the part itself had been observed, so that correlations stay right
                column = covariance[:, part] / variance
                covariance = covariance - (variance - widest**2) * np.outer(column, column)
        return replace(self, covariance=covariance)

    def widened(self, part: int, amount: float, seconds: float) -> "_State":
        """Return the state with one part so uncertain that an observation is no surprise."""
        covariance = self.covariance.copy()
        scale = amount if part == SLOWNESS else 1.0
        covariance[part, part] += (self.error_s(amount, seconds) / scale) ** 2
        return replace(self, covariance=covariance)

    def updated(self, amount: float, seconds: float) -> "_State":
        """Return the state after an observation: the Kalman filter's update, and what keeps the states in range."""
        row, noise = np.array([1.0, amount]), self.noise(amount, seconds)
        gain = self.covariance @ row / (self.variance(amount) + noise)
        rest = np.eye(2) - np.outer(gain, row)
        # Joseph's form: rounding cannot make variances negative.
        covariance = rest @ self.covariance @ rest.T + noise * np.outer(gain, gain)
        fixed_s, slowness = (float(value) for value in self.mean + gain * self.error_s(amount, seconds))
        if fixed_s < 0:  # fixed seconds of 0 are given: what is likely of slowness then
            slowness -= fixed_s * float(covariance[FIXED, SLOWNESS] / covariance[FIXED, FIXED])
            fixed_s = 0.0
        least = max(float(self.mean[SLOWNESS]) / self.settings.fastest_fall, 1 / self.settings.range)
        slowness = min(max(slowness, least), self.settings.range)
        mean = np.array([min(fixed_s, self.settings.longest_s), slowness])
        return replace(self, mean=mean, covariance=covariance)


def _widest(settings: AffineSettings, mean: FloatArray) -> FloatArray:
    """Return the largest standard deviation of both states."""
    return np.maximum(settings.wide * mean, [settings.wide_fixed_s, 0.0])


def _explained(state: _State, surprises: Sequence[Observation], past: Sequence[Observation]) -> _State:
    """Return the state after a change of which surprises tell: of the fixed seconds or of the rate."""
    likely = state.larger_part(surprises[-1][0])
    first, second = (_changed(state, part, surprises) for part in (likely, 1 - likely))
    first_fits, second_fits = (found.misfit(surprises) <= state.settings.tolerance for found in (first, second))
    if first_fits != second_fits:
        return first if first_fits else second
    return second if state.settings.clearly * second.misfit(past) < first.misfit(past) else first


def _changed(state: _State, part: int, surprises: Sequence[Observation]) -> _State:
    """Return the state if only one part has changed."""
    for amount, seconds in surprises:
        if (part == FIXED or amount > 1 / state.settings.range) and state.is_surprised_by(amount, seconds):
            state = state.widened(part, amount, seconds)
        state = state.updated(amount, seconds)
    return state
