"""The exact solver against the paper's (block-coordinate descent over MILPs solved by HiGHS), in one run.

Each problem is VGG-16 on a sampled fleet: Table II's ranges (`paper`), or two decades in every resource
(`heterogeneous`). The edge server and its links grow with the fleet, so that a large problem is not just one where the
server is always the bottleneck. Drift and target are drawn so that good intervals are neither 1 nor endless.

    python benchmarks/planner.py            # about 15 minutes, most of it HiGHS
    python benchmarks/planner.py --quick    # a minute

Times are seconds of the process's own CPU time, which other work on the machine disturbs little; ratios are within one
run, and the exact solver's time is the median of three. The table is printed and saved as Markdown, every number beside
it as JSON.
"""

import argparse
import itertools
import json
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from adaptsfl import planner
from adaptsfl.convergence import Constants, ConvergenceModel
from adaptsfl.fleet import FLEETS
from adaptsfl.paper_costs import vgg16
from adaptsfl.planner import Plan, PlanProblem

BATCH_SIZE, LEARNING_RATE, CLASSES = 16, 5e-4, 10
DEVICES_PER_SERVER = 20  # Table II: one server of 20 TFLOPS for 20 devices
BCD_LIMIT_S = 120.0


def make_problem(fleet: str, devices: int, seed: int) -> PlanProblem:
    """Return one problem of the benchmark."""
    rng = np.random.default_rng([seed, devices])
    costs = vgg16(CLASSES, BATCH_SIZE)
    sampled = FLEETS[fleet].sample(devices, rng)
    server = ("server.flops", "server.to_fed_bps", "server.from_fed_bps")
    sampled = sampled.scaled(devices / DEVICES_PER_SERVER, *server)
    shape = np.linspace(0.2, 3.0, costs.layers) * np.exp(rng.normal(0, 0.3, costs.layers))
    moment = np.exp(rng.uniform(np.log(0.1), np.log(10))) * shape / shape.sum()
    constants = Constants(20.0, moment, moment / 2, float(np.log(CLASSES)), rng.uniform(0.1, 0.5))
    model = ConvergenceModel.from_constants(constants, LEARNING_RATE, devices)
    return PlanProblem(sampled, costs, model, BATCH_SIZE)


def timed(problem: PlanProblem, solver: str, limit_s: float = float("inf")) -> tuple[Plan, float]:
    """Return the plan and the CPU seconds that it took; the limit is in seconds on the wall."""
    started = time.process_time()
    plan = planner.plan(problem, solver, limit_s)
    return plan, time.process_time() - started


def measure(problem: PlanProblem, bcd_limit_s: float | None) -> dict[str, Any]:
    """Solve one problem with both solvers (or exact alone) and compare."""
    exact = [timed(problem, "exact") for _ in range(3)]
    exact_s = statistics.median(seconds for _, seconds in exact)
    best = exact[0][0]
    row: dict[str, Any] = {
        "exact_s": exact_s,
        "exact_status": best.status,
        "nodes": best.nodes,
        "interval": best.interval,
        "different_cuts": len(np.unique(best.cuts)),
        "predicted_time_s": best.predicted_time_s,
    }
    if bcd_limit_s is not None:
        descent, bcd_s = timed(problem, "bcd", bcd_limit_s)
        row |= {
            "bcd_s": bcd_s,
            "bcd_cut_off": descent.solve_s >= bcd_limit_s,
            "milps": descent.nodes,
            "bcd_ratio": bcd_s / exact_s,
            "bcd_gap": descent.predicted_time_s / best.predicted_time_s - 1,
        }
    return row


def run(*, quick: bool, progress: Console) -> list[dict[str, Any]]:
    """Measure every fleet and size, and return one row per problem."""
    # (devices, problems, whether the descent runs too)
    sizes = [(20, 5, True), (100, 3, True), (1000, 1, True), (10_000, 3, False), (100_000, 3, False)]
    if quick:
        sizes = [(20, 2, True), (100, 1, True), (1000, 2, False), (10_000, 1, False)]
    rows = []
    for devices, problems, both in sizes:
        for fleet in FLEETS:
            for seed in range(problems):
                started = time.perf_counter()
                result = measure(make_problem(fleet, devices, seed), BCD_LIMIT_S if both else None)
                rows.append({"fleet": fleet, "devices": devices, "seed": seed, **result})
                took = time.perf_counter() - started
                progress.print(f"{fleet}, {devices:,} devices, problem {seed}: {took:.1f} s", style="dim")
    return rows


def growth(rows: list[dict[str, Any]], fleet: str) -> float:
    """Return the power of N with which the exact solver's time grows, from 1000 devices on."""
    points = [(row["devices"], row["exact_s"]) for row in rows if row["fleet"] == fleet and row["devices"] >= 1000]
    sizes, times = np.log(np.array(points)).T
    return float(np.polyfit(sizes, times, 1)[0])


COLUMNS = ("fleet", "devices", "problems", "exact", "BCD + HiGHS", "ratio", "BCD's plan slower by", "different cuts")


def summary(rows: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Return one line per fleet and size, with ranges over its problems."""
    lines: list[tuple[str, ...]] = []
    for fleet, devices in itertools.product(FLEETS, sorted({row["devices"] for row in rows})):
        group = [row for row in rows if (row["fleet"], row["devices"]) == (fleet, devices)]
        both = [row for row in group if "bcd_s" in row]
        cut_off = any(row["bcd_cut_off"] for row in both)
        lines.append(
            (
                fleet,
                f"{devices:,}",
                str(len(group)),
                spread([row["exact_s"] * 1e3 for row in group], "{:,.1f} ms"),
                spread([row["bcd_s"] for row in both], "{:,.2f} s") + (" (cut off)" if cut_off else ""),
                ("over " if cut_off else "") + spread([row["bcd_ratio"] for row in both], "{:,.0f}"),
                spread([row["bcd_gap"] * 100 for row in both], "{:.2g} %"),
                spread([row["different_cuts"] for row in group], "{}"),
            )
        )
    return lines


def page(rows: list[dict[str, Any]], growth_lines: list[str], quick: bool) -> str:
    """Return the results as a Markdown page."""
    lines = summary(rows)
    proven = sum(row["exact_status"] == "optimal" for row in rows)
    command = "python benchmarks/planner.py" + (" --quick" if quick else "")
    table = "\n".join(f"| {' | '.join(line)} |" for line in [COLUMNS, ("---",) * len(COLUMNS), *lines])
    return f"""# The exact solver against the paper's

Written by `{command}`; every number is in planner.json. Times are CPU seconds of one process, ranges
are over the problems. BCD is the paper's Algorithm 3 with HiGHS, stopped after {BCD_LIMIT_S:.0f} s; where it was cut
off, its plan is the best it had by then and the ratio a lower limit. Of `exact`'s {len(rows)} plans {proven} are
proven optimal.

{table}

{" ".join(growth_lines)}
"""


def spread(values: list[float], form: str) -> str:
    """Return the least and the largest value, or one if they print the same."""
    if not values:
        return "–"
    low, high = form.format(min(values)), form.format(max(values))
    return low if low == high else f"{low.split()[0]}–{high}"


def main() -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer and smaller problems")
    parser.add_argument("--out", type=Path, default=Path("docs/results"), help="folder for planner.md and planner.json")
    options = parser.parse_args()
    console = Console(width=140)
    rows = run(quick=options.quick, progress=console)
    lines = summary(rows)
    powers = {fleet: growth(rows, fleet) for fleet in FLEETS}
    growth_lines = [
        f"On {fleet} fleets exact's time grows as N^{power:.2f} from 1,000 devices on."
        for fleet, power in powers.items()
    ]
    table = Table(*COLUMNS)
    for line in lines:
        table.add_row(*line)
    console.print(table, *growth_lines, sep="\n")
    machine = {"python": platform.python_version(), "numpy": np.__version__, "processor": platform.machine()}
    result = {"machine": machine, "bcd_limit_s": BCD_LIMIT_S, "growth": powers, "rows": rows}
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "planner.json").write_text(json.dumps(result, indent=1) + "\n")
    (options.out / "planner.md").write_text(page(rows, growth_lines, options.quick))
    console.print(f"saved to {options.out}")


if __name__ == "__main__":
    main()
