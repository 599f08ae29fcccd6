"""What ranks do in tests: a list of cases trained, on however many ranks, and what came of each."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adaptsfl.decisions import Decision
from adaptsfl.models import SplitModel
from adaptsfl.rate_schedule import RateSchedule
from adaptsfl.training import (
    Batch,
    Engine,
    OptimizerSettings,
    load_checkpoint,
    save_checkpoint,
)
from adaptsfl.training.estimate import SmoothnessProbe, measure_constants
from adaptsfl.training.ranks import Ranks
from adaptsfl.training.sharding import Sharding, assigned
from training.cases import make_batches, make_model, make_norm_twice, make_odd_norms

SIZES = (2, 4, 2, 4, 2)
WEIGHTS = (1.0, 5.0, 2.0, 3.0, 1.0)
PLANS = (Decision((1, 3, 2, 1, 2), 3), Decision((4, 2, 1, 2, 1), 2, {4: 4}), Decision((2, 1, 1, 2, 1), 1))
LENGTHS = (3, 4, 2)
EVERYBODY = tuple(range(5))
MAKING = threading.Lock()  # weights are drawn from the generator that all threads share


@dataclass(frozen=True)
class Case:
    """One training run."""

    norm: str = "none"
    statistics: str = "pooled"
    optimizer: str = "momentum"
    rule: str = "average"
    dtype: torch.dtype = torch.float64
    weights: tuple[float, ...] | None = WEIGHTS
    present: tuple[tuple[int, ...], ...] = (EVERYBODY,)  # round by round, from the beginning again and again
    options: dict[str, Any] = field(default_factory=dict)
    schedule: RateSchedule = field(default_factory=RateSchedule)
    wire_dtype: str | None = None
    micro_batches: int = 1

    @property
    def plans(self) -> list[Decision]:
        return [replace(plan, wire_dtype=self.wire_dtype, micro_batches=self.micro_batches) for plan in PLANS]


def model_of(case: Case) -> SplitModel:
    if case.norm == "odd":
        return make_odd_norms()
    if case.norm == "twice":
        return make_norm_twice()
    return make_model("vgg_digits", case.dtype, width=0.25, norm=case.norm)


def engine_of(case: Case, ranks: Ranks) -> Engine:
    rate = 1e-3 if case.optimizer == "adam" else 0.05
    settings = OptimizerSettings(case.optimizer, rate, 2 * rate, at_averaging=case.rule, schedule=case.schedule)
    chosen = {"statistics": case.statistics, "weights": case.weights, "chunk": 2, **case.options}
    with MAKING:
        model = model_of(case)
    sharding = Sharding.of(len(SIZES), ranks, assigned(SIZES, ranks.speeds))
    return Engine(model, case.plans[0], settings, sharding=sharding, **chosen)


def mine(engine: Engine, batches: Sequence[Batch], present: Sequence[int]) -> list[Batch]:
    return [batches[k] for k in present if k in engine.batch_devices]


def trained(ranks: Ranks, cases: Sequence[Case]) -> list[tuple[list[list[float]], dict[str, Tensor], list[float]]]:
    """Return losses, weights and how far copies were apart, of every case."""
    found = []
    for case in cases:
        engine = engine_of(case, ranks)
        batches, t, losses = make_batches(engine.model, (1, 8, 8), SIZES), 0, []
        for plan, rounds in zip(case.plans, LENGTHS, strict=True):
            if t:
                engine.change_plan(plan)
            for _ in range(rounds):
                present = case.present[t % len(case.present)]
                t += 1
                losses.append(engine.round(mine(engine, batches(t), present), present).tolist())
        found.append((losses, engine.state(), [*engine.divergence(), *engine.last_divergence.values()]))
    return found


def measured(ranks: Ranks, cases: Sequence[Case]) -> list[tuple[Any, ...]]:
    """Return the constants of every case, measured two rounds after the beginning, and what a probe finds."""
    found = []
    for case in cases:
        engine = engine_of(case, ranks)
        batches = make_batches(engine.model, (1, 8, 8), SIZES)
        present = case.present[0]
        for t in (1, 2):
            engine.round(mine(engine, batches(t), EVERYBODY))
        given = mine(engine, batches(9), present)
        constants = measure_constants(engine, given, present)
        probe = SmoothnessProbe(engine, given, present)
        engine.round(mine(engine, batches(3), EVERYBODY))
        found.append((vars(constants), probe.measure(engine), engine.state()))
    return found


def stopped(ranks: Ranks, case: Case, rounds: int, folder: Path) -> None:
    """Write a checkpoint, here in the middle of an interval."""
    engine = engine_of(case, ranks)
    for t in range(1, rounds + 1):
        present = case.present[t % len(case.present)]
        engine.round(mine(engine, make_batches(engine.model, (1, 8, 8), SIZES)(t), present), present)
    save_checkpoint(folder, engine.snapshot(), extra={}, identity={}, ranks=ranks)


def gone_on(ranks: Ranks, case: Case, rounds: int, folder: Path) -> dict[str, Tensor]:
    """Return the weights after some more rounds from a checkpoint, whoever wrote it."""
    engine = engine_of(case, ranks)
    engine.restore(load_checkpoint(folder, identity={}, devices=engine.sharding.shard).state)
    for _ in range(rounds):
        t = engine.schedule.round + 1
        engine.round(mine(engine, make_batches(engine.model, (1, 8, 8), SIZES)(t), EVERYBODY))
    return engine.state()


def estimated(ranks: Ranks, cases: Sequence[Case]) -> list[dict[str, Tensor]]:
    """Return the model of every case two rounds after the beginning, with statistics estimated for it."""
    found = []
    for case in cases:
        engine = engine_of(case, ranks)
        batches, present = make_batches(engine.model, (1, 8, 8), SIZES), case.present[0]
        for t in (1, 2):
            engine.round(mine(engine, batches(t), present), present)
        found.append(engine.state(mine(engine, batches(2), present)))
    return found
