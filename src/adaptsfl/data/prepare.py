"""From the `[data]` of a recipe to mini-batches, with every check that can be made before training starts."""

from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from adaptsfl import checks
from adaptsfl.checks import FloatArray
from adaptsfl.config import DataConfig
from adaptsfl.data.batches import DeviceBatches
from adaptsfl.data.cache import Decoded, cache_folder
from adaptsfl.data.datasets import load_dataset
from adaptsfl.data.folder import read_class_folders
from adaptsfl.data.hub import HUB, read_cached_parquet
from adaptsfl.data.partition import FIELD, Parts, averaging_weights, check_parts, make_partition
from adaptsfl.data.samples import Dataset, Samples
from adaptsfl.errors import InvalidInput


@dataclass(frozen=True, eq=False)
class PreparedData:
    """Everything that training needs to know about its data."""

    dataset: Dataset
    parts: Parts  # which training samples each device holds
    weights: FloatArray  # of the devices in every average
    batches: DeviceBatches


def prepare(
    config: DataConfig,
    *,
    devices: int,
    batch_size: int,
    classes: int | None = None,
    device: torch.device | str = "cpu",
) -> PreparedData:
    """Load the dataset, share it out and check it: against mini-batches, and against the model's number of classes."""
    checks.whole_number("training.batch_size", batch_size)
    dataset, parts = share_out(config, devices, batch_size=batch_size)
    if classes is not None:
        dataset.check_classes(classes)
    check_parts(parts, batch_size)
    batches = DeviceBatches(
        dataset.train,
        parts,
        batch_size,
        seed=config.seed,
        normalisation=dataset.normalisation,
        augmentation=config.augmentation,
        device=device,
    )
    return PreparedData(dataset, parts, averaging_weights(parts, config.weights), batches)


def share_out(config: DataConfig, devices: int, *, batch_size: int = 1) -> tuple[Dataset, Parts]:
    """Return the dataset and each device's part of its training samples.

    Where every device brings a folder or a parquet file of its own, these together are the training samples.
    """
    dataset = load_dataset(config)
    if config.partition.kind == "files":
        files = [Path(file) for file in config.partition.files or ()]
        _check_files(files, devices)
        if any(_holds_samples(file) for file in files):
            return _together(config, dataset, files)
    return dataset, make_partition(config.partition, dataset.train.labels.numpy(), devices, batch_size=batch_size)


def _check_files(files: list[Path], devices: int) -> None:
    field = f"{FIELD}.files"
    if len(files) != devices:
        raise InvalidInput(
            field, f"has {len(files)} entries for {devices} devices", "Give one file or folder per device"
        )
    for k, file in enumerate(files):
        if not file.exists():
            raise InvalidInput(
                f"{field}[{k}]", f"{file} does not exist", "Check the path; it is relative to the recipe"
            )
        if _holds_samples(file) != _holds_samples(files[0]):
            problem = f"{file} and {files[0]} are of different kinds"
            raise InvalidInput(f"{field}[{k}]", problem, "Give lists of sample numbers, or folders and parquet files")


def _holds_samples(file: Path) -> bool:
    return file.is_dir() or file.suffix == ".parquet"


def _together(config: DataConfig, dataset: Dataset, files: list[Path]) -> tuple[Dataset, Parts]:
    """Return the dataset with the devices' own samples to train on, one device after the other."""
    cache = cache_folder(config.cache)
    label = HUB[config.name].label if config.name in HUB else "label"
    read: list[Samples] = []
    for k, file in enumerate(files):
        try:
            samples, _ = _read(file, label, dataset.classes, cache)
        except InvalidInput as error:
            raise InvalidInput(f"{FIELD}.files[{k}]", error.problem, error.remedy) from error
        if (
            samples.inputs.shape[1:] != dataset.train.inputs.shape[1:]
            or samples.inputs.dtype != dataset.train.inputs.dtype
        ):
            problem = f"{file} has samples of shape {tuple(samples.inputs.shape[1:])}"
            remedy = (
                f"The test samples are {dataset.train.inputs.dtype} of shape {tuple(dataset.train.inputs.shape[1:])}"
            )
            raise InvalidInput(f"{FIELD}.files[{k}]", problem, remedy)
        read.append(samples)
    train = Samples(torch.cat([part.inputs for part in read]), torch.cat([part.labels for part in read]))
    bounds = np.cumsum([0, *map(len, read)])
    parts = tuple(np.arange(low, high) for low, high in pairwise(bounds))
    return replace(dataset, train=train), parts


def _read(file: Path, label: str, classes: tuple[str, ...], cache: Path) -> Decoded:
    if file.is_dir():
        return read_class_folders(file, cache, classes)
    return read_cached_parquet([file], label, cache)
