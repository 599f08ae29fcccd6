"""The paper's figures, drawn from runs: PNG and SVG, and beside them every number as CSV."""

import csv
import io
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from adaptsfl.checks import FloatArray
from adaptsfl.costs import BITS_PER_BYTE
from adaptsfl.report.charts import (
    STYLE,
    AxisSpec,
    DrawnLine,
    Look,
    Unit,
    draw_cuts,
    draw_lines,
    drawing,
    pictures,
    plain_label,
    unit_of,
)
from adaptsfl.report.markup import write_text
from adaptsfl.report.series import COLOURS, OURS, Spread
from adaptsfl.reproduce import panels
from adaptsfl.reproduce.numbers import Evidence
from adaptsfl.reproduce.panels import FAR_APART, PAPER_ORDER, Line
from adaptsfl.reproduce.study import Panel, Study

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

WIDTH, ROW_HEIGHT, HIGH_ROW, REST_HEIGHT = 7.2, 2.75, 3.3, 0.75  # inches; half the width is a column of the paper
SHORT_TITLE, LONGEST_TITLE, LONGEST_FOOTER = 46, 52, 150  # letters in a line
SPARSE = (0.0, 0.11)  # between two markers, as a share of the diagonal of the axes
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
# A policy looks the same in every figure. SFL is I = 1; policies that are not listed get an unused look.
PLACES = {
    **{policy: k for k, policy in enumerate(PAPER_ORDER)},
    **{"sfl": 1, "fixed@I=1": 1, "fixed@I=5": 2, "fixed@I=15": 4, "fixed@I=25": 3, "psl": 6},
    **{"fixed@L_c=2": 1, "fixed@L_c=4": 2, "fixed@L_c=8": 3, "fixed@L_c=12": 4},
}


def write_figure(study: Study, evidence: Evidence, folder: Path) -> list[Path]:
    """Draw a figure into `folder`, creating it, and return the files: pictures and tables.

    A figure that needs runs and has none is not written. Without matplotlib, the tables are written, then it raises.
    """
    if not panels.worth_drawing(evidence, study):
        return []
    tables = []
    for panel in study.panels:
        if not panels.missing(evidence, panel):
            tables.append(folder / csv_name(panel))
            text = io.StringIO()
            columns, rows = panels.table(evidence, panel)
            csv.writer(text, lineterminator="\n").writerows([columns, *rows])
            write_text(text.getvalue(), tables[-1], "figures")
    rows_of_panels = (len(study.panels) + 1) // 2
    each = HIGH_ROW if any(panel.draw == "overhead" for panel in study.panels) else ROW_HEIGHT
    files = pictures(folder, study.name)
    with drawing(files, (WIDTH, rows_of_panels * each + REST_HEIGHT), PAPER_STYLE) as figure:
        _draw(figure, study, evidence, rows_of_panels)
    return [*files, *tables]


def csv_name(panel: Panel) -> str:
    """Return the name of the CSV file with a panel's numbers."""
    return f"{panel.figure}-{panel.name}.csv"


def _draw(figure: "Figure", study: Study, evidence: Evidence, rows: int) -> None:
    looks = _looks(study, evidence)
    columns = min(2, len(study.panels))
    places = np.ravel(np.asarray(figure.subfigures(rows, columns, wspace=0.02, hspace=0.04)))
    parts = list(places[: len(study.panels)])
    unit = unit_of(panels.longest_s(evidence, study))
    for letter, part, panel in zip("abcdefghijklmnopqrstuvwxyz", parts, study.panels, strict=False):
        _draw_panel(part, panel, evidence, looks, unit)
        title = f"({letter}) {panel.title}"
        middle = 0.54 if len(title) <= SHORT_TITLE else 0.5  # centred under the axes, or on the whole panel
        part.supxlabel(_wrapped(title, LONGEST_TITLE), x=middle, fontsize=9)
    _level_labels(parts)
    _legends(figure, parts, study)
    footer = "\n".join(_wrapped(text, LONGEST_FOOTER) for text in panels.caption(study, evidence))
    figure.supxlabel(footer, x=0.01, ha="left", fontsize=6.5, color="#555555")


def _wrapped(text: str, letters: int) -> str:
    return "\n".join(textwrap.wrap(plain_label(text), letters))


def _level_labels(parts: Sequence["SubFigure"]) -> None:
    """Give the x labels of neighbouring panels the same number of lines, so that their axes end at one height."""
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
    places = {**PLACES, **{policy: left[k % len(left)] for k, policy in enumerate(others)}}
    return {
        policy: Look(
            COLOURS[places[policy]],
            width=2.2 if policy == OURS else 1.3,
            marker=MARKERS[places[policy]],
            on_top=4 if policy == OURS else 3,
        )
        for policy in shown
    }


def _legends(figure: "Figure", parts: Sequence["SubFigure"], study: Study) -> None:
    """Draw one legend of policies for all panels; if a panel shows no policies, each panel has its own legend."""
    pairs = [
        [pair for axes in part.axes for pair in zip(*axes.get_legend_handles_labels(), strict=True)] for part in parts
    ]
    entries = [{label: handle for handle, label in found} for found in pairs]
    common = all(panel.draw != "overhead" for panel in study.panels)
    if common:
        entries = [{label: handle for entry in entries for label, handle in entry.items()}]
    for place, found in zip([figure] if common else parts, entries, strict=True):
        columns = min(6, len(found)) if common else (len(found) + 1) // 2  # two rows each: neighbours have equal height
        if found:
            place.legend(found.values(), found.keys(), loc="outside upper center", ncols=columns)


def _draw_panel(part: "SubFigure", panel: Panel, evidence: Evidence, looks: dict[str, Look], unit: Unit) -> None:
    if why := panels.missing(evidence, panel):
        _words_instead(part.subplots(), why)
    elif panel.draw == "converged":
        _converged(part, panels.converged(evidence, panel), looks, unit)
    elif panel.draw == "overhead":
        _overhead(part, panel)
    else:
        _lines(part.subplots(), panel, evidence, looks, unit)


def _words_instead(axes: "Axes", why: str) -> None:
    axes.set_axis_off()
    axes.text(0.5, 0.5, _wrapped(why, 36), ha="center", va="center", color="#777777")


def _lines(axes: "Axes", panel: Panel, evidence: Evidence, looks: dict[str, Look], unit: Unit) -> None:
    found = [line for line in panels.lines(evidence, panel) if line.curve.x.size]
    if not found:
        _words_instead(axes, "no mean: seeds have no x in common")
        return
    every = 1 if panel.sweep is not None else SPARSE
    traces = [DrawnLine(_shown(line.label), line.curve, looks[line.policy]._replace(every=every)) for line in found]
    draw_lines(axes, traces, _x_axis(evidence, panel, found, unit), _y_axis(evidence, panel, found, unit))


def _x_axis(evidence: Evidence, panel: Panel, found: Sequence[Line], unit: Unit) -> AxisSpec:
    lasts = [float(line.curve.x[-1]) for line in found]
    if panel.sweep is not None:
        return AxisSpec(_wrapped(panel.sweep.axis, 46), logarithmic=_geometric(found[0].curve.x), ticks=panel.sweep.xs)
    if panel.draw == "epochs":
        return AxisSpec("epochs", limits=(0, panels.ROOM * max(lasts)))
    if panel.draw == "aggregations":
        some = [last for last in lasts if last >= 1]
        apart = bool(some) and max(some) > FAR_APART * min(some)
        return AxisSpec(
            "rounds of model aggregation", logarithmic=apart, limits=(0.9, 1.2 * max(some)) if apart else None
        )
    axis, first, (scale, name) = panels.time_axis(evidence, panel), min(line.curve.x[0] for line in found), unit
    if axis.logarithmic and first > 0:
        limits = 0.8 * first / scale, 1.2 * axis.end_s / scale
        return AxisSpec(f"training time ({name})", scale, logarithmic=True, limits=limits)
    return AxisSpec(f"training time ({name})", scale, limits=(0, axis.end_s / scale))


def _y_axis(evidence: Evidence, panel: Panel, found: Sequence[Line], unit: Unit) -> AxisSpec:
    if panel.sweep is None:
        return AxisSpec("test accuracy (%)", 0.01)
    times = [time_s for line in found for time_s in line.curve.mean if np.isfinite(time_s)]
    label = f"converged time ({unit[1]}),\nto {100 * panels.target(evidence, panel):.3g} % accuracy"
    apart = bool(times) and max(times) > FAR_APART * min(times)
    return AxisSpec(label, unit[0], logarithmic=apart, limits=None if apart else (0, None))


def _geometric(xs: FloatArray) -> bool:
    """Whether points are spaced geometrically: the ratios of neighbours vary less than their differences."""
    if xs.size < 2 or xs[0] <= 0 or xs[-1] / xs[0] < 2:
        return False
    ratios, steps = xs[1:] / xs[:-1], np.diff(xs)
    return bool(np.ptp(np.log(ratios)) < np.ptp(np.log(steps)) or xs.size == 2)


def _shown(label: str) -> str:
    """Return a label that matplotlib shows unchanged, except that the paper's symbols I and L_c are formulas."""
    return re.sub(r"^(I|L_c) = ", r"$\1$ = ", plain_label(label))


def _converged(part: "SubFigure", found: Sequence[panels.Converged], looks: dict[str, Look], unit: Unit) -> None:
    """Draw accuracies beside times, one bar per policy, the first on top."""
    accuracy, time = part.subplots(1, 2, sharey=True)
    colours = [looks[one.policy].colour for one in found]
    _bars(accuracy, [one.accuracy for one in found], 0.01, colours)
    _bars(time, [one.time_s for one in found], unit[0], colours)
    accuracy.set_yticks(range(len(found)), [_shown(one.label) for one in found])
    accuracy.invert_yaxis()
    accuracy.set_xlabel("accuracy (%)")
    time.set_xlabel(f"time ({unit[1]})")


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
    """Return a number with at least three digits: 53.4, 1.25, 1,204."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _overhead(part: "SubFigure", panel: Panel) -> None:
    costs, batch = panel.costs, panel.recipe.training.batch_size
    names = [plain_label(f"{cut} {costs.name(cut)}") for cut in range(1, costs.layers + 1)]
    both_ways = batch * (costs.activation_bits + costs.gradient_bits) / BITS_PER_BYTE
    traffic = {
        "activations and gradients, a round": both_ways,
        "model up and down, an aggregation": 2 * costs.client_model_bits / BITS_PER_BYTE,
    }
    above, below = draw_cuts(part, names, {"": batch * (costs.forward_flops + costs.backward_flops)}, traffic)
    above.set_ylabel("computing")
    below.set_ylabel("traffic")
    every = max(1, costs.layers // 20)
    below.set_xticks(range(1, costs.layers + 1, every), names[::every], rotation=90, fontsize=6.5)
