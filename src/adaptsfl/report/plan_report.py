"""A plan as tables for people (rich) and as plain data for programs (JSON)."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from adaptsfl.convergence import LONGEST_INTERVAL, ConvergenceModel
from adaptsfl.planner import Alternative, OtherRounds, Plan, PlanProblem, Sensitivity, Without, time_ratio
from adaptsfl.report.tables import filled_table

MOST_CUTS_SHOWN = 8


def plan_tables(
    title: str,
    problem: PlanProblem,
    plan: Plan,
    others: Sequence[Alternative],
    sensitivities: Sequence[Sensitivity],
    rounds: Sequence[OtherRounds] = (),
    choices: Sequence[Without] = (),
) -> RenderableType:
    """Return a plan's summary, its phases and, where given, the tables that explain it."""
    size = f"{problem.devices:,} devices, {problem.layers} layers, batches of {problem.batch_size}"
    heading = Text.assemble((title, "bold"), f": {size}\n").append(_headline(problem, plan)).append("\n")
    parts: list[RenderableType] = [heading, _phase_table(plan)]
    if choices:
        parts.append(_choices_table(choices))
    if others:
        parts.append(_alternatives_table(others))
    if sensitivities:
        parts.append(_sensitivity_table(plan, sensitivities))
    if rounds:
        parts.append(_rounds_table(problem, plan, rounds))
    return Group(*parts)


def comparison_table(plans: Sequence[Plan]) -> RenderableType:
    """Return several solvers' plans for one problem side by side, each compared with the first."""
    first = plans[0]
    rows = [
        (
            plan.solver,
            plan.status,
            f"{plan.interval:,}",
            _cut_range(plan),
            seconds(plan.predicted_time_s),
            f"{time_ratio(plan.predicted_time_s, first.predicted_time_s) - 1:.4%}",
            seconds(plan.solve_s),
            f"{plan.solve_s / first.solve_s:,.1f}×",
        )
        for plan in plans
    ]
    headings = ("solver", "status", "interval", "cuts", "time", "slower by", "solved in", "ratio")
    return filled_table("Solvers", headings, rows, left=("solver", "status", "cuts"))


def plan_data(
    problem: PlanProblem,
    plan: Plan,
    others: Sequence[Alternative] = (),
    sensitivities: Sequence[Sensitivity] = (),
    rounds: Sequence[OtherRounds] = (),
    choices: Sequence[Without] = (),
) -> dict[str, Any]:
    """Return the plan and its evidence as plain data; times in seconds, cuts 1-based, one per device."""
    times = ("predicted_time_s", "lower_bound_s", "solve_s", "solver", "nodes")
    data: dict[str, Any] = {
        **_fields(plan, "status", "interval"),
        "cuts": plan.cuts.tolist(),
        **_fields(plan, *times, "rounds_model", "rounds", "relative_rounds"),
        **_fields(plan, "micro_batches", "wire_dtype"),
        "round_s": float(problem.sent_as(plan.wire_dtype).round_s(plan.cuts, plan.micro_batches)),
        "aggregation_s": float(problem.aggregation_s(plan.cuts)),
        "drift_share": plan.drift_share,
        "phases": [
            {
                **_fields(phase, "phase", "title", "seconds"),
                "total_s": plan.total_s(phase),
                "bottleneck": phase.bottleneck,
            }
            for phase in plan.phases
        ],
    }
    if problem.wires is not None:
        data["wires"], data["wires_assumed"] = dict(problem.wires), problem.assumes_wires
    if choices:
        data["without"] = [
            {**_fields(row, "title", "replanned"), **_new_plan(row.plan), "time_ratio": row.ratio} for row in choices
        ]
    if others:
        data["alternatives"] = [
            {**_fields(row, "title", "interval"), "cuts": list(row.cuts), "time_ratio": row.ratio} for row in others
        ]
    if sensitivities:
        data["sensitivity"] = [
            {**_fields(row, "resource", "factor", "kept_time_s"), **_new_plan(row.best)} for row in sensitivities
        ]
    if rounds:
        data["other_rounds"] = [
            {
                "factor": row.factor,
                "kept_time_s": row.kept_time_s if np.isfinite(row.kept_time_s) else None,
                **_new_plan(row.best),
                "relative_rounds": None if row.best is None else row.best.relative_rounds,
            }
            for row in rounds
        ]
    return data


def _fields(row: object, *names: str) -> dict[str, Any]:
    return {name: getattr(row, name) for name in names}


def _new_plan(best: Plan | None) -> dict[str, Any]:
    names = ("predicted_time_s", "interval", "micro_batches", "wire_dtype")
    if best is None:
        return dict.fromkeys((*names, "cuts"))
    return {**_fields(best, *names), "cuts": [int(best.cuts.min()), best.deepest]}


def seconds(value: float) -> str:
    """Return a time in readable units: 2.5 ms, 3.21 s, 12 min 5 s, 2 h 14 min, 3 d 4 h."""
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
        *_choice_words(problem, plan),
        _rounds_words(problem, plan),
        f"{plan.solver}: {proof[plan.status]}, in {seconds(plan.solve_s)}.",
    ]
    model = problem.convergence
    if isinstance(model, ConvergenceModel) and model.constants is not None:
        step = model.constants.smoothness * model.learning_rate
        if step > 1:
            lines.append(f"Note: βγ is {step:.3g}, and Theorem 1 holds up to 1: rounds are a guess.")
    return Text("\n".join(lines))


def _choice_words(problem: PlanProblem, plan: Plan) -> list[str]:
    """Say in how many parts and in which type of numbers, and what the types are taken to cost; nothing by default."""
    words = []
    if plan.micro_batches > 1:
        words.append(f"Every mini-batch goes through a round in {plan.micro_batches} parts.")
    elif len(problem.micro_batches) > 1:
        words.append("Mini-batches stay whole: no number of parts is faster.")
    if problem.wires is not None:
        source = "assumed" if problem.assumes_wires else "given"
        factors = ", ".join(f"{dtype} {factor:.4g}" for dtype, factor in problem.wires.items())
        words.append(
            f"Activations and gradients are sent in {plan.wire_dtype}: {problem.wires[plan.wire_dtype]:.4g} times the "
            f"rounds, {source}.\nTypes to choose from, with their factors: {factors}."
        )
    return words


def _rounds_words(problem: PlanProblem, plan: Plan) -> str:
    """Return the predicted time and rounds, and the model that predicts the rounds."""
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
    whole_s = plan.predicted_time_s
    rows = [
        (
            phase.phase,
            phase.title,
            seconds(phase.seconds),
            seconds(plan.total_s(phase)),
            f"{plan.total_s(phase) / whole_s if whole_s > 0 else 0.0:.1%}",
            phase.bottleneck,
        )
        for phase in plan.phases
    ]
    headings = ("phase", "what happens", "each time", "in total", "share", "bottleneck")
    title = (
        "Where the time goes" if plan.micro_batches == 1 else "Where the time goes, on the critical path of the parts"
    )
    return filled_table(title, headings, rows, left=("phase", "what happens", "bottleneck"))


def _choices_table(choices: Sequence[Without]) -> Table:
    rows = [
        (
            f"{row.title}, {'planned anew' if row.replanned else 'rest kept'}",
            f"{row.plan.interval:,}",
            _cut_range(row.plan),
            str(row.plan.micro_batches),
            row.plan.wire_dtype,
            f"{'≈ ' if row.replanned and row.plan.status != 'optimal' else ''}{row.ratio:.3g} ×",
        )
        for row in choices
    ]
    headings = ("without", "interval", "cuts", "parts", "numbers", "time")
    title = "What parts and types of numbers bring: the time without them"
    return filled_table(title, headings, rows, left=("without", "cuts", "numbers"))


def _alternatives_table(others: Sequence[Alternative]) -> Table:
    rows = [(row.title, f"{row.interval:,}", _span(*row.cuts), f"{row.ratio - 1:+.2%}") for row in others]
    headings = ("plan", "interval", "cuts", "time")
    return filled_table("What other plans would cost", headings, rows, left=("plan", "cuts"))


def _sensitivity_table(plan: Plan, sensitivities: Sequence[Sensitivity]) -> Table:
    factors = sorted({row.factor for row in sensitivities})
    found = {(row.resource, row.factor): row.best for row in sensitivities}
    rows = []
    for resource in dict.fromkeys(row.resource for row in sensitivities):
        new_plans = (found.get((resource, factor)) for factor in factors)
        cells = [("–", "") if best is None else (_change(best, plan), _short(best, plan)) for best in new_plans]
        rows.append((resource, *(text for cell in cells for text in cell)))
    headings = ["resource", *(heading for factor in factors for heading in (_factor(factor), "plan"))]
    title = "How the time would change with other resources, planned anew"
    return filled_table(title, headings, rows, left=("resource", "plan"))


def _rounds_table(problem: PlanProblem, plan: Plan, rounds: Sequence[OtherRounds]) -> Table:
    rows = []
    for row in rounds:
        title, best = f"{problem.convergence.scale} {_factor(row.factor)}", row.best
        if best is None:
            rows.append((title, "–", "none makes progress", "–", "–"))
            continue
        kept = time_ratio(row.kept_time_s, best.predicted_time_s) - 1
        shown = f"{_unsure(best, plan)}{kept:+.1%}" if np.isfinite(kept) else "makes no progress"
        rows.append((title, _change(best, plan), _short(best, plan), f"{best.relative_rounds:.3g}", shown))
    headings = ("model", "time", "plan", "rounds ÷ I = 1", "plan kept")
    title = "If longer intervals cost more or fewer rounds, planned anew"
    return filled_table(title, headings, rows, left=("model", "plan"))


def _change(best: Plan, plan: Plan) -> str:
    return f"{_unsure(best, plan)}{time_ratio(best.predicted_time_s, plan.predicted_time_s) - 1:+.1%}"


def _unsure(best: Plan, plan: Plan) -> str:
    return "" if best.status == plan.status == "optimal" else "≈ "  # not both are proven optimal


def _factor(factor: float) -> str:
    return {0.5: "halved", 2.0: "doubled"}.get(factor, f"× {factor:g}")


def _short(best: Plan, plan: Plan) -> str:
    """Return a new plan in few words: parts and type of numbers only where they differ from those of the plan."""
    words = [f"I {best.interval:,}", f"cut {_cut_range(best)}"]
    if best.micro_batches != plan.micro_batches:
        words.append("whole" if best.micro_batches == 1 else f"{best.micro_batches} parts")
    if best.wire_dtype != plan.wire_dtype:
        words.append(best.wire_dtype)
    return ", ".join(words)


def _cut_range(plan: Plan) -> str:
    return _span(int(plan.cuts.min()), plan.deepest)


def _span(shallowest: int, deepest: int) -> str:
    return f"{deepest}" if shallowest == deepest else f"{shallowest}–{deepest}"
