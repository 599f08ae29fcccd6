"""The paper's figures, drawn from runs: PNG and SVG, and beside them every number as CSV."""

import csv
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from adaptsfl.errors import InvalidInput
from adaptsfl.report.figures import STYLE, need_matplotlib, plain_label, save, unit_of
from adaptsfl.report.series import COLOURS, OURS, Spread
from adaptsfl.reproduce import panels
from adaptsfl.reproduce.numbers import Evidence
from adaptsfl.reproduce.panels import PAPER_ORDER, Line, Table
from adaptsfl.reproduce.study import Panel, Study

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure, SubFigure

WIDTH, ROW_HEIGHT, HIGH_ROW, REST_HEIGHT = 7.2, 2.75, 3.3, 0.75  # inches; half the width is a column of the paper
BAND = 0.15  # opacity
SHORT_TITLE, LONGEST_TITLE, LONGEST_FOOTER = 46, 52, 150  # letters in a line
SPARSE = (0.0, 0.11)  # of the diagonal of the axes, between two markers
PAPER_STYLE: dict[Any, Any] = {
    **STYLE,
    "font.size": 9.5,
    "axes.labelsize": 9.5,
    "axes.linewidth": 0.7,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "legend.fontsize": 8.5,
    "legend.handlelength": 2.2,
    "legend.columnspacing": 1.2,
    "grid.linewidth": 0.6,
    "figure.constrained_layout.w_pad": 0.06,
    "figure.constrained_layout.h_pad": 0.06,
}
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
# A policy looks the same in every figure. SFL is I = 1; what is no policy of the paper takes a look that is left.
PLACES = {
    **{policy: k for k, policy in enumerate(PAPER_ORDER)},
    **{"sfl": 1, "fixed@I=1": 1, "fixed@I=5": 2, "fixed@I=15": 4, "fixed@I=25": 3, "psl": 6},
    **{"fixed@L_c=2": 1, "fixed@L_c=4": 2, "fixed@L_c=8": 3, "fixed@L_c=12": 4},
}
Unit = tuple[float, str]  # its seconds, its name


class Look(NamedTuple):
    """How a policy is drawn."""

    colour: str
    marker: str
    width: float
    on_top: int


def write_figure(study: Study, evidence: Evidence, folder: Path) -> list[Path]:
    """Draw a figure into `folder`, creating it, and return the files: pictures and tables.

    Where it needs runs and has none, nothing is written. Without matplotlib the tables are, before that is said.
    """
    if not panels.worth_drawing(evidence, study):
        return []
    drawn = [panel for panel in study.panels if not panels.missing(evidence, panel)]
    tables = [_write_csv(folder / csv_name(panel), panels.table(evidence, panel)) for panel in drawn]
    need_matplotlib()
    import matplotlib  # noqa: PLC0415 (an extra: only drawings need it)
    from matplotlib.figure import Figure  # noqa: PLC0415

    with matplotlib.rc_context(PAPER_STYLE):
        rows = (len(study.panels) + 1) // 2
        each = HIGH_ROW if any(panel.draw == "overhead" for panel in study.panels) else ROW_HEIGHT
        figure = Figure(figsize=(WIDTH, rows * each + REST_HEIGHT), layout="constrained")
        _draw(figure, study, evidence, rows)
        pictures = [save(figure, folder / f"{study.name}{suffix}") for suffix in (".png", ".svg")]
    return [*pictures, *tables]


def csv_name(panel: Panel) -> str:
    """Return how the file of a panel's numbers is called."""
    return f"{panel.figure}-{panel.name}.csv"


def _write_csv(path: Path, table: Table) -> Path:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(table.columns)
            writer.writerows(table.rows)
    except OSError as error:
        raise InvalidInput(
            "figures", f"{path} cannot be written ({error.strerror})", "Give a folder that can be written"
        ) from None
    return path


def _draw(figure: "Figure", study: Study, evidence: Evidence, rows: int) -> None:
    looks = _looks(study, evidence)
    columns = min(2, len(study.panels))
    places = np.ravel(np.asarray(figure.subfigures(rows, columns, wspace=0.02, hspace=0.04)))
    parts = list(places[: len(study.panels)])
    unit = unit_of(panels.longest_s(evidence, study))
    for letter, part, panel in zip("abcdefghijklmnopqrstuvwxyz", parts, study.panels, strict=False):
        _draw_panel(part, panel, evidence, looks, unit)
        title = f"({letter}) {panel.title}"
        middle = 0.54 if len(title) <= SHORT_TITLE else 0.5  # of the axes, or of all the room that there is
        part.supxlabel("\n".join(textwrap.wrap(plain_label(title), LONGEST_TITLE)), x=middle, fontsize=9)
    _level_labels(parts)
    _legends(figure, parts, study)
    footer = "\n".join(
        line for text in panels.caption(study, evidence) for line in textwrap.wrap(plain_label(text), LONGEST_FOOTER)
    )
    figure.supxlabel(footer, x=0.01, ha="left", fontsize=6.5, color="#555555")


def _level_labels(parts: Sequence["SubFigure"]) -> None:
    """Give the x labels of neighbours as many lines, so that their axes end at one height."""
    for left, right in zip(parts[::2], parts[1::2], strict=False):
        labels = [part.axes[-1].xaxis.label for part in (left, right)]
        most = max(label.get_text().count("\n") for label in labels)
        for label in labels:
            label.set_text(label.get_text() + "\n" * (most - label.get_text().count("\n")))


def _looks(study: Study, evidence: Evidence) -> dict[str, Look]:
    """Return the look of every policy in the figure."""
    shown = dict.fromkeys(policy for panel in study.panels for policy in panels.runs_shown(evidence, panel))
    taken = {PLACES[policy] for policy in shown if policy in PLACES}
    left = [place for place in range(1, len(COLOURS)) if place not in taken] or [len(COLOURS) - 1]
    others = [policy for policy in shown if policy not in PLACES]
    places = {policy: left[k % len(left)] for k, policy in enumerate(others)}
    return {policy: _look(policy, PLACES.get(policy, places.get(policy, 0))) for policy in shown}


def _look(policy: str, place: int) -> Look:
    ours = policy == OURS
    return Look(COLOURS[place], MARKERS[place], 2.2 if ours else 1.3, 4 if ours else 3)


def _legends(figure: "Figure", parts: Sequence["SubFigure"], study: Study) -> None:
    """One legend of policies for all panels; where a panel shows something else, each panel has its own above it."""
    entries = [_entries(part) for part in parts]
    if all(panel.draw != "overhead" for panel in study.panels):
        found = {label: handle for entry in entries for label, handle in entry.items()}
        if found:
            figure.legend(found.values(), found.keys(), loc="outside upper center", ncols=min(6, len(found)))
        return
    for part, found in zip(parts, entries, strict=True):
        if found:
            columns = (len(found) + 1) // 2  # two rows each, so that neighbours are as high
            part.legend(found.values(), found.keys(), loc="outside upper center", ncols=columns)


def _entries(part: "SubFigure") -> dict[str, "Artist"]:
    pairs = (zip(*axes.get_legend_handles_labels(), strict=True) for axes in part.axes)
    return {label: handle for axes in pairs for handle, label in axes}


def _draw_panel(part: "SubFigure", panel: Panel, evidence: Evidence, looks: dict[str, Look], unit: Unit) -> None:
    if why := panels.missing(evidence, panel):
        _words_instead(part.subplots(), why)
        return
    match panel.draw:
        case "converged":
            _converged(part, panel, evidence, looks, unit)
        case "sweep":
            _sweep(part.subplots(), panel, evidence, looks, unit)
        case "overhead":
            _overhead(part, panels.overhead_of(panel.costs, panel.recipe.training.batch_size))
        case _:
            _lines(part.subplots(), panel, evidence, looks, unit)


def _words_instead(axes: "Axes", why: str) -> None:
    axes.set_axis_off()
    axes.text(0.5, 0.5, "\n".join(textwrap.wrap(plain_label(why), 36)), ha="center", va="center", color="#777777")


def _lines(axes: "Axes", panel: Panel, evidence: Evidence, looks: dict[str, Look], unit: Unit) -> None:
    found = [line for line in panels.lines(evidence, panel) if line.curve.x.size]
    if not found:
        _words_instead(axes, "no mean: seeds have no x in common")
        return
    scale = unit[0] if panel.draw == "time" else 1.0
    if panel.draw == "time":
        _time_axis(axes, panels.time_axis(evidence, panel), found, unit)
    elif panel.draw == "epochs":
        axes.set_xlabel("epochs")
        axes.set_xlim(0, panels.ROOM * max(float(line.curve.x[-1]) for line in found))
    else:
        _aggregations_axis(axes, found)
    for line in found:
        look, (x, mean, spread) = looks[line.policy], line.curve
        if axes.get_xscale() == "log":
            x, mean, spread = x[x > 0], mean[x > 0], None if spread is None else spread[x > 0]
        _plot(axes, x / scale, 100 * mean, look, line.label, every=SPARSE)
        if spread is not None:
            low, high = 100 * (mean - spread), 100 * (mean + spread)
            axes.fill_between(x / scale, low, high, color=look.colour, alpha=BAND, linewidth=0, zorder=look.on_top - 2)
    axes.set_ylabel("test accuracy (%)")


def _time_axis(axes: "Axes", axis: panels.TimeAxis, found: Sequence[Line], unit: Unit) -> None:
    scale, name = unit
    axes.set_xlabel(f"training time ({name})")
    first = min(line.curve.x[0] for line in found)
    if axis.logarithmic and first > 0:
        axes.set_xscale("log")
        _tick_powers(axes.xaxis)
        axes.set_xlim(0.8 * first / scale, 1.2 * axis.end_s / scale)
    else:
        axes.set_xlim(0, axis.end_s / scale)


def _aggregations_axis(axes: "Axes", found: Sequence[Line]) -> None:
    axes.set_xlabel("rounds of model aggregation")
    lasts = [last for line in found if (last := float(line.curve.x[-1])) >= 1]
    if lasts and max(lasts) > panels.FAR_APART * min(lasts):
        axes.set_xscale("log")
        _tick_powers(axes.xaxis)
        axes.set_xlim(0.9, 1.2 * max(lasts))


def _tick_powers(axis: "Axis", *, base: float = 10, at: Sequence[float] = ()) -> None:
    """Give a logarithmic axis numbers as people write them."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter  # noqa: PLC0415

    axis.set_major_locator(LogLocator(base=base))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())
    if at:
        axis.set_ticks(at)
        axis.set_ticks([], minor=True)


def _plot(axes: "Axes", x: Any, y: Any, look: Look, label: str, *, every: int | tuple[float, float] = 1) -> None:
    axes.plot(
        x,
        y,
        color=look.colour,
        linewidth=look.width,
        marker=look.marker,
        markersize=4.2,
        markeredgewidth=0.5,
        markeredgecolor="white",
        markevery=every,
        zorder=look.on_top,
        label=_shown(label),
    )


def _shown(label: str) -> str:
    """Return a label as matplotlib is to show it: as it is, but for the paper's symbols I and L_c."""
    return re.sub(r"^(I|L_c) = ", r"$\1$ = ", plain_label(label))


def _converged(part: "SubFigure", panel: Panel, evidence: Evidence, looks: dict[str, Look], unit: Unit) -> None:
    """Accuracies beside times, one bar per policy, the first on top."""
    _, found = panels.converged(evidence, panel)
    scale, name = unit
    accuracy, time = part.subplots(1, 2, sharey=True)
    colours = [looks[one.policy].colour for one in found]
    _bars(accuracy, [one.accuracy for one in found], 0.01, colours)
    _bars(time, [one.time_s for one in found], scale, colours)
    accuracy.set_yticks(range(len(found)), [_shown(one.label) for one in found])
    accuracy.invert_yaxis()
    accuracy.set_xlabel("accuracy (%)")
    time.set_xlabel(f"time ({name})")


def _bars(axes: "Axes", values: Sequence[Spread], scale: float, colours: Sequence[str]) -> None:
    means = [value.mean / scale for value in values]
    spreads = [(value.spread or 0.0) / scale for value in values]
    axes.barh(range(len(values)), means, height=0.68, color=colours)
    for place, (mean, deviation) in enumerate(zip(means, spreads, strict=True)):
        if deviation:
            axes.errorbar(mean, place, xerr=deviation, color="#333333", linewidth=0.9, capsize=2)
        at, gap = (mean + deviation, place), (3, 0)
        axes.annotate(_short(mean), at, gap, textcoords="offset points", va="center", fontsize=7.5)
    axes.set_xlim(0, 1.3 * max([mean + deviation for mean, deviation in zip(means, spreads, strict=True)] + [1e-9]))
    axes.grid(axis="y", visible=False)
    axes.tick_params(axis="y", length=0)
    axes.locator_params(axis="x", nbins=4)


def _short(value: float) -> str:
    """Return three digits at least: 53.4, 1.25, 1,204."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _sweep(axes: "Axes", panel: Panel, evidence: Evidence, looks: dict[str, Look], unit: Unit) -> None:
    assert panel.sweep is not None
    target, found = panels.sweep(evidence, panel)
    xs = np.array(panel.sweep.xs)
    scale, name = unit
    for line in found:
        look = looks[line.policy]
        means = np.array([np.nan if time is None else time.mean for time in line.times_s]) / scale
        spreads = np.array([0.0 if time is None else time.spread or 0.0 for time in line.times_s]) / scale
        _plot(axes, xs, means, look, line.label)
        if spreads.any():
            axes.fill_between(xs, means - spreads, means + spreads, color=look.colour, alpha=BAND, linewidth=0)
    if _geometric(xs):
        axes.set_xscale("log")
        _tick_powers(axes.xaxis, at=panel.sweep.xs)
    else:
        axes.set_xticks(panel.sweep.xs)
    times = [time.mean for line in found for time in line.times_s if time is not None]
    if times and max(times) > panels.FAR_APART * min(times):
        axes.set_yscale("log")
        _tick_powers(axes.yaxis)
    else:
        axes.set_ylim(bottom=0)
    axes.set_xlabel("\n".join(textwrap.wrap(plain_label(panel.sweep.axis), 46)))
    axes.set_ylabel(f"converged time ({name}),\nto {100 * target:.3g} % accuracy")


def _geometric(xs: Any) -> bool:
    """Whether points multiply rather than add: each at least as many times the one before as steps would not be."""
    if xs.size < 2 or xs[0] <= 0 or xs[-1] / xs[0] < 2:
        return False
    ratios, steps = xs[1:] / xs[:-1], np.diff(xs)
    return bool(np.ptp(np.log(ratios)) < np.ptp(np.log(steps)) or xs.size == 2)


def _overhead(part: "SubFigure", found: panels.Overhead) -> None:
    compute, traffic = part.subplots(2, 1, sharex=True)
    cuts = np.arange(1, len(found.names) + 1)
    compute.bar(cuts, found.compute_gflop, width=0.7, color=COLOURS[0])
    compute.set_ylabel("computing\n(GFLOP)")
    compute.locator_params(axis="y", nbins=4)
    both_ways = found.activations_mb + found.gradients_mb
    look: dict[str, Any] = {"markersize": 3.5, "linewidth": 1.3}
    traffic.plot(cuts, both_ways, "o-", color=COLOURS[5], label="activations and gradients, a round", **look)
    traffic.plot(cuts, 2 * found.model_mb, "x--", color=COLOURS[6], label="model up and down, an aggregation", **look)
    traffic.set_yscale("log")
    _tick_powers(traffic.yaxis, base=100)
    traffic.set_ylabel("traffic\n(MB)")
    every = max(1, cuts.size // 20)
    names = [plain_label(f"{cut} {name}") for cut, name in zip(cuts, found.names, strict=True)]
    traffic.set_xticks(cuts[::every], names[::every], rotation=90, fontsize=6.5)
    traffic.set_xlabel("split point: after layer")
    part.align_ylabels()
    for axes in (compute, traffic):
        axes.grid(axis="x", visible=False)
