"""The paper's bound: Theorem 1, Corollary 1, and the general drift of which the paper's is one case.

The paper bounds the mean squared gradient norm after R rounds (Theorem 1) by

    2ϑ/(γR) + βγ Σ_j σ_j² / N + 1{I>1} 4β²γ²I² Σ_{j≤L_c} G_j².

Setting that to the target ε and solving for R gives Corollary 1. The planner uses it in the form

    R(I, L_c) = 2ϑ / (γ (c − D(I, L_c))),     D(I, L_c) = 1{I>1} · I^p · Σ_{j≤L_c} κ_j,

of which the paper is the case p = 2, κ_j = 4β²γ²G_j², c = ε − βγ Σσ²/N. A drift that was measured instead of bounded
is given as other values of κ, p and c.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import numpy as np

from adaptsfl import checks
from adaptsfl.checks import FloatArray, IntArray
from adaptsfl.convergence.rounds import LARGEST_POWER, LONGEST_INTERVAL, Form, Intervals
from adaptsfl.errors import InfeasiblePlan, InvalidInput

# A budget smaller than this share of the target is rounding error, not progress.
NEGLIGIBLE = 1e-12


@dataclass(frozen=True)
class Constants:
    """The paper's constants of the loss, and the target.

    Attributes:
        smoothness: β, of Assumption 1.
        gradient_moment: G_j² of every layer (not cumulative), of Assumption 2.
        gradient_variance: σ_j² of every layer (not cumulative), of Assumption 2.
        initial_gap: ϑ = f(w⁰) − f*.
        target: ε, the mean squared gradient norm to reach.
    """

    smoothness: float
    gradient_moment: FloatArray
    gradient_variance: FloatArray
    initial_gap: float
    target: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "smoothness", checks.number("smoothness", self.smoothness))
        moment = checks.vector("gradient_moment", self.gradient_moment, of="one per layer")
        variance = checks.vector("gradient_variance", self.gradient_variance, length=moment.size, of="one per layer")
        object.__setattr__(self, "gradient_moment", moment)
        object.__setattr__(self, "gradient_variance", variance)
        object.__setattr__(self, "initial_gap", checks.number("initial_gap", self.initial_gap, positive=True))
        object.__setattr__(self, "target", checks.number("target", self.target, positive=True))


def noise_floor(constants: Constants, learning_rate: float, devices: int) -> float:
    """βγ Σ_j σ_j² / N: the gradient noise, which no plan can reduce. It is also the infimum of ε."""
    return float(constants.smoothness * learning_rate * constants.gradient_variance.sum() / devices)


def drift_per_layer(constants: Constants, learning_rate: float) -> FloatArray:
    """κ_j = 4β²γ²G_j²: the paper's drift, layer by layer."""
    drift = 4 * constants.smoothness**2 * learning_rate**2 * constants.gradient_moment
    if drift.max() > checks.LARGEST:
        problem = f"is {constants.smoothness:g}, and with it the drift 4β²γ²G² is {drift.max():g}"
        raise InvalidInput("smoothness", problem, "Check smoothness, learning_rate and gradient_moment")
    return np.where(drift < checks.SMALLEST, 0.0, drift)


def gradient_bound(
    constants: Constants, learning_rate: float, devices: int, rounds: float, interval: int, deepest: int
) -> float:
    """Theorem 1: the bound on the mean squared gradient norm after `rounds` rounds; `deepest` is L_c."""
    optimisation = 2 * constants.initial_gap / (learning_rate * rounds)
    drift = interval**2 * drift_per_layer(constants, learning_rate)[:deepest].sum() if interval > 1 else 0.0
    return float(optimisation + noise_floor(constants, learning_rate, devices) + drift)


@dataclass(frozen=True)
class ConvergenceModel:
    """R(I, L_c), the rounds that a plan needs. See the module's docstring.

    Attributes:
        learning_rate: γ.
        initial_gap: ϑ.
        drift_per_layer: κ_j of every layer (not cumulative).
        power: p.
        budget: c. At most zero means that no plan reaches the target.
        constants: the paper's constants that the model was made from, if any; used to explain infeasibility.
        devices: N, if the model was made from constants.
    """

    learning_rate: float
    initial_gap: float
    drift_per_layer: FloatArray
    power: float
    budget: float
    constants: Constants | None = None
    devices: int = 0

    form: ClassVar[Form] = "bound"
    title: ClassVar[str] = "Theorem 1's bound"
    achieved: ClassVar[str] = "Target reached"
    scale: ClassVar[str] = "drift"

    def __post_init__(self) -> None:
        for name in ("learning_rate", "initial_gap", "power"):
            object.__setattr__(self, name, checks.number(name, getattr(self, name), positive=True))
        if self.power > LARGEST_POWER:
            raise InvalidInput("drift.power", f"is {self.power:g}", f"Give a power of at most {LARGEST_POWER}")
        if not abs(self.budget) <= checks.LARGEST:
            raise InvalidInput("budget", f"is {self.budget:g}", f"Give a number of at most {checks.LARGEST:g}")
        object.__setattr__(self, "drift_per_layer", checks.vector("drift.per_layer", self.drift_per_layer))

    @classmethod
    def from_constants(cls, constants: Constants, learning_rate: float, devices: int) -> "ConvergenceModel":
        """Return the paper's case: p = 2, κ_j = 4β²γ²G_j², c = ε − βγ Σσ²/N."""
        checks.number("learning_rate", learning_rate, positive=True)
        return cls(
            learning_rate=learning_rate,
            initial_gap=constants.initial_gap,
            drift_per_layer=drift_per_layer(constants, learning_rate),
            power=2.0,
            budget=constants.target - noise_floor(constants, learning_rate, devices),
            constants=constants,
            devices=devices,
        )

    @property
    def layers(self) -> int:
        """L."""
        return self.drift_per_layer.size

    @cached_property
    def cumulative_drift(self) -> FloatArray:
        """Σ_{j≤L_c} κ_j, indexed by L_c from 0 on."""
        return np.concatenate(([0.0], np.cumsum(self.drift_per_layer)))

    def drift(self, interval: Intervals, deepest: int | IntArray) -> FloatArray:
        """D(I, L_c) = 1{I>1} · I^p · Σ_{j≤L_c} κ_j."""
        return (interval > 1) * interval**self.power * self.cumulative_drift[deepest]

    def progress(self, interval: Intervals, deepest: int | IntArray) -> FloatArray:
        """1/R = γ (c − D) / 2ϑ: the share of the way that one round covers; not positive if D ≥ c."""
        return self.pace * (self.budget - self.drift(interval, deepest))

    @property
    def pace(self) -> float:
        """γ / 2ϑ."""
        return self.learning_rate / (2 * self.initial_gap)

    def rounds(self, interval: Intervals, deepest: int | IntArray) -> FloatArray:
        """R(I, L_c), Corollary 1 with equality; infinite where the drift leaves no progress."""
        progress = self.progress(interval, deepest)
        with np.errstate(divide="ignore"):
            return np.where(progress > 0, 1 / np.asarray(progress), np.inf)

    def largest_interval(self, deepest: int) -> int:
        """The largest I with D(I, L_c) < c, at most `LONGEST_INTERVAL`; 1 where only I = 1 makes progress."""
        slope = float(self.cumulative_drift[deepest])
        if slope == 0 or self.drift(LONGEST_INTERVAL, deepest) < self.budget:
            return LONGEST_INTERVAL
        guess = max(1, int((self.budget / slope) ** (1 / self.power)))
        while guess > 1 and self.drift(guess, deepest) >= self.budget:
            guess -= 1
        while self.drift(guess + 1, deepest) < self.budget:
            guess += 1
        return guess

    def choices(self, deepest: int, shortest: int, longest: int) -> Sequence[int]:
        """Return the intervals of the range that make progress."""
        return range(shortest, min(longest, self.largest_interval(deepest)) + 1)

    def scaled(self, factor: float) -> "ConvergenceModel":
        """Return the model with all of the drift multiplied by `factor`."""
        return replace(self, drift_per_layer=self.drift_per_layer * factor)

    def smallest_target(self, interval: int = 1, deepest: int = 1) -> float | None:
        """The ε that this interval and L_c approach but never reach; None for a budget given without constants."""
        if self.constants is None:
            return None
        floor = noise_floor(self.constants, self.learning_rate, self.devices)
        return floor + float(self.drift(interval, deepest))

    def check_feasible(self, interval: int = 1, deepest: int = 1) -> None:
        """Raise `InfeasiblePlan` if the plan makes no progress; with the defaults, if no plan does."""
        scale = self.budget if self.constants is None else self.constants.target
        if self.budget - float(self.drift(interval, deepest)) > NEGLIGIBLE * scale:
            return
        raise InfeasiblePlan(self._why_infeasible(interval, deepest))

    def _why_infeasible(self, interval: int, deepest: int) -> str:
        drift = float(self.drift(interval, deepest))
        plan = f" with interval {interval} and cuts up to {deepest}" if drift > 0 else ""
        if self.constants is None:
            wanted = f"above {drift:.6g}" if drift > 0 else "above zero"
            return (
                f"convergence.budget: is {self.budget:g}, and the drift{plan} is {drift:.6g}: no round makes progress. "
                f"Give a budget {wanted}" + (", or a shorter interval or shallower cuts." if drift > 0 else ".")
            )
        target = self.smallest_target(interval, deepest)
        floor = noise_floor(self.constants, self.learning_rate, self.devices)
        return (
            f"convergence.target: is {self.constants.target:g}, but{plan} no number of rounds gets below {target:.6g} "
            f"(gradient noise βγΣσ²/N {floor:.6g}, drift {drift:.6g}). Raise target above {target:.6g}, lower "
            f"learning_rate (now {self.learning_rate:g}), or add devices (now {self.devices})."
        )
