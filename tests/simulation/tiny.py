"""Tiny worlds for tests of runs: four devices and a small network on the digits, trained in milliseconds."""

from pathlib import Path
from typing import Any

from adaptsfl.config import Recipe, parse
from adaptsfl.policies import make_policy
from adaptsfl.simulation.experiment import Experiment
from adaptsfl.simulation.faults import faults_from
from adaptsfl.simulation.folder import RECORD
from adaptsfl.simulation.run import Simulation
from adaptsfl.simulation.trajectory import Store, Trajectory
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


def simulation(world: World, policy: str, store: Store | None = None, **options: Any) -> Simulation:
    """Return a run that leaves nothing on disk."""
    chosen = make_policy(policy, **options)
    names = [world.fleet_at(1).name(k) for k in range(world.devices)]
    trajectory = Trajectory(world, chosen.trainer, store or Store(), divergence=chosen.divergence)
    return Simulation(world, chosen, faults_from(world.recipe.faults, names), trajectory)


def world(seed: int = 0, **changes: Any) -> World:
    return make_world(recipe(**changes), seed)


def record_of(experiment: Experiment, k: int = 0) -> bytes:
    folder: Path = experiment.folder / experiment.jobs[k].folder_name
    return (folder / RECORD).read_bytes()
