"""Batch-norm, the one usual layer whose output for a sample depends on the samples beside it."""

import warnings
from collections.abc import Iterable
from typing import get_args

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from adaptsfl.models import SplitModel
from adaptsfl.training.settings import Statistics, TrainingWarning, choice


def mixes_samples(modules: Iterable[nn.Module]) -> bool:
    """Whether any of `modules` normalises over the batch.

    A traced model may have lost the module and kept its running statistics, so their name counts too.
    """
    parts = [part for module in modules for part in module.modules()]
    return any(isinstance(part, _BatchNorm) or "running_mean" in part._buffers for part in parts)


def check_statistics(statistics: Statistics, model: SplitModel) -> None:
    """Refuse an unknown choice, and warn of one that fails where devices hold different classes."""
    choice("statistics", statistics, get_args(Statistics))
    if statistics == "device" and mixes_samples(model.pieces):
        warnings.warn(
            "statistics='device': every device's samples are normalised by themselves in the common part too. Where "
            "devices hold different classes, their statistics give the class away: the training loss falls and the "
            "test accuracy does not rise. Use statistics='pooled' or group-norm unless the data is IID.",
            TrainingWarning,
            stacklevel=3,
        )
