"""The samples of one device: its own files, or its part of a dataset that all devices have."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor

from adaptsfl.checks import IntArray
from adaptsfl.config import DataConfig
from adaptsfl.data import DeviceBatches, evaluation_batches, load_part
from adaptsfl.data.datasets import load_dataset
from adaptsfl.data.hub import HUB
from adaptsfl.data.samples import Dataset
from adaptsfl.deploy.terms import Terms
from adaptsfl.errors import InvalidInput
from adaptsfl.training.settings import Batch


@dataclass(frozen=True, eq=False)
class DeviceData:
    """The training and test samples of one device; only activations and labels leave the device."""

    batches: DeviceBatches
    samples: int
    dataset: Dataset  # this device's samples only, of train and test
    batch_size: int

    def at(self, round_: int) -> Batch:
        """Return the mini-batch of round 1, 2, …: the same as that of a simulated device."""
        batch = self.batches.at(round_ - 1)
        return batch.inputs, batch.labels

    def test_batches(self) -> list[tuple[Tensor, Tensor]]:
        """Return the test samples in mini-batches."""
        return list(evaluation_batches(self.dataset.test, self.dataset.normalisation, batch_size=self.batch_size))


def load_device_data(terms: Terms, number: int, path: Path | None, classes: int) -> DeviceData:
    """Return the samples of device `number`.

    Args:
        path: the device's own files; without them it takes its part of the recipe's dataset, as in a simulation.
        classes: the number of the model's classes.
    """
    config = terms.recipe.data or DataConfig()
    if path is None:
        own = load_part(
            config,
            terms.devices,
            number,
            tests=lambda labels: _own_tests(len(labels), terms, number),
            batch_size=terms.batch_size,
        )
    else:
        own = _own_files(config, path)
        if len(own.train) < terms.batch_size:
            problem = f"has {len(own.train)} samples to train on, but a mini-batch takes {terms.batch_size}"
            raise InvalidInput("--data", problem, "Add samples, or lower training.batch_size", source=str(path))
    own.check_classes(classes)
    batches = DeviceBatches(
        own.train,
        (np.arange(len(own.train)),),
        terms.batch_size,
        seed=config.seed,
        normalisation=own.normalisation,
        augmentation=config.augmentation,
        streams=[number],
    )
    return DeviceData(batches, len(own.train), own, terms.batch_size)


def _own_files(config: DataConfig, path: Path) -> Dataset:
    """Read the device's own files, with the same normalisation on all devices."""
    name = config.name if config.name in HUB else "images"
    if config.name not in (name, "images") and ":" not in config.name:
        problem = f"is given, but the run trains on {config.name}, which every device has"
        raise InvalidInput("--data", problem, "Leave it out, or let the recipe say data.name = 'images'")
    if name == "images" and (config.mean is None or config.std is None):
        problem = "is missing: with files of their own, devices would each normalise in another way"
        raise InvalidInput("data.mean", problem, "Give data.mean and data.std in the recipe of the edge server")
    if name == "images" and config.classes is None:
        problem = "is missing: devices that lack a class would number the others in another way"
        raise InvalidInput("data.classes", problem, "Give the names of all classes in the recipe of the edge server")
    return load_dataset(config.model_copy(update={"name": name, "path": str(path)}))


def _own_tests(count: int, terms: Terms, number: int) -> IntArray:
    """Return every N-th of the test samples, or one of them where there are fewer than devices."""
    own = np.arange(min(count, terms.test_samples or count))[number :: terms.devices]
    return own if len(own) else np.arange(count)[number : number + 1]
