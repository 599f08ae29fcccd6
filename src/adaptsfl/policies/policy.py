"""The interface of a policy: what it observes when a block of rounds begins, and the decision that it returns."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Protocol, TypeVar

import numpy as np

from adaptsfl.checks import BoolArray, FloatArray, IntArray
from adaptsfl.config import PlannerConfig, TrainingConfig
from adaptsfl.convergence import LONGEST_INTERVAL, RoundsModel
from adaptsfl.costs import CutCosts
from adaptsfl.decisions import Decision
from adaptsfl.errors import InvalidInput
from adaptsfl.fleet import Fleet
from adaptsfl.planner import Plan, PlanProblem

# The trainer: the engine; devices in turns (SplitFed V2, vanilla split learning); the server alone.
TrainerName = Literal["engine", "turns", "relay", "centralized"]

BLOCK_ROUNDS = 25  # the length of a block if the plan does not set it

Value = TypeVar("Value")


@dataclass(frozen=True)
class Trust:
    """How far plans may rely on the convergence model.

    Attributes:
        longest_interval: the longest interval that measurements support.
        longest_averaging: the same, where the rounds of the interval take no longer than `averagings` averagings.
        kept_gain: a plan is kept unless another is faster by this fraction.
        probe: the shortest interval that measures the drift of copies; 1 if enough is known.
        optimistic, pessimistic: `Observation.convergence` if longer intervals cost as little, or as much, as is still
            plausible; `pessimistic` is None before anything is measured.
        probe_gain: the fraction of time that must be gained under `optimistic` for a probing block.
    """

    longest_interval: int = LONGEST_INTERVAL
    longest_averaging: int = LONGEST_INTERVAL
    averagings: float = 1.0
    kept_gain: float = 0.0
    probe: int = 1
    optimistic: RoundsModel | None = None
    pessimistic: RoundsModel | None = None
    probe_gain: float = 0.0


@dataclass(frozen=True)
class Observation:
    """The input of a policy; devices are those present, numbered from 0 in the order of `fleet`.

    Attributes:
        round: rounds done.
        block: decisions made before this one.
        fleet: the present devices, as measured.
        convergence: the current convergence model: estimated, or a prior before the first measurement.
        epoch_rounds: rounds in which the device with the most samples sees all of them once.
        divergence: ‖w_i − w̄‖/‖w̄‖ of every client-specific layer when it was last averaged, the mean over devices;
            empty before the first averaging.
        limits: the recipe's [planner], which restricts the choice.
        rng: seeded by run and block, so a random policy does not depend on earlier runs.
        present: which devices of the whole fleet these are, as indices from 0 on; empty where all are.
        losses: mean training loss of every round so far; empty before the first.
        learning_rate: γ in the next round; in a warm-up, the rate to which it rises.
        trust: how far plans may follow `convergence`.
        wires: the types of numbers to choose from, each with the factor by which it multiplies the rounds, as far as it
            was measured; None where the recipe or the policy leaves no choice.
    """

    round: int
    block: int
    fleet: Fleet
    costs: CutCosts
    batch_size: int
    convergence: RoundsModel
    epoch_rounds: int
    rng: np.random.Generator
    divergence: FloatArray = field(default_factory=lambda: np.zeros(0))
    limits: PlannerConfig = field(default_factory=PlannerConfig)
    present: tuple[int, ...] = ()
    losses: FloatArray = field(default_factory=lambda: np.zeros(0))
    learning_rate: float = TrainingConfig().learning_rate
    trust: Trust = field(default_factory=Trust)
    wires: Mapping[str, float] | None = None

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

    @property
    def choices(self) -> dict[str, Any]:
        """All that may be chosen besides interval and cuts, for `problem`: micro-batches and the type of numbers.

        A problem without them has whole mini-batches, and the type that `costs` have.
        """
        return {"micro_batches": self.limits.parts(self.batch_size), "wires": self.wires}

    def problem(self, **fixed: Any) -> PlanProblem:
        """Return the current planning problem; `interval` and `cuts` may be fixed, other fields changed."""
        longest = LONGEST_INTERVAL if self.limits.max_interval is None else self.limits.max_interval
        usual = {
            "convergence": self.convergence,
            "interval": self.limits.interval,
            "max_interval": longest,
            "cuts": self._fixed_cuts(),
            "allowed_cuts": self.limits.allowed_cuts,
        }
        return PlanProblem(self.fleet, self.costs, batch_size=self.batch_size, **{**usual, **fixed})

    def of_those_present(self, name: str, values: Sequence[Value]) -> list[Value]:
        """Return the present devices' entries of a list with one entry per device of the whole fleet."""
        wanted = max(self.present) + 1 if self.present else self.devices
        if len(values) < wanted or (not self.present and len(values) > wanted):
            raise InvalidInput(name, f"has {len(values)} entries", "Give one per device of the whole fleet")
        return [values[index] for index in self.present or range(self.devices)]

    def _fixed_cuts(self) -> list[int] | None:
        match self.limits.cuts:
            case None:
                return None
            case int(cut):
                return [cut] * self.devices
            case cuts:
                return self.of_those_present("planner.cuts", cuts)


class Policy(Protocol):
    """Chooses interval and cuts, block by block. Options of a recipe are keyword arguments of its constructor.

    Attributes:
        title: its name in legends.
        trainer: the trainer that follows its plans.
        estimates: whether it uses `Observation.convergence`, so that constants must be estimated.
        divergence: whether it uses `Observation.divergence`, so that it must be measured.
        precision: whether it chooses the type of numbers by `Observation.wires`, so that these must be measured.
        adapt: keys that replace those of the recipe's [adapt].
    """

    title: ClassVar[str]
    trainer: ClassVar[TrainerName]
    estimates: ClassVar[bool]
    divergence: ClassVar[bool]
    precision: ClassVar[bool]
    adapt: Mapping[str, Any]

    def decide(self, seen: Observation) -> Decision:
        """Return how to train next. A policy may keep state: it is called once per decision, in order.

        A restarted run replays all calls from the first decision on, with the same observations.
        """
        ...


class BasePolicy:
    """A policy that trains with the engine: subclasses implement `decide` only."""

    title: ClassVar[str] = ""
    trainer: ClassVar[TrainerName] = "engine"
    estimates: ClassVar[bool] = False
    divergence: ClassVar[bool] = False
    precision: ClassVar[bool] = False
    adapt: Mapping[str, Any] = MappingProxyType({})

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.title = cls.__dict__.get("title", cls.__name__)

    def decide(self, seen: Observation) -> Decision:
        """Return how to train next."""
        raise NotImplementedError


def decision(
    cuts: Sequence[int] | IntArray, interval: int, micro_batches: int = 1, wire_dtype: str | None = None
) -> Decision:
    """Return the decision for one block of `interval` rounds; a practically infinite interval means no averaging."""
    chosen = tuple(int(cut) for cut in cuts)
    if interval >= LONGEST_INTERVAL:  # without drift the planner never averages
        return Decision(chosen, None, rounds=BLOCK_ROUNDS, micro_batches=micro_batches, wire_dtype=wire_dtype)
    return Decision(chosen, interval, micro_batches=micro_batches, wire_dtype=wire_dtype)


def planned(plan: Plan) -> Decision:
    """Return the decision for one block of a plan."""
    return decision(plan.cuts, plan.interval, plan.micro_batches, plan.wire_dtype)
