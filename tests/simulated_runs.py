"""Experiments without training: folders as a simulation leaves them, clocked by our latency, learning by formula."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from adaptsfl.checks import IntArray
from adaptsfl.costs import CutCosts
from adaptsfl.fleet import FIXED, FLEETS, RATES, Fleet
from adaptsfl.latency import PHASES, phase_times
from adaptsfl.paper_costs import vgg16
from adaptsfl.runs.folder import RECORD, Run, append_block, write_run
from adaptsfl.runs.record import Block

POLICIES = {"adaptsfl": "AdaptSFL", "rma+ms": "RMA+MS", "ma+rms": "MA+RMS", "rma+rms": "RMA+RMS"}
BATCH_SIZE = 16
RECIPE: dict[str, Any] = {
    "name": "VGG-16 on twenty devices",
    "model": {"name": "vgg16", "granularity": "layer", "options": {"classes": 10}},
    "data": {"name": "cifar10", "partition": "shards", "shards_per_device": 2, "augment": True},
    "training": {"optimizer": "sgd", "learning_rate": 0.05, "batch_size": BATCH_SIZE, "momentum": 0.0},
    "fleet": {"kind": "paper", "redraw": "round"},
    "simulation": {"rounds": None, "targets": [0.5, 0.6], "evaluate_every": 10},
}


def write_experiment(
    folder: Path,
    *,
    policies: dict[str, str] | None = None,
    seeds: int = 2,
    devices: int = 20,
    blocks: int = 60,
    **changes: Any,
) -> Path:
    """Write one run per policy and seed; `changes` replace fields of every run.json."""
    for policy, title in (policies or POLICIES).items():
        for seed in range(seeds):
            write_simulated_run(folder / f"{policy}-seed{seed}", policy, title, seed, devices, blocks, **changes)
    return folder


def write_simulated_run(
    folder: Path, policy: str, title: str, seed: int, devices: int, blocks: int, **changes: Any
) -> Path:
    """Write one run: planned intervals and cuts where the policy's name says so, random ones elsewhere."""
    costs = vgg16(10, BATCH_SIZE)
    base = FLEETS["paper"].sample(devices, np.random.default_rng([seed, 7]))
    info = {
        "name": "VGG-16 on twenty devices",
        "policy": policy,
        "title": title,
        "seed": seed,
        "recipe": {**RECIPE, "seed": seed, "policy": {"name": policy}},
        "versions": {"adaptsfl": "0.1.0", "python": "3.12.1", "torch": "2.13.0"},
        "devices": [f"phone {k + 1}" if k % 3 else f"board {k + 1}" for k in range(devices)],
        "layers": costs.names,
        "batch_size": BATCH_SIZE,
        "costs": costs,
        "server": base.server,
        "targets": [0.5, 0.6],
        "status": "done",
        "ended_by": "rounds",
        "wall_s": 12.3 * blocks,
    }
    write_run(folder, {**info, **changes})
    with (folder / RECORD).open("w") as file:
        for block in simulated_blocks(costs, base, policy, seed, blocks):
            append_block(file, block)
    return folder


def simulated_blocks(costs: CutCosts, base: Fleet, policy: str, seed: int, count: int) -> list[Block]:
    rng = np.random.default_rng([seed, *policy.encode()])
    blocks: list[Block] = []
    rounds, time_s, progress = 0, 0.0, 0.0
    for number in range(1, count + 1):
        fleet = base.with_rates({name: getattr(base, name) * rng.uniform(0.75, 1.25, base.size) for name in RATES})
        interval = int(rng.integers(1, 26)) if policy.startswith("rma") else 6 + number // 10
        cuts = _cuts(policy, costs, fleet, rng)
        here = rng.random(base.size) > 0.03
        here[0] = True
        phases = phase_times(costs, present(fleet, here), cuts[here], BATCH_SIZE)
        seconds = {phase.phase: phase.seconds * (interval if phase.every_round else 1) for phase in phases}
        time_s += sum(seconds.values())
        rounds += interval
        progress += interval / (1 + 0.09 * max(0, interval - 6) * cuts.max() / 7)
        accuracy = 0.1 + 0.62 * (1 - np.exp(-progress / 130)) + rng.normal(0, 0.006)
        worst = max(phases, key=lambda phase: seconds[phase.phase])
        blocks.append(
            Block(
                block=number,
                first_round=rounds - interval + 1,
                rounds=interval,
                time_s=time_s,
                interval=interval,
                cuts=tuple(int(cut) if there else 0 for cut, there in zip(cuts, here, strict=True)),
                deepest=int(cuts[here].max()),
                layer_intervals={},
                seconds={phase: seconds[phase] for phase in PHASES},
                bottleneck=(worst.bottleneck, worst.phase),
                bits=float(interval * BATCH_SIZE * 2 * costs.activation_bits[cuts[here] - 1].sum()),
                loss=float(2.3 * np.exp(-progress / 150)),
                evaluations=((rounds, time_s, float(accuracy), float(2.4 - 2.1 * accuracy)),),
                estimates=_estimates(policy, progress, costs, rng),
                resources={name: tuple(np.where(here, getattr(fleet, name), np.nan).tolist()) for name in RATES},
                predicted_s=sum(seconds.values()) * float(rng.normal(1, 0.03)),
            )
        )
    return blocks


def as_deployed(run: Run) -> Run:
    """The run as an edge server would have recorded it: real time, fixed seconds, servers measured block by block."""
    blocks = []
    for block in run.blocks:
        fixed = {name: tuple(0.001 * (k + block.block) for k in range(len(run.devices))) for name in FIXED}
        server = replace(run.server, turn_s=0.002 * block.block, averaging_s=0.003, averaging_bps=2e9)
        whole = {**block.estimates, "predicted": block.seconds, "averagings": block.block}
        work = {"forward_flops": run.costs.forward_flops, "backward_flops": run.costs.backward_flops}
        kept = {"server": asdict(server), **work}
        blocks.append(replace(block, resources={**block.resources, **fixed}, restart=kept, estimates=whole))
    return replace(run, blocks=tuple(blocks), real=True)


def present(fleet: Fleet, here: np.ndarray) -> Fleet:
    """The devices that are there, under the names of all."""
    names = tuple(fleet.name(int(index)) for index in np.flatnonzero(here))
    return Fleet(**{name: getattr(fleet, name)[here] for name in RATES}, server=fleet.server, names=names)


def _cuts(policy: str, costs: CutCosts, fleet: Fleet, rng: np.random.Generator) -> IntArray:
    if policy.endswith("rms"):
        return rng.integers(3, 11, fleet.size)
    slow = fleet.uplink_bps < np.median(fleet.uplink_bps)
    return np.where(slow, 7, np.where(rng.random(fleet.size) < 0.3, 4, 5)).astype(np.int64)


def _estimates(policy: str, progress: float, costs: CutCosts, rng: np.random.Generator) -> dict[str, object]:
    if policy == "rma+rms":
        return {}
    return {
        "gradient_norm2": float(4 * np.exp(-progress / 200) * rng.normal(1, 0.08)),
        **{f"kappa{end}": 0.5 * factor for end, factor in (("", 1.0), ("_low", 0.4), ("_high", 2.0))},
        **{f"relative_rounds{end}": 1.5 * factor for end, factor in (("", 1.0), ("_low", 0.8), ("_high", 1.9))},
        "growth": {"factors": np.sort(rng.random(costs.layers)).tolist(), "power": 0.8},
    }
