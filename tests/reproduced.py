"""The paper's figures without training: every run of a recipe, learning and taking time by formula."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from adaptsfl.fleet import FLEETS
from adaptsfl.latency import PHASES
from adaptsfl.paper_costs import vgg16
from adaptsfl.reproduce.numbers import Evidence
from adaptsfl.reproduce.study import Panel, Scale, load_studies, recipes_folder
from adaptsfl.runs.folder import Run
from adaptsfl.runs.record import Block

TITLES = {
    **{"adaptsfl": "AdaptSFL", "rma+ms": "RMA+MS", "ma+rms": "MA+RMS", "rma+rms": "RMA+RMS"},
    **{"dama+rms": "DAMA+RMS", "rma+ams": "RMA+AMS", "sfl": "SFL", "psl": "PSL", "fixed": "Fixed"},
}
# Seconds of a round against AdaptSFL's, and the accuracy that a policy comes to.
PACES = {"adaptsfl": 1.0, "rma+ms": 1.3, "ma+rms": 4.6, "rma+rms": 6.5, "dama+rms": 5.2, "rma+ams": 1.7, "sfl": 1.9}
TOPS = {"adaptsfl": 0.72, "rma+ms": 0.71, "ma+rms": 0.69, "rma+rms": 0.66, "dama+rms": 0.67, "rma+ams": 0.7, "psl": 0.6}
COSTS = vgg16(10, 16)
SERVER = FLEETS["paper"].sample(2, np.random.default_rng(0)).server


def evidence_of(names: Sequence[str], scale: Scale = "smoke", *, seeds: int | None = None, **changes: Any) -> Evidence:
    """All runs of these figures; `changes` are given to every `synthetic_run`."""
    studies = tuple(load_studies(names, scale, folder=recipes_folder(), seeds=seeds))
    own = [panel for study in studies for panel in study.panels if panel.runs == panel.key]
    return Evidence(studies, {panel.key: panel_runs(panel, **changes) for panel in own})


def panel_runs(panel: Panel, **changes: Any) -> tuple[Run, ...]:
    run = panel.recipe.run
    assert run is not None
    return tuple(
        synthetic_run(panel, policy, seed, fleet, **changes)
        for policy in run.policies
        for fleet in (list(run.fleets) or [""])
        for seed in range(panel.seeds)
    )


def synthetic_run(panel: Panel, policy: str, seed: int = 0, fleet: str = "", **changes: Any) -> Run:
    """One run as the panel's recipe has it; `changes` replace fields."""
    rng = np.random.default_rng([seed, *f"{panel.key}{policy}{fleet}".encode()])
    assert panel.recipe.run is not None
    options = panel.recipe.run.options.get(policy, {})
    interval = {"psl": None, "sfl": 1}.get(policy, int(options.get("interval", 8)))
    pace = PACES.get(policy, 1.0 + 0.1 * int(options.get("cut", 5))) * rng.uniform(0.95, 1.05)
    if fleet:
        pace *= 1 + (0.6 if policy == "adaptsfl" else 1.5) / (1 + float(fleet) ** 0.5)
    top = TOPS.get(policy, 0.72 - 0.002 * (interval or 40) - 0.004 * int(options.get("cut", 5)))
    top -= 0.06 if (panel.recipe.data is not None and panel.recipe.data.partition.kind == "shards") else 0.0
    every, rounds = panel.recipe.run.evaluate_every, panel.recipe.run.rounds or 100
    fields: dict[str, Any] = {
        "folder": Path(panel.key) / f"{policy}-seed{seed}",
        "name": panel.key,
        "policy": policy,
        "title": TITLES.get(policy.partition("@")[0], policy),
        "seed": seed,
        "recipe": panel.recipe.model_dump(mode="json"),
        "versions": {"adaptsfl": "0.1.0", "python": "3.12.1", "torch": "2.13.0"},
        "devices": ("phone",),
        "layers": COSTS.names,
        "batch_size": 16,
        "costs": COSTS,
        "server": SERVER,
        "targets": (),
        "status": "done",
        "ended_by": "rounds",
        "wall_s": 61.5,
        "blocks": tuple(blocks(rng, rounds, every, interval, 12.0 * pace, top)),
        "fleet": fleet,
        "epoch_rounds": 16,
    }
    return Run(**{**fields, **changes})


def evaluated_as(run: Run, points: Sequence[tuple[float, float]], **changes: Any) -> Run:
    """The same run with other evaluations, given as virtual seconds and accuracies, one per round."""
    evaluations = tuple((t, seconds, accuracy, 1.0) for t, (seconds, accuracy) in enumerate(points, 1))
    block = dataclasses.replace(run.blocks[0], rounds=len(points), time_s=points[-1][0], evaluations=evaluations)
    return dataclasses.replace(run, blocks=(block,), **changes)


def blocks(
    rng: np.random.Generator, rounds: int, every: int, interval: int | None, round_s: float, top: float
) -> list[Block]:
    """Blocks of one interval each, evaluated as the recipe says."""
    found: list[Block] = []
    last = 0
    while last < rounds:
        first, last = last + 1, min(rounds, last + (interval or 20))
        evaluated = [t for t in range(first, last + 1) if t % every == 0]
        accuracies = [0.1 + (top - 0.1) * (1 - np.exp(-4 * t / rounds)) + rng.normal(0, 0.012) for t in evaluated]
        found.append(
            Block(
                block=len(found) + 1,
                first_round=first,
                rounds=last - first + 1,
                time_s=last * round_s,
                interval=interval,
                cuts=(5,),
                deepest=5,
                layer_intervals={},
                seconds={phase: (last - first + 1) * round_s / len(PHASES) for phase in PHASES},
                bottleneck=("phone", "a2"),
                bits=1e9,
                loss=1.0,
                evaluations=tuple(
                    (t, t * round_s, float(accuracy), 1.0) for t, accuracy in zip(evaluated, accuracies, strict=True)
                ),
                estimates={},
                resources={},
                predicted_s=1.0,
            )
        )
    return found
