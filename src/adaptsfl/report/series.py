"""Groups runs that differ in their seed only: one label, one colour, a mean and a spread."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from adaptsfl.checks import FloatArray, IntArray
from adaptsfl.errors import InvalidInput
from adaptsfl.runs.folder import Run

OURS = "adaptsfl"  # the policy that is listed first, if it was run
# Okabe and Ito's colours, which colour-blind readers can distinguish; with more series, dashes change.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f")
DASHES = ("", "6 3", "2 2", "8 3 2 3")
# Related phases share a hue (devices' work; activations and gradients; models); the way back is lighter.
PHASE_COLOURS = {
    "a1": "#2171b5",
    "a2": "#d95f0e",
    "a3": "#1b9e77",
    "a4": "#fdae61",
    "a5": "#8ec1e4",
    "b1": "#88419d",
    "b2": "#969696",
    "b3": "#c994c7",
}
MOST_POINTS = 300

Axis = Literal["seconds", "rounds"]
Value = Literal["accuracies", "losses"]


def time_word(runs: Iterable[Run]) -> str:
    """Return how reports call the seconds of runs: `time` if all are real, else `virtual time`."""
    return "time" if all(run.real for run in runs) else "virtual time"


@dataclass(frozen=True)
class Series:
    """One policy's runs, one per seed; colour and dash (as SVG writes it) are the same in every figure."""

    label: str
    policy: str
    runs: tuple[Run, ...]
    colour: str
    dash: str


class Spread(NamedTuple):
    """A mean over seeds and their sample standard deviation, None for one seed alone."""

    mean: float
    spread: float | None


class Curve(NamedTuple):
    """A mean over seeds at every point of `x`, and their sample standard deviation, None for one seed alone."""

    x: FloatArray
    mean: FloatArray
    spread: FloatArray | None


def group(runs: Sequence[Run]) -> list[Series]:
    """Return the runs by policy, ours first, the others in the order given.

    Runs of one policy that lie in different experiments, or whose folders differ in more than the seed (another
    fleet), are kept apart, and their labels say what differs.
    """
    if not runs:
        raise InvalidInput("runs", "are none", "Give at least one run")
    groups: dict[tuple[str, str, str, str], list[Run]] = {}
    for run in sorted(runs, key=lambda run: run.policy != OURS):
        variant = re.sub(r"-?seed-?\d+$", "", run.folder.name)
        groups.setdefault((run.policy, run.title, variant, str(run.folder.parent)), []).append(run)
    keys = list(groups)
    return [
        Series(
            _label(key, keys),
            key[0],
            tuple(members),
            COLOURS[index % len(COLOURS)],
            DASHES[index // len(COLOURS) % len(DASHES)],
        )
        for index, (key, members) in enumerate(groups.items())
    ]


def _label(key: tuple[str, str, str, str], keys: Sequence[tuple[str, str, str, str]]) -> str:
    """Return the title, with as much of the folder's name as is needed to distinguish it from the others."""
    _, title, variant, parent = key
    alike = [other for other in keys if other[1] == title and other != key]
    if not alike:
        return title
    experiment = parent.rstrip("/").rpartition("/")[2]
    if all(other[2] != variant for other in alike):
        return f"{title} ({variant})"
    inside = any(other[3] == parent for other in alike)
    return f"{title} ({experiment}/{variant})" if inside else f"{title} ({experiment})"


def spread(values: Iterable[float]) -> Spread:
    """Return the mean and the sample standard deviation."""
    array = np.array(list(values), dtype=np.float64)
    return Spread(float(array.mean()), float(array.std(ddof=1)) if array.size > 1 else None)


def curve(runs: Sequence[Run], axis: Axis, value: Value) -> Curve:
    """Return the mean over runs, as far as all of them go; between evaluations values are interpolated."""
    return mean_curve([points(run, axis, value) for run in runs])


def mean_curve(lines: Sequence[tuple[FloatArray, FloatArray]]) -> Curve:
    """Return the mean of lines, given as x and y, as far as all of them go, interpolated linearly."""
    lines = [line for line in lines if line[0].size]
    if not lines:
        return Curve(np.zeros(0), np.zeros(0), None)
    first, last = max(x[0] for x, _ in lines), min(x[-1] for x, _ in lines)
    grid = np.unique(np.concatenate([x for x, _ in lines]))
    grid = grid[(grid >= first) & (grid <= last)]
    grid = grid[thinned(grid.size)]
    values = np.array([np.interp(grid, x, y) for x, y in lines])
    return Curve(grid, values.mean(axis=0), values.std(axis=0, ddof=1) if len(lines) > 1 else None)


def points(run: Run, axis: Axis, value: Value) -> tuple[FloatArray, FloatArray]:
    """Return a run's evaluations as x and y, without NaN and infinity."""
    x = np.asarray(getattr(run.evaluations, axis), dtype=np.float64)
    y = getattr(run.evaluations, value)
    known = np.isfinite(x) & np.isfinite(y)
    return x[known], y[known]


def thinned(size: int, most: int = MOST_POINTS) -> IntArray:
    """Return the indices of at most `most` of `size` entries, evenly spread, the first and the last among them."""
    return np.unique(np.linspace(0, size - 1, min(size, most)).round().astype(np.int64))
