"""A plan as tables for people (rich) and as plain data for programs (JSON)."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from adaptsfl.convergence import LONGEST_INTERVAL
from adaptsfl.planner import Alternative, Plan, PlanProblem, Sensitivity, time_ratio
from adaptsfl.report.tables import plain_table

MOST_CUTS_SHOWN = 8


def plan_tables(
    title: str,
    problem: PlanProblem,
    plan: Plan,
    others: Sequence[Alternative],
    sensitivities: Sequence[Sensitivity],
) -> RenderableType:
    """Return everything that a person wants to know about a plan."""
    size = f"{problem.devices:,} devices, {problem.layers} layers, batches of {problem.batch_size}"
    heading = Text.assemble((title, "bold"), f": {size}\n").append(_headline(problem, plan)).append("\n")
    parts: list[RenderableType] = [heading, _phase_table(plan)]
    if others:
        parts.append(_alternatives_table(others))
    if sensitivities:
        parts.append(_sensitivity_table(plan, sensitivities))
    return Group(*parts)


def comparison_table(plans: Sequence[Plan]) -> RenderableType:
    """Return several solvers' plans for one problem side by side; the first is what the others are measured by."""
    table = plain_table("Solvers")
    for column in ("solver", "status", "interval", "cuts", "time", "slower by", "solved in", "ratio"):
        table.add_column(column, justify="left" if column in ("solver", "status", "cuts") else "right")
    for plan in plans:
        table.add_row(
            plan.solver,
            plan.status,
            f"{plan.interval:,}",
            _cut_range(int(plan.cuts.min()), plan.deepest),
            seconds(plan.predicted_time_s),
            f"{time_ratio(plan.predicted_time_s, plans[0].predicted_time_s) - 1:.4%}",
            seconds(plan.solve_s),
            f"{plan.solve_s / plans[0].solve_s:,.1f}×",
        )
    return table


def plan_data(
    problem: PlanProblem, plan: Plan, others: Sequence[Alternative] = (), sensitivities: Sequence[Sensitivity] = ()
) -> dict[str, Any]:
    """Return the plan and its evidence as plain data; times in seconds, cuts 1-based, one per device."""
    data: dict[str, Any] = {
        "status": plan.status,
        "interval": plan.interval,
        "cuts": plan.cuts.tolist(),
        "predicted_time_s": plan.predicted_time_s,
        "lower_bound_s": plan.lower_bound_s,
        "solve_s": plan.solve_s,
        "solver": plan.solver,
        "nodes": plan.nodes,
        "rounds": plan.rounds,
        "round_s": float(problem.round_s(plan.cuts)),
        "aggregation_s": float(problem.aggregation_s(plan.cuts)),
        "drift_share": plan.drift_share,
        "phases": [
            {
                "phase": phase.phase,
                "title": phase.title,
                "seconds": phase.seconds,
                "total_s": plan.total_s(phase),
                "bottleneck": phase.bottleneck,
            }
            for phase in plan.phases
        ],
    }
    if others:
        data["alternatives"] = [
            {"title": row.title, "interval": row.interval, "cuts": list(row.cuts), "time_ratio": row.ratio}
            for row in others
        ]
    if sensitivities:
        data["sensitivity"] = [
            {
                "resource": row.resource,
                "factor": row.factor,
                "kept_time_s": row.kept_time_s,
                "predicted_time_s": row.best.predicted_time_s,
                "interval": row.best.interval,
                "cuts": [int(row.best.cuts.min()), row.best.deepest],
            }
            for row in sensitivities
        ]
    return data


def seconds(value: float) -> str:
    """Return a time as people say it: 2.5 ms, 3.21 s, 12 min 5 s, 2 h 14 min, 3 d 4 h."""
    if value < 1:
        return f"{value * 1e3:.3g} ms"
    if value < 60:
        return f"{value:.3g} s"
    whole = round(value)
    for large, small, names in ((86400, 3600, "d h"), (3600, 60, "h min"), (60, 1, "min s")):
        if whole >= large:
            first, second = names.split()
            return f"{whole // large:,} {first} {whole % large // small} {second}"
    raise AssertionError(value)


def _headline(problem: PlanProblem, plan: Plan) -> Text:
    often = f"Average every {plan.interval:,} rounds"
    if plan.interval == 1:
        often = "Average after every round"
    elif plan.interval >= min(LONGEST_INTERVAL, plan.rounds):
        often = f"Average once at the end (no gain from doing so within {plan.interval:,} rounds)"
    proof = {"optimal": "proven optimal", "limit": f"not proven; at most {plan.gap:.2%} slower than the optimum"}
    lines = [
        f"{often}; {_cut_words(problem, plan)}.",
        f"Target reached after {seconds(plan.predicted_time_s)} in {plan.rounds:,.0f} rounds; drift spends "
        f"{plan.drift_share:.0%} of each round's progress.",
        f"{plan.solver}: {proof[plan.status]}, in {seconds(plan.solve_s)}.",
    ]
    constants, rate = problem.convergence.constants, problem.convergence.learning_rate
    if constants is not None and constants.smoothness * rate > 1:
        lines.append(f"Note: βγ is {constants.smoothness * rate:.3g}, and Theorem 1 holds up to 1: rounds are a guess.")
    return Text("\n".join(lines))


def _cut_words(problem: PlanProblem, plan: Plan) -> str:
    cuts, counts = np.unique(plan.cuts, return_counts=True)
    if len(cuts) == 1:
        everyone = "the only device" if problem.devices == 1 else f"all {problem.devices:,} devices"
        return f"{everyone} cut after layer {cuts[0]} ({problem.costs.name(int(cuts[0]))})"
    shown = [
        f"after layer {cut} ({problem.costs.name(int(cut))}): {count:,}"
        for cut, count in zip(cuts[:MOST_CUTS_SHOWN], counts, strict=False)
    ]
    rest = f", the rest deeper, up to layer {cuts[-1]}" if len(cuts) > MOST_CUTS_SHOWN else ""
    return f"devices cut {', '.join(shown)}{rest}"


def _phase_table(plan: Plan) -> Table:
    table = plain_table("Where the time goes")
    table.add_column("phase")
    table.add_column("what happens")
    table.add_column("each time", justify="right")
    table.add_column("in total", justify="right")
    table.add_column("share", justify="right")
    table.add_column("bottleneck")
    for phase in plan.phases:
        total_s = plan.total_s(phase)
        share = total_s / plan.predicted_time_s if plan.predicted_time_s > 0 else 0.0
        table.add_row(
            phase.phase, phase.title, seconds(phase.seconds), seconds(total_s), f"{share:.1%}", phase.bottleneck
        )
    return table


def _alternatives_table(others: Sequence[Alternative]) -> Table:
    table = plain_table("What other plans would cost")
    table.add_column("plan")
    table.add_column("interval", justify="right")
    table.add_column("cuts")
    table.add_column("time", justify="right")
    for row in others:
        table.add_row(row.title, f"{row.interval:,}", _cut_range(*row.cuts), f"{row.ratio - 1:+.2%}")
    return table


def _sensitivity_table(plan: Plan, sensitivities: Sequence[Sensitivity]) -> Table:
    table = plain_table("How the time would change with other resources, planned anew")
    table.add_column("resource")
    factors = sorted({row.factor for row in sensitivities})
    for factor in factors:
        table.add_column({0.5: "halved", 2.0: "doubled"}.get(factor, f"× {factor:g}"), justify="right")
        table.add_column("plan")
    for resource in dict.fromkeys(row.resource for row in sensitivities):
        cells = []
        for factor in factors:
            found = (row.best for row in sensitivities if (row.resource, row.factor) == (resource, factor))
            best = next(found, None)
            if best is None:
                cells += ["–", ""]
                continue
            change = time_ratio(best.predicted_time_s, plan.predicted_time_s) - 1
            unsure = "" if best.status == plan.status == "optimal" else "≈ "  # not both proven
            cells += [f"{unsure}{change:+.1%}", _short(best)]
        table.add_row(resource, *cells)
    return table


def _short(plan: Plan) -> str:
    return f"I {plan.interval:,}, cut {_cut_range(int(plan.cuts.min()), plan.deepest)}"


def _cut_range(shallowest: int, deepest: int) -> str:
    return f"{deepest}" if shallowest == deepest else f"{shallowest}–{deepest}"
