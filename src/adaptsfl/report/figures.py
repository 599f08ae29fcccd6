"""Figures of an experiment for papers and slides, as PNG and SVG: accuracy, seconds by phase, the plan over time."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from adaptsfl.latency import PHASES
from adaptsfl.report.charts import (
    AxisSpec,
    DrawnLine,
    Look,
    draw_lines,
    drawing,
    need_matplotlib,
    pictures,
    plain_label,
    unit_of,
)
from adaptsfl.report.series import OURS, PHASE_COLOURS, Axis, Curve, Series, curve, group, points, time_word
from adaptsfl.runs.folder import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def write_figures(runs: Sequence[Run], folder: str | Path) -> list[Path]:
    """Draw every figure into `folder`, creating it, and return the files."""
    need_matplotlib()  # before a folder is created
    members, files = group(runs), []
    drawings: dict[str, Callable[[Figure, Sequence[Series]], None]] = {
        "accuracy-time": partial(_accuracy, axis="seconds"),
        "accuracy-rounds": partial(_accuracy, axis="rounds"),
        "phases": _phases,
        "plan": _plan,
    }
    for name, draw in drawings.items():
        paths = pictures(Path(folder), name)
        with drawing(paths) as figure:
            draw(figure, members)
        files += paths
    return files


def _accuracy(figure: "Figure", members: Sequence[Series], axis: Axis) -> None:
    """Draw means over seeds with a band of one standard deviation; single seeds faintly, each to its own end."""
    axes = figure.subplots()
    x = _time_axis(members) if axis == "seconds" else AxisSpec("rounds")
    draw_lines(axes, _accuracy_traces(members, axis), x, AxisSpec("test accuracy (%)", 0.01))
    for target in sorted({target for series in members for run in series.runs for target in run.targets}):
        axes.axhline(100 * target, color="#555555", linewidth=0.8, linestyle=":")
    axes.set_xlim(left=0)
    axes.legend(loc="lower right")


def _accuracy_traces(members: Sequence[Series], axis: Axis) -> Iterator[DrawnLine]:
    for series in members:
        look = _look(series)
        yield DrawnLine(plain_label(series.label), curve(series.runs, axis, "accuracies"), look)
        for run in series.runs if len(series.runs) > 1 else ():
            seed = Curve(*points(run, axis, "accuracies"), None)
            yield DrawnLine("", seed, look._replace(width=0.7, opacity=0.35))


def _phases(figure: "Figure", members: Sequence[Series]) -> None:
    """Draw mean seconds over seeds as stacked bars, the first policy on top."""
    axes = figure.subplots()
    x = _time_axis(members, " of the whole run")
    rows = np.arange(len(members))
    left = np.zeros(len(members))
    for phase, title in PHASES.items():
        values = np.array([mean_phase_s(series, phase) for series in members]) / x.unit
        if values.any():
            axes.barh(rows, values, left=left, height=0.65, color=PHASE_COLOURS[phase], label=f"{phase} {title}")
        left += values
    axes.set_yticks(rows, [plain_label(series.label) for series in members])
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(x.label)
    figure.legend(loc="outside lower center", ncols=3, fontsize=9)


def _plan(figure: "Figure", members: Sequence[Series]) -> None:
    """Draw the first seed of every policy: seeds plan differently, and a mean of plans is no plan."""
    above, below = figure.subplots(2, 1, sharex=True)
    x = _time_axis(members, ", first seed of each policy")
    planned = [series for series in members if series.runs[0].blocks]
    draw_lines(above, (_plan_trace(series, "interval") for series in planned), x, AxisSpec("interval I (rounds)"))
    draw_lines(below, (_plan_trace(series, "deepest") for series in planned), x, AxisSpec("deepest cut (layer)"))
    above.set_xlabel("")
    figure.legend(*above.get_legend_handles_labels(), loc="outside upper center", ncols=4)


def _plan_trace(series: Series, field: str) -> DrawnLine:
    blocks = series.runs[0].blocks
    values = np.array([getattr(block, field) for block in (*blocks, blocks[-1])], dtype=np.float64)  # None is NaN
    edges = np.array([0.0, *(block.time_s for block in blocks)])
    look = _look(series)._replace(width=1.4, opacity=0.85, steps=True)
    return DrawnLine(plain_label(series.label), Curve(edges, values, None), look)


def _time_axis(members: Sequence[Series], more: str = "") -> AxisSpec:
    runs = [run for series in members for run in series.runs]
    unit, name = unit_of(max(run.time_s for run in runs))
    return AxisSpec(f"{time_word(runs)}{more} ({name})", unit)


def mean_phase_s(series: Series, phase: str) -> float:
    """Return the seconds that a phase took in a whole run, the mean over seeds."""
    return float(np.mean([sum(block.seconds[phase] for block in run.blocks) for run in series.runs]))


def _look(series: Series) -> Look:
    return Look(series.colour, dashes=series.dash, on_top=3 if series.policy == OURS else 2)
