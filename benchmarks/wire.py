"""What do fewer bits on the wire and mini-batches in parts bring, and what do they cost?

Every workload is trained by AdaptSFL with equally many rounds in each way, on the same mini-batches, with three seeds:
activations and gradients in one type or in the type that the plan chooses, mini-batches whole or in as many parts as
the plan chooses. Time is virtual. The page has the time to 90 % and to 97 % of the best accuracy that the paper's way
(float32, whole mini-batches) reached with the same seed, over its time, and the best accuracy in points above or below
its own. Training has what arrives of the rounded numbers, and comparing types takes time, so that both are in the
times.

    python benchmarks/wire.py                                   # all that is missing of the four ways: hours
    python benchmarks/wire.py --types int8 int4 --parts 1       # one type for the whole run
    python benchmarks/wire.py --workloads digits-shards --fleets table2
    python benchmarks/wire.py --only-report

Every run that ends is one line in docs/results/wire.jsonl, and is not run again.
"""

import argparse
import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from adaptivity import BATCH, DEVICES, FLEETS, SEEDS, WORKLOADS

from adaptsfl.config import Recipe, parse
from adaptsfl.costs import WIRE_DTYPES
from adaptsfl.simulation.experiment import Experiment

RESULTS = Path(__file__).parent.parent / "docs" / "results"
SHARES = (0.90, 0.97)
ROUNDS, MOST_ROUNDS = 300, 900
DEFAULT_WORKLOADS = ("digits-iid", "digits-dirichlet", "digits-shards", "cifar10-dirichlet", "cifar10-shards-cosine")
TYPES = ("float32", "auto", *WIRE_DTYPES[1:])
Key = tuple[str, str, str, str, int]  # workload, fleet, type, parts, seed
PAPER = ("float32", "1")


def recipe_of(workload: str, fleet: str, dtype: str, parts: str, target: float | None) -> Recipe:
    """Return the recipe of AdaptSFL's run; with a target it may take more rounds, and ends there."""
    chosen = WORKLOADS[workload]
    content: dict[str, Any] = {
        "name": f"{workload}-{fleet}-{dtype}" + ("" if parts == "1" else "-parts"),
        "model": {**chosen.model, "wire_dtype": dtype},
        "training": {"batch_size": BATCH, **chosen.training},
        "data": {"name": chosen.data, "partition": chosen.partition, "path": os.environ.get("ADAPTSFL_DATA")},
        "fleet": {"devices": DEVICES, **FLEETS[fleet]},
        "planner": {"micro_batches": 1 if parts == "1" else parts},
        "run": {
            "policies": ["adaptsfl"],
            "rounds": MOST_ROUNDS if target else ROUNDS,
            "target_accuracy": target,
            "evaluate_every": 5,
            "test_samples": 1000,
        },
    }
    if chosen.data == "digits" or content["data"]["path"] is None:
        del content["data"]["path"]
    return parse(Recipe, content)


def run(key: Key, folder: Path, target: float | None) -> dict[str, Any]:
    """Train one run and return its line."""
    workload, fleet, dtype, parts, seed = key
    recipe = recipe_of(workload, fleet, dtype, parts, target)
    assert recipe.run is not None
    recipe = recipe.model_copy(update={"run": recipe.run.model_copy(update={"seed": seed})})
    (found,) = Experiment(recipe, folder / (f"{recipe.name}-{seed}" + ("-longer" if target else ""))).execute()
    evaluations = [(time_s, accuracy) for block in found.blocks for _, time_s, accuracy, _ in block.evaluations]
    last = found.blocks[-1]
    chosen: Counter[str] = Counter()
    for block in found.blocks:
        chosen[f"{block.wire_dtype}, {block.micro_batches} parts, I {block.interval}"] += block.rounds
    return {
        "workload": workload,
        "fleet": fleet,
        "wire_dtype": dtype,
        "micro_batches": parts,
        "seed": seed,
        "rounds": last.last_round,
        "time_s": last.time_s,
        "bits": sum(block.bits for block in found.blocks),
        "evaluations": evaluations,
        "chosen": dict(chosen.most_common()),  # rounds
        "wires": [block.wires for block in found.blocks if block.wires],
    }


def key_of(line: dict[str, Any]) -> Key:
    """Return what identifies a line."""
    return line["workload"], line["fleet"], line["wire_dtype"], line.get("micro_batches", "1"), line["seed"]


def targets(lines: dict[Key, dict[str, Any]], key: Key) -> list[float]:
    """Return the accuracies by which a run is judged; none before the paper's way has run."""
    paper = lines.get((*key[:2], *PAPER, key[4]))
    return [] if paper is None else [share * max(accuracy for _, accuracy in paper["evaluations"]) for share in SHARES]


def run_missing(wanted: list[Key], lines: dict[Key, dict[str, Any]], folder: Path, file: Path) -> None:
    """Do all runs that have not been done, and those again that need more rounds to reach the last target."""
    for key in wanted:
        for longer in (False, True):
            given = targets(lines, key)
            short = key in lines and lines[key]["rounds"] <= ROUNDS and given
            missed = short and time_to(lines[key], given[-1]) is None
            if key not in lines if not longer else missed:
                lines[key] = run(key, folder, given[-1] if longer else None)
                with file.open("a") as out:
                    out.write(json.dumps(lines[key]) + "\n")
                print(*key, "longer" if longer else "", flush=True)


def page(lines: dict[Key, dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of the page."""
    yield "# Fewer bits on the wire, and mini-batches in parts\n"
    yield f"AdaptSFL, {ROUNDS} rounds in every way, the same seeds and mini-batches; times are virtual, over those of"
    yield "float32 and whole mini-batches with the same seed (geometric mean over seeds; – if a seed did not reach it)."
    yield f"Who has not reached 97 % by then goes on until it has, up to {MOST_ROUNDS} rounds. Accuracy is the best of"
    yield "the run, in points above or below that way's (mean, and the worst seed)."
    yield "Type and parts: given, or auto, as the plan chooses. By `python benchmarks/wire.py`.\n"
    heads = [f"time to {share:.0%} of its best" for share in SHARES]
    yield f"| workload | fleet | type | parts | seeds | {' | '.join(heads)} | points | worst |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for workload, fleet, dtype, parts in dict.fromkeys(key[:4] for key in sorted(lines, key=_order)):
        both = [((workload, fleet, dtype, parts, seed), (workload, fleet, *PAPER, seed)) for seed in range(SEEDS)]
        pairs = [(lines[own], lines[paper]) for own, paper in both if {own, paper} <= lines.keys()]
        if pairs:
            yield f"| {workload} | {fleet} | {dtype} | {parts} | {len(pairs)} | {' | '.join(_cells(pairs))} |"


def _order(key: Key) -> tuple[str, str, str, int, int]:
    return key[0], key[1], key[3], TYPES.index(key[2]), key[4]


def _cells(pairs: list[tuple[dict[str, Any], dict[str, Any]]]) -> list[str]:
    cells = []
    for share in SHARES:
        ratios = []
        for own, exact in pairs:
            target = share * max(accuracy for _, accuracy in exact["evaluations"])
            times = [time_to(line, target) for line in (own, exact)]
            ratios.append(None if times[0] is None or times[1] is None else times[0] / times[1])
        cells.append("–" if None in ratios else f"{np.exp(np.mean(np.log(np.array(ratios, dtype=float)))):.2f}")
    points = [
        100 * (max(a for _, a in own["evaluations"]) - max(a for _, a in exact["evaluations"])) for own, exact in pairs
    ]
    return [*cells, f"{np.mean(points):+.1f}", f"{min(points):+.1f}"]


def time_to(line: dict[str, Any], target: float) -> float | None:
    """Return the virtual seconds to an accuracy; None if the run never had it."""
    return next((time_s for time_s, accuracy in line["evaluations"] if accuracy >= target), None)


def main() -> None:
    """Run what is missing, then write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=DEFAULT_WORKLOADS)
    parser.add_argument("--fleets", nargs="+", choices=FLEETS, default=("table2", "heterogeneous"))
    parser.add_argument("--types", nargs="+", choices=TYPES, default=("float32", "auto"))
    parser.add_argument("--parts", nargs="+", choices=("1", "auto"), default=("1", "auto"))
    parser.add_argument("--runs", type=Path, default=Path("runs/wire"), help="where runs are kept; default %(default)s")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where results go; default docs/results")
    parser.add_argument("--only-report", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    file = options.out / "wire.jsonl"
    # A run that was repeated with more rounds counts with its last line.
    lines = {key_of(line): line for line in map(json.loads, file.read_text().splitlines())} if file.exists() else {}
    wanted = [
        (workload, fleet, dtype, parts, seed)
        for seed in range(SEEDS)
        for fleet in options.fleets
        for workload in options.workloads
        for parts in options.parts
        for dtype in options.types
    ]
    if not options.only_report:
        run_missing(wanted, lines, options.runs, file)
    (options.out / "wire.md").write_text("\n".join(page(lines)) + "\n")


if __name__ == "__main__":
    main()
