"""What would change the plan: other resources, another interval, one cut for all."""

from dataclasses import dataclass, replace

import numpy as np

from adaptsfl.errors import InvalidInput
from adaptsfl.planner import exact
from adaptsfl.planner.bound import best_uniform
from adaptsfl.planner.problem import Plan, PlanProblem, time_ratio

RESOURCES = {
    "device compute": ("flops",),
    "uplink": ("uplink_bps", "fed_uplink_bps"),
    "downlink": ("downlink_bps", "fed_downlink_bps"),
    "server compute": ("server.flops",),
    "inter-server": ("server.to_fed_bps", "server.from_fed_bps"),
}
FACTORS = (0.5, 2.0)


@dataclass(frozen=True)
class Sensitivity:
    """What happens if all of one resource is multiplied by `factor`: with the plan kept, and with the new optimum."""

    resource: str
    factor: float
    kept_time_s: float
    best: Plan


@dataclass(frozen=True)
class Alternative:
    """Another plan, and how many times as long as the given one it takes."""

    title: str
    interval: int
    cuts: tuple[int, int]  # shallowest and deepest
    ratio: float


def sensitivity(problem: PlanProblem, plan: Plan, time_limit_s: float = float("inf")) -> list[Sensitivity]:
    """Re-plan with half and with double of every class of resources, each within `time_limit_s`."""
    rows = []
    for resource, names in RESOURCES.items():
        for factor in FACTORS:
            try:
                other = replace(problem, fleet=problem.fleet.scaled(factor, *names))
            except InvalidInput:
                continue  # at the edge of what numbers may be; the plan itself stands
            kept_s = float(other.time_to_target_s(plan.interval, plan.cuts))
            rows.append(Sensitivity(resource, factor, kept_s, exact.solve(other, time_limit_s=time_limit_s)))
    return rows


def alternatives(problem: PlanProblem, plan: Plan) -> list[Alternative]:
    """Return plans near the given one: one cut for all devices, and the same cuts with a slightly other interval."""
    rows = []
    shortest, longest = problem.intervals
    for interval in (plan.interval + step for step in (-2, -1, 1, 2)):
        time_s = float(problem.time_to_target_s(interval, plan.cuts)) if shortest <= interval <= longest else np.inf
        if np.isfinite(time_s):
            spread = (int(plan.cuts.min()), plan.deepest)
            rows.append(Alternative("same cuts", interval, spread, time_ratio(time_s, plan.predicted_time_s)))
    uniform = best_uniform(problem)
    spread = (int(uniform.cuts.min()), int(uniform.cuts.max()))
    title = "one cut for all" if spread[0] == spread[1] else "one cut, or the deepest allowed"
    time_s = float(problem.time_to_target_s(uniform.interval, uniform.cuts))
    ratio = time_ratio(time_s, plan.predicted_time_s)
    return [Alternative(title, uniform.interval, spread, ratio), *rows]
