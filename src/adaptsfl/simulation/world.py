"""Everything in a run that no policy changes: model, data, fleet, and how to train and evaluate."""

import json
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from hashlib import sha256
from uuid import uuid4

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

import adaptsfl
from adaptsfl import factories
from adaptsfl.config import DataConfig, FleetConfig, ModelConfig, Recipe, RunConfig
from adaptsfl.costs import CutCosts
from adaptsfl.data import PreparedData, evaluation_batches, prepare
from adaptsfl.data.samples import Samples, fingerprint
from adaptsfl.errors import InvalidInput, inside
from adaptsfl.fleet import Fleet, MeasurementNoise, Resources, noise_from, resources_from
from adaptsfl.loading import Optimizer, classes_of, costs_of, model_costs, split_model
from adaptsfl.models import SplitModel
from adaptsfl.runs.recipe import check_run, check_training, optimizer_settings, seeded
from adaptsfl.training import OptimizerSettings
from adaptsfl.training.ranks import ALONE, Ranks
from adaptsfl.training.settings import Batch
from adaptsfl.training.sharding import Sharding


@dataclass(frozen=True, eq=False)
class TrueFleet:
    """The true and the measured resources of a fleet, round by round."""

    resources: Resources
    noise: MeasurementNoise

    @classmethod
    def of(cls, config: FleetConfig) -> "TrueFleet":
        """Return the fleet of a recipe, whose seed is final."""
        with inside("fleet"):
            resources = resources_from(config)
        with inside("fleet.noise"):
            return TrueFleet(resources, noise_from(config.noise, config.seed))

    def fleet_at(self, round_: int) -> Fleet:
        """Return the true resources in round 1, 2, …."""
        return self.resources.at(round_ - 1)

    def measured_at(self, round_: int) -> Fleet:
        """Return the resources of round 1, 2, … as they are measured."""
        return self.noise.measure(self.fleet_at(round_), round_ - 1)


@dataclass(frozen=True, eq=False)
class World(TrueFleet):
    """Everything that a recipe and a seed describe: model, data, fleet.

    Attributes:
        recipe: with every seed in it final.
        seed: of this run.
        model: split, with its initial weights.
        ranks: the processes that train together.
    """

    recipe: Recipe
    seed: int
    model: SplitModel
    costs: CutCosts
    data: PreparedData
    ranks: Ranks = ALONE

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

    def batches(self, round_: int, present: Sequence[int] | None = None) -> list[Batch]:
        """Return one mini-batch per present device for round 1, 2, …; this rank must hold their samples."""
        here = range(self.devices) if present is None else present
        batch = self.data.batches.at(round_ - 1, [self._row[device] for device in here])
        inputs, labels = (torch.split(tensor, self.batch_size) for tensor in (batch.inputs, batch.labels))
        return list(zip(inputs, labels, strict=True))

    @cached_property
    def _row(self) -> dict[int, int]:
        return {device: row for row, device in enumerate(self.data.mine)}

    @cached_property
    def model_code(self) -> str | None:
        """A fingerprint of the code of a user's own model; None if the code cannot be read."""
        return factories.code_of("model", self.recipe.model.name)

    @cached_property
    def learning_identity(self) -> str:
        """A key for everything but the schedule that determines the trained weights: equal keys, equal weights.

        If the model's code cannot be read, no other world has the same key.
        """
        return self.fingerprint if self.model_code is not None else uuid4().hex[:16]

    @cached_property
    def fingerprint(self) -> str:
        """The same key, but equal on all ranks even if the model's code cannot be read."""
        recipe = self.recipe.model_dump(mode="json", include={"model", "training", "data"})
        recipe["seed"], recipe["devices"] = self.seed, self.devices
        recipe["evaluation"] = [self.run.evaluate_every, self.run.test_samples]
        recipe["versions"] = [torch.__version__, adaptsfl.__version__]
        recipe["content"] = self.data.content
        recipe["parts"] = [fingerprint(torch.from_numpy(part)) for part in self.data.parts]
        # A user's own factory may return a different model later, under the same name.
        recipe["code"] = self.model_code
        recipe["weights"] = {name: fingerprint(value) for name, value in self.model.module.state_dict().items()}
        recipe["work"] = [self.costs.forward_flops.tolist(), self.costs.activation_bits.tolist()]
        for key in ("path", "cache"):  # the location of the samples does not matter
            recipe["data"].pop(key)
        return sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:16]

    @cached_property
    def evaluate(self) -> Callable[[Mapping[str, Tensor]], tuple[float, float]]:
        """A function from a state_dict to accuracy and loss on the test samples, which the ranks divide."""
        device = self.recipe.training.device
        net = deepcopy(self.model.module).to(device).eval()
        test, wanted = self.data.dataset.test, self.run.test_samples
        if wanted is not None and wanted < len(test):  # the same ones in every run
            picked = torch.from_numpy(np.sort(np.random.default_rng(0).permutation(len(test))[:wanted]))
            test = Samples(test.inputs[picked], test.labels[picked])

        def of_batch(batch: Batch) -> list[float]:
            outputs, labels = net(batch[0]).flatten(0, -2), batch[1].flatten()
            loss = functional.cross_entropy(outputs, labels, reduction="sum")
            return [float((outputs.argmax(1) == labels).sum()), float(loss)]

        @torch.inference_mode()
        def measure(state: Mapping[str, Tensor]) -> tuple[float, float]:
            net.load_state_dict(state)
            batches, count = (
                evaluation_batches(test, self.data.dataset.normalisation, device=device),
                test.labels.numel(),
            )
            found = self.ranks.map_numbers(of_batch, batches, 2)
            return sum(found[::2]) / count, sum(found[1::2]) / count

        return measure


def make_world(
    recipe: Recipe, seed: int, like: World | None = None, *, ranks: Ranks = ALONE, pooled: bool = False
) -> World:
    """Build everything that a recipe names, with every check that can be made before training starts.

    Args:
        like: a world of the same seed whose recipe differs at most in its fleet; model and data are then shared.
        ranks: the processes that train together; each keeps the training samples of its own devices only.
        pooled: whether the first rank needs all samples, because it trains one model on them by itself.
    """
    recipe = seeded(recipe, seed)
    run = recipe.run or RunConfig()
    check_run(run)
    data_config = recipe.data or DataConfig()
    fleet = TrueFleet.of(recipe.fleet)
    devices, batch_size = fleet.fleet_at(1).size, recipe.training.batch_size
    if like is not None and like.devices == devices:
        kept = {"run": like.recipe.run, "data": like.recipe.data}
        return replace(like, recipe=recipe.model_copy(update=kept), resources=fleet.resources, noise=fleet.noise)
    check_training(recipe.training)
    torch.manual_seed(seed)
    model, example = split_model(recipe.model, to_train=True)
    if recipe.model.charged_as is None:
        costs = costs_of(model, example, recipe.model, batch_size, recipe.training.optimizer)
    else:
        costs = _charged(recipe.model.model_dump_json(), batch_size, recipe.training.optimizer)
        _check_layers(model.layers, costs.layers)
    torch.manual_seed(seed)  # a user's own dataset may draw random numbers: the samples do not depend on the model
    data = prepare(
        data_config,
        devices=devices,
        batch_size=batch_size,
        classes=classes_of(model, example),
        device=recipe.training.device,
        mine=None if pooled and ranks.first else Sharding.of(devices, ranks).local,
    )
    check_inputs(example, data)
    recipe = recipe.model_copy(update={"run": run, "data": data_config})
    return World(fleet.resources, fleet.noise, recipe, seed, model, costs, data, ranks)


@lru_cache(maxsize=4)
def _charged(model: str, batch_size: int, optimizer: Optimizer) -> CutCosts:
    """Return the costs of the `charged_as` model; cached, because all worlds of a sweep need the same."""
    return model_costs(ModelConfig.model_validate_json(model), batch_size, optimizer)


def _check_layers(learning: int, charged: int) -> None:
    """Refuse a `charged_as` model whose number of layers differs from that of the trained model."""
    if learning != charged:
        problem = f"gives a model of {charged} layers, the one that learns has {learning}"
        raise InvalidInput("model.charged_as", problem, "Change options that keep the layers, such as width")


def check_inputs(example: Tensor, data: PreparedData) -> None:
    """Refuse samples whose shape the model does not accept."""
    expected, found = tuple(example.shape[1:]), tuple(data.dataset.train.inputs.shape[1:])
    if expected != found:
        problem = f"has samples of shape {found}, the model takes {expected}"
        raise InvalidInput("data", problem, "Give data that fit the model, or another model")
