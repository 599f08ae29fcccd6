"""The exact solver against the paper's (block-coordinate descent over MILPs solved by HiGHS), in one run.

Each problem is VGG-16 on a sampled fleet: Table II's ranges (`paper`), or two decades in every resource
(`heterogeneous`). The edge server and its links grow with the fleet, so that a large problem is not just one where the
server is always the bottleneck. Drift and target are drawn so that good intervals are neither 1 nor endless.

On some sizes the exact solver also plans the same fleets with rounds as they are measured: powers of the interval,
p = 1 − exp(−κ L_c/L), and a table of such powers with steps in it.

A third kind of problem is hard for the exact solver: the server is the bottleneck, so that every device counts. One
server of 0.1 TFLOPS, whatever the number of devices; devices, links and the costs of 20 layers are log-uniform over
decades, so that nearly all cuts are in use.

    python benchmarks/planner.py                     # about 15 minutes, most of it HiGHS
    python benchmarks/planner.py --quick             # a minute
    python benchmarks/planner.py --only bottleneck   # only the problems whose server is the bottleneck
    python benchmarks/planner.py --only choices      # only those with parts and types of numbers to choose from

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
from unittest import mock

import numpy as np
from planner_choices import CHOICES_COLUMNS, choices_summary, run_choices
from planner_problems import BOTTLENECK_LAYERS, INTERVALS, make_bottleneck, make_problem, measured_rounds
from rich.console import Console
from rich.table import Table

from adaptsfl import planner
from adaptsfl.fleet import FLEETS
from adaptsfl.planner import Plan, PlanProblem, exact

BCD_LIMIT_S = 120.0
PROVEN = 1e-10  # gaps below are rounding
SHORT_LIMIT_S = 1.0  # of CPU time: a limit that users may set
PLAIN_LIMIT_S = 300.0  # on the wall, for the solver without the Lagrangian bound


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


def measure_bottleneck(problem: PlanProblem, seed: int) -> dict[str, Any]:
    """Solve one problem with each rounds model: to the end, with a short limit, and without the Lagrangian bound."""
    models = {"bound": problem.convergence, **measured_rounds(problem.layers, seed)}
    found: dict[str, Any] = {}
    for name, model in models.items():
        same = dataclasses.replace(problem, convergence=model)
        best, exact_s = timed(same, "exact")
        with mock.patch("time.perf_counter", time.process_time):  # the limit in CPU seconds
            stopped, _ = timed(same, "exact", SHORT_LIMIT_S)
        with mock.patch.object(exact, "CHARGED_AFTER", float("inf")):
            plain, plain_s = timed(same, "exact", PLAIN_LIMIT_S)
        found[name] = {
            "exact_s": exact_s,
            "status": best.status,
            "nodes": best.nodes,
            "interval": best.interval,
            "different_cuts": len(np.unique(best.cuts)),
            "short_gap": stopped.gap,
            "plain_s": plain_s,
            "plain_nodes": plain.nodes,
            "plain_status": plain.status,
        }
    return found


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


def run_bottleneck(*, quick: bool, progress: Console) -> list[dict[str, Any]]:
    """Measure problems whose server is the bottleneck, and return one row per problem."""
    rows = []
    for devices, seed in itertools.product([20, 100, 300] if quick else [20, 100, 300, 1000], range(2 if quick else 6)):
        found = measure_bottleneck(make_bottleneck(devices, seed), seed)
        rows.append({"devices": devices, "seed": seed, **found})
        progress.print(f"the server is the bottleneck: {devices:,} devices, problem {seed}", style="dim")
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


BOTTLENECK_COLUMNS = (
    "devices",
    "rounds",
    "exact",
    "boxes",
    "proven",
    "different cuts",
    "gap after 1 s",
    "without the Lagrangian bound",
    "boxes",
    "ratio of times: median, largest",
)


def bottleneck_summary(rows: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Return one line per size and rounds model, with medians and worst cases over its problems."""
    lines: list[tuple[str, ...]] = []
    for devices, name in itertools.product(sorted({row["devices"] for row in rows}), ("bound", "powers", "table")):
        group = [row[name] for row in rows if row["devices"] == devices]
        cut_off = any(row["plain_status"] != "optimal" for row in group)
        gap = max(row["short_gap"] for row in group)
        lines.append(
            (
                f"{devices:,}",
                name,
                middle_and_worst([row["exact_s"] for row in group], "{:.2f} s"),
                middle_and_worst([row["nodes"] for row in group], "{:,.0f}"),
                f"{sum(row['status'] == 'optimal' for row in group)} of {len(group)}",
                spread([row["different_cuts"] for row in group], "{}"),
                "none" if gap < PROVEN else f"up to {gap:.2g}",
                middle_and_worst([row["plain_s"] for row in group], "{:.2f} s") + (" (cut off)" if cut_off else ""),
                middle_and_worst([row["plain_nodes"] for row in group], "{:,.0f}"),
                middle_and_worst([row["plain_s"] / row["exact_s"] for row in group], "{:.1f}"),
            )
        )
    return lines


def middle_and_worst(values: list[float], form: str) -> str:
    """Return the median and the largest value."""
    return f"{form.format(statistics.median(values))}, {form.format(max(values))}"


def markdown(columns: tuple[str, ...], lines: list[tuple[str, ...]]) -> str:
    """Return a table of a Markdown page."""
    return "\n".join(f"| {' | '.join(line)} |" for line in [columns, ("---",) * len(columns), *lines])


def page(result: dict[str, Any]) -> str:
    """Return the results as a Markdown page."""
    rows, rounds, bottleneck = result["rows"], result.get("rounds", []), result.get("bottleneck", [])
    proven = sum(row["exact_status"] == "optimal" for row in rows)
    models = [row[name] for row in rounds for name in ("bound", "powers", "table")]
    proven_rounds = sum(model["status"] == "optimal" for model in models)
    written = {part: f"`{command}`" for part, command in result["commands"].items()}
    return f"""# The exact solver against the paper's

Written by {written["rows"]}; every number is in planner.json. Times are CPU seconds of one process, ranges
are over the problems. BCD is the paper's Algorithm 3 with HiGHS, stopped after {BCD_LIMIT_S:.0f} s; where it was cut
off, its plan is the best it had by then and the ratio a lower limit. Of `exact`'s {len(rows)} plans {proven} are
proven optimal.

{markdown(COLUMNS, summary(rows))}

{" ".join(growth_lines(result["growth"]))}

## Other rounds models

The exact solver on the same fleets, with the bound, with rounds as powers of the interval, and with a table of
{len(INTERVALS)} intervals; written by {written.get("rounds")}. Of {len(models)} plans {proven_rounds} are proven
optimal.

{markdown(ROUNDS_COLUMNS, rounds_summary(rounds))}

## The server is the bottleneck

Problems that are hard for the exact solver: a server of 0.1 TFLOPS, {BOTTLENECK_LAYERS} layers, devices, links and
costs that are log-uniform over decades; written by {written.get("bottleneck")}. Times and boxes are the
median and the worst of the problems. With and without the Lagrangian bound `exact` ran in turns in one process, on a
machine that other work shares: ratios tell more than seconds. Without it, `exact` had a limit of {PLAIN_LIMIT_S:.0f} s
on the wall. The gap is that of the worst problem, after 1 s of CPU time.

{markdown(BOTTLENECK_COLUMNS, bottleneck_summary(bottleneck))}

{choices_section(result, written)}"""


def choices_section(result: dict[str, Any], written: dict[str, str]) -> str:
    """Return the section on parts and types of numbers."""
    return f"""## Parts of mini-batches and types of numbers

`exact` with 1, 2, 4, 8 and 16 parts and five types of numbers to choose from, against the same problems without
either; written by {written.get("choices")}. Fleets with fixed seconds have 20 to 80 ms per message, 1 to 5 ms per pass
and 2 ms per turn: without those of passes and turns more parts are never slower. CPU times are the least of up to
three runs; other work on the machine makes them longer too, so that ratios tell more. "Own types" is how much faster
plans could be if every device had its own type: at most the bound; and the estimate, if the factor of a mixture were
the mean of its devices' factors.

{markdown(CHOICES_COLUMNS, choices_summary(result.get("choices", [])))}
"""


def growth_lines(powers: dict[str, float]) -> list[str]:
    """Say how the exact solver's time grows with the fleet."""
    return [
        f"On {fleet} fleets exact's time grows as N^{power:.2f} from 1,000 devices on."
        for fleet, power in powers.items()
    ]


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
    parser.add_argument(
        "--only",
        choices=["rows", "rounds", "bottleneck", "choices"],
        help="measure one part, and keep the others as they are saved",
    )
    parser.add_argument("--out", type=Path, default=Path("docs/results"), help="folder for planner.md and planner.json")
    options = parser.parse_args()
    console = Console(width=180)
    file = options.out / "planner.json"
    parts = {"rows": run, "rounds": run_rounds, "bottleneck": run_bottleneck, "choices": run_choices}
    chosen = list(parts) if options.only is None else [options.only]
    result: dict[str, Any] = {} if options.only is None else json.loads(file.read_text())
    command = "python benchmarks/planner.py" + (" --quick" if options.quick else "")
    for part in chosen:
        result[part] = parts[part](quick=options.quick, progress=console)
        result.setdefault("commands", {})[part] = command + (f" --only {part}" if options.only else "")
    result["growth"] = {fleet: growth(result["rows"], fleet) for fleet in FLEETS}
    result["machine"] = {"python": platform.python_version(), "numpy": np.__version__, "processor": platform.machine()}
    result["bcd_limit_s"] = BCD_LIMIT_S
    tables = {
        "rows": (COLUMNS, summary),
        "rounds": (ROUNDS_COLUMNS, rounds_summary),
        "bottleneck": (BOTTLENECK_COLUMNS, bottleneck_summary),
        "choices": (CHOICES_COLUMNS, choices_summary),
    }
    for part in chosen:
        columns, lines = tables[part]
        table = Table(*columns)
        for line in lines(result[part]):
            table.add_row(*line)
        console.print(table)
    console.print(*growth_lines(result["growth"]), sep="\n")
    options.out.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(result, indent=1) + "\n")
    (options.out / "planner.md").write_text(page(result))
    console.print(f"saved to {options.out}")


if __name__ == "__main__":
    main()
