"""What it costs the exact solver to choose parts of mini-batches and types of numbers too, and what that saves.

All numbers of parts (1, 2, 4, 8, 16) and all five types with the assumed factors, against the same problem without
either. Besides, how much faster plans could be if each device had its own type: a bound, and an estimate.
"""

import dataclasses
import itertools
import time
from typing import Any

import numpy as np
from planner_problems import make_bottleneck, make_problem, with_fixed_seconds
from rich.console import Console

from adaptsfl import planner
from adaptsfl.costs import ASSUMED_FACTORS
from adaptsfl.fleet import FLEETS
from adaptsfl.planner import Plan, PlanProblem
from adaptsfl.planner.terms import Terms

PARTS = (1, 2, 4, 8, 16)
AGAIN_BELOW_S = 2.0  # searches that take less are repeated
BOTTLENECK = "server-bound"
FIXED = ", fixed seconds"


def run_choices(*, quick: bool, progress: Console) -> list[dict[str, Any]]:
    """Measure every fleet and size, and return one row per problem."""
    rows = []
    for name, devices, seed in cases(quick=quick):
        rows.append({"fleet": name, "devices": devices, "seed": seed, **measure(problem_of(name, devices, seed))})
        progress.print(f"parts and types: {name}, {devices:,} devices, problem {seed}", style="dim")
    return rows


def cases(*, quick: bool) -> list[tuple[str, int, int]]:
    """Return the problems by fleet, number of devices and seed."""
    names = [fleet + fixed for fleet in FLEETS for fixed in ("", FIXED)]
    sizes = [(20, 3), (1000, 3), (10_000, 1)] if quick else [(20, 5), (1000, 5), (10_000, 3), (100_000, 3)]
    found = [(name, devices, seed) for name in names for devices, problems in sizes for seed in range(problems)]
    return found + list(itertools.product([BOTTLENECK], [20, 100, 300] if quick else [20, 100, 300, 1000], range(3)))


def problem_of(name: str, devices: int, seed: int) -> PlanProblem:
    """Return one problem, with neither parts nor types to choose from."""
    if name == BOTTLENECK:
        return make_bottleneck(devices, seed)
    problem = make_problem(name.removesuffix(FIXED), devices, seed)
    return with_fixed_seconds(problem, seed) if name.endswith(FIXED) else problem


def measure(problem: PlanProblem) -> dict[str, Any]:
    """Solve one problem without the choices and with them."""
    chosen = dataclasses.replace(problem, micro_batches=PARTS, wires=ASSUMED_FACTORS)
    alone, alone_s = solved(problem)
    both, both_s = solved(chosen)
    fewest = dataclasses.replace(chosen, wires={fewest_bits(chosen): min(ASSUMED_FACTORS.values())})
    relaxed_s = planner.plan(fewest).predicted_time_s
    return {
        "alone_s": alone_s,
        "both_s": both_s,
        "alone_nodes": alone.nodes,
        "nodes": both.nodes,
        "status": both.status,
        "micro_batches": both.micro_batches,
        "wire_dtype": both.wire_dtype,
        "saved": alone.predicted_time_s / both.predicted_time_s,
        "own_types_bound": both.predicted_time_s / relaxed_s,
        "own_types_estimate": max(ASSUMED_FACTORS[both.wire_dtype] / mixed_factor(chosen, both), 1.0),
    }


def solved(problem: PlanProblem) -> tuple[Plan, float]:
    """Return the plan and the least CPU seconds of up to three runs."""
    times: list[float] = []
    while len(times) < 3 and (not times or times[0] < AGAIN_BELOW_S):
        started = time.process_time()
        plan = planner.plan(problem)
        times.append(time.process_time() - started)
    return plan, min(times)


def fewest_bits(problem: PlanProblem) -> str:
    """Return the type that needs the fewest bits at every cut."""
    costs = {dtype: problem.costs.sent_as(dtype).activation_bits for dtype in problem.wire_dtypes}
    least = min(costs, key=lambda dtype: float(costs[dtype].sum()))
    assert all((costs[least] <= bits).all() for bits in costs.values())
    return least


def mixed_factor(problem: PlanProblem, plan: Plan) -> float:
    """Return the mean factor if each device takes the type with the least factor that makes the plan no slower.

    That the factor of a mixture is the mean of its devices' is an assumption; nobody has measured it.
    """
    devices = np.arange(problem.devices)
    own = {
        dtype: Terms(plan.micro_batches).times(problem.sent_as(dtype), plan.cuts).reshape(-1, problem.devices)
        for dtype in problem.wire_dtypes
    }
    most = own[plan.wire_dtype].max(axis=1, keepdims=True) * (1 + 1e-12)
    factors = np.full(devices.size, ASSUMED_FACTORS[plan.wire_dtype])
    for dtype, times in own.items():
        fits = (times <= most).all(axis=0)
        factors[fits] = np.minimum(factors[fits], ASSUMED_FACTORS[dtype])
    return float(factors.mean())


CHOICES_COLUMNS = (
    "fleet",
    "devices",
    "without",
    "with both",
    "ratio",
    "boxes",
    "proven",
    "parts",
    "numbers",
    "time without ÷ with",
    "own types: bound",
    "estimate",
)


def choices_summary(rows: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Return one line per fleet and size, with ranges over its problems."""
    lines: list[tuple[str, ...]] = []
    for fleet, devices in dict.fromkeys((row["fleet"], row["devices"]) for row in rows):
        group = [row for row in rows if (row["fleet"], row["devices"]) == (fleet, devices)]
        lines.append(
            (
                fleet,
                f"{devices:,}",
                between([row["alone_s"] * 1e3 for row in group], "{:,.0f}") + " ms",
                between([row["both_s"] * 1e3 for row in group], "{:,.0f}") + " ms",
                between([row["both_s"] / row["alone_s"] for row in group], "{:.1f}"),
                between([row["nodes"] for row in group], "{:,}"),
                f"{sum(row['status'] == 'optimal' for row in group)} of {len(group)}",
                ", ".join(str(k) for k in sorted({row["micro_batches"] for row in group})),
                ", ".join(sorted({row["wire_dtype"] for row in group})),
                between([row["saved"] for row in group], "{:.2f}"),
                "+" + between([(row["own_types_bound"] - 1) * 100 for row in group], "{:.1f}") + " %",
                "+" + between([(row["own_types_estimate"] - 1) * 100 for row in group], "{:.1f}") + " %",
            )
        )
    return lines


def between(values: list[float], form: str) -> str:
    """Return the least and the largest value, or one if they print the same."""
    low, high = form.format(min(values)), form.format(max(values))
    return low if low == high else f"{low}–{high}"
