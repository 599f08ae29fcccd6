"""Time and rounds of every policy to each accuracy, and its traffic, as a table and as plain data."""

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from adaptsfl.costs import BITS_PER_BYTE
from adaptsfl.report.plan_report import seconds
from adaptsfl.report.series import Series, group, spread, time_word
from adaptsfl.report.tables import filled_table
from adaptsfl.runs.folder import Run

BYTE_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def summary_data(runs: Sequence[Run]) -> dict[str, Any]:
    """Return, per policy, time and rounds to every target, accuracy and traffic, with the spread over seeds.

    `speed_up` is the policy's time to the target over the first policy's; null if a seed of either does not reach it.
    """
    members = group(runs)
    targets = sorted({target for run in runs for target in run.targets})
    policies = [_policy(series, targets) for series in members]
    for policy in policies:
        for own, first in zip(policy["targets"], policies[0]["targets"], strict=True):
            own["speed_up"] = _ratio(own, first)
    return {"first": members[0].label, "targets": targets, "policies": policies}


def _policy(series: Series, targets: Sequence[float]) -> dict[str, Any]:
    final = [run.final_accuracy for run in series.runs if run.final_accuracy is not None]
    best = [run.best_accuracy for run in series.runs if run.best_accuracy is not None]
    return {
        "label": series.label,
        "policy": series.policy,
        "seeds": [run.seed for run in series.runs],
        "targets": [_target(series.runs, target) for target in targets],
        "final_accuracy": spread(final)._asdict() if final else None,
        "best_accuracy": max(best) if best else None,
        "bytes": spread(run.bits / BITS_PER_BYTE for run in series.runs)._asdict(),
        "time_s": spread(run.time_s for run in series.runs)._asdict(),
        "rounds": spread(run.rounds for run in series.runs)._asdict(),
    }


def _target(runs: Sequence[Run], target: float) -> dict[str, Any]:
    times = [time_s for run in runs if (time_s := run.time_to(target)) is not None]
    rounds = [count for run in runs if (count := run.rounds_to(target)) is not None]
    return {
        "target": target,
        "reached": len(times),
        "of": len(runs),
        "time_s": spread(times)._asdict() if times else None,
        "rounds": spread(rounds)._asdict() if rounds else None,
    }


def _ratio(own: dict[str, Any], first: dict[str, Any]) -> float | None:
    """Return the ratio of times; None if a seed missed the target: the mean of the others would be too good."""
    if any(row["reached"] < row["of"] for row in (own, first)) or not first["time_s"]["mean"]:
        return None
    return own["time_s"]["mean"] / first["time_s"]["mean"]


def summary_rows(data: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return the table's headings and cells as text; a cell may have several lines."""
    to_targets = [f"to {percent(target)}" for target in data["targets"]]
    headings = ["policy", *to_targets, "final accuracy", "sent", "in all"]
    return headings, [
        [
            _who(policy),
            *(_target_cell(row, policy, data["first"]) for row in policy["targets"]),
            percents(policy["final_accuracy"]),
            sizes(policy["bytes"]),
            f"{seconds(policy['time_s']['mean'])}\n{policy['rounds']['mean']:,.0f} rounds",
        ]
        for policy in data["policies"]
    ]


def summary_table(runs: Sequence[Run]) -> Table:
    """Return one line per policy."""
    data = summary_data(runs)
    title = f"{time_word(runs).capitalize()} and rounds to each accuracy; speed-up is that of {data['first']}"
    return filled_table(title, *summary_rows(data), left=("policy",))


def _who(policy: dict[str, Any]) -> str:
    seeds = len(policy["seeds"])
    return f"{policy['label']}\n{seeds} seed{'s' if seeds != 1 else ''}"


def _target_cell(row: dict[str, Any], policy: dict[str, Any], first: str) -> str:
    if not row["reached"]:
        best = policy["best_accuracy"]
        return "not reached" if best is None else f"not reached (best {best:.2f})"
    lines = [times(row["time_s"]), f"{with_spread(row['rounds'], '{:,.0f}'.format)} rounds"]
    if row["reached"] < row["of"]:
        lines.append(f"{row['reached']} of {row['of']} seeds")
    elif row["speed_up"] is not None and policy["label"] != first:
        lines.append(f"speed-up {row['speed_up']:.2f}×")
    return "\n".join(lines)


def with_spread(value: dict[str, float | None] | None, write: Any) -> str:
    """Return a mean and, where there is more than one seed, its spread."""
    if value is None:
        return "–"
    mean = str(write(value["mean"]))
    return mean if value["spread"] is None else f"{mean} ± {write(value['spread'])}"


def times(value: dict[str, Any]) -> str:
    """Return a time with its spread, the spread without milliseconds beside minutes: 2 min 3 s ± 0.2 s."""
    short = value["mean"] >= 60 and (value["spread"] or 0) < 60
    return with_spread(value, lambda time_s: f"{time_s:.1f} s" if short and time_s < 60 else seconds(time_s))


def percent(share: float) -> str:
    """Return 0.534 as 53.4 %."""
    return f"{100 * share:.3g} %"


def percents(value: dict[str, float | None] | None) -> str:
    """Return an accuracy with its spread: 53.4 ± 0.8 %."""
    return "–" if value is None else with_spread(value, lambda share: f"{100 * share:.1f}") + " %"


def sizes(value: dict[str, Any]) -> str:
    """Return bytes with their spread, both in one unit: 3.20 ± 0.05 GB."""
    power = 0
    while value["mean"] >= 999.5 * 1000**power and power < len(BYTE_UNITS) - 1:
        power += 1
    decimals = 2 if power else 0
    return f"{with_spread(value, lambda count: f'{count / 1000**power:,.{decimals}f}')} {BYTE_UNITS[power]}"
