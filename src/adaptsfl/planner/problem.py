"""The planning problem (`PlanProblem`), and a plan with its evidence (`Plan`)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np

from adaptsfl import checks, latency
from adaptsfl.checks import BoolArray, FloatArray, IntArray
from adaptsfl.convergence import LONGEST_INTERVAL, Form, Intervals, RoundsModel
from adaptsfl.costs import ASSUMED_FACTORS, WIRE_DTYPES, CutCosts
from adaptsfl.errors import InfeasiblePlan, InvalidInput
from adaptsfl.fleet import Fleet
from adaptsfl.latency import PhaseTime

# optimal: proven. limit: the best plan found, not proven; the lower bound says how far off it can be.
Status = Literal["optimal", "limit", "infeasible"]


def total_s(
    rounds: FloatArray | float, interval: Intervals, round_s: FloatArray | float, aggregation_s: FloatArray | float
) -> FloatArray:
    """Θ = R · (A + B/I): rounds needed, times the seconds of a round and its share of an aggregation."""
    with np.errstate(invalid="ignore"):
        # Infinitely many rounds take infinite time, even if a round takes none: fmin turns NaN (∞ · 0) into infinity.
        return np.fmin(rounds * (round_s + aggregation_s / interval), np.inf)


@dataclass(frozen=True)
class PlanProblem:
    """Choose I and every device's cut so that the target is reached in the least time.

    Attributes:
        convergence: R(I, L_c), the rounds that a plan needs.
        interval: fixes I; None leaves it to the planner.
        max_interval: the longest interval to consider.
        cuts: fixes every device's cut (1-based); None leaves them to the planner.
        allowed_cuts: the cuts to choose from, for all devices; None means all.
        micro_batches: the k to choose from: into how many equal parts a mini-batch is divided.
        wires: the types of numbers to choose from, in which activations and gradients are sent, each with the factor
            by which it multiplies the rounds needed; None keeps that of `costs`, with factor 1.
    """

    fleet: Fleet
    costs: CutCosts
    convergence: RoundsModel
    batch_size: int
    interval: int | None = None
    max_interval: int = LONGEST_INTERVAL
    cuts: Sequence[int] | None = None
    allowed_cuts: Sequence[int] | None = None
    micro_batches: Sequence[int] = (1,)
    wires: Mapping[str, float] | None = None

    def __post_init__(self) -> None:
        checks.whole_number("batch_size", self.batch_size)
        if self.convergence.layers != self.layers:
            raise InvalidInput(
                "convergence",
                f"describes {self.convergence.layers} layers",
                f"The model has {self.layers}; give as many",
            )
        checks.whole_number("planner.max_interval", self.max_interval, at_most=LONGEST_INTERVAL)
        if self.interval is not None:
            checks.whole_number("planner.interval", self.interval, at_most=self.max_interval)
        if self.allowed_cuts is not None:
            checks.cut_numbers("planner.allowed_cuts", self.allowed_cuts, self.layers)
        if self.cuts is not None:
            cuts = checks.cut_numbers("planner.cuts", self.cuts, self.layers)
            if cuts.size != self.devices:
                raise InvalidInput("planner.cuts", f"has {cuts.size} entries", f"Give {self.devices}, one per device")
        self._check_parts()
        self._check_wires()
        if self._limits is not None and self.costs.memory_bytes is None:
            raise InvalidInput(
                "cuts.memory_bytes",
                "is missing, but devices.memory_bytes sets limits",
                "Give the memory that each cut needs, or remove the limits",
            )

    def _check_parts(self) -> None:
        if not len(self.micro_batches):
            raise InvalidInput("planner.micro_batches", "is empty", "Give at least one number")
        for k in self.micro_batches:
            checks.whole_number("planner.micro_batches", k)
            if self.batch_size % k:
                problem = f"is {k}, which does not divide the batch size {self.batch_size}"
                raise InvalidInput("planner.micro_batches", problem, "Give divisors, so that all parts are equal")

    def _check_wires(self) -> None:
        if self.wires is None:
            return
        if not self.wires:
            raise InvalidInput("planner.wires", "is empty", "Give at least one type of numbers")
        for dtype, factor in self.wires.items():
            if dtype not in WIRE_DTYPES:
                raise InvalidInput("planner.wires", f"names {dtype!r}", f"Choose from: {', '.join(WIRE_DTYPES)}")
            checks.number(f"planner.wires.{dtype}", factor, at_least=1)

    @property
    def wire_dtypes(self) -> tuple[str, ...]:
        """The types of numbers to choose from."""
        return (self.costs.wire_dtype,) if self.wires is None else tuple(self.wires)

    @property
    def rounds_factor(self) -> float:
        """By how much the rounds grow with the type of numbers that `costs` has; 1 if `wires` does not give it."""
        return 1.0 if self.wires is None else self.wires.get(self.costs.wire_dtype, 1.0)

    @property
    def assumes_wires(self) -> bool:
        """Whether the factors of the types of numbers are assumptions that nobody gave or measured."""
        return self.wires is ASSUMED_FACTORS

    def sent_as(self, dtype: str) -> "PlanProblem":
        """Return the same problem with only this type of numbers on the wire."""
        if self.wire_dtypes == (dtype,) and self.costs.wire_dtype == dtype:
            return self
        factor = 1.0 if self.wires is None else self.wires.get(dtype, 1.0)
        return replace(self, costs=self.costs.sent_as(dtype), wires={dtype: factor})

    @property
    def devices(self) -> int:
        """N."""
        return self.fleet.size

    @property
    def layers(self) -> int:
        """L."""
        return self.costs.layers

    @property
    def intervals(self) -> tuple[int, int]:
        """The shortest and the longest interval to choose from."""
        return (1, self.max_interval) if self.interval is None else (self.interval, self.interval)

    @cached_property
    def allowed(self) -> BoolArray:
        """Whether each device may take each cut, by memory, `allowed_cuts` and `cuts`: shape (L, N)."""
        every_cut = np.arange(1, self.layers + 1)[:, None]
        allowed = np.ones((self.layers, self.devices), dtype=bool)
        if self.allowed_cuts is not None:
            allowed &= np.isin(every_cut, self.allowed_cuts)
        if self._limits is not None and self.costs.memory_bytes is not None:
            allowed &= self.costs.memory_bytes[:, None] <= self._limits
        if self.cuts is not None:
            allowed &= every_cut == np.asarray(self.cuts)
        return allowed

    def round_s(self, cuts: IntArray, micro_batches: int = 1) -> FloatArray:
        """Seconds of one round (A in docs/planner.md), with the type of numbers that `costs` has."""
        return latency.round_s(self.costs, self.fleet, cuts, self.batch_size, micro_batches)

    def aggregation_s(self, cuts: IntArray) -> FloatArray:
        """Seconds of one aggregation (B in docs/planner.md)."""
        return latency.aggregation_s(self.costs, self.fleet, cuts)

    def time_to_target_s(self, interval: int, cuts: IntArray, micro_batches: int = 1) -> FloatArray:
        """Return Θ(I, μ), the seconds until the target is reached; with powers and tables, those of one unit of R.

        Paper: Θ charges the drift at I = 1 too. Here: it does not. Because: Theorem 1, from which Θ is derived, carries
        the indicator 1{I>1}, and with averaging after every round the copies cannot drift.
        """
        rounds = self.rounds_factor * self.convergence.rounds(interval, np.max(cuts, axis=-1))
        return total_s(rounds, interval, self.round_s(cuts, micro_batches), self.aggregation_s(cuts))

    def time_of(self, plan: "Plan") -> float:
        """Return the seconds until the target is reached with a plan, perhaps one made for another problem."""
        problem = self.sent_as(plan.wire_dtype)
        return float(problem.time_to_target_s(plan.interval, plan.cuts, plan.micro_batches))

    def check_feasible(self) -> None:
        """Raise `InfeasiblePlan` if no plan reaches the target; the message names the limit."""
        self.convergence.check_feasible()
        stuck = np.flatnonzero(~self.allowed.any(axis=0))
        if stuck.size:
            raise InfeasiblePlan(self._why_stuck(int(stuck[0]), stuck.size))
        shortest, _ = self.intervals
        self.convergence.check_feasible(shortest, deepest=int(self.allowed.argmax(axis=0).max()) + 1)

    @property
    def _limits(self) -> FloatArray | None:
        limits = self.fleet.memory_bytes
        return None if limits is None or np.isinf(limits).all() else limits

    def _why_stuck(self, index: int, count: int) -> str:
        """Explain why the device at `index` has no allowed cut."""
        name = self.fleet.name(index)
        others = f" ({count - 1} more devices are in the same place)" if count > 1 else ""
        memory = self.costs.memory_bytes
        wanted = set(range(1, self.layers + 1) if self.allowed_cuts is None else self.allowed_cuts)
        wanted = wanted if self.cuts is None else wanted & {self.cuts[index]}
        if self._limits is None or memory is None or not wanted:
            return f"{name}: planner.cuts gives a cut outside planner.allowed_cuts{others}. Allow it, or give another."
        need, cut = min((float(memory[cut - 1]), cut) for cut in wanted)
        have = self._limits[index]
        return (
            f"{name}: cut {cut} needs {need / 1e6:.3f} MB, the least of its cuts, and devices.memory_bytes[{index}] is "
            f"{have:g} ({have / 1e6:.3f} MB){others}. Raise its memory, lower batch_size, or drop the device."
        )


@dataclass(frozen=True)
class Plan:
    """An interval and cuts, with the evidence for them.

    Attributes:
        interval: I.
        cuts: every device's cut, 1-based.
        predicted_time_s: Θ(I, μ), the seconds until the target is reached; with powers and tables, of one unit of R.
        lower_bound_s: no plan is faster than this; equal to `predicted_time_s` up to rounding where status is optimal.
        status: whether the plan is proven to be optimal.
        rounds: R, the rounds needed, with the factor of `wire_dtype`.
        rounds_model: the form of the model that R comes from: bound, powers or table.
        relative_rounds: R(I, L_c) / R(1, L_c), how many times as many rounds as with I = 1 and the same cuts.
        phases: one round's a1 to a5 and one aggregation's b1 to b3, each with its bottleneck.
        solver: the solver that found the plan.
        solve_s: how long the solver took.
        nodes: how many steps the solver took: boxes bounded (exact), MILPs solved (bcd), plans tried (exhaustive).
        micro_batches: k, into how many equal parts every mini-batch is divided.
        wire_dtype: the type of numbers in which activations and gradients are sent.
    """

    interval: int
    cuts: IntArray
    predicted_time_s: float
    lower_bound_s: float
    status: Status
    rounds: float
    rounds_model: Form
    relative_rounds: float
    phases: tuple[PhaseTime, ...]
    solver: str
    solve_s: float
    nodes: int
    micro_batches: int = 1
    wire_dtype: str = "float32"

    @property
    def deepest(self) -> int:
        """L_c."""
        return int(self.cuts.max())

    @property
    def drift_share(self) -> float:
        """The share of each round's progress that is lost compared with I = 1; D/c for the bound."""
        return 1 - 1 / self.relative_rounds

    @property
    def gap(self) -> float:
        """Upper bound on how much slower than the optimum this plan is, as a fraction."""
        return time_ratio(self.predicted_time_s, self.lower_bound_s) - 1

    def total_s(self, phase: PhaseTime) -> float:
        """Return the seconds that a phase takes over the whole training."""
        return phase.seconds * (self.rounds if phase.every_round else self.rounds / self.interval)


def time_ratio(time_s: float, reference_s: float) -> float:
    """Return the ratio of a time to the reference; 1 if both are zero."""
    if time_s == reference_s:
        return 1.0
    return time_s / reference_s if reference_s > 0 else float("inf")


def explained(
    problem: PlanProblem,
    interval: int,
    cuts: IntArray,
    *,
    micro_batches: int = 1,
    wire_dtype: str | None = None,
    lower_bound_s: float,
    proven: bool,
    solver: str,
    solve_s: float,
    nodes: int,
) -> Plan:
    """Return the plan with its evidence, recomputed from the formulas instead of taken from the solver."""
    wire_dtype = problem.costs.wire_dtype if wire_dtype is None else wire_dtype
    problem = problem.sent_as(wire_dtype)
    time_s = float(problem.time_to_target_s(interval, cuts, micro_batches))
    model, deepest = problem.convergence, int(cuts.max())
    rounds = float(model.rounds(interval, deepest))
    return Plan(
        interval=interval,
        cuts=cuts,
        predicted_time_s=time_s,
        lower_bound_s=min(lower_bound_s, time_s),
        status="optimal" if proven else "limit",
        rounds=problem.rounds_factor * rounds,
        rounds_model=model.form,
        relative_rounds=rounds / float(model.rounds(1, deepest)),
        phases=latency.phase_times(problem.costs, problem.fleet, cuts, problem.batch_size, micro_batches),
        solver=solver,
        solve_s=solve_s,
        nodes=nodes,
        micro_batches=micro_batches,
        wire_dtype=wire_dtype,
    )
