"""The seam between the loop of a run and the place where it trains: a simulated fleet, or a real one."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from adaptsfl.config import PlannerConfig, Recipe
from adaptsfl.costs import CutCosts
from adaptsfl.decisions import Decision
from adaptsfl.fleet import Fleet
from adaptsfl.runs.record import Evaluation
from adaptsfl.training.estimate import ConstantsSample

Present = tuple[tuple[int, ...], ...]  # the devices in every round of a block


@dataclass(frozen=True)
class Scene:
    """Who could begin a block, and what is known of them.

    Attributes:
        members: the devices, as indices of the whole fleet from 0 on.
        fleet: these devices as measured, in the same order.
        costs: of every cut.
        epoch_rounds: rounds in which the device with the most samples sees all of them once.
    """

    members: tuple[int, ...]
    fleet: Fleet
    costs: CutCosts
    epoch_rounds: int


@dataclass(frozen=True)
class Order:
    """Rounds to train under one decision.

    Attributes:
        rounds: how many.
        first_round: the number of the first of them, from 1 on.
        present: the devices that take part, round by round, where that is known before; None for all of the scene.
        measure: whether to measure the paper's constants at the start of the last round, when copies differ most.
        final: whether the run ends with the last round, so that the model is evaluated after it in any case.
    """

    decision: Decision
    rounds: int
    first_round: int
    present: Present | None = None
    measure: bool = False
    final: bool = False

    @property
    def last_round(self) -> int:
        """The number of the last round."""
        return self.first_round + self.rounds - 1


@dataclass(frozen=True)
class Learned:
    """What is known of learning after some rounds.

    Attributes:
        losses: the mean training loss of every round.
        evaluations: (round, accuracy, loss) on the test samples.
        divergence: ‖w_i − w̄‖/‖w̄‖ of every client-specific layer before it was last averaged.
        constants: the paper's, where they were measured.
    """

    losses: tuple[float, ...]
    evaluations: tuple[tuple[int, float, float], ...] = ()
    divergence: tuple[float, ...] = ()
    constants: ConstantsSample | None = None


@dataclass(frozen=True)
class Trained:
    """What the rounds of an order gave, and where their time went. Fields not named here are those of `Block`.

    Attributes:
        evaluations: as the record has them; in a deployment, of the model with which the block began.
        estimates: what the backend itself has to say for the record.
        reestimated: whether batch-norm's statistics were re-estimated for every evaluation.
        restart: what a restarted process needs to tell the scene from the block; None where runs are replayed.
    """

    learned: Learned
    cuts: tuple[int, ...]
    time_s: float
    seconds: Mapping[str, float]
    bottleneck: tuple[str, str]
    bits: float
    predicted_s: float
    evaluations: tuple[Evaluation, ...]
    present: Present | None = None
    estimates: Mapping[str, object] = field(default_factory=dict)
    restart: Mapping[str, object] | None = None
    reestimated: bool = False


class Backend(Protocol):
    """Where a run trains.

    Attributes:
        recipe: with its [run], and with every seed in it final.
        devices: N.
        limits: what may be chosen.
        measures: whether it can measure what an order asks for.
        planning_limit_s: how long the others wait for a policy; None where virtual time stands still meanwhile.
    """

    recipe: Recipe
    seed: int
    limits: PlannerConfig
    measures: bool
    planning_limit_s: float | None

    @property
    def devices(self) -> int:
        """N."""
        ...

    @property
    def layers(self) -> int:
        """L."""
        ...

    def observe(self, round_: int) -> Scene:
        """Return who could begin a block with round 1, 2, …; wait until they are enough."""
        ...

    def check(self, decision: Decision) -> None:
        """Refuse a decision that cannot be carried out here."""
        ...

    def block_rounds(self, decision: Decision) -> int:
        """Return how many rounds of a decision make one block: all of them, or those up to the next averaging."""
        ...

    def train(self, order: Order, scene: Scene) -> Trained:
        """Train, average and evaluate as ordered, with the devices of the scene; charge the time."""
        ...
