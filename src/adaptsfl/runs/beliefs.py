"""A run's beliefs: estimates of convergence and of its fleet, updated while it trains."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from adaptsfl import checks
from adaptsfl.config import AdaptConfig, Recipe
from adaptsfl.convergence import (
    ConvergenceModel,
    GrowthRounds,
    RoundsEstimator,
    RoundsModel,
    model_from,
    noise_floor,
)
from adaptsfl.decisions import Decision
from adaptsfl.errors import InvalidInput, inside
from adaptsfl.fleet import FIXED, RATES, Fleet
from adaptsfl.policies import Trust
from adaptsfl.runs.record import Block
from adaptsfl.training.estimate import ConstantsSample, MovingConstants

# Rates are averaged over about this many rounds: long enough to average out noise, short enough to follow changes.
MEMORY_ROUNDS = 20
# Where the paper's bound leaves no budget at all, this part of ε is left, so that I = 1 is planned.
LEAST_BUDGET = 1e-3
# The longest interval before the paper's constants are measured: copies have to differ for that.
UNMEASURED_INTERVAL = 5
LOW, HIGH = 0.1, 0.9  # quantiles: the range that is shown for an estimate covers 80 %


class Beliefs(Protocol):
    """Beliefs about convergence, in one of the two modes.

    Attributes:
        needs_constants: whether the paper's constants are to be measured while training.
    """

    needs_constants: bool

    def model(self, devices: int) -> RoundsModel:
        """Return the convergence model for the planner."""
        ...

    def trust(self) -> Trust:
        """Return how far plans may follow the model."""
        ...

    def learn(self, block: Block) -> None:
        """Update the beliefs with a block that was trained, now or before a restart."""
        ...

    def measured(self, sample: ConstantsSample) -> None:
        """Update the beliefs with measured constants."""
        ...

    def data(self, decision: Decision) -> Mapping[str, Any]:
        """Return the beliefs for the record, above all the rounds that a decision needs."""
        ...


class Calibrated:
    """The default: how rounds grow with the interval, estimated from training losses.

    Args:
        given: the recipe's growth, the first estimate; None for the default.
    """

    needs_constants = False

    def __init__(self, layers: int, adapt: AdaptConfig, given: GrowthRounds | None = None) -> None:
        self.settings = adapt.calibration
        self.estimator = RoundsEstimator(layers, self.settings, given)
        self.estimate = self.estimator.estimate()
        self.rounds = 0

    def model(self, devices: int) -> RoundsModel:
        """Return the expected rounds."""
        return self.estimate.model

    def trust(self) -> Trust:
        """Return limits that keep a wrong estimate from doing harm; docs/calibration.md explains each of them."""
        known = self.settings
        due = self.estimator.long_blocks < known.probes
        return Trust(
            longest_interval=max(known.long_block, int(known.growth * self.rounds)),
            longest_averaging=max(4 * known.long_block, int(known.averaging_growth * self.rounds)),
            averagings=known.risked_averagings,
            kept_gain=known.kept_gain,
            probe=known.long_block if due else 1,
            probe_gain=known.probe_gain,
            optimistic=self.estimate.model_at(LOW),
            pessimistic=self.estimate.model_at(HIGH) if self.estimate.averagings else None,
        )

    def learn(self, block: Block) -> None:
        """Update the estimate with a block's losses. Layers with their own intervals are not averaged together."""
        interval = None if block.layer_intervals else block.interval
        if block.losses:
            self.estimator.learn(block.losses, interval, block.deepest)
        else:  # an older record, without losses
            self.estimator.skip(block.rounds)
        self.estimate = self.estimator.estimate()
        self.rounds = block.last_round

    def measured(self, sample: ConstantsSample) -> None:
        """Ignore constants: this mode does not use them."""

    def data(self, decision: Decision) -> Mapping[str, Any]:
        """Return κ, c of every L_c, and the rounds that the decision needs relative to I = 1, with their range."""
        estimate = self.estimate
        data: dict[str, Any] = {
            "kappa": estimate.kappa,
            "kappa_low": estimate.quantile(LOW),
            "kappa_high": estimate.quantile(HIGH),
            "averagings": estimate.averagings,
            "growth": {"factors": estimate.model.factors.tolist(), "power": estimate.power},
        }
        if decision.interval is not None:
            interval, deepest = decision.interval, decision.deepest
            data["relative_rounds"] = float(estimate.model.rounds(interval, deepest))
            data["relative_rounds_low"] = estimate.rounds(interval, deepest, LOW)
            data["relative_rounds_high"] = estimate.rounds(interval, deepest, HIGH)
        return data


class Given:
    """A recipe's [convergence], used unchanged."""

    needs_constants = False

    def __init__(self, recipe: Recipe, layers: int) -> None:
        self.recipe, self.layers = recipe, layers
        self.model(recipe.fleet.devices or 1)  # raises its errors before training starts

    def model(self, devices: int) -> RoundsModel:
        """Return the model that the section describes."""
        assert self.recipe.convergence is not None
        with inside("convergence"):
            return model_from(self.recipe.convergence, self.recipe.training.learning_rate, devices, self.layers)

    def trust(self) -> Trust:
        """Return no limits."""
        return Trust()

    def learn(self, block: Block) -> None:
        """Learn nothing."""

    def measured(self, sample: ConstantsSample) -> None:
        """Learn nothing."""

    def data(self, decision: Decision) -> Mapping[str, Any]:
        """Return nothing: the recipe contains the model."""
        return {}


class PaperBound:
    """The paper's bound, with constants measured while training, and a given ε."""

    needs_constants = True

    def __init__(self, recipe: Recipe, adapt: AdaptConfig, layers: int) -> None:
        self.learning_rate, self.layers = recipe.training.learning_rate, layers
        self.moving, self.gap = MovingConstants(), 1.0
        if adapt.target is None:
            remedy = "Give ε in [adapt], or the constants in [convergence], or use mode = 'calibrated'"
            raise InvalidInput("adapt.target", "is missing for mode 'paper'", remedy)
        self.target = adapt.target
        self._before = RoundsEstimator(layers, adapt.calibration).estimate().model

    def model(self, devices: int) -> RoundsModel:
        """Return the bound; before anything is measured, the model with which the default mode begins."""
        constants = self.moving.constants(initial_gap=self.gap, target=self.target)
        if constants is None:
            return self._before
        floor = noise_floor(constants, self.learning_rate, devices)
        least = floor + LEAST_BUDGET * self.target
        return ConvergenceModel.from_constants(
            replace(constants, target=max(self.target, least)), self.learning_rate, devices
        )

    def trust(self) -> Trust:
        """Return no limits once constants are measured: the bound is used unchanged."""
        if self.moving.constants(initial_gap=self.gap, target=self.target) is not None:
            return Trust()
        return Trust(longest_interval=UNMEASURED_INTERVAL, longest_averaging=UNMEASURED_INTERVAL)

    def learn(self, block: Block) -> None:
        """Take the first loss as ϑ, because f* = 0 for cross-entropy."""
        if block.first_round == 1 and block.losses:
            self.gap = max(block.losses[0], checks.SMALLEST)

    def measured(self, sample: ConstantsSample) -> None:
        """Update the beliefs with measured constants."""
        self.moving = self.moving.with_sample(sample)

    def data(self, decision: Decision) -> Mapping[str, Any]:
        """Return the constants."""
        moving = self.moving
        if moving.variance is None:
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


def beliefs_from(recipe: Recipe, adapt: AdaptConfig, layers: int) -> Beliefs:
    """Return the beliefs with which a run begins, in simulation and deployment.

    A recipe's [convergence] is used unchanged, except a growth in the default mode: it is the first estimate.
    """
    if recipe.convergence is not None:
        given = Given(recipe, layers)
        model = given.model(1)
        if adapt.mode == "calibrated" and isinstance(model, GrowthRounds):
            return Calibrated(layers, adapt, model)
        return given
    return PaperBound(recipe, adapt, layers) if adapt.mode == "paper" else Calibrated(layers, adapt)


class MovingFleet:
    """Moving averages of measured rates (the mean of 1/rate, because times are proportional to it) and fixed seconds.

    Paper: plans follow the resources of the moment. Here: their moving average. Because: where rates are drawn anew
    every round, those of the moment say little about the rounds to come, and errors of measurement average out.
    """

    def __init__(self) -> None:
        self._averages: dict[str, checks.FloatArray] = {}  # 1/rate, or seconds
        self._rounds = 0

    def observe(self, fleet: Fleet) -> Fleet:
        """Add one round's measurement; return the averages."""
        self._rounds = min(self._rounds + 1, MEMORY_ROUNDS)
        for name in (*RATES, *FIXED):
            now = getattr(fleet, name) if name in FIXED else 1 / getattr(fleet, name)
            before = self._averages.get(name, now)
            self._averages[name] = before + (now - before) / self._rounds
        return fleet.with_rates({name: mean if name in FIXED else 1 / mean for name, mean in self._averages.items()})
