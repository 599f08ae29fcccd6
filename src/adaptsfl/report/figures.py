"""Figures of an experiment for papers and slides, as PNG and SVG: accuracy, seconds by phase, the plan over time."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from adaptsfl.errors import InvalidInput
from adaptsfl.latency import PHASES
from adaptsfl.report.series import OURS, PHASE_COLOURS, Axis, Series, curve, group, points, time_word
from adaptsfl.runs.folder import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STYLE: dict[Any, Any] = {
    "font.size": 11,
    "axes.titlesize": 12,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "legend.frameon": False,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "adaptsfl",  # the same file from the same runs
}
UNITS = ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes"), (1.0, "seconds"))
WIDTH, HEIGHT = 7.0, 4.4


def write_figures(runs: Sequence[Run], folder: str | Path) -> list[Path]:
    """Draw every figure into `folder`, creating it, and return the files."""
    need_matplotlib()
    import matplotlib  # noqa: PLC0415 (an extra: only figures need it)
    from matplotlib.figure import Figure  # noqa: PLC0415

    members, folder = group(runs), Path(folder)
    drawings: dict[str, Callable[[Figure], None]] = {
        "accuracy-time": lambda figure: _accuracy(figure, members, "seconds"),
        "accuracy-rounds": lambda figure: _accuracy(figure, members, "rounds"),
        "phases": lambda figure: _phases(figure, members),
        "plan": lambda figure: _plan(figure, members),
    }
    files = []
    with matplotlib.rc_context(STYLE):
        for name, draw in drawings.items():
            figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
            draw(figure)
            files += [save(figure, folder / f"{name}{suffix}") for suffix in (".png", ".svg")]
    return files


def need_matplotlib() -> None:
    """Explain what to install where it is missing."""
    try:
        import matplotlib.figure  # noqa: F401, PLC0415
    except ImportError:
        raise InvalidInput("figures", "need matplotlib", "Install it: pip install 'adaptsfl[plots]'") from None


def save(figure: "Figure", path: Path) -> Path:
    """Write a figure as PNG or SVG by its suffix, the same bytes from the same figure."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=200, metadata={"Date": None} if path.suffix == ".svg" else None)
    except OSError as error:
        raise InvalidInput(
            "figures", f"{path} cannot be written ({error.strerror})", "Give a folder that can be written"
        ) from None
    return path


def _accuracy(figure: "Figure", members: Sequence[Series], axis: Axis) -> None:
    """Means over seeds with a band of one standard deviation; single seeds faintly, as far as each goes."""
    axes = figure.subplots()
    scale, unit = time_unit(members) if axis == "seconds" else (1.0, "")
    for series in members:
        line = curve(series.runs, axis, "accuracies")
        look = _look(series)
        axes.plot(line.x / scale, 100 * line.mean, linewidth=2, label=plain_label(series.label), **look)
        if line.spread is not None:
            low, high = 100 * (line.mean - line.spread), 100 * (line.mean + line.spread)
            axes.fill_between(line.x / scale, low, high, color=series.colour, alpha=0.18, linewidth=0)
            for run in series.runs:
                x, y = points(run, axis, "accuracies")
                axes.plot(x / scale, 100 * y, linewidth=0.7, alpha=0.35, **look)
    for target in sorted({target for series in members for run in series.runs for target in run.targets}):
        axes.axhline(100 * target, color="#555555", linewidth=0.8, linestyle=":")
    axes.set_xlabel(f"{_time(members)} ({unit})" if axis == "seconds" else "rounds")
    axes.set_ylabel("test accuracy (%)")
    axes.set_xlim(left=0)
    axes.legend(loc="lower right")


def _phases(figure: "Figure", members: Sequence[Series]) -> None:
    """Mean seconds over seeds, stacked; the first policy on top."""
    axes = figure.subplots()
    scale, unit = time_unit(members)
    rows = np.arange(len(members))
    left = np.zeros(len(members))
    for phase, title in PHASES.items():
        values = np.array([mean_phase_s(series, phase) for series in members]) / scale
        if values.any():
            axes.barh(rows, values, left=left, height=0.65, color=PHASE_COLOURS[phase], label=f"{phase} {title}")
        left += values
    axes.set_yticks(rows, [plain_label(series.label) for series in members])
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(f"{_time(members)} of the whole run ({unit})")
    figure.legend(loc="outside lower center", ncols=3, fontsize=9)


def _plan(figure: "Figure", members: Sequence[Series]) -> None:
    """The first seed of every policy: seeds plan differently, and a mean of plans is no plan."""
    above, below = figure.subplots(2, 1, sharex=True)
    scale, unit = time_unit(members)
    for series in members:
        blocks = series.runs[0].blocks
        edges = np.array([0.0, *(block.time_s for block in blocks)]) / scale
        intervals = [np.nan if block.interval is None else block.interval for block in blocks]
        _steps(above, edges, intervals, series)
        _steps(below, edges, [block.deepest for block in blocks], series)
    above.set_ylabel("interval I (rounds)")
    below.set_ylabel("deepest cut (layer)")
    below.set_xlabel(f"{_time(members)} ({unit}), first seed of each policy")
    figure.legend(*above.get_legend_handles_labels(), loc="outside upper center", ncols=4)


def _steps(axes: "Axes", edges: Any, values: Sequence[float], series: Series) -> None:
    if not values:
        return
    axes.step(
        edges,
        [*values, values[-1]],
        where="post",
        linewidth=1.4,
        alpha=0.85,
        label=plain_label(series.label),
        **_look(series),
    )


def time_unit(members: Sequence[Series]) -> tuple[float, str]:
    """Return the unit for the times of all these runs."""
    return unit_of(max(run.time_s for series in members for run in series.runs))


def unit_of(longest_s: float) -> tuple[float, str]:
    """Return the largest unit of which the longest time has two at least."""
    return next(((scale, name) for scale, name in UNITS if longest_s >= 2 * scale), UNITS[-1])


def mean_phase_s(series: Series, phase: str) -> float:
    """Return the seconds that a phase took in a whole run, the mean over seeds."""
    return float(np.mean([sum(block.seconds[phase] for block in run.blocks) for run in series.runs]))


def _look(series: Series) -> dict[str, Any]:
    dashes = tuple(float(length) for length in series.dash.split())
    on_top = 3 if series.policy == OURS else 2
    return {"color": series.colour, "linestyle": (0, dashes) if dashes else "-", "zorder": on_top}


def plain_label(label: str) -> str:
    """Return a label as matplotlib shows it as it is: no formulas, and no leading underscore, which hides it."""
    text = label.replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text


def _time(members: Sequence[Series]) -> str:
    return time_word(run for series in members for run in series.runs)
