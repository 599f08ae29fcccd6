"""What every run takes from a recipe, simulated or deployed: final seeds, checked numbers, the optimiser, run.json."""

import platform
from collections.abc import Sequence
from typing import Any

import torch

import adaptsfl
from adaptsfl.config import DataConfig, Recipe, RunConfig, TrainingConfig
from adaptsfl.costs import CutCosts
from adaptsfl.errors import InvalidInput, first_line
from adaptsfl.fleet import Server
from adaptsfl.models import SplitModel
from adaptsfl.policies import Policy
from adaptsfl.rate_schedule import RateSchedule
from adaptsfl.runs.record import plain
from adaptsfl.training import OptimizerSettings
from adaptsfl.training.batchnorm import mixes_samples
from adaptsfl.training.statistics import tracks_statistics


def seeded(recipe: Recipe, seed: int) -> Recipe:
    """Return the recipe with `seed` added to the seed of every section."""
    data = recipe.data or DataConfig()
    partition = data.partition.model_copy(update={"seed": data.partition.seed + seed})
    sections: dict[str, Any] = {
        "fleet": recipe.fleet.model_copy(update={"seed": recipe.fleet.seed + seed}),
        "faults": recipe.faults.model_copy(update={"seed": recipe.faults.seed + seed}),
        "data": data.model_copy(update={"seed": data.seed + seed, "partition": partition}),
    }
    return recipe.model_copy(update=sections)


def optimizer_settings(given: TrainingConfig) -> OptimizerSettings:
    """Return the optimiser settings of a recipe."""
    return OptimizerSettings(
        name=given.optimizer,
        learning_rate=given.learning_rate,
        common_learning_rate=given.common_learning_rate,
        momentum=given.momentum,
        weight_decay=given.weight_decay,
        at_averaging=given.at_averaging,
        schedule=rate_schedule(given),
    )


def rate_schedule(given: TrainingConfig) -> RateSchedule:
    """Return the learning-rate schedule of a recipe."""
    return RateSchedule() if given.schedule is None else RateSchedule(**given.schedule.model_dump())


def check_training(given: TrainingConfig) -> None:
    """Refuse settings with which training cannot begin; errors name the keys of the recipe."""
    try:
        optimizer_settings(given)
    except InvalidInput as error:
        field = f"training.{error.field.removeprefix('optimizer.')}"
        raise InvalidInput(field, error.problem, error.remedy) from None
    try:
        torch.zeros(1, device=given.device)
    except (RuntimeError, AssertionError) as error:  # torch raises one of them for a missing device
        problem = f"is {given.device!r}, which torch cannot use: {first_line(error)}"
        raise InvalidInput("training.device", problem, "Give cpu, or a device that this machine has") from None


def check_run(run: RunConfig) -> None:
    """Refuse a run that would never end."""
    if run.rounds is None and run.samples is None and run.seconds is None and not run.converged:
        raise InvalidInput("run", "has no end", "Give rounds, samples or seconds, or converged = true")


def about_run(
    recipe: Recipe, seed: int, name: str, policy: Policy, devices: Sequence[str], costs: CutCosts, server: Server
) -> dict[str, Any]:
    """Return the content of run.json at the start of a run, in a simulation and in a deployment.

    Args:
        name: of the policy, as in the recipe: `fixed@2` is a variant of `fixed`.
    """
    run, variant = recipe.run or RunConfig(), name.partition("@")[2]
    measured: dict[str, Any] = plain(costs)
    layers = measured.pop("names")
    return {
        "name": recipe.name,
        "policy": name,
        "title": f"{policy.title} {variant}" if variant else policy.title,
        "trainer": policy.trainer,
        "estimates": policy.estimates,
        "adapt": {**recipe.adapt.model_dump(mode="json"), **policy.adapt},
        "seed": seed,
        "recipe": recipe.model_dump(mode="json"),
        "versions": {
            "adaptsfl": adaptsfl.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
        },
        "devices": list(devices),
        "layers": layers or [f"layer {k}" for k in range(1, costs.layers + 1)],
        "batch_size": recipe.training.batch_size,
        "costs": measured,
        "server": plain(server),
        "targets": targets_of(run),
    }


def reestimates(given: TrainingConfig, model: SplitModel, devices: int) -> bool:
    """Whether batch-norm's running statistics are re-estimated wherever the copies of a model are averaged."""
    return given.reestimate_statistics and devices > 1 and tracks_statistics(model.pieces)


def norm_remark(recipe: Recipe, model: SplitModel) -> str:
    """Return a note for the user if the model's normalisation does not suit the data; else an empty text."""
    partition = (recipe.data or DataConfig()).partition
    if partition.kind != "shards" or not mixes_samples(model.pieces):
        return ""
    return (
        "devices hold shards of few labels, and the model has batch-norm, which in client-specific layers normalises "
        "every device's samples by themselves. Group-norm would learn several times faster (model.options.norm = "
        "'group' for models of the zoo)"
    )


def targets_of(run: RunConfig) -> list[float]:
    """Return the accuracies for which times are reported, in rising order."""
    own = [] if run.target_accuracy is None else [run.target_accuracy]
    return sorted({*run.targets, *own})
