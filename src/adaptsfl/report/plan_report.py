"""A plan as tables for people (rich) and as plain data for programs (JSON)."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from adaptsfl.convergence import LONGEST_INTERVAL, ConvergenceModel
from adaptsfl.planner import Alternative, OtherRounds, Plan, PlanProblem, Sensitivity, time_ratio
from adaptsfl.report.tables import plain_table

MOST_CUTS_SHOWN = 8


def plan_tables(
    title: str,
    problem: PlanProblem,
    plan: Plan,
    others: Sequence[Alternative],
    sensitivities: Sequence[Sensitivity],
    rounds: Sequence[OtherRounds] = (),
) -> RenderableType:
    """Return everything that a person wants to know about a plan."""
    size = f"{problem.devices:,} devices, {problem.layers} layers, batches of {problem.batch_size}"
    heading = Text.assemble((title, "bold"), f": {size}\n").append(_headline(problem, plan)).append("\n")
    parts: list[RenderableType] = [heading, _phase_table(plan)]
    if others:
        parts.append(_alternatives_table(others))
    if sensitivities:
        parts.append(_sensitivity_table(plan, sensitivities))
    if rounds:
        parts.append(_rounds_table(problem, plan, rounds))
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
    problem: PlanProblem,
    plan: Plan,
    others: Sequence[Alternative] = (),
    sensitivities: Sequence[Sensitivity] = (),
    rounds: Sequence[OtherRounds] = (),
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
        "rounds_model": plan.rounds_model,
        "rounds": plan.rounds,
        "relative_rounds": plan.relative_rounds,
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
    if rounds:
        data["other_rounds"] = [_other_rounds_data(row) for row in rounds]
    return data


def _other_rounds_data(row: OtherRounds) -> dict[str, Any]:
    best = row.best
    return {
        "factor": row.factor,
        "kept_time_s": row.kept_time_s if np.isfinite(row.kept_time_s) else None,
        "predicted_time_s": None if best is None else best.predicted_time_s,
        "interval": None if best is None else best.interval,
        "cuts": None if best is None else [int(best.cuts.min()), best.deepest],
        "relative_rounds": None if best is None else best.relative_rounds,
    }


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
    elif plan.interval >= LONGEST_INTERVAL or (plan.rounds_model == "bound" and plan.interval >= plan.rounds):
        often = f"Average once at the end (no gain from doing so within {plan.interval:,} rounds)"
    proof = {"optimal": "proven optimal", "limit": f"not proven; at most {plan.gap:.2%} slower than the optimum"}
    lines = [
        f"{often}; {_cut_words(problem, plan)}.",
        _rounds_words(problem, plan),
        f"{plan.solver}: {proof[plan.status]}, in {seconds(plan.solve_s)}.",
    ]
    model = problem.convergence
    if isinstance(model, ConvergenceModel) and model.constants is not None:
        step = model.constants.smoothness * model.learning_rate
        if step > 1:
            lines.append(f"Note: βγ is {step:.3g}, and Theorem 1 holds up to 1: rounds are a guess.")
    return Text("\n".join(lines))


def _rounds_words(problem: PlanProblem, plan: Plan) -> str:
    """Say what the rounds come to, and by which model."""
    rounds = f"{plan.rounds:,.0f}" if plan.rounds >= 100 else f"{plan.rounds:.3g}"
    model, time = problem.convergence, seconds(plan.predicted_time_s)
    return (
        f"{model.achieved} after {time} in {rounds} rounds; drift spends {plan.drift_share:.0%} of each round's "
        f"progress.\nRounds by {model.title}: {plan.relative_rounds:.3g} × those of I = 1 with the same cuts."
    )


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
        table.add_column(_factor(factor), justify="right")
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


def _rounds_table(problem: PlanProblem, plan: Plan, rounds: Sequence[OtherRounds]) -> Table:
    scale = problem.convergence.scale
    table = plain_table("If longer intervals cost more or fewer rounds, planned anew")
    for column in ("model", "time", "plan", "rounds ÷ I = 1", "plan kept"):
        table.add_column(column, justify="left" if column in ("model", "plan") else "right")
    for row in rounds:
        title = f"{scale} {_factor(row.factor)}"
        if row.best is None:
            table.add_row(title, "–", "none makes progress", "–", "–")
            continue
        change = time_ratio(row.best.predicted_time_s, plan.predicted_time_s) - 1
        kept = time_ratio(row.kept_time_s, row.best.predicted_time_s) - 1
        unsure = "" if row.best.status == plan.status == "optimal" else "≈ "  # not both proven
        shown = f"{unsure}{kept:+.1%}" if np.isfinite(kept) else "makes no progress"
        table.add_row(title, f"{unsure}{change:+.1%}", _short(row.best), f"{row.best.relative_rounds:.3g}", shown)
    return table


def _factor(factor: float) -> str:
    return {0.5: "halved", 2.0: "doubled"}.get(factor, f"× {factor:g}")


def _short(plan: Plan) -> str:
    return f"I {plan.interval:,}, cut {_cut_range(int(plan.cuts.min()), plan.deepest)}"


def _cut_range(shallowest: int, deepest: int) -> str:
    return f"{deepest}" if shallowest == deepest else f"{shallowest}–{deepest}"
