"""The exact solver against the paper's (block-coordinate descent over MILPs solved by HiGHS), in one run.

Each problem is VGG-16 on a sampled fleet: Table II's ranges (`paper`), or two decades in every resource
(`heterogeneous`). The edge server and its links grow with the fleet, so that a large problem is not just one where the
server is always the bottleneck. Drift and target are drawn so that good intervals are neither 1 nor endless.

On some sizes the exact solver also plans the same fleets with rounds as they are measured: powers of the interval,
p = 1 − exp(−κ L_c/L), and a table of such powers with steps in it.

    python benchmarks/planner.py            # about 15 minutes, most of it HiGHS
    python benchmarks/planner.py --quick    # a minute

Times are seconds of the process's own CPU time, which other work on the machine disturbs little; ratios are within one
run, and the exact solver's time is the median of three. The table is printed and saved as Markdown, every number beside
it as JSON.
"""

import argparse
import dataclasses
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
from adaptsfl.convergence import Constants, ConvergenceModel, PowerRounds, RoundsModel, RoundsTable
from adaptsfl.fleet import FLEETS
from adaptsfl.paper_costs import vgg16
from adaptsfl.planner import Plan, PlanProblem

BATCH_SIZE, LEARNING_RATE, CLASSES = 16, 5e-4, 10
DEVICES_PER_SERVER = 20  # Table II: one server of 20 TFLOPS for 20 devices
BCD_LIMIT_S = 120.0
KAPPAS = (0.17, 0.4, 1.0)  # how fast p rises with depth: from data that are alike to data sorted by label
INTERVALS = np.array([1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64])  # of the table


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


def measured_rounds(layers: int, seed: int) -> dict[str, RoundsModel]:
    """Return rounds as powers, and as a table that climbs around them in uneven steps."""
    deepest = np.arange(1, layers + 1)
    powers = PowerRounds(1 - np.exp(-KAPPAS[seed % len(KAPPAS)] * deepest / layers))
    rounds = powers.rounds(INTERVALS.astype(np.float64), deepest[:, None])
    noisy = rounds * np.exp(np.random.default_rng(seed).normal(0, 0.1, rounds.shape))
    table = RoundsTable(INTERVALS, np.maximum.accumulate(np.maximum.accumulate(noisy, axis=0), axis=1))
    return {"powers": powers, "table": table}


def timed(problem: PlanProblem, solver: str, limit_s: float = float("inf")) -> tuple[Plan, float]:
    """Return the plan and the CPU seconds that it took; the limit is in seconds on the wall."""
    started = time.process_time()
    plan = planner.plan(problem, solver, limit_s)
    return plan, time.process_time() - started


def measure_rounds(problem: PlanProblem, seed: int) -> dict[str, Any]:
    """Solve one problem with the bound, with powers and with a table, in turns; return the numbers of each."""
    models = {"bound": problem.convergence, **measured_rounds(problem.layers, seed)}
    problems = {name: dataclasses.replace(problem, convergence=model) for name, model in models.items()}
    runs = [{name: timed(one, "exact") for name, one in problems.items()} for _ in range(3)]
    return {
        name: {
            "exact_s": statistics.median(run[name][1] for run in runs),
            "status": plan.status,
            "nodes": plan.nodes,
            "interval": plan.interval,
            "deepest": plan.deepest,
        }
        for name, (plan, _) in runs[0].items()
    }


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
    rows: list[dict[str, Any]] = []
    for devices, problems, both in sizes:
        for fleet in FLEETS:
            for seed in range(problems):
                started = time.perf_counter()
                result = measure(make_problem(fleet, devices, seed), BCD_LIMIT_S if both else None)
                rows.append({"fleet": fleet, "devices": devices, "seed": seed, **result})
                took = time.perf_counter() - started
                progress.print(f"{fleet}, {devices:,} devices, problem {seed}: {took:.1f} s", style="dim")
    return rows


def run_rounds(*, quick: bool, progress: Console) -> list[dict[str, Any]]:
    """Measure what other rounds models cost the exact solver, and return one row per problem."""
    rows = []
    for devices, fleet, seed in itertools.product([1000, 10_000 if quick else 100_000], FLEETS, range(3)):
        found = measure_rounds(make_problem(fleet, devices, seed), seed)
        rows.append({"fleet": fleet, "devices": devices, "seed": seed, **found})
        progress.print(f"rounds models: {fleet}, {devices:,} devices, problem {seed}", style="dim")
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


ROUNDS_COLUMNS = ("fleet", "devices", "rounds", "exact", "÷ bound", "interval", "deepest cut")


def rounds_summary(rows: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Return one line per fleet, size and rounds model, with ranges over its problems."""
    lines: list[tuple[str, ...]] = []
    for fleet, devices in itertools.product(FLEETS, sorted({row["devices"] for row in rows})):
        group = [row for row in rows if (row["fleet"], row["devices"]) == (fleet, devices)]
        for name in ("bound", "powers", "table"):
            lines.append(
                (
                    fleet,
                    f"{devices:,}",
                    name,
                    spread([row[name]["exact_s"] * 1e3 for row in group], "{:,.1f} ms"),
                    spread([row[name]["exact_s"] / row["bound"]["exact_s"] for row in group], "{:.2f}"),
                    spread([row[name]["interval"] for row in group], "{}"),
                    spread([row[name]["deepest"] for row in group], "{}"),
                )
            )
    return lines


def markdown(columns: tuple[str, ...], lines: list[tuple[str, ...]]) -> str:
    """Return a table of a Markdown page."""
    return "\n".join(f"| {' | '.join(line)} |" for line in [columns, ("---",) * len(columns), *lines])


def page(rows: list[dict[str, Any]], rounds: list[dict[str, Any]], growth_lines: list[str], quick: bool) -> str:
    """Return the results as a Markdown page."""
    proven = sum(row["exact_status"] == "optimal" for row in rows)
    command = "python benchmarks/planner.py" + (" --quick" if quick else "")
    models = [row[name] for row in rounds for name in ("bound", "powers", "table")]
    proven_rounds = sum(model["status"] == "optimal" for model in models)
    return f"""# The exact solver against the paper's

Written by `{command}`; every number is in planner.json. Times are CPU seconds of one process, ranges
are over the problems. BCD is the paper's Algorithm 3 with HiGHS, stopped after {BCD_LIMIT_S:.0f} s; where it was cut
off, its plan is the best it had by then and the ratio a lower limit. Of `exact`'s {len(rows)} plans {proven} are
proven optimal.

{markdown(COLUMNS, summary(rows))}

{" ".join(growth_lines)}

## Other rounds models

The exact solver on the same fleets, with the bound, with rounds as powers of the interval, and with a table of
{len(INTERVALS)} intervals. Of {len(models)} plans {proven_rounds} are proven optimal.

{markdown(ROUNDS_COLUMNS, rounds_summary(rounds))}
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
    rounds = run_rounds(quick=options.quick, progress=console)
    powers = {fleet: growth(rows, fleet) for fleet in FLEETS}
    growth_lines = [
        f"On {fleet} fleets exact's time grows as N^{power:.2f} from 1,000 devices on."
        for fleet, power in powers.items()
    ]
    for columns, lines in ((COLUMNS, summary(rows)), (ROUNDS_COLUMNS, rounds_summary(rounds))):
        table = Table(*columns)
        for line in lines:
            table.add_row(*line)
        console.print(table)
    console.print(*growth_lines, sep="\n")
    machine = {"python": platform.python_version(), "numpy": np.__version__, "processor": platform.machine()}
    result = {"machine": machine, "bcd_limit_s": BCD_LIMIT_S, "growth": powers, "rows": rows, "rounds": rounds}
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "planner.json").write_text(json.dumps(result, indent=1) + "\n")
    (options.out / "planner.md").write_text(page(rows, rounds, growth_lines, options.quick))
    console.print(f"saved to {options.out}")


if __name__ == "__main__":
    main()
