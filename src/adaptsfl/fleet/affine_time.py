"""Seconds of a phase as fixed seconds plus an amount over a rate, estimated from what was measured.

A link takes seconds = fixed_s + bits / rate, a machine seconds = fixed_s + FLOPs / rate. `AffineTime` is a Kalman
filter over (fixed_s, slowness), where slowness = 1 / rate. An observation of a small amount is mostly fixed seconds, so
it moves these and leaves the rate alone: latency is not booked as rate.

An edge server adds several observations per device and round on its event loop. So the filter is written out in plain
floats: numpy takes several times as long for matrices of two rows.
"""

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from adaptsfl import checks

TINY_S = 1e-9  # shorter than anything that is measured
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
        small: an amount is small if it is less than this part of the largest recent one. Buffers and token buckets let
            the first bytes after a pause pass at once, so small amounts that take less than the rate allows are
            ignored: they would make it look high.
        contradictions: so many of these, with no larger amount between them, are believed.
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
    small: float = 0.1
    contradictions: int = 100
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
        self._state = _initial(self.settings, fixed_s, 1.0)
        self._count = 0
        self._past: deque[Observation] = deque(maxlen=self.settings.memory)
        self._surprises: list[Observation] = []
        self._recent: deque[tuple[Observation, bool]] = deque(maxlen=self.settings.memory)  # and whether it surprised
        self._missed = 0  # how many of these surprised
        self._expects_change = False
        self._largest = 0.0  # the largest recent amount that took as long as predicted
        self._contradictions = 0  # small amounts since then that took less than the rate allows

    @property
    def fixed_s(self) -> float:
        """The seconds that even the smallest amount takes."""
        return self._state.fixed_s

    @property
    def rate(self) -> float:
        """Amount per second, beside the fixed seconds."""
        return self._per_s / self._state.slowness

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
        observation = self._scaled(amount), min(float(seconds), self.settings.longest_s)
        self._count += 1
        state = self._state.after_a_step()
        if self._has_passed_at_once(state, observation):
            return
        surprised = state.is_surprised_by(*observation)
        if self._is_hopeless_after(observation, surprised):
            self._restart()
        elif surprised:
            self._take_surprise(state, observation)
        else:
            if self._surprises:
                self._surprises = self._apart_from(observation[0])
            self._past.append(observation)
            self._state = state.updated(*observation)
            if observation[0] > self.settings.small * self._largest:
                self._largest, self._contradictions = max(observation[0], self._largest), 0
                self._expects_change = False  # it did not come

    def expect_change(self) -> None:
        """Believe a surprise at once: something else says that this link or machine has changed.

        A large amount that then takes as long as predicted ends the expectation: else a stall much later, such as a
        server's restart, would be believed.
        """
        self._expects_change = True

    def _is_hopeless_after(self, observation: Observation, surprised: bool) -> bool:
        """Note whether an observation was a surprise; return whether too many of the last ones were."""
        recent = self._recent
        if len(recent) == recent.maxlen and recent[0][1]:  # the oldest one is forgotten
            self._missed -= 1
        recent.append((observation, surprised))
        self._missed += surprised
        return self._missed >= self.settings.hopeless

    def _take_surprise(self, state: "_State", observation: Observation) -> None:
        """Add an observation that was not expected: a stall, or the last of several that tell of a change."""
        # Surprises in a row are those of about one amount: a small message that took as long as predicted is no
        # evidence against a change of the rate.
        others = self._apart_from(observation[0])
        late = state.error_s(*observation) > 0
        alike = [
            before
            for before in self._surprises
            if self._are_alike(before[0], observation[0]) and (state.error_s(*before) > 0) == late
        ]
        alike.append(observation)
        at_once = self._expects_change or self._count <= self.settings.young
        if len(alike) < (1 if at_once else self.settings.patience):
            self._state, self._surprises = state.updated(*observation), [*others, *alike]
            return
        self._state, self._surprises, self._expects_change = _explained(state, alike, self._past), others, False
        kept = [before for before in self._past if self._state.misfit([before]) <= self.settings.tolerance]
        self._past = deque([*kept, *alike], maxlen=self.settings.memory)

    def _restart(self) -> None:
        """Begin anew with what explains the last observations: a line, where their amounts are far enough apart."""
        recent, before = [observation for observation, _ in self._recent], self._state
        small, large = min(recent)[0], max(recent)[0]
        if large <= self.settings.small * self._largest:  # too small to say anything about the rate
            slowness = before.slowness
            fixed_s = statistics.median(seconds - amount * slowness for amount, seconds in recent)
        elif self._are_alike(small, large):  # nothing is known of a slope
            factor = statistics.median(seconds / max(before.predict_s(amount), TINY_S) for amount, seconds in recent)
            fixed_s, slowness = before.fixed_s * factor, before.slowness * factor
        else:
            short_s, long_s = (self._median_s(recent, amount) for amount in (small, large))
            slowness = (long_s - short_s) / (large - small)
            fixed_s = short_s - small * max(slowness, 0.0)
        slowness = min(max(slowness, 1 / self.settings.range), self.settings.range)
        self._state = _initial(self.settings, min(max(0.0, fixed_s), self.settings.longest_s), slowness)
        self._past = deque(recent, maxlen=self.settings.memory)
        self._count, self._surprises, self._missed = 0, [], 0
        self._recent.clear()

    def _has_passed_at_once(self, state: "_State", observation: Observation) -> bool:
        """Whether an amount took less than the rate allows, but is too small to contradict it."""
        amount, seconds = observation
        if amount > self.settings.small * self._largest or seconds >= amount * state.slowness:
            return False
        self._contradictions += 1
        if self._contradictions > self.settings.contradictions:
            self._largest, self._contradictions = amount, 0
            return False
        return True

    def _median_s(self, observations: Sequence[Observation], amount: float) -> float:
        """Return the median seconds of about this amount."""
        return statistics.median(seconds for other, seconds in observations if self._are_alike(other, amount))

    def _apart_from(self, amount: float) -> list[Observation]:
        """Return the surprises of other amounts."""
        return [before for before in self._surprises if not self._are_alike(before[0], amount)]

    def _are_alike(self, one: float, other: float) -> bool:
        return max(one, other) <= self.settings.alike * min(one, other) + 1 / self.settings.range

    def _scaled(self, amount: float) -> float:
        return min(float(amount) / self._per_s, self.settings.range)


class _State(NamedTuple):
    """Mean and covariance of (fixed seconds, slowness): a symmetric matrix of two rows is three numbers."""

    settings: AffineSettings
    fixed_s: float
    slowness: float
    fixed_variance: float
    slowness_variance: float
    covariance: float

    def predict_s(self, amount: float) -> float:
        return self.fixed_s + amount * self.slowness

    def error_s(self, amount: float, seconds: float) -> float:
        return seconds - self.predict_s(amount)

    def variance(self, amount: float) -> float:
        """Return the variance of the predicted seconds."""
        found = self.fixed_variance + amount * (2 * self.covariance + amount * self.slowness_variance)
        return max(0.0, found)

    def larger_part(self, amount: float) -> int:
        """Return the part of the predicted seconds that is larger; what is below the floor is fixed seconds."""
        fixed_s = max(self.fixed_s, self.settings.floor_s)
        return SLOWNESS if amount * self.slowness >= fixed_s else FIXED

    def noise(self, amount: float, seconds: float) -> float:
        """Return the variance of an observation around its true value."""
        settings, predicted_s = self.settings, self.fixed_s + amount * self.slowness
        scatter_s = settings.noise * (seconds if seconds > predicted_s else predicted_s)
        return scatter_s * scatter_s + settings.floor_s * settings.floor_s

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
        settings, fixed_s, slowness, fixed, slow, both = self
        step = settings.noise / settings.memory
        walk_s, walk = step * max(fixed_s, settings.floor_s), step * slowness
        fixed, slow = fixed + walk_s * walk_s, slow + walk * walk
        # A part that is too uncertain is limited as if it had been observed, so that correlations stay right.
        widest = max(settings.wide * fixed_s, settings.wide_fixed_s)
        if (excess := fixed - widest * widest) > 0:
            ratio = both / fixed
            fixed, slow, both = fixed - excess, slow - excess * ratio * ratio, both - excess * ratio
        widest = settings.wide * slowness
        if (excess := slow - widest * widest) > 0:
            ratio = both / slow
            fixed, slow, both = fixed - excess * ratio * ratio, slow - excess, both - excess * ratio
        return _State(settings, fixed_s, slowness, fixed, slow, both)

    def widened(self, part: int, amount: float, seconds: float) -> "_State":
        """Return the state with one part so uncertain that an observation is no surprise."""
        error = self.error_s(amount, seconds) / (amount if part == SLOWNESS else 1.0)
        if part == SLOWNESS:
            return self._replace(slowness_variance=self.slowness_variance + error * error)
        return self._replace(fixed_variance=self.fixed_variance + error * error)

    def updated(self, amount: float, seconds: float) -> "_State":
        """Return the state after an observation: the Kalman filter's update, and what keeps the states in range."""
        settings, fixed_s, slowness, fixed, slow, both = self
        noise = self.noise(amount, seconds)
        whole = self.variance(amount) + noise
        gain_s, gain = (fixed + both * amount) / whole, (both + slow * amount) / whole
        # Joseph's form, (1 − K h) P (1 − K h)ᵀ + noise K Kᵀ. Where amounts differ by many decades, rounding may still
        # make a variance negative, or a covariance too large for its variances.
        a, b, c, d = 1.0 - gain_s, -gain_s * amount, -gain, 1.0 - gain * amount  # 1 − K h
        top, top_right = a * fixed + b * both, a * both + b * slow  # (1 − K h) P
        low, low_right = c * fixed + d * both, c * both + d * slow
        both = top * c + top_right * d + noise * gain_s * gain
        fixed = max(0.0, top * a + top_right * b) + noise * gain_s * gain_s
        slow = max(0.0, low * c + low_right * d) + noise * gain * gain
        most = math.sqrt(fixed * slow)
        both = min(max(both, -most), most)
        error_s, before = seconds - (fixed_s + amount * slowness), slowness
        fixed_s, slowness = fixed_s + gain_s * error_s, slowness + gain * error_s
        if fixed_s < 0:  # fixed seconds of 0 are given: what is likely of slowness then
            slowness -= fixed_s * (both / fixed) if fixed > 0 else 0.0  # rounding may leave no variance
            fixed_s = 0.0
        slowness = min(max(slowness, before / settings.fastest_fall, 1 / settings.range), settings.range)
        return _State(settings, min(fixed_s, settings.longest_s), slowness, fixed, slow, both)


def _initial(settings: AffineSettings, fixed_s: float, slowness: float) -> _State:
    """Return a state of which little is known but a guess: as uncertain as any may be."""
    widest_s, widest = max(settings.wide * fixed_s, settings.wide_fixed_s), settings.wide * slowness
    return _State(settings, fixed_s, slowness, widest_s * widest_s, widest * widest, 0.0)


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
