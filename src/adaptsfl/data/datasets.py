"""Load the dataset that a recipe names."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from adaptsfl.config import DataConfig
from adaptsfl.data.cache import cache_folder
from adaptsfl.data.folder import read_class_folders
from adaptsfl.data.hub import HUB, load_hub_dataset
from adaptsfl.data.own import load_own
from adaptsfl.data.samples import Choice, Dataset, Normalisation, Samples, measured_normalisation
from adaptsfl.errors import InvalidInput, unknown

DIGITS = ("digits", "digits32")
NAMES = (*DIGITS, *HUB, "images")

DIGITS_TEST_SIZE = 357  # leaves 1440 to train on, which divides among many numbers of devices and shards
# Mean and deviation of the training set, with pixels in 0 … 1.
DIGITS_NORMALISATION = Normalisation((0.3053,), (0.3760,))


def load_dataset(config: DataConfig, chosen: Mapping[str, Choice] | None = None) -> Dataset:
    """Load the `[data]` of a recipe: digits, cifar10, cifar100, images (a folder), or package.module:factory.

    Args:
        chosen: which samples of train and test to load; by default all. The others are not kept in memory; for CIFAR,
            only their labels are decoded.
    """
    own = ":" in config.name
    if config.options and not own:
        raise InvalidInput("data.options", f"is given, but {config.name} takes none", "Only a factory takes options")
    if config.classes is not None and config.name != "images":
        problem = f"is given, but {config.name} has classes of its own"
        raise InvalidInput("data.classes", problem, "Remove it")
    if config.path is not None and (own or config.name in DIGITS):
        remedy = "Remove it" + ("; give the factory what it needs as data.options" if own else "")
        raise InvalidInput("data.path", f"is {config.path!r}, but {config.name} reads no files", remedy)
    dataset = _load(config, cache_folder(config.cache), chosen)
    if chosen is not None and config.name not in HUB:
        train, test = (
            samples.only([chosen[split](samples.labels)]) if split in chosen else samples
            for split, samples in (("train", dataset.train), ("test", dataset.test))
        )
        dataset = replace(dataset, train=train, test=test)
    if config.mean is None and config.std is None:
        return dataset
    return replace(dataset, normalisation=Normalisation(tuple(config.mean or ()), tuple(config.std or ())))


def _load(config: DataConfig, cache: Path, chosen: Mapping[str, Choice] | None) -> Dataset:
    if ":" in config.name:
        return load_own(config.name, dict(config.options))
    if config.name == "digits":
        return _load_digits()
    if config.name == "digits32":
        return _like_cifar(_load_digits())
    if config.name in HUB:
        return load_hub_dataset(config.name, config.path, cache, chosen)
    if config.name == "images":
        return _load_images(config.path, cache, config.classes)
    remedy = f"Give one of {', '.join(NAMES)}, or package.module:factory of your own"
    raise unknown("data.name", config.name, NAMES, remedy)


def _load_digits() -> Dataset:
    """Return scikit-learn's 1797 digits of 8×8 pixels, in 0 … 1: 1440 to train on, 357 to test on, always the same."""
    # Imported here: scikit-learn takes longer to import than the rest of this package together.
    from sklearn.datasets import load_digits  # noqa: PLC0415
    from sklearn.model_selection import train_test_split  # noqa: PLC0415

    digits = load_digits()
    inputs = (digits.images[:, None] / 16).astype("float32")
    split = train_test_split(inputs, digits.target, test_size=DIGITS_TEST_SIZE, stratify=digits.target, random_state=0)
    train_inputs, test_inputs, train_labels, test_labels = (torch.from_numpy(part) for part in split)
    train = Samples(train_inputs, train_labels.to(torch.int64))
    test = Samples(test_inputs, test_labels.to(torch.int64))
    return Dataset(train, test, tuple(map(str, range(10))), DIGITS_NORMALISATION)


def _like_cifar(digits: Dataset) -> Dataset:
    """Return the digits as colour images of 32×32 pixels, for networks made for CIFAR."""

    def enlarged(samples: Samples) -> Samples:
        inputs = samples.inputs.repeat_interleave(4, dim=2).repeat_interleave(4, dim=3)
        return Samples(inputs.repeat(1, 3, 1, 1), samples.labels)

    normalisation = Normalisation(3 * DIGITS_NORMALISATION.mean, 3 * DIGITS_NORMALISATION.std)
    return replace(digits, train=enlarged(digits.train), test=enlarged(digits.test), normalisation=normalisation)


def _load_images(path: str | None, cache: Path, classes: Sequence[str] | None) -> Dataset:
    """Read train/<class>/* and test/<class>/*; by default the training images define classes and mean/std."""
    if path is None:
        raise InvalidInput("data.path", "is missing", "Give a folder with train/<class>/ and test/<class>/ images")
    for split in ("train", "test"):
        if not (Path(path) / split).is_dir():
            problem = f"{path} has no folder {split}"
            raise InvalidInput("data.path", problem, "Give a folder with train/<class>/ and test/<class>/ images")
    train, names = read_class_folders(Path(path) / "train", cache, classes)
    test, _ = read_class_folders(Path(path) / "test", cache, names)
    return Dataset(train, test, names, measured_normalisation(train))
