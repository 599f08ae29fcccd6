"""Do the plans really save time? AdaptSFL against other policies and against fixed plans that hindsight would choose.

Every workload is trained under ten fixed plans (I, L_c) and under every policy, on three fleets with three seeds. On
one fleet everybody has the same virtual time. The figure of merit is the time to 90 % and to 97 % of the best accuracy
of any fixed plan, over the time of the fixed plan that turned out to be the fastest: nobody knows that plan before.
Times are geometric means over seeds; who does not reach the accuracy, or diverges, is charged the whole budget. Models
are had by averaging: one that is evaluated in the middle of a block is charged one more. Fixed plans have one cut for
all devices.

    python benchmarks/adaptivity.py --jobs 2                    # all that is missing: hours
    python benchmarks/adaptivity.py --workloads digits-iid      # one workload
    python benchmarks/adaptivity.py --redo adaptsfl             # runs of one policy again, after it was changed
    python benchmarks/adaptivity.py --only-report               # page and picture from the results so far

Every run that ends is one line in docs/results/adaptivity.jsonl, and is not run again: interrupted, the benchmark goes
on where it was. What was trained is kept in --runs and shared: a fixed plan is trained once for all fleets.
"""

import argparse
import json
import multiprocessing
import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from matplotlib.figure import Figure

from adaptsfl.config import Recipe, parse
from adaptsfl.convergence import PowerRounds
from adaptsfl.errors import TrainingDiverged
from adaptsfl.planner import PlanProblem
from adaptsfl.report.charts import HEIGHT, STYLE, WIDTH, save
from adaptsfl.runs.folder import Run
from adaptsfl.runs.record import Block
from adaptsfl.simulation.experiment import Experiment
from adaptsfl.simulation.jobs import Job, Watcher
from adaptsfl.simulation.world import make_world

SEEDS, DEVICES, BATCH = 3, 20, 16
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
    "slow-fed": {"base": "paper", "fed_uplink_mbps": [7.5, 8.0], "fed_downlink_mbps": [37.0, 37.0]},
}


@dataclass(frozen=True)
class Workload:
    """What is learned.

    Attributes:
        model: as in a recipe.
        depths: the L_c of fixed plans: shallow, middle, deep.
        rounds: for which the budget is enough under the fixed plan that is the fastest in a middling case.
        fitted: whether a constant of the estimator was fitted to runs like these.
    """

    model: dict[str, Any]
    data: str
    partition: dict[str, Any]
    training: dict[str, Any]
    depths: tuple[int, int, int]
    rounds: int
    fitted: bool = False

    @property
    def grid(self) -> dict[str, dict[str, int]]:
        """The fixed plans, by name: short intervals with shallow cuts, long ones with all."""
        shallow, middle, deep = self.depths
        plans = [(1, 1), *((interval, shallow) for interval in (1, 4, 16, 64))]
        plans += [(interval, middle) for interval in (4, 16, 64)] + [(interval, deep) for interval in (16, 64)]
        return {f"fixed@I{interval}-L{cut}": {"interval": interval, "cut": cut} for interval, cut in plans}


def _digits(norm: str = "group") -> dict[str, Any]:
    return {"name": "vgg_digits", "options": {"norm": norm, "width": 0.5}, "charged_as": {"width": 4.0}}


def _vgg11(norm: str) -> dict[str, Any]:
    return {"name": "vgg11", "options": {"norm": norm, "width": 0.125}, "charged_as": {"width": 1.0}}


IID, DIRICHLET = {"kind": "iid"}, {"kind": "dirichlet", "alpha": 0.3}
SHARDS = {"kind": "shards", "shards_per_device": 2}
SLOWEST, SLOW, FAST = ({"learning_rate": rate} for rate in (0.01, 0.03, 0.1))
COSINE = {"learning_rate": 0.1, "schedule": {"kind": "cosine", "rounds": 600, "floor": 0.1}}
MOMENTUM = {"learning_rate": 0.001, "optimizer": "momentum"}
DIGITS_DEPTHS, VGG11_DEPTHS = (2, 4, 6), (2, 4, 8)

WORKLOADS: dict[str, Workload] = {
    "digits-iid": Workload(_digits(), "digits", IID, SLOWEST, DIGITS_DEPTHS, 500, fitted=True),
    "digits-shards": Workload(_digits(), "digits", {**SHARDS, "shard_size": 35}, SLOW, DIGITS_DEPTHS, 600, fitted=True),
    "digits-dirichlet": Workload(_digits(), "digits", DIRICHLET, SLOWEST, DIGITS_DEPTHS, 500, fitted=True),
    "digits-momentum": Workload(_digits(), "digits", DIRICHLET, MOMENTUM, DIGITS_DEPTHS, 500),
    "cifar10-iid-batchnorm": Workload(_vgg11("batch"), "cifar10", IID, FAST, VGG11_DEPTHS, 350, fitted=True),
    "cifar10-dirichlet": Workload(_vgg11("group"), "cifar10", DIRICHLET, FAST, VGG11_DEPTHS, 350),
    "cifar10-shards-cosine": Workload(_vgg11("group"), "cifar10", SHARDS, COSINE, VGG11_DEPTHS, 350),
    "cifar10-dirichlet-batchnorm": Workload(_vgg11("batch"), "cifar10", DIRICHLET, SLOW, VGG11_DEPTHS, 350),
}
# Rivals with the options that their authors give or that suit the runs' length; cuts are the fastest for the interval.
RIVALS: dict[str, dict[str, Any]] = {
    "adacomm": {"tau0": 16},
    "post-local": {"interval": 16, "switch_round": 50},
    "qsr": {"base": 4},
    "fedlama": {"interval": 4, "factor": 4},
    "rma+ms": {},
    "ma+rms": {},
    "rma+rms": {},
    "dama+rms": {},
    "rma+ams": {},
    "sfl": {},
    "fedavg": {},
}
ONE_PLAN = "one fixed plan for all"
STAGES = ("grid", "adaptsfl", "rivals")


def recipe_of(workload: Workload, fleet: str, seconds: float | None, target: float | None = None) -> Recipe:
    """Return the recipe of all runs of a workload on one fleet; at the target accuracy they may end."""
    small = workload.data == "digits"
    return parse(
        Recipe,
        {
            "name": "adaptivity",
            "model": workload.model,
            "training": {"batch_size": BATCH, **workload.training},
            "fleet": {"devices": DEVICES, "seed": 1, **FLEETS[fleet]},
            "data": {"name": workload.data, "partition": workload.partition},
            "run": {
                "seconds": seconds,
                "target_accuracy": target,
                "rounds": None if seconds else 1,
                "evaluate_every": 5 if small else 10,
                **({} if small else {"test_samples": 2000}),
                "options": {**workload.grid, **RIVALS},
                "policies": ["adaptsfl"],
            },
        },
    )


def budget_s(workload: Workload, fleet: str) -> float:
    """Return everybody's virtual seconds: `rounds` of the fixed plan that is the fastest in a middling case."""
    world = make_world(recipe_of(workload, fleet, None), 0)
    now, layers = world.fleet_at(1), world.costs.layers
    middling = PowerRounds(1 - np.exp(-0.7 * np.arange(1, layers + 1) / layers))
    problem = PlanProblem(now, world.costs, middling, BATCH)
    plans = [(plan["interval"], np.full(DEVICES, plan["cut"])) for plan in workload.grid.values()]
    interval, cuts = min(plans, key=lambda plan: float(problem.time_to_target_s(*plan)))
    return workload.rounds * float(problem.round_s(cuts) + problem.aggregation_s(cuts) / interval)


# --- running ---


def run_stage(name: str, stage: str, folder: Path, results: Path) -> None:
    """Do all missing runs of one stage of a workload, fleet by fleet."""
    torch.set_num_threads(1)
    workload = WORKLOADS[name]
    policies = {"grid": list(workload.grid), "adaptsfl": ["adaptsfl"], "rivals": list(RIVALS)}[stage]
    for fleet in FLEETS:
        done = {(line["policy"], line["seed"]) for line in read_lines(results) if matches(line, name, fleet)}
        missing = [policy for policy in policies if any((policy, seed) not in done for seed in range(SEEDS))]
        if not missing:
            continue
        budget = budget_s(workload, fleet)
        # Nobody looks at a policy beyond the last accuracy that it is judged by.
        best = None if stage == "grid" else best_accuracy(fixed_of(read_lines(results), name, fleet))

        def ended(job: Job, run: Run, fleet: str = fleet, done: set[tuple[str, int]] = done) -> None:
            if (job.policy, job.seed) not in done:
                append_line(results, line_of(name, fleet, job, run.blocks))

        def failed(job: Job, error: Exception, fleet: str = fleet) -> None:
            if not isinstance(error, TrainingDiverged):
                raise error
            append_line(results, line_of(name, fleet, job, ()))

        experiment = Experiment(
            recipe_of(workload, fleet, budget, best and SHARES[-1] * best),
            folder / name / f"{stage}-{fleet}",
            policies=missing,
            seeds=SEEDS,
            trajectories=folder / name / "trajectories",
            keep_models=False,
        )
        experiment.execute(Watcher(ends=ended, fails=failed, remarks=lambda _job, _remark: None))


def line_of(name: str, fleet: str, job: Job, blocks: Sequence[Block]) -> dict[str, Any]:
    """Return what is kept of a run: every time within the budget at which its accuracy was better than ever before."""
    budget = budget_s(WORKLOADS[name], fleet)
    best, curve = -1.0, []
    for block in blocks:
        for round_, evaluated_s, accuracy, _ in block.evaluations:
            time_s = evaluated_s + averaging_s(block, round_)
            if accuracy > best and time_s <= budget:
                best = accuracy
                curve.append([float(f"{time_s:.5g}"), float(f"{accuracy:.4f}")])
    return {
        "workload": name,
        "fleet": fleet,
        "policy": job.policy,
        "seed": job.seed,
        "budget_s": budget,
        "rounds": blocks[-1].last_round if blocks else 0,
        "curve": curve,
        "plans": [] if job.policy.startswith("fixed@") else plans_of(blocks),
    }


def averaging_s(block: Block, round_: int) -> float:
    """Return the seconds of the averaging that a model evaluated after this round still needs; 0 right after one."""
    interval = block.interval or block.rounds
    if (round_ - block.first_round + 1) % interval == 0:
        return 0.0
    averagings = max(1, block.rounds // interval)
    return sum(block.seconds[phase] for phase in ("b1", "b2", "b3")) / averagings


def plans_of(blocks: Sequence[Block]) -> list[list[int | None]]:
    """Return [round, I, L_c] wherever the plan changed."""
    plans: list[list[int | None]] = []
    for block in blocks:
        if not plans or plans[-1][1:] != [block.interval, block.deepest]:
            plans.append([block.first_round, block.interval, block.deepest])
    return plans


def read_lines(results: Path) -> list[dict[str, Any]]:
    """Return the results so far."""
    return [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []


def append_line(results: Path, line: dict[str, Any]) -> None:
    """Add a result by one single write: several processes add to the file."""
    handle = os.open(results, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(handle, (json.dumps(line, separators=(",", ":")) + "\n").encode())
    finally:
        os.close(handle)


def matches(line: dict[str, Any], name: str, fleet: str) -> bool:
    """Whether a result is of this workload on this fleet."""
    return line["workload"] == name and line["fleet"] == fleet


# --- judging ---


def time_to(line: dict[str, Any], accuracy: float) -> float:
    """Return the seconds to an accuracy; the budget's end if it was not reached."""
    return float(next((time_s for time_s, reached in line["curve"] if reached >= accuracy), line["budget_s"]))


def best_of(line: dict[str, Any]) -> float:
    """Return the best accuracy of a run."""
    return float(line["curve"][-1][1]) if line["curve"] else 0.0


def geometric_mean(values: Iterable[float]) -> float:
    """Return the geometric mean."""
    return float(np.exp(np.mean(np.log(list(values)))))


def fixed_of(lines: Sequence[dict[str, Any]], name: str, fleet: str) -> dict[str, list[dict[str, Any]]]:
    """Return the results of every fixed plan of a workload on a fleet; none unless all are complete."""
    grid = WORKLOADS[name].grid
    found = complete([line for line in lines if matches(line, name, fleet) and line["policy"] in grid])
    return found if len(found) == len(grid) else {}


def complete(lines: Iterable[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Return results by policy, of those that ran with every seed."""
    by_policy: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        by_policy.setdefault(line["policy"], []).append(line)
    return {policy: found for policy, found in by_policy.items() if len(found) == SEEDS}


def best_accuracy(fixed: dict[str, list[dict[str, Any]]]) -> float | None:
    """Return the best accuracy of any fixed plan, the mean over seeds; None where none ran."""
    return max((float(np.mean([best_of(line) for line in found])) for found in fixed.values()), default=None)


def judged(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one row per workload, fleet and share whose fixed plans are complete: everybody's ratio to the best."""
    rows = []
    for name in WORKLOADS:
        for fleet in FLEETS:
            fixed = fixed_of(lines, name, fleet)
            best = best_accuracy(fixed)
            if best is None:
                continue
            whole = complete(line for line in lines if matches(line, name, fleet))
            for share in SHARES:
                times = {
                    policy: geometric_mean(time_to(line, share * best) for line in found)
                    for policy, found in whole.items()
                }
                fastest = min(fixed, key=lambda plan: times[plan])
                reached = all(best_of(line) >= share * best for line in whole[fastest])
                rounds = np.mean([line["rounds"] * times[fastest] / line["budget_s"] for line in whole[fastest]])
                rows.append(
                    {
                        "workload": name,
                        "fleet": fleet,
                        "share": share,
                        "target": share * best,
                        "fastest": fastest,
                        "fastest_s": times[fastest],
                        "fastest_rounds": float(rounds),
                        "fastest_reached": reached,
                        "ratios": {policy: time_s / times[fastest] for policy, time_s in times.items()},
                    }
                )
    return rows


def profiled(rows: Sequence[dict[str, Any]]) -> dict[str, list[float]]:
    """Return every policy's ratios over the cases in which it is complete, the best policy first.

    Beside them is the one fixed plan that was the best for all cases together: the same I and depth in each.
    """
    found = {
        name: ratios
        for name in ("adaptsfl", *RIVALS)
        if (ratios := sorted(row["ratios"][name] for row in rows if name in row["ratios"]))
    }
    kinds = list(zip(*(workload.grid for workload in WORKLOADS.values()), strict=True))
    names = list(WORKLOADS)
    fixed = [sorted(row["ratios"][kind[names.index(row["workload"])]] for row in rows) for kind in kinds]
    if rows:
        found[ONE_PLAN] = min(fixed, key=geometric_mean)
    return dict(sorted(found.items(), key=lambda item: geometric_mean(item[1])))


def ratios_beside(rows: Sequence[dict[str, Any]], name: str) -> list[float]:
    """Return AdaptSFL's ratios in the cases that a policy has run."""
    cases = [row["ratios"] for row in rows if name == ONE_PLAN or name in row["ratios"]]
    return [ratios["adaptsfl"] for ratios in cases if "adaptsfl" in ratios] or [float("nan")]


def page(rows: Sequence[dict[str, Any]]) -> str:
    """Return the results as a Markdown page."""
    profiles = profiled(rows)
    lines = [
        "# Do the plans really save time?",
        "",
        "Written by `python benchmarks/adaptivity.py`, which says what is measured; every run is a line of",
        f"adaptivity.jsonl. {DEVICES} devices, batches of {BATCH}, {SEEDS} seeds. A ratio is the virtual time to an",
        "accuracy over that of the fixed plan that was the fastest of ten; below 1, a policy beat all fixed",
        "plans. Who does not reach the accuracy is charged the whole budget, which is the same for all on one fleet.",
        "",
        f"{len(rows)} of {len(WORKLOADS) * len(FLEETS) * len(SHARES)} cases have all fixed plans. A policy counts in",
        "the cases that it has run with every seed; the last column has AdaptSFL in the same cases.",
        "",
        "![Performance profiles](adaptivity.png)",
        "",
        "| | geometric mean | 90 % | worst | cases at or below 1 | AdaptSFL there |",
        "|---|---|---|---|---|---|",
    ]
    for name, ratios in profiles.items():
        below = sum(ratio <= 1 for ratio in ratios)
        numbers = (geometric_mean(ratios), float(np.quantile(ratios, 0.9)), max(ratios))
        shown = " | ".join(f"{one:.2f}" for one in numbers)
        beside = geometric_mean(ratios_beside(rows, name))
        lines.append(f"| {bold(name)} | {shown} | {below} of {len(ratios)} | {beside:.2f} |")
    lines += ["", "| workload | AdaptSFL, geometric mean | worst case | cases |", "|---|---|---|---|"]
    for name in WORKLOADS:
        ours = [row["ratios"]["adaptsfl"] for row in rows if row["workload"] == name and "adaptsfl" in row["ratios"]]
        if ours:
            lines.append(f"| {name} | {geometric_mean(ours):.2f} | {max(ours):.2f} | {len(ours)} |")
    policies = [name for name in profiles if name != ONE_PLAN]
    lines += [
        "",
        "## Every case",
        "",
        "Constants of the estimator were fitted to runs of the workloads in *italics*, or to others like them. Rules",
        "that limit intervals (docs/calibration.md) were chosen on the four of digits. While the learning rate is",
        "constant, QSR averages every 4 rounds. So does FedLAMA where it finds no layer to average less often: with",
        "two client-specific layers, of which the large one differs less per parameter, it finds none.",
        "",
        "| workload | fleet | accuracy | fastest fixed plan | its rounds | " + " | ".join(map(bold, policies)) + " |",
        "|---|---|---|---|---|" + "---|" * len(policies),
    ]
    for row in rows:
        name = f"*{row['workload']}*" if WORKLOADS[row["workload"]].fitted else row["workload"]
        fastest = row["fastest"].removeprefix("fixed@") + ("" if row["fastest_reached"] else ", not with every seed")
        known = [f"{row['ratios'][policy]:.2f}" if policy in row["ratios"] else "" for policy in policies]
        cells = [name, row["fleet"], f"{row['target']:.3f}", fastest, f"{row['fastest_rounds']:.0f}", *known]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def bold(name: str) -> str:
    """Return a policy's name as tables have it."""
    return "**AdaptSFL**" if name == "adaptsfl" else name


def draw(rows: Sequence[dict[str, Any]], file: Path) -> None:
    """Draw the performance profiles: the share of cases within a factor of the fastest fixed plan."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
        axes = figure.subplots()
        for k, (name, ratios) in enumerate(profiled(rows).items()):
            x = np.concatenate([[0.01], ratios, [100.0]])
            y = np.concatenate([[0.0], np.arange(1, len(ratios) + 1) / len(ratios), [1.0]])
            ours = name == "adaptsfl"
            look: dict[str, Any] = {
                "linewidth": 2.6 if ours else 1.2,
                "color": f"C{k % 10}",
                "linestyle": "-" if k < 10 else "--",
            }
            axes.step(x, y, where="post", label=bold(name).strip("*"), **look)
        axes.axvline(1.0, color="#888888", linewidth=0.8)
        axes.set(xscale="log", xlim=(0.4, 8.0), ylim=(0.0, 1.02), ylabel="share of cases")
        axes.set_xlabel("time to the accuracy, over that of the fastest fixed plan in hindsight")
        axes.minorticks_off()
        axes.set_xticks([0.5, 1, 2, 4, 8], ["0.5", "1", "2", "4", "8"])
        axes.legend(fontsize=9)
        save(figure, file)


def main() -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES))
    parser.add_argument("--runs", type=Path, default=Path("runs/adaptivity"), help="where what was trained is kept")
    parser.add_argument("--jobs", type=int, default=1, help="workloads side by side, of one thread each")
    parser.add_argument("--out", type=Path, default=Path("docs/results"), help="folder for the results")
    parser.add_argument("--redo", nargs="+", default=[], help="policies whose results are dropped first")
    parser.add_argument("--only-report", action="store_true", help="run nothing")
    options = parser.parse_args()
    results = options.out / "adaptivity.jsonl"
    if options.redo:
        kept = [line for line in read_lines(results) if line["policy"] not in options.redo]
        results.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in kept))
        for folder in options.runs.glob("*/*-*"):  # decisions are made anew; what was trained stays in trajectories
            shutil.rmtree(folder)
    if not options.only_report:
        wanted = [(name, stage) for stage in STAGES for name in options.workloads if stage in options.stages]
        todo = [(name, stage, options.runs, results) for name, stage in wanted]
        with multiprocessing.get_context("spawn").Pool(options.jobs, maxtasksperchild=1) as pool:
            pool.starmap(run_stage, todo, chunksize=1)
    rows = judged(read_lines(results))
    (options.out / "adaptivity.md").write_text(page(rows))
    draw(rows, options.out / "adaptivity.png")
    print(page(rows))


if __name__ == "__main__":
    main()
