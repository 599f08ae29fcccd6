"""What would change the plan: other resources, other rounds, another interval, one cut for all."""

import bisect
import itertools
from dataclasses import dataclass, replace
from typing import Any

from adaptsfl.errors import InfeasiblePlan, InvalidInput
from adaptsfl.fleet import FIXED, SERVER_FIXED
from adaptsfl.planner import exact
from adaptsfl.planner.bound import best_uniform
from adaptsfl.planner.problem import Plan, PlanProblem, explained, time_ratio

RESOURCES = {
    "device compute": ("flops",),
    "uplink": ("uplink_bps", "fed_uplink_bps"),
    "downlink": ("downlink_bps", "fed_downlink_bps"),
    "server compute": ("server.flops",),
    "inter-server": ("server.to_fed_bps", "server.from_fed_bps"),
}
FIXED_SECONDS = {"fixed seconds": (*FIXED, *(f"server.{name}" for name in SERVER_FIXED))}
FACTORS = (0.5, 2.0)
EXACT = "float32"  # numbers on the wire as they are


@dataclass(frozen=True)
class Sensitivity:
    """The effect of multiplying one resource by `factor`: the time with the plan kept, and the new optimum."""

    resource: str
    factor: float
    kept_time_s: float
    best: Plan


@dataclass(frozen=True)
class OtherRounds:
    """The effect if longer intervals cost `factor` times as much as the rounds model says (`RoundsModel.scaled`).

    Attributes:
        kept_time_s: the time with the plan kept; infinite if it then makes no progress.
        best: the new optimum; None if there is no plan at all.
    """

    factor: float
    kept_time_s: float
    best: Plan | None


@dataclass(frozen=True)
class Alternative:
    """Another plan, and the ratio of its time to that of the given plan."""

    title: str
    interval: int
    cuts: tuple[int, int]  # shallowest and deepest
    ratio: float


@dataclass(frozen=True)
class Without:
    """What the time is without a choice that the plan makes: whole mini-batches, exact numbers, or both.

    Attributes:
        title: what is left out: parts, smaller types, or both.
        replanned: whether interval and cuts, and the other choice, are planned anew.
        plan: the plan without it.
        ratio: its time divided by that of the given plan.
    """

    title: str
    replanned: bool
    plan: Plan
    ratio: float


def without(problem: PlanProblem, plan: Plan, time_limit_s: float = float("inf")) -> list[Without]:
    """Leave out parts of mini-batches, smaller types of numbers, and both; keep the rest, and plan it anew.

    What the plan does not use is not left out. Each new plan may take `time_limit_s`.
    """
    changes: dict[str, dict[str, Any]] = {}
    if plan.micro_batches > 1:
        changes["parts"] = {"micro_batches": 1}
    if problem.wires is not None and plan.wire_dtype != EXACT:
        changes["smaller types"] = {"wire_dtype": EXACT}
    if len(changes) > 1:
        changes["both"] = {"micro_batches": 1, "wire_dtype": EXACT}
    rows = []
    for replanned, (title, change) in itertools.product((False, True), changes.items()):
        if replanned:
            other = problem.sent_as(EXACT) if "wire_dtype" in change else problem
            other = replace(other, micro_batches=(1,)) if "micro_batches" in change else other
            found = exact.solve(other, time_limit_s=time_limit_s)
        else:
            found = _kept(problem, plan, **change)
        ratio = time_ratio(found.predicted_time_s, plan.predicted_time_s)
        rows.append(Without(title, replanned, found, ratio))
    return rows


def _kept(problem: PlanProblem, plan: Plan, **changes: Any) -> Plan:
    """Return the plan with another number of parts or type of numbers, and its evidence."""
    other = replace(plan, **changes)
    return explained(
        problem,
        other.interval,
        other.cuts,
        micro_batches=other.micro_batches,
        wire_dtype=other.wire_dtype,
        lower_bound_s=0.0,
        proven=False,
        solver=plan.solver,
        solve_s=0.0,
        nodes=0,
    )


def sensitivity(problem: PlanProblem, plan: Plan, time_limit_s: float = float("inf")) -> list[Sensitivity]:
    """Re-plan with half and with double of every class of resources, each within `time_limit_s`."""
    rows = []
    resources = RESOURCES | (FIXED_SECONDS if problem.fleet.has_fixed_costs else {})
    for resource, names in resources.items():
        for factor in FACTORS:
            try:
                other = replace(problem, fleet=problem.fleet.scaled(factor, *names))
            except InvalidInput:
                continue  # the scaled value is out of range; the plan itself is valid
            kept_s = other.time_of(plan)
            rows.append(Sensitivity(resource, factor, kept_s, exact.solve(other, time_limit_s=time_limit_s)))
    return rows


def other_rounds(problem: PlanProblem, plan: Plan, time_limit_s: float = float("inf")) -> list[OtherRounds]:
    """Re-plan with half and with double of what longer intervals cost, each within `time_limit_s`."""
    rows = []
    for factor in FACTORS:
        try:
            other = replace(problem, convergence=problem.convergence.scaled(factor))
        except InvalidInput:
            continue  # the scaled value is out of range
        kept_s = other.time_of(plan)
        try:
            best = exact.solve(other, time_limit_s=time_limit_s)
        except InfeasiblePlan:
            best = None
        rows.append(OtherRounds(factor, kept_s, best))
    return rows


def alternatives(problem: PlanProblem, plan: Plan) -> list[Alternative]:
    """Return plans near the given one: one cut for all devices, and the same cuts with slightly other intervals."""
    rows = []
    choices = problem.convergence.choices(plan.deepest, *problem.intervals)
    own = bisect.bisect_left(choices, plan.interval)
    for interval in (*choices[max(own - 2, 0) : own], *choices[own + 1 : own + 3]):
        time_s = problem.time_of(replace(plan, interval=interval))
        spread = (int(plan.cuts.min()), plan.deepest)
        rows.append(Alternative("same cuts", interval, spread, time_ratio(time_s, plan.predicted_time_s)))
    uniform = best_uniform(problem.sent_as(plan.wire_dtype), plan.micro_batches)
    spread = (int(uniform.cuts.min()), int(uniform.cuts.max()))
    title = "one cut for all" if spread[0] == spread[1] else "one cut, or the deepest allowed"
    time_s = problem.time_of(replace(plan, interval=uniform.interval, cuts=uniform.cuts))
    ratio = time_ratio(time_s, plan.predicted_time_s)
    return [Alternative(title, uniform.interval, spread, ratio), *rows]
