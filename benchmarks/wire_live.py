"""Wall time to accuracies on shaped links: AdaptSFL as in the paper, with types of numbers, parts, and both to choose.

The links, processes and data are those of live.py in its steady setting; here only what is sent, and how, differs. The
ways take turns, seed by seed.

    python benchmarks/wire_live.py               # as root; goes on with what docs/results/wire_live.jsonl lacks
    python benchmarks/wire_live.py --seeds 1     # one seed only
    python benchmarks/wire_live.py --only paper  # some of the ways only

Every run is a line of wire_live.jsonl; the table has seconds to each accuracy, and their ratios to the paper's way.
"""

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import live
from rich.console import Console
from rich.table import Table

from adaptsfl.deploy.security.certs import make_certificates

ACCURACIES = (0.8, 0.9, 0.95)
PARTS, TYPES = 'planner.micro_batches="auto"', 'model.wire_dtype="auto"'
WAYS: dict[str, tuple[str, ...]] = {"paper": (), "types": (TYPES,), "parts": (PARTS,), "both": (PARTS, TYPES)}
LIMIT_S = 240.0


def run(way: str, seed: int, folder: Path, certs: Path, limit_s: float) -> dict[str, Any]:
    """Train until the last accuracy, or the end of the time; return the seconds to each accuracy."""
    case = live.Case("steady", seed, "adaptsfl")
    live.run(case, folder, certs, limit_s, WAYS[way])
    blocks = [json.loads(line) for line in (folder / "run" / "edge" / "record.jsonl").read_text().splitlines()]
    rows = [row for block in blocks for row in block["evaluations"]]
    reached = [next((row[1] for row in rows if row[2] >= accuracy), None) for accuracy in ACCURACIES]
    wall_s = sum(block["estimates"]["measured"]["wall_s"] for block in blocks)
    return {
        "way": way,
        "seed": seed,
        "seconds": dict(zip(map(str, ACCURACIES), reached, strict=True)),
        "rounds": blocks[-1]["first_round"] + blocks[-1]["rounds"] - 1,
        "predicted_over_measured": sum(block["predicted_s"] for block in blocks) / wall_s,
        "sent": [[block["first_round"], block["micro_batches"], block["wire_dtype"]] for block in blocks],
        "plans": [[block["first_round"], block["interval"], block["cuts"]] for block in blocks],
    }


def table(results: Sequence[dict[str, Any]]) -> Table:
    """Return a line per way: mean seconds to each accuracy over the seeds that the paper's way has, and their ratio."""
    shown = Table("way", "seeds", *(f"{accuracy:.0%}, s" for accuracy in ACCURACIES), "over the paper's", "predicted")
    by = {(result["way"], result["seed"]): result for result in results}
    for way in WAYS:
        seeds = [seed for other, seed in by if other == way and ("paper", seed) in by]
        if not seeds:
            continue
        cells = []
        for accuracy in map(str, ACCURACIES):
            found = [by[way, seed]["seconds"][accuracy] for seed in seeds]
            base = [by["paper", seed]["seconds"][accuracy] for seed in seeds]
            if None in found or None in base:
                cells.append(("missed", "–"))
                continue
            mean = statistics.geometric_mean(found)
            cells.append((f"{mean:.1f}", f"{mean / statistics.geometric_mean(base):.2f}"))
        ratios = ", ".join(ratio for _, ratio in cells)
        right = statistics.median(by[way, seed]["predicted_over_measured"] for seed in seeds)
        shown.add_row(way, str(len(seeds)), *(seconds for seconds, _ in cells), ratios, f"{right:.2f}")
    return shown


def main() -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=live.SEEDS)
    parser.add_argument("--only", nargs="*", choices=list(WAYS), help="these ways only")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="most seconds of a run")
    parser.add_argument("--out", type=Path, default=Path("docs/results"), help="folder of wire_live.jsonl")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    live.CONTEXT.set_forkserver_preload(list(live.PRELOADED))
    console, file = Console(width=140), options.out / "wire_live.jsonl"
    options.out.mkdir(parents=True, exist_ok=True)
    results = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    done = {(result["way"], result["seed"]) for result in results}
    with tempfile.TemporaryDirectory() as scratch:
        certs = Path(scratch) / "certs"
        make_certificates(certs, [f"device-{k + 1}" for k in range(len(live.LINKS))])
        for seed, way in [(seed, way) for seed in range(options.seeds) for way in options.only or WAYS]:
            if (way, seed) in done:
                continue
            found = run(way, seed, Path(scratch) / f"{way}-{seed}", certs, options.limit)
            results.append(found)
            with file.open("a", encoding="utf-8") as out:
                out.write(json.dumps(found) + "\n")
            console.print(way, seed, found["seconds"], f"{found['rounds']} rounds")
    console.print(table(results))


if __name__ == "__main__":
    main()
