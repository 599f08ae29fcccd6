"""The trainers that a policy may name: how to make each, which decisions it can follow, how long its rounds take."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from adaptsfl.decisions import Decision
from adaptsfl.errors import InvalidInput, unknown
from adaptsfl.policies import TrainerName
from adaptsfl.runs.recipe import reestimates
from adaptsfl.simulation.clock import RoundTime, centralized_time, parallel_time, relayed_time
from adaptsfl.simulation.world import World
from adaptsfl.training import Engine, PooledEngine, Sequential, Trainer
from adaptsfl.training.engine import compared_round
from adaptsfl.training.estimate import ConstantsSample, measured_round
from adaptsfl.training.settings import Batch
from adaptsfl.training.sharding import Sharding
from adaptsfl.training.variants import pooled

MeasuredRound = Callable[[Any, Sequence[Batch], Sequence[int] | None], tuple[Tensor, ConstantsSample]]
ComparedRound = Callable[
    [Any, Sequence[Batch], Sequence[int] | None, Sequence[str]], tuple[Tensor, Mapping[str, float]]
]


@dataclass(frozen=True)
class TrainerKind:
    """One way to train.

    Attributes:
        make: makes the trainer of a run, from its world, its first decision, and whether to record divergence.
        round_time: how long one of its rounds takes.
        averages: whether copies are averaged. If not, there is one model, with its own batch-norm statistics.
        measured_round: trains a round and measures the paper's constants; None where that is not possible.
        compared_round: trains a round and measures what types of numbers cost in rounds; None where nothing is sent.
        takes_turns: whether devices take turns with one model. Then they need the same cut, cut and
            interval stay the same for the whole run, and only one rank could work at a time.
        pooled: whether the server holds all samples itself.
        divides: whether batch-norm can normalise the parts of a mini-batch one by one.
    """

    name: TrainerName
    make: Callable[[World, Decision, bool], Trainer]
    round_time: RoundTime = parallel_time
    averages: bool = True
    measured_round: MeasuredRound | None = None
    compared_round: ComparedRound | None = None
    takes_turns: bool = False
    pooled: bool = False
    divides: bool = False

    def reestimates(self, world: World) -> bool:
        """Whether batch-norm's running statistics are re-estimated for the model that is evaluated or handed over."""
        return self.averages and reestimates(world.recipe.training, world.model, world.devices)

    def check(self, decision: Decision, first: Decision) -> None:
        """Refuse a decision that this trainer cannot follow; `first` is that of the run's first block."""
        same = (decision.deepest, decision.interval) == (first.deepest, first.interval)
        if self.takes_turns and (len(set(decision.cuts)) > 1 or not same):
            problem = f"is {decision.cuts}, with interval {decision.interval}"
            remedy = f"Trainer {self.name!r} needs one cut for all and one interval, kept for the whole run"
            raise InvalidInput("decision.cuts", problem, remedy)


def _engine(world: World, first: Decision, record_divergence: bool) -> Trainer:
    sharding, weights = Sharding.of(world.devices, world.ranks), world.data.weights.tolist()
    options = _engine_options(world, record_divergence)
    return Engine(
        world.model, first.levelled(world.devices), world.optimizer, weights=weights, sharding=sharding, **options
    )


def _pooled(world: World, first: Decision, record_divergence: bool) -> Trainer:
    options = _engine_options(world, record_divergence)
    return PooledEngine(world.model, first, world.optimizer, devices=world.devices, ranks=world.ranks, **options)


def _measured_pooled(
    engine: PooledEngine, batches: Sequence[Batch], _present: Sequence[int] | None
) -> tuple[Tensor, ConstantsSample]:
    return measured_round(engine, pooled(batches))


def _engine_options(world: World, record_divergence: bool) -> dict[str, Any]:
    training = world.recipe.training
    return {
        "statistics": training.statistics,
        "device": training.device,
        "record_divergence": record_divergence,
    }


def _sequential(world: World, first: Decision, _record_divergence: bool, *, relayed: bool) -> Trainer:
    return Sequential(
        world.model,
        first.deepest,
        world.devices,
        world.optimizer,
        interval=first.interval,
        relayed=relayed,
        wire_dtype=first.wire_dtype,
        seed=world.seed,
        weights=world.data.weights.tolist(),
        device=world.recipe.training.device,
    )


TRAINERS: Mapping[str, TrainerKind] = {
    kind.name: kind
    for kind in (
        TrainerKind("engine", _engine, measured_round=measured_round, compared_round=compared_round, divides=True),
        # Devices that take turns with the server model (SplitFed V2) still compute and send at the same time, and the
        # server's work is the same in any order: a round takes as long as with the engine.
        TrainerKind("turns", partial(_sequential, relayed=False), takes_turns=True),
        TrainerKind("relay", partial(_sequential, relayed=True), relayed_time, averages=False, takes_turns=True),
        TrainerKind(
            "centralized", _pooled, centralized_time, averages=False, measured_round=_measured_pooled, pooled=True
        ),
    )
}


def trainer_kind(name: str) -> TrainerKind:
    """Return the trainer kind of a name that run.json contains."""
    if name not in TRAINERS:
        raise unknown("trainer", name, tuple(TRAINERS), "Use a version of AdaptSFL that knows it")
    return TRAINERS[name]
