"""Batch-norm, the one usual layer whose output for a sample depends on the samples beside it."""

import warnings
from collections.abc import Iterable, Sequence
from typing import get_args

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from adaptsfl.errors import InvalidInput
from adaptsfl.models import SplitModel
from adaptsfl.models.pieces import Piece
from adaptsfl.training.settings import Statistics, TrainingWarning, choice


def mixes_samples(modules: Iterable[nn.Module]) -> bool:
    """Whether any of `modules` normalises over the batch.

    A traced model may have lost the module and kept its running statistics or the operation, so these count too.
    """
    parts = [part for module in modules for part in module.modules()]
    return any(isinstance(part, _BatchNorm) or _is_lost(part) for part in parts)


def _is_lost(part: nn.Module) -> bool:
    """Whether a batch-norm became plain operations, as torch.export makes of it, with running statistics or without."""
    if isinstance(part, Piece):
        return any("batch_norm" in name for name in part.operations)
    return "running_mean" in part._buffers and not isinstance(part, _BatchNorm)


def check_statistics(statistics: Statistics, model: SplitModel) -> None:
    """Refuse an unknown choice, and warn of one that fails where devices hold different classes."""
    choice("statistics", statistics, get_args(Statistics))
    if statistics == "device" and any(_is_lost(part) for piece in model.pieces for part in piece.modules()):
        problem = "is 'device', but tracing turned the model's batch-norm into plain operations"
        remedy = "Use 'pooled', or split the model with layers=[…] so that its modules are kept"
        raise InvalidInput("statistics", problem, remedy)
    if statistics == "device" and mixes_samples(model.pieces):
        warnings.warn(
            "statistics='device': every device's samples are normalised by themselves in the common part too. Where "
            "devices hold different classes, their statistics give the class away: the training loss falls and the "
            "test accuracy does not rise. Use statistics='pooled' or group-norm unless the data is IID.",
            TrainingWarning,
            stacklevel=3,
        )


class Slices:
    """Which samples of the batch that is running belong to which device: sizes in order, and the devices' weights."""

    def __init__(self) -> None:
        self.sizes: Sequence[int] = ()
        self.weights: Sequence[float] = ()


class SlicedBatchNorm(nn.Module):
    """Batch-norm over a batch of several devices' samples that normalises every device's by themselves.

    It takes the place of `original` and holds the same tensors under the same names. The running statistics of a
    common layer follow the mean of the devices' statistics, once a round (`finish`), however many batches it took.
    """

    def __init__(self, original: nn.Module, slices: Slices) -> None:
        super().__init__()
        assert isinstance(original, _BatchNorm)
        self.slices, self.eps, self.momentum = slices, original.eps, original.momentum
        for name, parameter in original.named_parameters():
            self.register_parameter(name, parameter)
        for name, buffer in original.named_buffers():
            self.register_buffer(name, buffer)
        self.channels = original.num_features
        self._seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        """Normalise each device's samples and remember their statistics."""
        times = len(x) // sum(self.slices.sizes)  # a layer before may have moved another axis into the batch
        parts = x.split_with_sizes([size * times for size in self.slices.sizes])
        weight, bias = self._parameters.get("weight"), self._parameters.get("bias")
        outputs = []
        for part, share in zip(parts, self.slices.weights, strict=True):
            statistics = x.new_zeros(2, self.channels)  # with momentum 1 the running statistics are the batch's
            mean, variance = statistics
            outputs.append(functional.batch_norm(part, mean, variance, weight, bias, True, 1.0, self.eps))
            self._seen.append(statistics * share)
        return torch.cat(outputs)

    @torch.no_grad()
    def finish(self) -> None:
        """End the round: move the running statistics."""
        if "running_mean" in self._buffers:
            mean, variance = torch.stack(self._seen).sum(0)
            count = self.get_buffer("num_batches_tracked").add_(1)
            factor = 1 / float(count) if self.momentum is None else self.momentum
            self.get_buffer("running_mean").lerp_(mean, factor)
            self.get_buffer("running_var").lerp_(variance, factor)
        self.forget()

    def forget(self) -> None:
        """Forget the statistics of batches that were not trained on."""
        self._seen.clear()


def slice_batch_norm(module: nn.Module, slices: Slices) -> list[SlicedBatchNorm]:
    """Put a sliced batch-norm in the place of every batch-norm in `module`; return the new ones."""
    made = []
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, _BatchNorm):
                made.append(SlicedBatchNorm(child, slices))
                setattr(parent, name, made[-1])
    return made
