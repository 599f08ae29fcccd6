"""Does what a run measures of a type of numbers predict the rounds that it costs? And what does it cost in accuracy?

One plan (I = 8, a shallow cut, where most layers learn from rounded activations) is trained with exact numbers and with
every type, on the same mini-batches, with three seeds. On the way the exact run measures the factor of every type, as
AdaptSFL does. Beside its mean stands the factor that training shows: the rounds that a type needs for the losses of the
exact run, from a quarter of the run on, over the exact run's (both smoothed over twenty rounds, geometric mean).
Accuracy is that of the averaged model after the last round, in points above or below the exact run's.

    python benchmarks/precision.py                   # all that is missing: half an hour
    python benchmarks/precision.py --only-report

Every run that ends is one line in docs/results/precision.jsonl, and is not run again.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from adaptivity import SEEDS, WORKLOADS, recipe_of

from adaptsfl.checks import FloatArray
from adaptsfl.decisions import Decision
from adaptsfl.simulation.trainers import TRAINERS
from adaptsfl.simulation.world import World, make_world
from adaptsfl.training import Engine

RESULTS = Path(__file__).parent.parent / "docs" / "results"
TYPES = ("bfloat16", "int8", "int4")
DEFAULT_WORKLOADS = ("digits-dirichlet", "digits-shards", "cifar10-dirichlet")
INTERVAL, ROUNDS, SMOOTHED, MEASUREMENTS = 8, 240, 20, 4
Key = tuple[str, str, int]  # workload, type, seed


def run(key: Key) -> dict[str, Any]:
    """Train one run and return its line."""
    name, wire, seed = key
    workload = WORKLOADS[name]
    world = make_world(recipe_of(workload, "table2", None), seed)
    torch.manual_seed(seed)
    plan = Decision((workload.depths[0],) * world.devices, INTERVAL, wire_dtype=wire)
    engine = TRAINERS["engine"].make(world, plan, False)
    assert isinstance(engine, Engine)
    losses, factors = [], []
    for t in range(1, ROUNDS + 1):
        batches = world.batches(t, range(world.devices))
        if wire == "float32" and (t - 1) % (ROUNDS // MEASUREMENTS) == 0:
            factors.append(engine.wire_factors(batches, TYPES))
        losses.append(float(engine.round(batches).mean()))
    line = {"workload": name, "wire_dtype": wire, "seed": seed, "losses": losses, "accuracy": accuracy(world, engine)}
    return {**line, "factors": factors} if factors else line


def accuracy(world: World, engine: Engine) -> float:
    """Return the accuracy of the averaged model."""
    return world.evaluate(engine.state(world.batches(ROUNDS, range(world.devices))))[0]


def shown(rounded: FloatArray, exact: FloatArray) -> float:
    """Return the rounds for the exact run's losses over the exact run's rounds; a lower loss is reached if it stays."""
    window = np.ones(SMOOTHED) / SMOOTHED
    own, other = (np.minimum.accumulate(np.convolve(losses, window, "valid")) for losses in (rounded, exact))
    rounds = np.arange(SMOOTHED, ROUNDS + 1)
    ratios = []
    for k in range(ROUNDS // 4 - SMOOTHED, rounds.size, 5):
        if own[-1] <= other[k]:
            ratios.append(np.interp(-other[k], -own, rounds) / rounds[k])
    return float(np.exp(np.mean(np.log(ratios))))


def page(lines: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of the page."""
    yield "# What types of numbers cost: measured in one round, and shown by training\n"
    yield f"One plan, I = {INTERVAL}, {ROUNDS} rounds, 20 devices. Factors on the rounds: the mean of {MEASUREMENTS}"
    yield "measurements of the exact run, and the factor that training losses show; points of accuracy above or below"
    yield "the exact run's. Mean over seeds, and the range. By `python benchmarks/precision.py`.\n"
    yield "| workload | type | seeds | measured | shown by training | points |"
    yield "|---|---|---|---|---|---|"
    by_key = {(line["workload"], line["wire_dtype"], line["seed"]): line for line in lines}
    for name in dict.fromkeys(line["workload"] for line in lines):
        for wire in TYPES:
            seeds = [s for s in range(SEEDS) if {(name, wire, s), (name, "float32", s)} <= by_key.keys()]
            if not seeds:
                continue
            pairs = [(by_key[name, wire, s], by_key[name, "float32", s]) for s in seeds]
            measured = [float(np.mean([row[wire] for row in exact["factors"]])) for _, exact in pairs]
            found = [shown(np.array(own["losses"]), np.array(exact["losses"])) for own, exact in pairs]
            points = [100 * (own["accuracy"] - exact["accuracy"]) for own, exact in pairs]
            cells = [_range(measured, ".3f"), _range(found, ".3f"), _range(points, "+.1f")]
            yield f"| {name} | {wire} | {len(seeds)} | {' | '.join(cells)} |"


def _range(values: list[float], form: str) -> str:
    return f"{np.mean(values):{form}} ({min(values):{form}} … {max(values):{form}})"


def main() -> None:
    """Run what is missing, then write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=DEFAULT_WORKLOADS)
    parser.add_argument("--out", type=Path, default=RESULTS, help="where results go; default docs/results")
    parser.add_argument("--only-report", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    file = options.out / "precision.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    known = {(line["workload"], line["wire_dtype"], line["seed"]) for line in lines}
    wanted = [(name, wire, seed) for seed in range(SEEDS) for name in options.workloads for wire in ("float32", *TYPES)]
    for key in () if options.only_report else [key for key in wanted if key not in known]:
        lines.append(run(key))
        with file.open("a") as out:
            out.write(json.dumps(lines[-1]) + "\n")
        print(*key, flush=True)
    (options.out / "precision.md").write_text("\n".join(page(lines)) + "\n")


if __name__ == "__main__":
    main()
