"""The user's own datasets: torch Datasets from a factory, read into memory."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from adaptsfl import factories
from adaptsfl.data.samples import Dataset, Samples, measured_normalisation
from adaptsfl.errors import InvalidInput, first_line

RETURNS = "two torch Datasets of (input, label): train and test"


def load_own(target: str, options: dict[str, Any]) -> Dataset:
    """Call `package.module:factory` with `options`; it returns a training and a test set of (input, label)."""
    with factories.importing_from_here():
        made = factories.call("data.name", target, factories.find("data.name", target, RETURNS), options)
        if not isinstance(made, tuple) or len(made) != 2:
            raise InvalidInput("data.name", f"{target} returned a {type(made).__name__}", f"Return {RETURNS}")
        train, test = (
            _in_memory(f"{target} ({split})", part) for split, part in zip(("train", "test"), made, strict=True)
        )
    names = getattr(made[0], "classes", None)
    count = int(max(train.labels.max(), test.labels.max())) + 1
    classes = tuple(map(str, names if names is not None else range(count)))
    return Dataset(train, test, classes, measured_normalisation(train))


def _in_memory(source: str, dataset: Any) -> Samples:
    """Return all samples of a torch Dataset as two tensors. A random transform is applied once, here."""
    inputs, labels = [], []
    try:
        for value, label in _rows(dataset):
            inputs.append(_tensor(value))
            labels.append(torch.as_tensor(label))
    except InvalidInput:
        raise
    except Exception as error:
        problem = f"{source}: sample {len(inputs)} raised {type(error).__name__}: {first_line(error)}"
        raise InvalidInput("data.name", problem, "Every sample is a pair (input, label)") from error
    if not inputs:
        raise InvalidInput("data.name", f"{source} has no samples", "Give at least one")
    for k, (value, label) in enumerate(zip(inputs, labels, strict=True)):
        if _kind(value) != _kind(inputs[0]) or label.shape != labels[0].shape or label.is_floating_point():
            raise InvalidInput(
                "data.name",
                f"{source}: sample {k} is {_kind(value)} with label {_kind(label)}, "
                f"sample 0 is {_kind(inputs[0])} with label {_kind(labels[0])}",
                "Give all samples one shape and type, and whole numbers as labels",
            )
    return Samples(torch.stack(inputs), torch.stack(labels).to(torch.int64))


def _rows(dataset: Any) -> Iterator[Any]:
    """Yield the samples by index if the dataset has a length, as torch does; else by iteration."""
    if hasattr(dataset, "__len__"):
        return (dataset[k] for k in range(len(dataset)))
    return iter(dataset)


def _tensor(value: Any) -> Tensor:
    """Return one input as a tensor of a dtype that models take; a Pillow image as (C, H, W)."""
    if not isinstance(value, Tensor):
        array = np.asarray(value)
        tensor = torch.from_numpy(array.copy())
        if hasattr(value, "getbands"):  # a Pillow image
            tensor = tensor.permute(2, 0, 1) if tensor.ndim == 3 else tensor[None]
    else:
        tensor = value
    if tensor.dtype == torch.uint8:
        return tensor
    return tensor.to(torch.float32 if tensor.is_floating_point() or tensor.dtype == torch.bool else torch.int64)


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
