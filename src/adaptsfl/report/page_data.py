"""The data of the page's charts: thinned, rounded and limited to what is shown, so that the page stays small."""

import base64
import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from adaptsfl.checks import FloatArray, IntArray
from adaptsfl.fleet import FIXED
from adaptsfl.latency import PHASES
from adaptsfl.report.figures import mean_phase_s
from adaptsfl.report.series import PHASE_COLOURS, Axis, Curve, Series, curve, group, points, thinned, time_word
from adaptsfl.report.timeline import Timeline, round_timeline
from adaptsfl.runs.folder import Run
from adaptsfl.runs.record import Block

MOST_COLUMNS, MOST_ROWS = 300, 100  # of the heat map
MOST_BARS, MOST_SEED_POINTS = 150, 150
MOST_ROUNDS, MOST_LANES = 40, 40  # of the timelines
MOST_TIMES, MOST_LINES = 40, 50  # of the fleet over time: blocks and devices
QUANTILES = (0.0, 0.1, 0.5, 0.9, 1.0)  # of the fleet over time
MOST_DETAILS = 12  # with more runs, only the first seed of every policy has details
BINS = 12
# What is measured of a device: its title, its unit, and how much one unit is. Fixed times follow their rate.
RESOURCES = {
    "flops": ("processor", "GFLOPS", 1e9),
    "forward_s": ("fixed time of a forward pass", "ms", 1e-3),
    "backward_s": ("fixed time of a backward pass", "ms", 1e-3),
    "uplink_bps": ("uplink to the edge server", "Mbit/s", 1e6),
    "uplink_s": ("latency of the uplink to the edge server", "ms", 1e-3),
    "downlink_bps": ("downlink from the edge server", "Mbit/s", 1e6),
    "downlink_s": ("latency of the downlink from the edge server", "ms", 1e-3),
    "fed_uplink_bps": ("uplink to the fed server", "Mbit/s", 1e6),
    "fed_uplink_s": ("latency of the uplink to the fed server", "ms", 1e-3),
    "fed_downlink_bps": ("downlink from the fed server", "Mbit/s", 1e6),
    "fed_downlink_s": ("latency of the downlink from the fed server", "ms", 1e-3),
}
# Of the servers: title, rate with its unit, fixed seconds.
SERVER_RESOURCES = (
    ("edge server’s turn in a round", "flops", "GFLOPS", 1e9, "turn_s"),
    ("link from edge server to fed server", "to_fed_bps", "Mbit/s", 1e6, "to_fed_s"),
    ("link from fed server to edge server", "from_fed_bps", "Mbit/s", 1e6, "from_fed_s"),
    ("averaging at the fed server", "averaging_bps", "Mbit/s", 1e6, "averaging_s"),
)

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

WIRE_TITLE = "More rounds if numbers are sent as {}, in %"


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
        "wire": [block.wire_dtype for block in blocks],
        "parts": [block.micro_batches for block in blocks],
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
    bars = timeline.bars
    return {
        "devices": [run.devices[device] for device in timeline.devices[rows]],
        "of": timeline.devices.size,
        "cuts": timeline.cuts[rows].tolist(),
        "bars": [[[_short(float(edge), 4) for edge in phase[:, row]] for phase in bars] for row in rows],
        "parts": timeline.parts,
        "start": _short(timeline.server_start_s),
        "end": _short(timeline.server_end_s),
        "length": _short(timeline.length_s),
    }


def _estimates(run: Run) -> dict[str, Any]:
    """Return the estimates that are one number per block, some with their range; lists (per layer) are left out."""
    blocks = _some(run.blocks, MOST_BARS)
    keys = dict.fromkeys(key for block in blocks for key, value in _flat(block).items() if _is_number(value))
    ends = {end for key in keys for end in _range_of(key) if end in keys}
    charts = []
    for key in sorted(keys.keys() - ends, key=lambda key: _place(key, list(keys))):
        chart = {"title": ESTIMATE_TITLES.get(key, key.replace("_", " ")), "values": _values(blocks, key)}
        for name, end in zip(("low", "high"), _range_of(key), strict=True):
            if end in ends:
                chart[name] = _values(blocks, end)
        charts.append(chart)
    return {"edges": _planned_s(run, thinned(len(run.blocks), MOST_BARS)), "charts": charts}


def _planned_s(run: Run, indices: IntArray) -> list[float | None]:
    """Return when these blocks were planned, which is when the ones before them ended, and the end of the run."""
    ends = np.array([0.0, *(block.time_s for block in run.blocks)])
    return _numbers(np.append(ends[indices], ends[-1]), 6)


def _range_of(key: str) -> tuple[str, str]:
    """Return the names under which the ends of an estimate's range are recorded."""
    return f"{key}_low", f"{key}_high"


def _place(key: str, recorded: list[str]) -> int:
    """Return the position of an estimate on the page: those with a title come first, in the order of titles."""
    titled = list(ESTIMATE_TITLES)
    return titled.index(key) if key in titled else len(titled) + recorded.index(key)


def _values(blocks: Sequence[Block], key: str) -> list[float | None]:
    return [_short(float(value)) if _is_number(value := _flat(block).get(key)) else None for block in blocks]  # type: ignore[arg-type]


def _flat(block: Block) -> dict[str, object]:
    """Return a block's estimates, with an entry for every type of numbers but the exact one."""
    wires = block.estimates.get("wires")
    factors = wires.items() if isinstance(wires, dict) else ()
    more = {WIRE_TITLE.format(name): 100 * (factor - 1) for name, factor in factors if name != "float32"}
    return {**block.estimates, **more}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _fleet(run: Run) -> dict[str, Any]:
    """Return what was measured of every device: over time, as means over blocks, and as histograms over the fleet."""
    rows = thinned(len(run.devices), MOST_ROWS)
    times = thinned(len(run.blocks), MOST_TIMES)
    resources = []
    for name, (title, unit, scale) in RESOURCES.items():
        values = _recorded(run, name) / scale
        means = _means(values)
        if np.isfinite(means).any():
            shown = {"values": _numbers(means[rows], 4), **_histogram(means[np.isfinite(means)])}
            resources.append({"title": title, "unit": unit, **shown, **_over_time(values, times)})
    return {
        "devices": [run.devices[row] for row in rows],
        "of": len(run.devices),
        "names": [run.devices[row] for row in thinned(len(run.devices), MOST_LINES)],
        "edges": _planned_s(run, times),
        "blocks": [run.blocks[k].block for k in times],
        "of_blocks": len(run.blocks),
        "resources": resources,
        "servers": _servers(run),
    }


def _over_time(values: FloatArray, times: IntArray) -> dict[str, Any]:
    """Return a resource of every device, or of some, when blocks were planned, and its `QUANTILES` over all devices.

    Empty if nothing changed: then the means say it all.
    """
    first = values[np.argmax(np.isfinite(values), axis=0), np.arange(values.shape[1])]
    if not np.nanmax(np.abs(values - first), initial=0.0) > 1e-6 * np.nanmax(np.abs(values)):
        return {}
    rows = thinned(values.shape[1], MOST_LINES)
    present = [known[np.isfinite(known)] for known in values[times]]
    shares = np.array([np.quantile(known, QUANTILES) if known.size else [np.nan] * len(QUANTILES) for known in present])
    lines, quantiles = values[times][:, rows].T, shares.T
    return {"lines": [_numbers(line, 3) for line in lines], "quantiles": [_numbers(line, 3) for line in quantiles]}


def _recorded(run: Run, name: str) -> FloatArray:
    """Return a resource by block and device: NaN where it is not known, 0 for fixed seconds that are 0 for all."""
    size, known = len(run.devices), any(name in block.resources for block in run.blocks)
    nothing = (0.0 if known and name in FIXED else np.nan,) * size
    found = [block.resources.get(name, nothing) for block in run.blocks]
    return np.array([row if len(row) == size else (np.nan,) * size for row in found], dtype=np.float64)


def _means(values: FloatArray) -> FloatArray:
    """Return the mean of every column, as far as it is known."""
    known = np.isfinite(values)
    counts, sums = known.sum(axis=0), np.where(known, values, 0.0).sum(axis=0)
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)


def _servers(run: Run) -> dict[str, Any]:
    """Return the servers' resources: of a deployment, in its first and in its last block."""
    recorded = [block.restart["server"] for block in run.blocks if "server" in block.restart]
    servers = [recorded[0], recorded[-1]] if len(recorded) > 1 else recorded or [dataclasses.asdict(run.server)]
    rows = []
    for title, rate, unit, scale, fixed_s in SERVER_RESOURCES:
        rates = np.array([server.get(rate) or np.nan for server in servers], dtype=np.float64) / scale
        fixed_ms = 1e3 * np.array([server.get(fixed_s) or 0.0 for server in servers], dtype=np.float64)
        if np.isfinite(rates).any() or fixed_ms.any():
            rows.append({"title": title, "unit": unit, "rates": _numbers(rates, 3), "fixed_ms": _numbers(fixed_ms, 3)})
    return {
        "columns": ["in the first block", "in the last block"] if len(servers) > 1 else ["in the whole run"],
        "rows": rows,
    }


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
