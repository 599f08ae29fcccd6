"""Drawing code that all figures share: one style, lines with their spread, bars, axes; written as PNG and SVG."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from adaptsfl.checks import FloatArray
from adaptsfl.errors import InvalidInput
from adaptsfl.report.markup import writing
from adaptsfl.report.series import COLOURS, Curve

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis as PlotAxis
    from matplotlib.figure import Figure, SubFigure

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
SUFFIXES = (".png", ".svg")
WIDTH, HEIGHT = 7.0, 4.4  # inches
UNITS = ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes"), (1.0, "seconds"))
BAND = 0.15  # opacity of a spread
Unit = tuple[float, str]  # seconds in it, its name


class Look(NamedTuple):
    """How a line is drawn; `dashes` as SVG writes them, `every` as matplotlib's `markevery`."""

    colour: str
    width: float = 2.0
    dashes: str = ""
    marker: str = ""
    every: int | tuple[float, float] = 1
    opacity: float = 1.0
    on_top: int = 2
    steps: bool = False


class DrawnLine(NamedTuple):
    """A line of a chart; the legend leaves out lines without a label."""

    label: str
    curve: Curve
    look: Look


class AxisSpec(NamedTuple):
    """An axis: values are divided by `unit`, limits and ticks are given in that unit; None leaves them open."""

    label: str
    unit: float = 1.0
    logarithmic: bool = False
    limits: tuple[float | None, float | None] | None = None
    ticks: Sequence[float] = ()


@contextmanager
def drawing(
    files: Sequence[Path], size: tuple[float, float] = (WIDTH, HEIGHT), style: Mapping[Any, Any] = STYLE
) -> Iterator["Figure"]:
    """Yield an empty figure; after the caller has drawn it, write it to every file in the format of its suffix."""
    need_matplotlib()
    import matplotlib  # noqa: PLC0415 (an extra: only figures need it)
    from matplotlib.figure import Figure  # noqa: PLC0415

    with matplotlib.rc_context(dict(style)):
        figure = Figure(figsize=size, layout="constrained")
        yield figure
        for path in files:
            save(figure, path)


def need_matplotlib() -> None:
    """Raise an error that says how to install matplotlib, if it is not installed."""
    try:
        import matplotlib.figure  # noqa: F401, PLC0415
    except ImportError:
        raise InvalidInput("figures", "need matplotlib", "Install it: pip install 'adaptsfl[plots]'") from None


def save(figure: "Figure", path: Path) -> None:
    """Write a figure as PNG or SVG by its suffix; the same figure gives the same bytes."""
    with writing("figures", path):
        figure.savefig(path, dpi=200, metadata={"Date": None} if path.suffix == ".svg" else None)


def pictures(folder: Path, name: str) -> list[Path]:
    """Create the folder, and return the paths of a figure's files in it."""
    with writing("figures", folder):
        folder.mkdir(parents=True, exist_ok=True)
    return [folder / f"{name}{suffix}" for suffix in SUFFIXES]


def unit_of(longest_s: float) -> Unit:
    """Return the largest unit of which the longest time has at least two."""
    return next(((scale, name) for scale, name in UNITS if longest_s >= 2 * scale), UNITS[-1])


def plain_label(label: str) -> str:
    """Escape a label so that matplotlib shows it unchanged: $ starts no formula, a leading _ does not hide it."""
    text = label.replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text


def draw_lines(axes: "Axes", traces: Iterable[DrawnLine], x: AxisSpec, y: AxisSpec) -> None:
    """Draw lines, each with a band of its spread, and both axes."""
    for label, curve, look in traces:
        known = curve.x > 0 if x.logarithmic else slice(None)
        at, mean = curve.x[known] / x.unit, curve.mean[known] / y.unit
        axes.plot(
            at,
            mean,
            color=look.colour,
            linewidth=look.width,
            linestyle=(0, tuple(map(float, look.dashes.split()))) if look.dashes else "-",
            drawstyle="steps-post" if look.steps else "default",
            marker=look.marker,
            markersize=4.2,
            markeredgewidth=0.5,
            markeredgecolor="white",
            markevery=look.every,
            alpha=look.opacity,
            zorder=look.on_top,
            label=label,
        )
        if curve.spread is not None:
            spread = curve.spread[known] / y.unit
            band: dict[str, Any] = {"color": look.colour, "alpha": BAND, "linewidth": 0, "zorder": look.on_top - 2}
            axes.fill_between(at, mean - spread, mean + spread, **band)
    _dress(axes, "x", x)
    _dress(axes, "y", y)


def _dress(axes: "Axes", name: str, spec: AxisSpec) -> None:
    axis: PlotAxis = getattr(axes, f"{name}axis")
    axes.set(**{f"{name}label": spec.label})
    if spec.logarithmic:
        axes.set(**{f"{name}scale": "log"})
        tick_powers(axis)
    if spec.ticks:
        axis.set_ticks(spec.ticks)
        axis.set_ticks([], minor=True)
    if spec.limits is not None:
        axes.set(**{f"{name}lim": spec.limits})


def tick_powers(axis: "PlotAxis") -> None:
    """Label a logarithmic axis with plain numbers instead of powers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter  # noqa: PLC0415

    axis.set_major_locator(LogLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def draw_cuts(
    part: "Figure | SubFigure", names: Sequence[str], work: Mapping[str, FloatArray], traffic: Mapping[str, FloatArray]
) -> tuple["Axes", "Axes"]:
    """Draw what every cut costs: stacked bars of FLOPs above, lines of bytes below; return both axes."""
    from matplotlib.ticker import EngFormatter  # noqa: PLC0415

    above, below = part.subplots(2, 1, sharex=True)
    cuts, bottom = np.arange(1, len(names) + 1), np.zeros(len(names))
    for colour, (label, flops) in zip(COLOURS, work.items(), strict=False):
        above.bar(cuts, flops, bottom=bottom, width=0.7, color=colour, label=label)
        bottom = bottom + flops
    for colour, style, (label, count) in zip(COLOURS[5:], ("o-", "x--"), traffic.items(), strict=True):
        below.plot(cuts, count, style, color=colour, label=label, markersize=3.5, linewidth=1.3)
    below.set_yscale("log")
    for axes, unit in ((above, "FLOP"), (below, "B")):
        axes.yaxis.set_major_formatter(EngFormatter(unit, sep=" "))
        axes.grid(axis="x", visible=False)
    above.locator_params(axis="y", nbins=4)
    below.set_xlabel("cut after layer")
    part.align_ylabels()
    return above, below
