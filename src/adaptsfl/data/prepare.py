"""From the `[data]` of a recipe to mini-batches, with every check that can be made before training starts."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import file_digest, sha256
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from adaptsfl import checks
from adaptsfl.checks import FloatArray, IntArray
from adaptsfl.config import DataConfig
from adaptsfl.data.batches import DeviceBatches
from adaptsfl.data.cache import Decoded, cache_folder
from adaptsfl.data.datasets import load_dataset
from adaptsfl.data.folder import read_class_folders, read_class_labels
from adaptsfl.data.hub import HUB, read_cached_parquet
from adaptsfl.data.parquet import read_parquet_labels
from adaptsfl.data.partition import FIELD, Parts, averaging_weights, check_parts, make_partition
from adaptsfl.data.samples import Choice, Dataset, Samples
from adaptsfl.errors import InvalidInput


@dataclass(frozen=True, eq=False)
class PreparedData:
    """Everything that training needs to know about its data.

    Attributes:
        dataset: its training samples are those of the devices `mine` only.
        parts: which of all training samples each device holds.
        weights: of the devices in every average.
        batches: those of the devices `mine`, in that order.
        mine: the devices whose training samples are in memory here.
        labels: of the training samples of all devices.
        content: a fingerprint of the samples of all devices and of the files of a partition (`content_of`).
    """

    dataset: Dataset
    parts: Parts
    weights: FloatArray
    batches: DeviceBatches
    mine: tuple[int, ...]
    labels: Tensor
    content: str


def prepare(
    config: DataConfig,
    *,
    devices: int,
    batch_size: int,
    classes: int | None = None,
    device: torch.device | str = "cpu",
    mine: Sequence[int] | None = None,
) -> PreparedData:
    """Load the dataset, share it out and check it: against mini-batches, and against the model's number of classes.

    Where only the mini-batches of the devices `mine` are wanted, only their training samples stay in memory. Of samples
    that other devices bring as files of their own, nothing but the labels is read.
    """
    checks.whole_number("training.batch_size", batch_size)
    held = tuple(range(devices) if mine is None else mine)
    dataset = load_dataset(config)
    content = dataset.fingerprint()  # while it is whole
    dataset, parts, labels = _share_out(config, dataset, devices, batch_size, held)
    content = _with_files(config, content)
    if classes is not None:
        dataset.check_classes(classes)
    check_parts(parts, batch_size)
    batches = DeviceBatches(
        dataset.train,
        parts if len(held) == devices else _behind_each_other([len(parts[k]) for k in held]),
        batch_size,
        seed=config.seed,
        normalisation=dataset.normalisation,
        augmentation=config.augmentation,
        streams=held,
        device=device,
    )
    return PreparedData(dataset, parts, averaging_weights(parts, config.weights), batches, held, labels, content)


def content_of(config: DataConfig) -> str:
    """Return a fingerprint of what `prepare` would read, without partitioning it."""
    return _with_files(config, load_dataset(config).fingerprint())


def _with_files(config: DataConfig, content: str) -> str:
    """Add the files of a partition, byte for byte: no rank has all of the samples in them."""
    if config.partition.kind != "files":
        return content
    whole = sha256(content.encode())
    for place in map(Path, config.partition.files or ()):
        for file in sorted(place.rglob("*")) if place.is_dir() else [place]:
            if file.is_file():
                with file.open("rb") as opened:
                    whole.update(f"{file.relative_to(place)} {file_digest(opened, 'sha256').hexdigest()}\n".encode())
        whole.update(b"\n")
    return whole.hexdigest()[:16]


def share_out(config: DataConfig, devices: int, *, batch_size: int = 1) -> tuple[Dataset, Parts]:
    """Return the dataset and each device's part of its training samples.

    Where every device brings a folder or a parquet file of its own, these together are the training samples.
    """
    dataset, parts, _ = _share_out(config, load_dataset(config), devices, batch_size, range(devices))
    return dataset, parts


def load_part(config: DataConfig, devices: int, device: int, *, tests: Choice, batch_size: int = 1) -> Dataset:
    """Return the dataset with one device's part of the training samples, the same as by `share_out`, and chosen tests.

    Of other samples only the labels are read into memory, and they are gone when this returns.
    """

    def part(labels: Tensor) -> IntArray:
        return make_partition(config.partition, labels.numpy(), devices, batch_size=batch_size)[device]

    return load_dataset(config, {"train": part, "test": tests})


def _share_out(
    config: DataConfig, dataset: Dataset, devices: int, batch_size: int, mine: Sequence[int]
) -> tuple[Dataset, Parts, Tensor]:
    """Return the dataset with the training samples of `mine`, one device after the other, and all parts and labels.

    With all devices, samples are in the order of the dataset.
    """
    if config.partition.kind == "files":
        files = [Path(file) for file in config.partition.files or ()]
        _check_files(files, devices)
        if any(_holds_samples(file) for file in files):
            return _together(config, dataset, files, mine)
    labels = dataset.train.labels
    parts = make_partition(config.partition, labels.numpy(), devices, batch_size=batch_size)
    if len(mine) < devices:
        dataset = replace(dataset, train=dataset.train.only([parts[k] for k in mine]))
        labels = labels.clone()  # else they would hold on to the file that all samples are mapped from
    return dataset, parts, labels


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


def _together(
    config: DataConfig, dataset: Dataset, files: list[Path], mine: Sequence[int]
) -> tuple[Dataset, Parts, Tensor]:
    """Return the dataset with the samples that `mine` bring to train on, and the parts and labels of all devices."""
    cache = cache_folder(config.cache)
    label = HUB[config.name].label if config.name in HUB else "label"
    read: list[Samples] = []
    labels: list[Tensor] = []
    for k, file in enumerate(files):
        try:
            if k not in mine:
                labels.append(_read_labels(file, label, dataset.classes))
                continue
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
        labels.append(samples.labels)
    if read:
        train = Samples(torch.cat([part.inputs for part in read]), torch.cat([part.labels for part in read]))
    else:
        train = dataset.train.only([])
    return replace(dataset, train=train), _behind_each_other([len(part) for part in labels]), torch.cat(labels)


def _behind_each_other(sizes: Sequence[int]) -> Parts:
    """Return the parts of devices whose samples lie one device after the other."""
    return tuple(np.arange(low, high) for low, high in pairwise(np.cumsum([0, *sizes])))


def _read(file: Path, label: str, classes: tuple[str, ...], cache: Path) -> Decoded:
    if file.is_dir():
        return read_class_folders(file, cache, classes)
    return read_cached_parquet([file], label, cache)


def _read_labels(file: Path, label: str, classes: tuple[str, ...]) -> Tensor:
    return read_class_labels(file, classes) if file.is_dir() else read_parquet_labels(file, label)
