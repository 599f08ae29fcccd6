"""Predicted and measured seconds of a deployment, phase by phase."""

from rich.table import Table

from adaptsfl.latency import PHASES
from adaptsfl.report.plan_report import seconds
from adaptsfl.report.tables import filled_table
from adaptsfl.runs.folder import Run

PREDICTED_HEADINGS = ("phase", "predicted", "measured", "measured / predicted")


def predicted_s(run: Run) -> dict[str, tuple[float, float]]:
    """Return, by phase, predicted and measured seconds of one round or of one averaging, on average over blocks.

    Only deployments predict single phases; for other runs the result is empty.
    """
    found: dict[str, tuple[float, float]] = {}
    blocks = [block for block in run.blocks if isinstance(block.estimates.get("predicted"), dict)]
    for phase in PHASES:
        counts = [block.rounds if phase.startswith("a") else 1 for block in blocks]
        values = [dict(block.estimates["predicted"]).get(phase, 0.0) for block in blocks]  # type: ignore[call-overload]
        if blocks:
            predicted = sum(count * value for count, value in zip(counts, values, strict=True)) / sum(counts)
            found[phase] = predicted, sum(block.seconds[phase] for block in blocks) / sum(counts)
    return found


def predicted_rows(run: Run) -> list[tuple[str, ...]]:
    """Return a row of text per phase, and one for a whole round and a whole averaging."""
    times = predicted_s(run)
    if not times:
        return []
    rows = [_row(f"{phase} {PHASES[phase]}", *pair) for phase, pair in times.items()]
    for letter, title in (("a", "one round"), ("b", "one averaging")):
        pairs = [pair for phase, pair in times.items() if phase.startswith(letter)]
        rows.append(_row(title, *(sum(column) for column in zip(*pairs, strict=True))))
    return rows


def predicted_table(run: Run) -> Table | None:
    """Return the rows of `predicted_rows` as a table; None for a run without predictions."""
    rows = predicted_rows(run)
    title = "Seconds predicted and measured, of a round and of an averaging"
    return filled_table(title, PREDICTED_HEADINGS, rows, left=("phase",)) if rows else None


def _row(title: str, predicted: float, measured: float) -> tuple[str, ...]:
    ratio = f"{measured / predicted:.2f}" if predicted > 0 else "–"
    return title, seconds(predicted), seconds(measured), ratio
