"""Tiny worlds for tests of runs: four devices and a small network on the digits, trained in milliseconds."""

from pathlib import Path
from typing import Any

from adaptsfl.config import Recipe, parse
from adaptsfl.decisions import Decision
from adaptsfl.policies import BasePolicy, make_policy
from adaptsfl.runs.backend import Order
from adaptsfl.runs.folder import RECORD
from adaptsfl.runs.loop import BlockLoop
from adaptsfl.simulation.backend import SimulatedBackend
from adaptsfl.simulation.experiment import Experiment
from adaptsfl.simulation.faults import Faults, faults_from
from adaptsfl.simulation.store import Store
from adaptsfl.simulation.world import World, make_world

BASE: dict[str, Any] = {
    "model": {"name": "vgg_digits", "options": {"width": 0.25}},
    "training": {"batch_size": 4, "learning_rate": 0.05},
    "fleet": {"base": "heterogeneous", "devices": 4, "redraw": []},
    "data": {"partition": {"kind": "dirichlet", "alpha": 0.5}},
    "run": {"rounds": 8, "evaluate_every": 4, "test_samples": 40, "checkpoint_every": 3},
    "adapt": {"measure_every": 4},
}


def recipe(**changes: Any) -> Recipe:
    """Return the tiny recipe; sections are changed key by key, and left out where None is given."""
    content = {key: dict(value) for key, value in BASE.items()}
    for section, values in changes.items():
        if values is None:
            content.pop(section, None)
        elif isinstance(values, dict):
            content[section] = {**content.get(section, {}), **values}
        else:
            content[section] = values
    return parse(Recipe, content)


def simulation(world: World, policy: str, store: Store | None = None, **options: Any) -> BlockLoop:
    """Return a run that leaves nothing on disk."""
    chosen = make_policy(policy, **options)
    names = [world.fleet_at(1).name(k) for k in range(world.devices)]
    return BlockLoop(SimulatedBackend(world, chosen, faults_from(world.recipe.faults, names), store or Store()), chosen)


class Undecided(BasePolicy):
    """A policy that nobody asks, for those who give the orders themselves."""

    def __init__(self, trainer: Any = "engine", divergence: bool = False) -> None:
        self.trainer, self.divergence = trainer, divergence


def learning(world: World, trainer: str, store: Store, *, divergence: bool = False, **more: Any) -> SimulatedBackend:
    """Return a backend that is asked to learn, block by block, without a loop."""
    return SimulatedBackend(world, Undecided(trainer, divergence), Faults(world.devices), store, **more)


def step(rounds: int, interval: int | None, deepest: int, intervals: Any = (), **more: Any) -> Order:
    """Return an order of so many rounds, for whoever is there."""
    return Order(Decision((deepest,), interval, dict(intervals)), rounds, first_round=1, **more)


def world(seed: int = 0, **changes: Any) -> World:
    return make_world(recipe(**changes), seed)


def record_of(experiment: Experiment, k: int = 0) -> bytes:
    folder: Path = experiment.folder / experiment.jobs[k].folder_name
    return (folder / RECORD).read_bytes()
