"""The interface between the loop of a run and its backend: a simulated fleet, or a real one."""

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
    """The devices that can begin a block, and what is known about them.

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
        members: the devices that the decision is for, in its order; None for all.
        present: the devices that take part, round by round, if known in advance; None for all devices of the scene.
        measure: whether to measure the paper's constants at the start of the last round, when copies differ most.
        compared: types of numbers whose cost in rounds is measured in the first round. That round is trained with
            whole mini-batches that are sent as float32, whatever the decision says; usually none.
        final: whether the run ends with the last round, so that the model is evaluated after it in any case.
        estimates: of convergence, as the record will show them.
    """

    decision: Decision
    rounds: int
    first_round: int
    members: tuple[int, ...] | None = None
    present: Present | None = None
    measure: bool = False
    compared: tuple[str, ...] = ()
    final: bool = False
    estimates: Mapping[str, object] = field(default_factory=dict)

    @property
    def last_round(self) -> int:
        """The number of the last round."""
        return self.first_round + self.rounds - 1


@dataclass(frozen=True)
class Learned:
    """The training results of some rounds.

    Attributes:
        losses: the mean training loss of every round.
        evaluations: (round, accuracy, loss) on the test samples.
        divergence: ‖w_i − w̄‖/‖w̄‖ of every client-specific layer before it was last averaged.
        constants: the paper's constants, if they were measured.
        wires: by type of numbers, the factor by which sending activations and gradients in it multiplies the rounds;
            for the types that were compared.
    """

    losses: tuple[float, ...]
    evaluations: tuple[tuple[int, float, float], ...] = ()
    divergence: tuple[float, ...] = ()
    constants: ConstantsSample | None = None
    wires: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Trained:
    """The results of the rounds of an order, and their times. Fields not named here are those of `Block`.

    Attributes:
        evaluations: as in the record; in a deployment, of the model with which the block began.
        estimates: entries that the backend adds to the record's `estimates`.
        reestimated: whether batch-norm's statistics were re-estimated for every evaluation.
        restart: what a restarted process needs to rebuild the scene of the block; None where runs are replayed.
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
        limits: which intervals and cuts may be chosen.
        measures: whether it can measure the paper's constants.
        compares: whether it can measure what types of numbers cost in rounds.
        planning_limit_s: how long to wait for a policy's decision; None if virtual time stands still meanwhile.
    """

    recipe: Recipe
    seed: int
    limits: PlannerConfig
    measures: bool
    compares: bool
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
        """Return the devices that can begin a block with round 1, 2, …; wait until there are enough."""
        ...

    def check(self, decision: Decision) -> None:
        """Refuse a decision that this backend cannot carry out."""
        ...

    def block_rounds(self, decision: Decision) -> int:
        """Return how many rounds of a decision make one block: all of them, or those up to the next averaging."""
        ...

    def train(self, order: Order, scene: Scene) -> Trained:
        """Train, average and evaluate as ordered, with the devices of the scene; charge the time."""
        ...
