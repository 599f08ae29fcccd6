"""Labelled samples in memory, and their normalisation."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256

import numpy as np
import torch
from torch import Tensor

from adaptsfl import checks
from adaptsfl.checks import IntArray
from adaptsfl.errors import InvalidInput

Choice = Callable[[Tensor], IntArray]  # from the labels of all samples to the numbers of the chosen samples, ascending

INPUT_DTYPES = (torch.uint8, torch.float32, torch.int64)


def fingerprint(*tensors: Tensor) -> str:
    """Return a fingerprint of tensors: of their types, shapes and values, in one pass over their memory."""
    whole = sha256()
    for tensor in tensors:
        flat = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)  # NumPy does not know every type
        whole.update(f"{tensor.dtype} {tuple(tensor.shape)}\n".encode())
        whole.update(flat.numpy().data)
    return whole.hexdigest()[:16]


@dataclass(frozen=True, eq=False)
class Samples:
    """Inputs and labels, one row per sample.

    Inputs are uint8 images (n, C, H, W), float32 of any shape, or int64 tokens; labels are int64, usually (n,).
    """

    inputs: Tensor
    labels: Tensor

    def __post_init__(self) -> None:
        if self.inputs.dtype not in INPUT_DTYPES or self.labels.dtype != torch.int64:
            problem = f"has inputs of {self.inputs.dtype} and labels of {self.labels.dtype}"
            raise InvalidInput("data", problem, "Give inputs of uint8, float32 or int64, and labels of int64")
        if self.inputs.ndim < 1 or self.labels.ndim < 1 or len(self.inputs) != len(self.labels):
            problem = f"has inputs of shape {_shape(self.inputs)} and labels of shape {_shape(self.labels)}"
            raise InvalidInput("data", problem, "Give one label, or one row of labels, per input")
        if len(self.inputs) == 0:
            raise InvalidInput("data", "has no samples", "Give at least one")
        if self.inputs.is_floating_point() and not bool(self.inputs.isfinite().all()):
            row = int(self.inputs.isfinite().flatten(1).all(1).logical_not().nonzero()[0])
            raise InvalidInput("data", f"has NaN or infinity in sample {row}", "Correct or remove the sample")

    def __len__(self) -> int:
        return len(self.labels)

    def only(self, parts: Sequence[IntArray]) -> "Samples":
        """Return a copy of the samples of these parts, in order; without parts, the first sample, for its shape."""
        rows = torch.from_numpy(np.concatenate(parts)) if parts else torch.tensor([0])
        return Samples(self.inputs[rows], self.labels[rows])


@dataclass(frozen=True)
class Normalisation:
    """(x − mean) / std, per channel, of inputs in 0 … 1: uint8 is divided by 255 first, floats are used as they are."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.mean) != len(self.std):
            problem = f"has {len(self.std)} entries, and data.mean {len(self.mean)}"
            raise InvalidInput("data.std", problem, "Give both, one number per channel each")
        for k, (mean, std) in enumerate(zip(self.mean, self.std, strict=True)):
            checks.number(f"data.mean[{k}]", abs(mean))
            checks.number(f"data.std[{k}]", std, positive=True)

    def __call__(self, inputs: Tensor) -> Tensor:
        """Return inputs (b, C, …) as float32, normalised."""
        shape = (-1, *[1] * (inputs.ndim - 2))
        scale = 255.0 if inputs.dtype == torch.uint8 else 1.0
        mean, std = (torch.tensor(values, dtype=torch.float64).view(shape) for values in (self.mean, self.std))
        factor, offset = (t.to(inputs.device, torch.float32) for t in (1 / (scale * std), mean / std))
        return (inputs.to(torch.float32) * factor).sub_(offset)


def measured_normalisation(train: Samples) -> Normalisation | None:
    """Return the normalisation of uint8 images to mean 0 and deviation 1 per channel; None for other dtypes."""
    if train.inputs.dtype != torch.uint8:
        return None
    if train.inputs.ndim != 4:
        return Normalisation((0.0,), (1.0,))
    counts = torch.stack([torch.bincount(c.flatten(), minlength=256) for c in train.inputs.unbind(1)]).double()
    levels = torch.arange(256, dtype=torch.float64) / 255
    share = counts / counts.sum(1, keepdim=True)
    mean = share @ levels
    std = (share * (levels - mean[:, None]) ** 2).sum(1).sqrt().clamp_min(1 / 255)  # avoids 1/0 for one flat colour
    return Normalisation(tuple(mean.tolist()), tuple(std.tolist()))


@dataclass(frozen=True, eq=False)
class Dataset:
    """Samples to train on, samples to test on, the names of the classes, and how inputs are normalised."""

    train: Samples
    test: Samples
    classes: tuple[str, ...]
    normalisation: Normalisation | None = None

    def __post_init__(self) -> None:
        train, test = self.train.inputs, self.test.inputs
        if train.shape[1:] != test.shape[1:] or train.dtype != test.dtype:
            problem = f"trains on {_kind(train)} and tests on {_kind(test)}"
            raise InvalidInput("data", problem, "Give both the same shape and type")
        if self.normalisation is not None and len(self.normalisation.mean) not in (1, _channels(train)):
            problem = f"has {len(self.normalisation.mean)} entries for inputs of {_channels(train)} channels"
            raise InvalidInput("data.mean", problem, "Give one number per channel")
        self.check_classes(len(self.classes), "its own class names")

    def fingerprint(self) -> str:
        """Return a fingerprint of all training and test samples."""
        return fingerprint(self.train.inputs, self.train.labels, self.test.inputs, self.test.labels)

    def check_classes(self, count: int, of: str = "the model's outputs") -> None:
        """Raise unless every label is one of 0 … count − 1, the classes of `of`."""
        for name, labels in (("training", self.train.labels), ("test", self.test.labels)):
            low, high = int(labels.min()), int(labels.max())
            if low < 0 or high >= count:
                wrong = low if low < 0 else high
                raise InvalidInput(
                    "data",
                    f"has the label {wrong} among its {name} samples, outside of {of} (0 … {count - 1})",
                    f"Labels count from 0; a model for this data needs {max(len(self.classes), high + 1)} classes",
                )


def _channels(inputs: Tensor) -> int:
    return inputs.shape[1] if inputs.ndim > 1 else 1


def _kind(inputs: Tensor) -> str:
    return f"{inputs.dtype} of shape {tuple(inputs.shape[1:])}"


def _shape(tensor: Tensor) -> str:
    return str(tuple(tensor.shape))
