"""What a policy sees when a block of rounds begins, and what it answers."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Literal, Protocol

import numpy as np

from adaptsfl.checks import BoolArray, FloatArray
from adaptsfl.config import PlannerConfig
from adaptsfl.convergence import LONGEST_INTERVAL, ConvergenceModel
from adaptsfl.costs import CutCosts
from adaptsfl.fleet import Fleet
from adaptsfl.planner import PlanProblem
from adaptsfl.training import TrainingPlan

# Who trains: the engine; devices in turns (SplitFed V2, vanilla split learning); the server alone.
Trainer = Literal["engine", "turns", "relay", "centralized"]


@dataclass(frozen=True)
class Observation:
    """All that a policy may look at; devices are those present, numbered from 0 in the order of `fleet`.

    Attributes:
        round: rounds done.
        block: blocks done.
        fleet: the present devices, as measured.
        convergence: what is believed about convergence now: estimated, or a prior while nothing was measured.
        epoch_rounds: rounds in which the device with the most samples sees all of them once.
        divergence: ‖w_i − w̄‖/‖w̄‖ of every client-specific layer when it was last averaged, the mean over devices;
            empty before the first averaging.
        limits: the recipe's [planner]: what may be chosen.
        rng: seeded by run and block, so a random policy is the same whatever ran before it.
    """

    round: int
    block: int
    fleet: Fleet
    costs: CutCosts
    batch_size: int
    convergence: ConvergenceModel
    epoch_rounds: int
    rng: np.random.Generator
    divergence: FloatArray = field(default_factory=lambda: np.zeros(0))
    limits: PlannerConfig = field(default_factory=PlannerConfig)

    @property
    def devices(self) -> int:
        """How many devices are present."""
        return self.fleet.size

    @property
    def layers(self) -> int:
        """L."""
        return self.costs.layers

    @cached_property
    def allowed(self) -> BoolArray:
        """Which device may take which cut, by its memory and the recipe's limits: shape (L, devices)."""
        return self.problem().allowed

    def problem(self, **fixed: Any) -> PlanProblem:
        """Return the planning problem of this moment; `interval` and `cuts` may be fixed."""
        longest = LONGEST_INTERVAL if self.limits.max_interval is None else self.limits.max_interval
        chosen = {"interval": self.limits.interval, "cuts": self._fixed_cuts(), **fixed}
        return PlanProblem(
            self.fleet,
            self.costs,
            self.convergence,
            self.batch_size,
            max_interval=longest,
            allowed_cuts=self.limits.allowed_cuts,
            **chosen,
        )

    def _fixed_cuts(self) -> list[int] | None:
        cuts = self.limits.cuts
        return [cuts] * self.devices if isinstance(cuts, int) else cuts


@dataclass(frozen=True)
class Decision:
    """How to train until the next decision.

    Attributes:
        plan: one cut per present device, and the interval.
        rounds: rounds until the next decision; the plan's interval if not given.
        placed: where every device's model is cut in truth, where that is not what the plan says: SplitFed V1 has a
            copy of every layer for every device, and runs the later ones on the edge server.
    """

    plan: TrainingPlan
    rounds: int | None = None
    placed: tuple[int, ...] | None = None


class Policy(Protocol):
    """Chooses interval and cuts, block by block. Options of a recipe are keyword arguments of its constructor.

    Attributes:
        trainer: who trains by its plans.
        estimates: whether it looks at `Observation.convergence`, so that constants are to be estimated.
    """

    trainer: ClassVar[Trainer]
    estimates: ClassVar[bool]

    def decide(self, seen: Observation) -> Decision:
        """Return how to train next. A policy may remember what it saw: it is asked once per block, in order."""
        ...
