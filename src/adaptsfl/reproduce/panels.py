"""The numbers of one panel, for the drawing and for the CSV file beside it, from which others can draw it again.

A line shows means of the last `numbers.WINDOW` evaluations, from which converged accuracies and times are read. Its
first points are means of fewer evaluations. Tables have both the accuracies and their means.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from adaptsfl.checks import FloatArray
from adaptsfl.costs import BITS_PER_BYTE, CutCosts
from adaptsfl.report.series import OURS, Curve, Spread, mean_curve, spread
from adaptsfl.reproduce.numbers import (
    NEARLY,
    WINDOW,
    Evidence,
    aggregations,
    common_target,
    converged_accuracy,
    converged_s,
    epochs,
    finished,
    label_of,
    mean_time_to,
    time_to,
)
from adaptsfl.reproduce.study import Drawing, Panel, Study, Sweep
from adaptsfl.runs.folder import Run

PAPER_ORDER = (OURS, "rma+ms", "ma+rms", "rma+rms", "dama+rms", "rma+ams")
GIGA, MEGA = 1e9, 1e6
LONGEST = 8.0  # a time axis ends at so many times our whole run at most
FAR_APART = 10.0  # if lengths of runs differ by a larger factor, the axis is logarithmic
SWEEPS_FROM = 0.5  # of the best policy's accuracy: a sweep's lines should have as many points as possible
ROOM, LITTLE_MORE = 1.05, 1.6

_LINES = f"Lines are means of the last {WINDOW} evaluations and over seeds, bands one standard deviation of the seeds."
EXPLANATIONS: dict[Drawing, str] = {
    "epochs": _LINES,
    "aggregations": _LINES,
    "time": _LINES,
    "converged": (
        f"Accuracy is the highest mean of {WINDOW} evaluations, time that to {100 * NEARLY:g} % of it; whiskers are "
        "one standard deviation of the seeds. A policy that learns less may converge sooner: the files also have the "
        "times to one accuracy for all."
    ),
    "sweep": "Times are those to one accuracy for all runs of a panel, close to the highest that all of them reach.",
    "overhead": "What one device computes and exchanges with one mini-batch, and its layers when they are averaged.",
}

Row = Sequence[object]


class Table(NamedTuple):
    """The content of a CSV file."""

    columns: tuple[str, ...]
    rows: Sequence[Row]


@dataclass(frozen=True)
class Line:
    """One policy's mean over seeds: accuracies, or in a sweep seconds to the target (NaN if it is not reached)."""

    policy: str
    label: str
    curve: Curve


@dataclass(frozen=True)
class Converged:
    """One policy's converged accuracy and the time to it."""

    policy: str
    label: str
    accuracy: Spread
    time_s: Spread


class TimeAxis(NamedTuple):
    """Where a time axis ends, in seconds, whether it is logarithmic, and whether it shows all of every run."""

    end_s: float
    logarithmic: bool
    whole: bool


def runs_shown(evidence: Evidence, panel: Panel) -> dict[str, tuple[Run, ...]]:
    """Return a panel's complete and evaluated runs by policy; the paper's policies come first, in its order."""
    if not panel.runs:
        return {}
    found = [run for run in evidence.of(panel.key) if finished(run)]
    order = dict.fromkeys([*PAPER_ORDER, *(run.policy for run in found)])
    by_policy = {policy: tuple(run for run in found if run.policy == policy) for policy in order}
    return {policy: runs for policy, runs in by_policy.items() if runs}


def worth_drawing(evidence: Evidence, study: Study) -> bool:
    """Whether a figure has a run to show, or needs none."""
    need = [panel for panel in study.panels if panel.runs]
    return not need or any(runs_shown(evidence, panel) for panel in need)


def missing(evidence: Evidence, panel: Panel) -> str:
    """Return the reason why a panel has nothing to show; empty if it has something."""
    if not panel.runs or runs_shown(evidence, panel):
        return ""
    found = evidence.of(panel.key)
    if not found:
        return f"{panel.runs} was not run"
    failed = sum(run.status == "failed" for run in found)
    return f"{panel.runs}: none of {len(found)} runs finished" + (f", {failed} failed" if failed else "")


def target(evidence: Evidence, panel: Panel) -> float:
    """Return the accuracy to which the times of a panel are compared."""
    shown = runs_shown(evidence, panel).values()
    return common_target(shown) if panel.sweep is None else common_target(shown, SWEEPS_FROM)


def lines(evidence: Evidence, panel: Panel) -> list[Line]:
    """Return a line per policy over the panel's x axis; it has no points where its seeds share no x."""
    shown = runs_shown(evidence, panel)
    if panel.sweep is not None:
        reached = target(evidence, panel) if shown else 0.0
        return [Line(policy, label_of(runs[0]), _times(runs, panel.sweep, reached)) for policy, runs in shown.items()]
    return [
        Line(policy, label_of(runs[0]), mean_curve([_one_per_x(*_smoothed(run, panel.draw)) for run in runs]))
        for policy, runs in shown.items()
    ]


def _times(runs: Sequence[Run], sweep: Sweep, target: float) -> Curve:
    """Return the seconds to an accuracy at every point of a sweep."""
    times = [mean_time_to([run for run in runs if run.fleet == fleet], target) for fleet in sweep.fleets]
    spreads = np.array([0.0 if time is None else time.spread or 0.0 for time in times])
    means = np.array([np.nan if time is None else time.mean for time in times])
    return Curve(np.array(sweep.xs), means, spreads if spreads.any() else None)


def _smoothed(run: Run, draw: str) -> tuple[FloatArray, FloatArray]:
    """Return x and the mean of the last `WINDOW` evaluations, or of all so far if they are fewer."""
    known = np.isfinite(run.evaluations.accuracies)
    accuracies = run.evaluations.accuracies[known]
    means = [float(accuracies[max(0, k - WINDOW + 1) : k + 1].mean()) for k in range(accuracies.size)]
    return _x(run, draw)[known], np.array(means, dtype=np.float64)


def _x(run: Run, draw: str) -> FloatArray:
    if draw == "epochs":
        return epochs(run)
    return aggregations(run) if draw == "aggregations" else run.evaluations.seconds


def _one_per_x(x: FloatArray, y: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Keep the last of the points that share an x: between two aggregations there may be several evaluations."""
    last = np.append(np.diff(x) > 0, True) if x.size else np.zeros(0, dtype=bool)
    return x[last], y[last]


def time_axis(evidence: Evidence, panel: Panel) -> TimeAxis:
    """Return an axis that shows both the fastest and the slowest policy.

    Either all panels of a figure are logarithmic, or none. A linear axis ends where the last policy has converged, at
    `LONGEST` times our whole run at most; if a little more length shows all runs in full, it is that long.
    """
    shown = runs_shown(evidence, panel)
    longest = max(run.time_s for runs in shown.values() for run in runs)
    beside = [other for study in evidence.studies for other in study.panels if other.figure == panel.figure]
    if any(_far_apart(evidence, other) for other in beside if other.draw == "time"):
        return TimeAxis(longest, True, True)
    needed = max(converged_s(run) for runs in shown.values() for run in runs)
    ours = max((run.time_s for run in shown.get(OURS, ())), default=longest)
    end_s = max(ours, min(needed, LONGEST * ours))
    whole = longest < LITTLE_MORE * end_s
    return TimeAxis(ROOM * longest if whole else end_s, False, whole)


def _far_apart(evidence: Evidence, panel: Panel) -> bool:
    lengths = [np.mean([run.time_s for run in runs]) for runs in runs_shown(evidence, panel).values()]
    return bool(lengths) and max(lengths) > FAR_APART * min(lengths)


def longest_s(evidence: Evidence, study: Study) -> float:
    """Return the longest time that a figure shows, which sets the unit of all its panels."""
    found = [0.0]
    for panel in study.panels:
        if not runs_shown(evidence, panel):
            continue
        if panel.draw == "time":
            found.append(time_axis(evidence, panel).end_s)
        elif panel.draw == "converged":
            found += [one.time_s.mean for one in converged(evidence, panel)]
        elif panel.draw == "sweep":
            found += [time_s for line in lines(evidence, panel) for time_s in line.curve.mean if np.isfinite(time_s)]
    return max(found)


def converged(evidence: Evidence, panel: Panel) -> list[Converged]:
    """Return the converged accuracy of each policy and the time to it."""
    return [
        Converged(
            policy,
            label_of(runs[0]),
            spread(converged_accuracy(run) for run in runs),
            spread(converged_s(run) for run in runs),
        )
        for policy, runs in runs_shown(evidence, panel).items()
    ]


def table(evidence: Evidence, panel: Panel) -> Table:
    """Return every number that the panel shows, and those of the single seeds; times in seconds."""
    if panel.draw == "overhead":
        return overhead_table(panel.costs, panel.recipe.training.batch_size)
    if panel.draw in ("converged", "sweep"):
        return _outcome_table(evidence, panel)
    x = "time_s" if panel.draw == "time" else panel.draw
    columns = ("policy", "label", "seed", "round", x, "accuracy", "smoothed_accuracy", "spread")
    return Table(columns, list(_line_rows(evidence, panel)))


def overhead_table(costs: CutCosts, batch_size: int) -> Table:
    """Return a device's work and one-way traffic at every cut: per round, for its layers per aggregation."""
    megabyte = BITS_PER_BYTE * MEGA
    columns = {
        "compute_gflop": batch_size * (costs.forward_flops + costs.backward_flops) / GIGA,
        "activations_mb": batch_size * costs.activation_bits / megabyte,
        "gradients_mb": batch_size * costs.gradient_bits / megabyte,
        "model_mb": costs.client_model_bits / megabyte,
    }
    rows = [(k + 1, costs.name(k + 1), *(float(column[k]) for column in columns.values())) for k in range(costs.layers)]
    return Table(("cut", "layer", *columns), rows)


def _line_rows(evidence: Evidence, panel: Panel) -> Iterator[Row]:
    """Yield one row per evaluation; then, if there are several seeds, one per point of the mean line."""
    drawn = {line.policy: line for line in lines(evidence, panel)}
    for policy, runs in runs_shown(evidence, panel).items():
        label = drawn[policy].label
        for run in runs:
            x, means = _smoothed(run, panel.draw)
            known = np.isfinite(run.evaluations.accuracies)
            raw, rounds = run.evaluations.accuracies[known], run.evaluations.rounds[known]
            for values in zip(rounds.tolist(), x.tolist(), raw.tolist(), means.tolist(), strict=True):
                yield policy, label, run.seed, *values, ""
        curve = drawn[policy].curve
        if curve.spread is not None:
            for at, mean, deviation in zip(curve.x.tolist(), curve.mean.tolist(), curve.spread.tolist(), strict=True):
                yield policy, label, "mean", "", at, "", mean, deviation


def _outcome_table(evidence: Evidence, panel: Panel) -> Table:
    """Return one row per seed and point of a sweep, then the mean over seeds with its spread."""
    points = [()] if panel.sweep is None else list(zip(panel.sweep.fleets, panel.sweep.xs, strict=True))
    place_columns = ("policy", "label", *(() if panel.sweep is None else ("fleet", "x")), "seed")
    outcomes = ("converged_accuracy", "converged_s", "target_accuracy", "time_to_target_s")
    spreads = [k for k in (0, 1, 3) if panel.sweep is None or k == 3]  # indices of the outcomes that have one
    common = target(evidence, panel)
    rows: list[Row] = []
    for policy, runs in runs_shown(evidence, panel).items():
        for point in points:
            place = (policy, label_of(runs[0]), *point)
            members = [run for run in runs if not point or run.fleet == point[0]]
            rows += [(*place, run.seed, *_outcome(run, common), *[""] * len(spreads)) for run in members]
            if len(members) > 1:
                accuracy, time_s = (spread(map(of, members)) for of in (converged_accuracy, converged_s))
                found = (accuracy, time_s, Spread(common, None), mean_time_to(members, common))
                means = ["" if one is None else one.mean for one in found]
                rows.append(
                    (*place, "mean", *means, *("" if (one := found[k]) is None else one.spread for k in spreads))
                )
    return Table((*place_columns, *outcomes, *(f"{outcomes[k]}_spread" for k in spreads)), rows)


def _outcome(run: Run, target: float) -> tuple[float, float, float, float | str]:
    reached = time_to(run, target)
    return converged_accuracy(run), converged_s(run), target, "" if reached is None else reached


def explanation(study: Study) -> str:
    """Return a text that explains how to read a figure."""
    return " ".join(dict.fromkeys(EXPLANATIONS[panel.draw] for panel in study.panels))


def caption(study: Study, evidence: Evidence) -> list[str]:
    """Return the lines below a figure: its scale, and what its axes leave out."""
    return [_scale_words(study, evidence), *_notes(study, evidence)]


def _scale_words(study: Study, evidence: Evidence) -> str:
    runs = [run for panel in study.panels for of_one in runs_shown(evidence, panel).values() for run in of_one]
    if not runs:
        return f"Scale: {study.scale}"
    seeds, rounds = {run.seed for run in runs}, sorted({run.rounds for run in runs})
    models = _model_words([run.recipe.get("model") or {} for run in runs])
    data = list(dict.fromkeys(str((run.recipe.get("data") or {}).get("name", "")) for run in runs))
    span = f"{rounds[0]:,}" if rounds[0] == rounds[-1] else f"{rounds[0]:,} to {rounds[-1]:,}"
    expected = sum(_expected(panel) for panel in study.panels)
    words = [
        f"Scale: {study.scale}",
        f"{len(seeds)} seed{'s' if len(seeds) != 1 else ''}",
        f"{span} rounds",
        models,
        " and ".join(data),
    ]
    if len(runs) < expected:
        words.append(f"{len(runs)} of {expected} runs")
    return " · ".join(word for word in words if word)


def _expected(panel: Panel) -> int:
    """Return how many runs a panel has if none is missing."""
    asked = panel.recipe.run
    return len(asked.policies) * panel.seeds * max(1, len(asked.fleets)) if panel.runs and asked is not None else 0


def _model_words(models: Sequence[Mapping[str, Any]]) -> str:
    """Return which model is trained and which costs are charged: `vgg16 at width 0.125, charged at width 1.0`."""
    named: dict[str, dict[str, None]] = {}
    for model in models:
        options, charged = model.get("options") or {}, model.get("charged_as") or {}
        changed = [key for key, value in charged.items() if options.get(key) != value]
        learns = ", ".join(f"{key} {options.get(key, 'by default')}" for key in changed)
        counts = ", ".join(f"{key} {charged[key]}" for key in changed)
        words = f" at {learns}, charged at {counts}" if changed else ""
        named.setdefault(words, {})[str(model.get("name", ""))] = None
    return "; ".join(" and ".join(names) + words for words, names in named.items())


def _notes(study: Study, evidence: Evidence) -> Iterator[str]:
    timed = [panel for panel in study.panels if panel.draw == "time" and runs_shown(evidence, panel)]
    axes = [time_axis(evidence, panel) for panel in timed]
    if any(axis.logarithmic for axis in axes):
        yield "Time is logarithmic."
    if not all(axis.whole for axis in axes):
        yield f"Time ends where all have converged, at {LONGEST:g} times AdaptSFL's run at most; slower runs go on."
    for label, titles in _without_accuracy(study, evidence).items():
        yield f"{label} has no run that ended with an accuracy in: {'; '.join(titles)}."
    for panel in study.panels:
        found = lines(evidence, panel)
        apart = [line.label for line in found if not line.curve.x.size]
        if apart and panel.draw in ("epochs", "aggregations", "time"):
            yield f"{panel.title}: the seeds of {', '.join(apart)} have no x in common, and no mean."
        absent = ", ".join(_unreached(line) for line in found if np.isnan(line.curve.mean).any())
        if absent and panel.draw == "sweep":
            yield f"{panel.title}: never reached by {absent}."


def _unreached(line: Line) -> str:
    """Return a policy that misses the target, with the points where it does, unless it misses it everywhere."""
    places = [f"{x:g}" for x in line.curve.x[np.isnan(line.curve.mean)]]
    return line.label if len(places) == line.curve.x.size else f"{line.label} at {' and '.join(places)}"


def _without_accuracy(study: Study, evidence: Evidence) -> dict[str, list[str]]:
    """Return the policies that were run but cannot be drawn, with the titles of the panels that show others."""
    found: dict[str, list[str]] = {}
    for panel in study.panels:
        shown = runs_shown(evidence, panel)
        tried = {run.policy: run for run in evidence.of(panel.key)} if shown else {}
        for policy, run in tried.items():
            if policy not in shown:
                found.setdefault(label_of(run), []).append(panel.title)
    return found
