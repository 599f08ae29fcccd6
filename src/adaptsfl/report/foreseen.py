"""What a deployment was thought to take, phase by phase, against what it took."""

from rich.table import Table

from adaptsfl.latency import PHASES
from adaptsfl.report.plan_report import seconds
from adaptsfl.report.tables import filled_table
from adaptsfl.runs.folder import Run

HEADINGS = ("phase", "foreseen", "measured", "measured / foreseen")


def foreseen_s(run: Run) -> dict[str, tuple[float, float]]:
    """Return by phase the seconds foreseen and measured, of one round or of one averaging, on average over blocks.

    Only deployments foresee phases one by one; for other runs nothing is returned.
    """
    found: dict[str, tuple[float, float]] = {}
    blocks = [block for block in run.blocks if isinstance(block.estimates.get("predicted"), dict)]
    for phase in PHASES:
        counts = [block.rounds if phase.startswith("a") else 1 for block in blocks]
        predicted = [dict(block.estimates["predicted"]).get(phase, 0.0) for block in blocks]  # type: ignore[call-overload]
        if blocks:
            foreseen = sum(count * value for count, value in zip(counts, predicted, strict=True)) / sum(counts)
            found[phase] = foreseen, sum(block.seconds[phase] for block in blocks) / sum(counts)
    return found


def foreseen_rows(run: Run) -> list[tuple[str, ...]]:
    """Return a line of text per phase, and one for a whole round and a whole averaging."""
    times = foreseen_s(run)
    if not times:
        return []
    rows = [_row(f"{phase} {PHASES[phase]}", *pair) for phase, pair in times.items()]
    for letter, title in (("a", "one round"), ("b", "one averaging")):
        pairs = [pair for phase, pair in times.items() if phase.startswith(letter)]
        rows.append(_row(title, *(sum(column) for column in zip(*pairs, strict=True))))
    return rows


def foreseen_table(run: Run) -> Table | None:
    """Return the same as a table; None for a run that foresaw nothing."""
    rows = foreseen_rows(run)
    if not rows:
        return None
    title = "Seconds foreseen and measured, of a round and of an averaging"
    return filled_table(title, HEADINGS, rows, left=("phase",))


def _row(title: str, foreseen: float, measured: float) -> tuple[str, ...]:
    ratio = f"{measured / foreseen:.2f}" if foreseen > 0 else "–"
    return title, seconds(foreseen), seconds(measured), ratio
