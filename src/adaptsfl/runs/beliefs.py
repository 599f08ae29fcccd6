"""What a run believes about convergence and about its fleet, from what it measured on the way."""

from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from adaptsfl import checks
from adaptsfl.config import AdaptConfig, Recipe
from adaptsfl.convergence import LONGEST_INTERVAL, ConvergenceModel, RoundsModel, model_from, noise_floor
from adaptsfl.errors import InvalidInput, inside
from adaptsfl.fleet import RATES, Fleet
from adaptsfl.runs.backend import Learned, Measurement
from adaptsfl.training.calibration import FIRST_INTERVAL, Calibration
from adaptsfl.training.estimate import CONSTANTS_COST, DRIFT_COST, MovingConstants

# Rates are averaged over about this many rounds: long enough to see through noise, short enough to follow changes.
MEMORY_ROUNDS = 20
# Rounds of training that a measurement takes.
MEASURING_ROUNDS: dict[Measurement, int] = {"drift": DRIFT_COST, "constants": CONSTANTS_COST}
# Where the paper's bound leaves no budget at all, this part of ε is left, so that I = 1 is planned.
LEAST_BUDGET = 1e-3


class Beliefs(Protocol):
    """Beliefs about convergence, in one of the two modes.

    Attributes:
        measurement: what is measured.
        probe: the least interval of a block at whose end drift is measured.
    """

    measurement: Measurement | None
    probe: int

    @property
    def trusted_interval(self) -> int:
        """The longest interval that the measurements speak for."""
        ...

    def is_new_ground(self, interval: int | None, deepest: int) -> bool:
        """Whether a plan goes so far beyond what was measured that it is to be measured itself."""
        ...

    def model(self, devices: int) -> RoundsModel:
        """Return what to plan with."""
        ...

    def learn(self, learned: Learned) -> None:
        """Take in what a block gave."""
        ...

    def data(self) -> dict[str, Any]:
        """Return what is believed, for the record."""
        ...


class Calibrated:
    """The default: measured drift."""

    measurement: Measurement | None = "drift"
    probe = FIRST_INTERVAL

    def __init__(self, layers: int, learning_rate: float, measure_every: int) -> None:
        self.learning_rate, self.measure_every = learning_rate, measure_every
        self.calibration = Calibration(layers)
        self.last: dict[str, Any] = {}

    @property
    def trusted_interval(self) -> int:
        """The longest interval that measurements speak for; a block that outlasts their pace could not be mended."""
        return min(self.calibration.longest_interval, max(FIRST_INTERVAL, self.measure_every))

    def is_new_ground(self, interval: int | None, deepest: int) -> bool:
        """Whether a plan lets copies drift much further than was ever measured."""
        return interval is not None and interval > 1 and self.calibration.is_new_ground(interval, deepest)

    def model(self, devices: int) -> ConvergenceModel:
        """Return what to plan with."""
        return self.calibration.model(self.learning_rate)

    def learn(self, learned: Learned) -> None:
        """Take in a measured drift."""
        sample = learned.drift
        if sample is not None:
            self.calibration = self.calibration.with_sample(sample)
            self.last = {
                "gradient_norm2": float(sample.squared_norm.sum()),
                "drift": float(sample.drift.sum()),
                "lost_share": sample.lost_share,
                "drift_age": sample.age,
            }

    def data(self) -> dict[str, Any]:
        """Return the fit and the last measurement."""
        scale, power = self.calibration.fit()
        known = {"scale": scale, "power": power, "noise_to_signal": self.calibration.noise_to_signal}
        return {**known, "shape": self.calibration.shape.tolist(), **self.last}


class PaperBound:
    """The paper's bound, with constants from the recipe or measured, and a given ε."""

    measurement: Measurement | None = "constants"
    probe = 1

    def __init__(self, recipe: Recipe, adapt: AdaptConfig, layers: int) -> None:
        self.learning_rate = recipe.training.learning_rate
        self.given, self.layers = recipe.convergence, layers
        self.moving, self.gap = MovingConstants(), 1.0
        target = adapt.target
        if self.given is not None:
            self.measurement = None
        elif target is None:
            remedy = "Give ε in [adapt], or the constants in [convergence], or use mode = 'calibrated'"
            raise InvalidInput("adapt.target", "is missing for mode 'paper'", remedy)
        else:
            self.target = checks.number("adapt.target", target, positive=True)

    @property
    def trusted_interval(self) -> int:
        """Any: the bound is believed."""
        return LONGEST_INTERVAL if self.given is not None or self.moving.squared_norms else FIRST_INTERVAL

    def is_new_ground(self, interval: int | None, deepest: int) -> bool:
        """Never: the bound speaks for all plans."""
        return False

    def model(self, devices: int) -> RoundsModel:
        """Return the bound; before anything is measured, one whose drift allows short intervals only."""
        if self.given is not None:
            with inside("convergence"):
                return model_from(self.given, self.learning_rate, devices, self.layers)
        constants = self.moving.constants(initial_gap=self.gap, target=self.target)
        if constants is None:
            return Calibration(self.layers).model(self.learning_rate)
        floor = noise_floor(constants, self.learning_rate, devices)
        least = floor + LEAST_BUDGET * self.target
        return ConvergenceModel.from_constants(
            replace(constants, target=max(self.target, least)), self.learning_rate, devices
        )

    def learn(self, learned: Learned) -> None:
        """Take in measured constants; the first loss is ϑ, as f* = 0 for cross-entropy."""
        if not self.moving.squared_norms:
            self.gap = max(learned.losses[0], checks.SMALLEST)
        if learned.constants is not None:
            self.moving = self.moving.with_sample(learned.constants)

    def data(self) -> dict[str, Any]:
        """Return the constants."""
        moving = self.moving
        if self.given is not None or moving.variance is None:
            return {}
        moment = np.max(list(moving.squared_norms.values()), axis=0)
        return {
            "smoothness": moving.smoothness,
            "gradient_moment": moment.tolist(),
            "gradient_variance": moving.variance.tolist(),
            "moment_sum": float(moment.sum()),
            "variance_sum": float(moving.variance.sum()),
            "target": self.target,
        }


def beliefs_from(recipe: Recipe, adapt: AdaptConfig, layers: int, *, measures: bool = True) -> Beliefs:
    """Return the beliefs with which a run begins: where nothing can be measured, what the recipe says counts."""
    if adapt.mode == "paper" or (not measures and recipe.convergence is not None):
        return PaperBound(recipe, adapt, layers)
    every = checks.whole_number("adapt.measure_every", adapt.measure_every)
    return Calibrated(layers, recipe.training.learning_rate, every)


class MovingFleet:
    """Measured rates, averaged over the last rounds as times are: the mean of 1/rate, because seconds are what counts.

    Paper: plans follow the resources of the moment. Here: their moving average. Because: where rates are drawn anew
    every round, those of the moment say little about the rounds to come, and errors of measurement average out.
    """

    def __init__(self) -> None:
        self._slowness: dict[str, checks.FloatArray] = {}
        self._rounds = 0

    def observe(self, fleet: Fleet) -> Fleet:
        """Take in one round's measurement; return the averages."""
        self._rounds = min(self._rounds + 1, MEMORY_ROUNDS)
        for name in RATES:
            now = 1 / getattr(fleet, name)
            before = self._slowness.get(name, now)
            self._slowness[name] = before + (now - before) / self._rounds
        return fleet.with_rates({name: 1 / slowness for name, slowness in self._slowness.items()})
