"""Turn the `[data]` of a recipe into mini-batches, with every check that is possible before training starts."""

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
        dataset: the dataset, with the training samples of the devices `mine` only.
        parts: the numbers of the training samples that each device holds.
        weights: the weight of each device in every average.
        batches: the mini-batches of the devices `mine`, in that order.
        mine: the devices whose training samples this process has in memory.
        labels: the labels of the training samples of all devices.
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
    """Load and partition the dataset; check it against the batch size and the model's number of classes.

    If `mine` is given, only the training samples of these devices stay in memory. If every device has a file of its
    own, only the labels of the other devices' files are read.
    """
    checks.whole_number("training.batch_size", batch_size)
    held = tuple(range(devices) if mine is None else mine)
    dataset = load_dataset(config)
    content = dataset.fingerprint()  # before samples of other devices are dropped
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
    """Add the bytes of a partition's files to the fingerprint: no rank loads all of their samples."""
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

    If every device has its own folder or parquet file, these together are the training samples.
    """
    dataset, parts, _ = _share_out(config, load_dataset(config), devices, batch_size, range(devices))
    return dataset, parts


def load_part(config: DataConfig, devices: int, device: int, *, tests: Choice, batch_size: int = 1) -> Dataset:
    """Return the dataset with one device's part of the training samples, as in `share_out`, and chosen test samples.

    Of the other samples only the labels are read into memory, and they are freed when this returns.
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
        labels = labels.clone()  # else they would keep the memory-mapped file of all samples open
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
    """Return the dataset with the training samples in the files of `mine`, and the parts and labels of all devices."""
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
    """Return the parts of devices whose samples are stored one device after the other."""
    return tuple(np.arange(low, high) for low, high in pairwise(np.cumsum([0, *sizes])))


def _read(file: Path, label: str, classes: tuple[str, ...], cache: Path) -> Decoded:
    if file.is_dir():
        return read_class_folders(file, cache, classes)
    return read_cached_parquet([file], label, cache)


def _read_labels(file: Path, label: str, classes: tuple[str, ...]) -> Tensor:
    return read_class_labels(file, classes) if file.is_dir() else read_parquet_labels(file, label)
