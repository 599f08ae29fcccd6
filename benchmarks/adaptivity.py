"""Do the plans really save time? AdaptSFL against every policy and against a grid of fixed plans, judged in hindsight.

Every plan (I, L_c) of a grid is trained from start to end, and so is every policy, on the same data, fleet and seed.
The figure that matters is the time in which AdaptSFL reaches an accuracy over the time of the plan that turned out to
be the fastest of the grid: nobody knows that plan before. Two accuracies are judged, 90 % and 97 % of the best that
any fixed plan reached. Two fleets: the paper's (Table II), and one in which devices differ by two decades.

    python benchmarks/adaptivity.py                     # everything: hours; interrupted, it goes on where it was
    python benchmarks/adaptivity.py --cases digits-iid  # one case

Results go to docs/results/adaptivity.md and .json, one case after another; runs are kept in --runs.
"""

import argparse
import json
import math
import multiprocessing
import platform
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from adaptsfl.config import Recipe, parse
from adaptsfl.runs.folder import Run
from adaptsfl.simulation.experiment import Experiment, Job, Watcher

INTERVALS = (1, 2, 5, 10, 15, 25, None)
POLICIES = (
    "adaptsfl",
    "adaptsfl@paper",
    "rma+ms",
    "ma+rms",
    "rma+rms",
    "dama+rms",
    "rma+ams",
    "sfl",
    "psl",
    "fedavg",
    "splitfed-v1",
    "splitfed-v2",
    "vanilla-sl",
    "centralized",
)
SHARES = (0.90, 0.97)  # of the best accuracy of any fixed plan
FLEETS: dict[str, dict[str, Any]] = {
    "table2": {"base": "paper"},
    "heterogeneous": {
        "base": "heterogeneous",
        "device_tflops": [0.05, 5.0],
        "uplink_mbps": [1.0, 200.0],
        "fed_uplink_mbps": [1.0, 200.0],
        "redraw": [],
    },
}
DIGITS = {
    "model": {"name": "vgg_digits", "options": {"norm": "group", "width": 0.5}},
    "training": {"learning_rate": 0.1},
    "data": {"name": "digits"},
    "run": {"rounds": 120, "evaluate_every": 4},
    "cuts": (1, 2, 4, 6),
}
CIFAR = {
    "model": {"name": "vgg11", "options": {"norm": "batch", "width": 0.125}},
    "training": {"learning_rate": 0.1},
    "data": {"name": "cifar10"},
    "run": {"rounds": 150, "evaluate_every": 10, "test_samples": 2000},
    "cuts": (2, 4, 8),
}
SHARDS = {"kind": "shards", "shards_per_device": 2}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "digits-iid": (DIGITS, {"kind": "iid"}),
    "digits-shards": (DIGITS, {**SHARDS, "shard_size": 35}),
    "cifar10-iid": (CIFAR, {"kind": "iid"}),
    "cifar10-shards": (CIFAR, SHARDS),
}
MEASURE_EVERY = 50  # rounds: runs are short
PAPER_TARGET = 1.0  # ε of the paper's mode: ‖∇f‖² in the middle of training, as measured


def experiment(case: str, folder: Path) -> Experiment:
    """Return all runs of one case."""
    setting, partition = CASES[case]
    options: dict[str, dict[str, Any]] = {"adaptsfl@paper": {"mode": "paper", "target": PAPER_TARGET}}
    grid = []
    for cut in setting["cuts"]:
        for interval in INTERVALS:
            name = f"psl@L{cut}" if interval is None else f"fixed@I{interval}-L{cut}"
            options[name] = {"cut": cut} if interval is None else {"cut": cut, "interval": interval}
            grid.append(name)
    recipe = parse(
        Recipe,
        {
            "name": case,
            "model": setting["model"],
            "training": {"batch_size": 16, **setting["training"]},
            "fleet": {"devices": 20, "seed": 1},
            "data": {**setting["data"], "partition": partition},
            "adapt": {"measure_every": MEASURE_EVERY},
            "run": {**setting["run"], "fleets": FLEETS, "options": options, "policies": ["adaptsfl"]},
        },
    )
    return Experiment(recipe, folder / case, policies=[*POLICIES, *grid])


def judged(runs: list[Run]) -> list[dict[str, Any]]:
    """Return, per fleet and target, every policy's time and the hindsight ratios."""
    rows = []
    for fleet in FLEETS:
        mine = {run.policy: run for run in runs if f"-{fleet}-" in run.folder.name}
        grid = {name: run for name, run in mine.items() if name.startswith(("fixed@", "psl@"))}
        best_accuracy = max(run.best_accuracy or 0.0 for run in grid.values())
        for share in SHARES:
            target = share * best_accuracy
            times = {name: run.time_to(target) for name, run in mine.items()}
            reached = {name: time_s for name in grid if (time_s := times[name]) is not None}
            best = min(reached, key=lambda name: reached[name])
            rows.append(
                {
                    "fleet": fleet,
                    "share": share,
                    "target": target,
                    "best_fixed": best,
                    "best_fixed_s": reached[best],
                    "median_fixed_s": sorted(times[name] or math.inf for name in grid)[len(grid) // 2],
                    "times_s": times,
                    "ratios": {
                        name: None if time_s is None else time_s / reached[best] for name, time_s in times.items()
                    },
                }
            )
    return rows


def ratio(value: float | None) -> str:
    """Return a ratio as people read it."""
    return "–" if value is None or math.isinf(value) else f"{value:.2f}"


def page(results: dict[str, Any]) -> str:
    """Return the results as a Markdown page."""
    lines = [
        "# Do the plans really save time?",
        "",
        "Written by `python benchmarks/adaptivity.py`, which says what is measured. All numbers: adaptivity.json.",
        "Virtual seconds to 90 % and 97 % of the best accuracy that any plan of the grid reached, over those of the",
        "plan of the grid that turned out to be the fastest. 20 devices, batches of 16, plain SGD, one seed. A dash:",
        "the accuracy was not reached within the rounds. AdaptSFL pays for its measurements; fixed plans know",
        "everything and measure nothing. `psl@L4` is I = ∞.",
    ]
    for case, found in results["cases"].items():
        setting = CASES[case][0]
        lines += [
            "",
            f"## {case}",
            "",
            f"{setting['model']['name']}, {setting['run']['rounds']} rounds, grid I ∈ {{1, 2, 5, 10, 15, 25, ∞}} × "
            f"L_c ∈ {{{', '.join(map(str, setting['cuts']))}}}; {found['wall_s'] / 60:.0f} minutes here.",
            "",
            "| | " + " | ".join(f"{row['fleet']}, accuracy {row['target']:.3f}" for row in found["rows"]) + " |",
            "|---|" + "---|" * len(found["rows"]),
            "| fastest fixed plan | "
            + " | ".join(f"{row['best_fixed']}: {row['best_fixed_s']:.3g} s" for row in found["rows"])
            + " |",
            "| median fixed plan | "
            + " | ".join(ratio(row["median_fixed_s"] / row["best_fixed_s"]) for row in found["rows"])
            + " |",
        ]
        for name in POLICIES:
            cells = " | ".join(ratio(row["ratios"][name]) for row in found["rows"])
            lines.append(f"| {'**AdaptSFL**' if name == 'adaptsfl' else name} | {cells} |")
    return "\n".join(lines) + "\n"


def run_case(case: str, folder: Path, threads: int) -> None:
    """Do one case and add it to the results."""
    torch.set_num_threads(threads)
    console = Console()

    def ended(_job: Job, run: Run) -> None:
        console.print(
            f"{case} {run.folder.name}: best {run.best_accuracy}, {run.time_s:.4g} virtual s", highlight=False
        )

    runs = experiment(case, folder).execute(Watcher(ends=ended))
    result = {"rows": judged(runs), "wall_s": sum(run.wall_s for run in runs)}
    (folder / case / "result.json").write_text(json.dumps(result))


def save(folder: Path, results: Path) -> None:
    """Write what the cases done so far have given."""
    cases = {case: json.loads(file.read_text()) for case in CASES if (file := folder / case / "result.json").exists()}
    machine = {"python": platform.python_version(), "torch": torch.__version__}
    results.mkdir(parents=True, exist_ok=True)
    found = {"machine": machine, "cases": cases}
    (results / "adaptivity.json").write_text(json.dumps(found, indent=1) + "\n")
    (results / "adaptivity.md").write_text(page(found))


def main() -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--runs", type=Path, default=Path("runs/adaptivity"), help="where runs are kept")
    parser.add_argument("--jobs", type=int, default=1, help="cases side by side, of one thread each")
    parser.add_argument("--out", type=Path, default=Path("docs/results"), help="folder for adaptivity.md and .json")
    options = parser.parse_args()
    threads = 1 if options.jobs > 1 else torch.get_num_threads()
    context = multiprocessing.get_context("spawn")
    with context.Pool(options.jobs, maxtasksperchild=1) as pool:
        todo = [(case, options.runs, threads) for case in options.cases]
        pool.starmap(run_case, todo, chunksize=1)
    save(options.runs, options.out)
    Console().print(page(json.loads((options.out / "adaptivity.json").read_text())), highlight=False)


if __name__ == "__main__":
    main()
