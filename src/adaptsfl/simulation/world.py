"""All that a run is made of and that no policy changes: model, data, fleet, and how to train and evaluate."""

import json
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from hashlib import sha256
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

import adaptsfl
from adaptsfl import checks
from adaptsfl.config import DataConfig, ModelConfig, Recipe, RunConfig, TrainingConfig
from adaptsfl.costs import CutCosts
from adaptsfl.data import PreparedData, evaluation_batches, prepare
from adaptsfl.data.samples import Samples
from adaptsfl.errors import InvalidInput, first_line
from adaptsfl.fleet import Fleet, MeasurementNoise, Resources, noise_from, resources_from
from adaptsfl.loading import Optimizer, costs_of, inside, model_costs, split_model
from adaptsfl.models import SplitModel
from adaptsfl.training import OptimizerSettings
from adaptsfl.training.ranks import ALONE, Ranks
from adaptsfl.training.settings import Batch


@dataclass(frozen=True, eq=False)
class World:
    """A recipe and a seed, made real.

    Attributes:
        recipe: with every seed in it final.
        seed: of this run.
        model: split, with its initial weights.
    """

    recipe: Recipe
    seed: int
    model: SplitModel
    costs: CutCosts
    data: PreparedData
    resources: Resources
    noise: MeasurementNoise

    @property
    def run(self) -> RunConfig:
        """The recipe's [run]."""
        assert self.recipe.run is not None
        return self.recipe.run

    @property
    def devices(self) -> int:
        """N."""
        return len(self.data.parts)

    @property
    def batch_size(self) -> int:
        """Samples in a device's mini-batch, b."""
        return self.recipe.training.batch_size

    @cached_property
    def epoch_rounds(self) -> int:
        """Rounds in which the device with the most samples sees all of them once."""
        return max(map(len, self.data.parts)) // self.batch_size

    @cached_property
    def optimizer(self) -> OptimizerSettings:
        """How weights follow gradients."""
        return optimizer_settings(self.recipe.training)

    def fleet_at(self, round_: int) -> Fleet:
        """Return the true resources in round 1, 2, …."""
        return self.resources.at(round_ - 1)

    def measured_at(self, round_: int) -> Fleet:
        """Return the resources of round 1, 2, … as they are measured."""
        return self.noise.measure(self.fleet_at(round_), round_ - 1)

    def batches(self, round_: int, present: Sequence[int] | None = None) -> list[Batch]:
        """Return one mini-batch per present device for round 1, 2, …; all must be devices whose samples are here."""
        here = range(self.devices) if present is None else present
        batch = self.data.batches.at(round_ - 1, [self._row[device] for device in here])
        inputs, labels = (torch.split(tensor, self.batch_size) for tensor in (batch.inputs, batch.labels))
        return list(zip(inputs, labels, strict=True))

    @cached_property
    def _row(self) -> dict[int, int]:
        return {device: row for row, device in enumerate(self.data.mine)}

    @cached_property
    def learning_identity(self) -> str:
        """A name for everything that decides what is learned, but for the schedule: equal names, equal weights."""
        recipe = self.recipe.model_dump(mode="json", include={"model", "training", "data"})
        recipe["seed"], recipe["devices"] = self.seed, self.devices
        recipe["evaluation"] = [self.run.evaluate_every, self.run.test_samples]
        recipe["versions"] = [torch.__version__, adaptsfl.__version__]
        recipe["labels"] = [_fingerprint(labels) for labels in (self.data.labels, self.data.dataset.test.labels)]
        recipe["parts"] = [_fingerprint(torch.from_numpy(part)) for part in self.data.parts]
        # A factory of the user's own may give another model tomorrow, under the same name.
        recipe["weights"] = {name: _fingerprint(value) for name, value in self.model.module.state_dict().items()}
        recipe["work"] = [self.costs.forward_flops.tolist(), self.costs.activation_bits.tolist()]
        for key in ("path", "cache"):  # where samples lie does not matter
            recipe["data"].pop(key)
        return sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:16]

    @cached_property
    def evaluate(self) -> Callable[..., tuple[float, float]]:
        """A function from a state_dict to accuracy and loss on the test samples, of which every rank takes a part."""
        net = deepcopy(self.model.module).to(self.recipe.training.device).eval()
        test, wanted = self.data.dataset.test, self.run.test_samples
        if wanted is not None and wanted < len(test):  # the same ones in every run
            picked = torch.from_numpy(np.sort(np.random.default_rng(0).permutation(len(test))[:wanted]))
            test = Samples(test.inputs[picked], test.labels[picked])

        @torch.inference_mode()
        def measure(state: Mapping[str, Tensor], ranks: Ranks = ALONE) -> tuple[float, float]:
            net.load_state_dict(state)
            found: list[float] = []  # of every batch, how many are right, and the loss
            count = 0
            for k, (inputs, labels) in enumerate(
                evaluation_batches(test, self.data.dataset.normalisation, device=self.recipe.training.device)
            ):
                flat = labels.flatten()
                count += len(flat)
                if k % ranks.size != ranks.rank:
                    found += [0.0, 0.0]
                    continue
                outputs = net(inputs).flatten(0, -2)
                found.append(float((outputs.argmax(1) == flat).sum()))
                found.append(float(functional.cross_entropy(outputs, flat, reduction="sum")))
            told = ranks.totals(found)
            return sum(told[::2]) / count, sum(told[1::2]) / count

        return measure


def _fingerprint(values: Tensor) -> str:
    flat = values.detach().cpu().contiguous().flatten().view(torch.uint8)  # NumPy does not know every type
    return sha256(flat.numpy().tobytes()).hexdigest()[:16]


def make_world(
    recipe: Recipe, seed: int, like: World | None = None, *, ranks: Ranks = ALONE, pooled: bool = False
) -> World:
    """Build everything that a recipe names, with every check that can be made before training starts.

    Args:
        like: a world of the same seed whose recipe differs in its fleet at most; model and data are then shared.
        ranks: the processes that train together; each keeps the training samples of its own devices only.
        pooled: whether the first rank needs all samples, because it trains one model on them by itself.
    """
    recipe = seeded(recipe, seed)
    run = recipe.run or RunConfig()
    check_run(run)
    data_config = recipe.data or DataConfig()
    with inside("fleet"):
        resources = resources_from(recipe.fleet)
    with inside("fleet.noise"):
        noise = noise_from(recipe.fleet.noise, recipe.fleet.seed)
    if like is not None and like.devices == resources.at(0).size:
        kept = {"run": like.recipe.run, "data": like.recipe.data}
        return replace(like, recipe=recipe.model_copy(update=kept), resources=resources, noise=noise)
    check_training(recipe.training)
    torch.manual_seed(seed)
    model, example = split_model(recipe.model, to_train=True)
    if recipe.model.charged_as is None:
        costs = costs_of(model, example, recipe.model, recipe.training.batch_size, recipe.training.optimizer)
    else:
        costs = _charged(recipe.model.model_dump_json(), recipe.training.batch_size, recipe.training.optimizer)
        _check_layers(model.layers, costs.layers)
    devices, batch_size = resources.at(0).size, recipe.training.batch_size
    data = prepare(
        data_config,
        devices=devices,
        batch_size=batch_size,
        classes=classes_of(model, example),
        device=recipe.training.device,
        mine=None if pooled and ranks.first else ranks.shares(devices)[ranks.rank],
    )
    check_inputs(example, data)
    recipe = recipe.model_copy(update={"run": run, "data": data_config})
    return World(recipe, seed, model, costs, data, resources, noise)


@lru_cache(maxsize=4)
def _charged(model: str, batch_size: int, optimizer: Optimizer) -> CutCosts:
    """Return the costs of the model that is charged for another; every world of a sweep asks for the same."""
    return model_costs(ModelConfig.model_validate_json(model), batch_size, optimizer)


def _check_layers(learning: int, charged: int) -> None:
    """Refuse a model charged for another one that is cut elsewhere."""
    if learning != charged:
        problem = f"gives a model of {charged} layers, the one that learns has {learning}"
        raise InvalidInput("model.charged_as", problem, "Change options that keep the layers, such as width")


def optimizer_settings(given: TrainingConfig) -> OptimizerSettings:
    """Return how weights follow gradients, as a recipe has it."""
    return OptimizerSettings(
        name=given.optimizer,
        learning_rate=given.learning_rate,
        common_learning_rate=given.common_learning_rate,
        momentum=given.momentum,
        weight_decay=given.weight_decay,
        at_averaging=given.at_averaging,
    )


def check_training(given: TrainingConfig) -> None:
    """Refuse what training could not begin with, by the names that a recipe has for it."""
    checks.whole_number("training.batch_size", given.batch_size)
    try:
        optimizer_settings(given)
    except InvalidInput as error:
        field = f"training.{error.field.removeprefix('optimizer.')}"
        raise InvalidInput(field, error.problem, error.remedy) from None
    try:
        torch.zeros(1, device=given.device)
    except (RuntimeError, AssertionError) as error:  # torch's two ways to say that it has no such device
        problem = f"is {given.device!r}, which torch cannot use: {first_line(error)}"
        raise InvalidInput("training.device", problem, "Give cpu, or a device that this machine has") from None


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


def check_run(run: RunConfig) -> None:
    """Refuse a run that would never end, and numbers that make no sense."""
    for name in ("rounds", "samples", "test_samples"):
        if getattr(run, name) is not None:
            checks.whole_number(f"run.{name}", getattr(run, name))
    checks.whole_number("run.evaluate_every", run.evaluate_every)
    checks.whole_number("run.checkpoint_every", run.checkpoint_every)
    checks.whole_number("run.seed", run.seed, at_least=0)
    if run.seconds is not None:
        checks.number("run.seconds", run.seconds, positive=True)
    for goal in run.targets:
        if not 0 < goal <= 1:
            raise InvalidInput("run.targets", f"holds {goal:g}", "Give accuracies above 0 and at most 1")
    if run.target_accuracy is not None and not 0 < run.target_accuracy <= 1:
        problem = f"is {run.target_accuracy:g}"
        raise InvalidInput("run.target_accuracy", problem, "Give an accuracy above 0 and at most 1")
    if run.rounds is None and run.samples is None and run.seconds is None and not run.converged:
        raise InvalidInput("run", "has no end", "Give rounds, samples or seconds, or converged = true")


def classes_of(model: SplitModel, example: Tensor) -> int:
    """Return the size of the model's last dimension: how many classes it tells apart."""
    module = model.module
    mode = module.training
    with torch.no_grad():
        outputs = module.eval()(example)
    module.train(mode)
    return int(outputs.shape[-1])


def check_inputs(example: Tensor, data: PreparedData) -> None:
    """Refuse samples of another shape than the model takes."""
    expected, found = tuple(example.shape[1:]), tuple(data.dataset.train.inputs.shape[1:])
    if expected != found:
        problem = f"has samples of shape {found}, the model takes {expected}"
        raise InvalidInput("data", problem, "Give data that fit the model, or another model")
