"""The settings that all parties of a run share: model, training, data and rules. Devices receive them as JSON.

A device does not trust the server: it runs models and datasets of this package, and others only if its owner has
allowed them by name.
"""

import json
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from adaptsfl import checks
from adaptsfl.checks import printable, short
from adaptsfl.config import DataConfig, Recipe, RunConfig, parse
from adaptsfl.deploy.security.certs import is_device_name
from adaptsfl.errors import BadMessage, InvalidInput, first_line
from adaptsfl.loading import classes_of, split_model
from adaptsfl.models import SplitModel
from adaptsfl.runs.recipe import check_training, optimizer_settings, seeded
from adaptsfl.training import OptimizerSettings
from adaptsfl.training.settings import check_trainable

PROTOCOL = 4  # the version; it changes when older parties would not understand the messages
SHARED = ("name", "model", "training", "data", "deploy")
LOCAL = {"path": None, "cache": None}  # each device has its own paths
# Limits of what a server may ask of a device: more would be a mistake, or an attempt to fill its memory.
MOST_DEVICES, LARGEST_BATCH = 1_000_000, 1_000_000


@dataclass(frozen=True)
class Terms:
    """The part of a recipe that all parties need, with all seeds set.

    Attributes:
        devices: N.
        test_samples: the number for all devices together; None for all samples that they have.
    """

    recipe: Recipe
    seed: int
    devices: int
    test_samples: int | None = None

    @classmethod
    def of(cls, recipe: Recipe) -> "Terms":
        """Return the terms of a recipe, after the checks that all parties make."""
        run = recipe.run or RunConfig()
        check_rules(recipe)
        data = recipe.data or DataConfig()
        recipe = seeded(recipe.model_copy(update={"data": data}), run.seed)
        names = recipe.deploy.devices
        return cls(recipe, run.seed, recipe.fleet.devices if names is None else len(names), run.test_samples)

    def to_json(self) -> str:
        """Return the settings as they are sent to devices."""
        settings = self.recipe.model_dump(mode="json", include=set(SHARED))
        settings["data"] |= LOCAL
        settings["deploy"]["devices"] = None  # no device needs to know the others
        return json.dumps(
            {"recipe": settings, "seed": self.seed, "devices": self.devices, "test_samples": self.test_samples}
        )

    @classmethod
    def from_json(cls, text: str, allowed: Collection[str] = ()) -> "Terms":
        """Return the terms that a server sent, if this machine allows them.

        Args:
            allowed: factories (package.module:factory) that the owner of this machine permits servers to name.
        """
        try:
            settings: dict[str, Any] = json.loads(text)
            others = set(settings) - {"recipe", "seed", "devices", "test_samples"}
            others |= set(settings["recipe"]) - set(SHARED)
            if others:
                raise InvalidInput("settings", f"hold {short(min(others))}", "Only what devices need may be sent")
            recipe = parse(Recipe, settings["recipe"])
            devices = checks.whole_number("devices", settings["devices"], at_most=MOST_DEVICES)
            seed = checks.whole_number("seed", settings["seed"], at_least=0, at_most=2**63 - 1)
            tests = settings["test_samples"]
            test_samples = None if tests is None else checks.whole_number("test_samples", tests)
            checks.whole_number("training.batch_size", recipe.training.batch_size, at_most=LARGEST_BATCH)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, InvalidInput) as error:
            why = printable(first_line(error), 200)
            raise BadMessage(f"the edge server's settings cannot be read ({why})") from None
        check_rules(recipe)
        data = recipe.data or DataConfig()
        for what, name in (("model", recipe.model.name), ("data", data.name)):
            if ":" in name and name not in allowed:
                shown = printable(name, 100)
                problem = f"the edge server wants {shown} to run on this machine"
                raise InvalidInput(f"{what}.name", problem, f"If you trust it, say so: --allow {shown}")
        # Also here, not only in `to_json`: a server must not choose where samples are read and caches are written.
        own = data.model_copy(update=LOCAL)
        return cls(recipe.model_copy(update={"data": own}), seed, devices, test_samples)

    @property
    def run(self) -> RunConfig:
        """How long to train, and by which policy."""
        return self.recipe.run or RunConfig()

    @property
    def names(self) -> list[str]:
        """The names of devices, which are also those in their certificates."""
        return self.recipe.deploy.devices or [f"device-{k + 1}" for k in range(self.devices)]

    @property
    def floor(self) -> int:
        """The smallest cut of any device."""
        return self.recipe.deploy.cut_floor

    @property
    def batch_size(self) -> int:
        """Samples in a mini-batch, b."""
        return self.recipe.training.batch_size

    @property
    def optimizer(self) -> OptimizerSettings:
        """The settings of the optimiser."""
        return optimizer_settings(self.recipe.training)

    def model(self, seed: int | None = None) -> tuple[SplitModel, Tensor]:
        """Return the model, split, and one sample of its input; with weights drawn from the run's seed or another."""
        torch.manual_seed(self.seed if seed is None else seed)
        model, example = split_model(self.recipe.model, to_train=True)
        check_trainable(model)
        checks.whole_number("deploy.cut_floor", self.floor, at_least=1, at_most=model.layers)
        return model, example

    def classes(self, model: SplitModel, example: Tensor) -> int:
        """Return the number of the model's classes."""
        return classes_of(model, example)


def check_rules(recipe: Recipe) -> None:
    """Reject recipes that cannot be deployed."""
    check_training(recipe.training)
    rules, training = recipe.deploy, recipe.training
    for k, name in enumerate(rules.devices or ()):
        if not is_device_name(name) or name in (rules.devices or ())[:k]:
            problem = f"is {short(name)}"
            raise InvalidInput(f"deploy.devices[{k}]", problem, "Give letters, digits, - and _, and every name once")
    if rules.devices == []:
        raise InvalidInput("deploy.devices", "is empty", "Name at least one device, or leave it out")
    if training.optimizer != "sgd" and training.at_averaging == "keep":
        problem = "is 'keep', but layers travel with one optimiser state for all"
        raise InvalidInput("training.at_averaging", problem, "Give 'average' or 'reset'")
    if recipe.data is not None and recipe.data.partition.kind == "files":
        problem = "is 'files', but files of a server are nothing that devices should look for"
        raise InvalidInput("data.partition.kind", problem, "Give each device its own: adaptsfl join --data")
    if recipe.model.charged_as is not None:
        problem = "is given, but a deployment trains what it is charged for"
        raise InvalidInput("model.charged_as", problem, "Remove it")
