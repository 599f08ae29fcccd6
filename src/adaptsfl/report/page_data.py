"""The data of the page's charts: thinned, rounded and limited to what is shown, so that the page stays small."""

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np

from adaptsfl.checks import FloatArray
from adaptsfl.fleet import FIXED, RATES
from adaptsfl.latency import PHASES
from adaptsfl.report.figures import mean_phase_s
from adaptsfl.report.series import PHASE_COLOURS, Axis, Curve, Series, curve, group, points, thinned, time_word
from adaptsfl.report.timeline import Timeline, round_timeline
from adaptsfl.runs.folder import Run
from adaptsfl.runs.record import Block

MOST_COLUMNS, MOST_ROWS = 300, 100  # of the heat map
MOST_BARS, MOST_SEED_POINTS = 150, 150
MOST_ROUNDS, MOST_LANES = 40, 40  # of the timelines
MOST_DETAILS = 12  # with more runs, only the first seed of every policy has details
BINS = 12
RATE_TITLES = {
    "flops": ("work", "FLOP/s"),
    "uplink_bps": ("uplink", "bit/s"),
    "downlink_bps": ("downlink", "bit/s"),
    "fed_uplink_bps": ("uplink to the fed server", "bit/s"),
    "fed_downlink_bps": ("downlink from the fed server", "bit/s"),
    "forward_s": ("every forward pass, besides its work", "s"),
    "backward_s": ("every backward pass, besides its work", "s"),
    "uplink_s": ("every upload, besides its bits", "s"),
    "downlink_s": ("every download, besides its bits", "s"),
    "fed_uplink_s": ("every upload to the fed server, besides its bits", "s"),
    "fed_downlink_s": ("every download from the fed server, besides its bits", "s"),
}

# A run's estimates of convergence, in the order in which the page shows them. The line is the estimate, the band its
# interval of 80 %.
ESTIMATE_TITLES = {
    "relative_rounds": "Rounds that the plan needs, relative to I = 1",
    "kappa": "κ: what drifting copies cost (0.02: little, 1: most)",
    "averagings": "Averagings that the estimate rests on",
    "smoothness": "β, smoothness",
    "moment_sum": "ΣG², second moment of gradients",
    "variance_sum": "Σσ², variance of gradients",
    "target": "ε, the target of the bound",
}


def page_data(runs: Sequence[Run]) -> dict[str, Any]:
    """Return everything that the page's charts need."""
    members = group(runs)
    return {
        "time": time_word(runs),
        "targets": sorted({target for run in runs for target in run.targets}),
        "phases": [{"key": key, "title": title, "colour": PHASE_COLOURS[key]} for key, title in PHASES.items()],
        "series": [_series(series) for series in members],
        "details": [
            _detail(run, index, series)
            for index, series in enumerate(members)
            for run in (series.runs if len(runs) <= MOST_DETAILS else series.runs[:1])
            if run.blocks
        ],
    }


def _series(series: Series) -> dict[str, Any]:
    axes: tuple[Axis, ...] = ("seconds", "rounds")
    return {
        "label": series.label,
        "colour": series.colour,
        "dash": series.dash,
        "accuracies": {axis: _curve(curve(series.runs, axis, "accuracies")) for axis in axes},
        "losses": {axis: _curve(curve(series.runs, axis, "losses")) for axis in axes},
        "seeds": {axis: [_seed(run, axis) for run in series.runs] if len(series.runs) > 1 else [] for axis in axes},
        "phases": {phase: _short(mean_phase_s(series, phase)) for phase in PHASES},
        "rounds": _short(float(np.mean([run.rounds for run in series.runs]))),
    }


def _curve(line: Curve) -> dict[str, Any]:
    spread = None if line.spread is None else _numbers(line.spread)
    return {"x": _numbers(line.x, 6), "y": _numbers(line.mean), "spread": spread}


def _seed(run: Run, axis: Axis) -> dict[str, Any]:
    x, y = points(run, axis, "accuracies")
    some = thinned(x.size, MOST_SEED_POINTS)
    return {"x": _numbers(x[some], 6), "y": _numbers(y[some])}


def _detail(run: Run, index: int, series: Series) -> dict[str, Any]:
    return {
        "label": f"{series.label}, seed {run.seed}",
        "series": index,
        "layers": list(run.layers),
        "plan": _plan(run),
        "blocks": _blocks(run),
        "timelines": _timelines(run),
        "estimates": _estimates(run),
        "fleet": _fleet(run),
    }


def _plan(run: Run) -> dict[str, Any]:
    """Return interval and cuts over time: one column per block, or slices of equal length if blocks are too many."""
    blocks = run.blocks
    ends = np.array([block.time_s for block in blocks])
    edges = np.concatenate([[0.0], ends])
    if len(blocks) > MOST_COLUMNS:
        edges = np.linspace(0.0, ends[-1], MOST_COLUMNS + 1)
        middles = (edges[:-1] + edges[1:]) / 2
        blocks = tuple(blocks[index] for index in np.searchsorted(ends, middles))
    rows = thinned(len(run.devices), MOST_ROWS)
    wide = run.costs.layers > np.iinfo(np.uint8).max
    cuts = np.array([block.cuts for block in blocks]).T[rows]
    return {
        "edges": _numbers(edges, 6),
        "block": [block.block for block in blocks],
        "interval": [block.interval for block in blocks],
        "deepest": [block.deepest for block in blocks],
        "rows": [run.devices[row] for row in rows],
        "devices": len(run.devices),
        "bytes": 2 if wide else 1,
        "cuts": base64.b64encode(cuts.astype("<u2" if wide else "u1").tobytes()).decode(),  # row after row
    }


def _blocks(run: Run) -> dict[str, Any]:
    """Return the seconds by phase of every block, or of some, evenly spread."""
    blocks = _some(run.blocks, MOST_BARS)
    return {
        "block": [block.block for block in blocks],
        "rounds": [block.rounds for block in blocks],
        "of": len(run.blocks),
        "seconds": {phase: [_short(block.seconds[phase]) for block in blocks] for phase in PHASES},
        "predicted": [_short(block.predicted_s) for block in blocks],
        "bottleneck": [f"{who} in {phase}" for who, phase in (block.bottleneck for block in blocks)],
    }


def _timelines(run: Run) -> list[dict[str, Any]]:
    found = []
    for block in _some(run.blocks, MOST_ROUNDS):
        timeline = round_timeline(run, block)
        if timeline is not None:
            found.append({"block": block.block, "interval": block.interval, **_timeline(run, timeline)})
    return found


def _timeline(run: Run, timeline: Timeline) -> dict[str, Any]:
    """Return some of many devices, including the slowest of each half of the round."""
    lanes = set(thinned(timeline.devices.size, MOST_LANES).tolist())
    lanes |= {int(np.argmax(timeline.forward_s + timeline.upload_s))}
    lanes |= {int(np.argmax(timeline.download_s + timeline.backward_s))}
    rows = sorted(lanes)
    parts = (timeline.forward_s, timeline.upload_s, timeline.download_s, timeline.backward_s)
    return {
        "devices": [run.devices[device] for device in timeline.devices[rows]],
        "of": timeline.devices.size,
        "cuts": timeline.cuts[rows].tolist(),
        "parts": [[_short(float(part[row]), 4) for part in parts] for row in rows],
        "start": _short(timeline.server_start_s),
        "server": _short(timeline.server_s),
        "length": _short(timeline.length_s),
    }


def _estimates(run: Run) -> dict[str, Any]:
    """Return the estimates that are one number per block, some with their range; lists (per layer) are left out."""
    blocks = _some(run.blocks, MOST_BARS)
    keys = dict.fromkeys(key for block in blocks for key, value in block.estimates.items() if _is_number(value))
    ends = {end for key in keys for end in _range_of(key) if end in keys}
    charts = []
    for key in sorted(keys.keys() - ends, key=lambda key: _place(key, list(keys))):
        chart = {"title": ESTIMATE_TITLES.get(key, key.replace("_", " ")), "values": _values(blocks, key)}
        for name, end in zip(("low", "high"), _range_of(key), strict=True):
            if end in ends:
                chart[name] = _values(blocks, end)
        charts.append(chart)
    return {"x": _numbers(np.array([block.time_s for block in blocks]), 6), "charts": charts}


def _range_of(key: str) -> tuple[str, str]:
    """Return the names under which the ends of an estimate's range are recorded."""
    return f"{key}_low", f"{key}_high"


def _place(key: str, recorded: list[str]) -> int:
    """Return the position of an estimate on the page: those with a title come first, in the order of titles."""
    titled = list(ESTIMATE_TITLES)
    return titled.index(key) if key in titled else len(titled) + recorded.index(key)


def _values(blocks: Sequence[Block], key: str) -> list[float | None]:
    return [_short(float(value)) if _is_number(value := block.estimates.get(key)) else None for block in blocks]  # type: ignore[arg-type]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _fleet(run: Run) -> dict[str, Any]:
    """Return the rates of every device, as means over blocks, and a histogram of each rate over the fleet."""
    rows = thinned(len(run.devices), MOST_ROWS)
    rates = {name: _mean_rates(run, name) for name in (*RATES, *FIXED)}
    return {
        "devices": [run.devices[row] for row in rows],
        "of": len(run.devices),
        "rates": [
            {
                "title": RATE_TITLES[name][0],
                "unit": RATE_TITLES[name][1],
                "values": _numbers(values[rows], 4),
                **_histogram(values[np.isfinite(values)]),
            }
            for name, values in rates.items()
            if np.isfinite(values).any()
        ],
    }


def _mean_rates(run: Run, name: str) -> FloatArray:
    size = len(run.devices)
    recorded = [rates for block in run.blocks if len(rates := block.resources.get(name, ())) == size]
    values = np.array(recorded, dtype=np.float64).reshape(-1, size)
    known = np.isfinite(values)
    counts = known.sum(axis=0)
    sums = np.where(known, values, 0.0).sum(axis=0)
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)


def _histogram(values: FloatArray) -> dict[str, Any]:
    low, high = float(values.min()), float(values.max())
    if high - low <= 1e-9 * high:  # all alike: one bar in the middle
        low, high = 0.5 * low, 1.5 * high
    counts, edges = np.histogram(values, bins=BINS, range=(low, high))
    return {"edges": _numbers(edges, 4), "counts": counts.tolist()}


def _some(blocks: Sequence[Block], most: int) -> list[Block]:
    return [blocks[index] for index in thinned(len(blocks), most)]


def _numbers(values: FloatArray, digits: int = 5) -> list[float | None]:
    return [_short(float(value), digits) for value in values]


def _short(value: float, digits: int = 5) -> float | None:
    """Return a number with no more digits than a chart can show; None for NaN and infinity."""
    return float(f"{value:.{digits}g}") if np.isfinite(value) else None
