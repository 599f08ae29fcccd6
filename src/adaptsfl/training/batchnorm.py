"""Batch-norm: the one common layer type whose output for a sample depends on the other samples of the batch."""

import warnings
from collections.abc import Iterable, Sequence
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from adaptsfl.errors import InvalidInput
from adaptsfl.models import SplitModel
from adaptsfl.models.pieces import Piece
from adaptsfl.training.ranks import ALONE, Ranks
from adaptsfl.training.settings import Statistics, TrainingWarning, choice


def mixes_samples(modules: Iterable[nn.Module]) -> bool:
    """Whether any of `modules` normalises over the batch.

    Tracing may replace the module by its operation or keep only its running statistics, so these count too.
    """
    parts = [part for module in modules for part in module.modules()]
    return any(isinstance(part, _BatchNorm) or _is_lost(part) for part in parts)


def _is_lost(part: nn.Module) -> bool:
    """Whether torch.export turned a batch-norm into plain operations, with or without running statistics."""
    if isinstance(part, Piece):
        return any("batch_norm" in name for name in part.operations)
    return "running_mean" in part._buffers and not isinstance(part, _BatchNorm)


def check_statistics(statistics: Statistics, model: SplitModel, ranks: Ranks = ALONE) -> None:
    """Refuse an unknown value, and warn if the value fails on non-IID data."""
    choice("statistics", statistics, get_args(Statistics))
    lost = any(_is_lost(part) for piece in model.pieces for part in piece.modules())
    if statistics == "device" and lost:
        problem = "is 'device', but tracing turned the model's batch-norm into plain operations"
        remedy = "Use 'pooled', or split the model with layers=[…] so that its modules are kept"
        raise InvalidInput("statistics", problem, remedy)
    if ranks.size > 1 and lost:
        problem = "is 'pooled' over several ranks, but tracing turned the model's batch-norm into plain operations"
        remedy = "Train in one process, or split the model with layers=[…] so that its modules are kept"
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
    """Which samples of the current batch belong to which device: batch sizes in order, and the devices' weights.

    Attributes:
        ranks: the ranks that run the other parts of the same batch.
        idle: whether this rank has no samples of its own; it then runs a dummy sample that does not count.
        part, parts: which part of the mini-batches it is, from 0 on, and into how many they are divided.
        batches: how many batches there have been.
    """

    def __init__(self) -> None:
        self.sizes: Sequence[int] = ()
        self.weights: Sequence[float] = ()
        self.ranks = ALONE
        self.idle = False
        self.part, self.parts = 0, 1
        self.batches = 0

    def begin(self, sizes: Sequence[int], weights: Sequence[float]) -> None:
        """Begin another batch."""
        self.sizes, self.weights = sizes, weights
        self.batches += 1


class _Replaced(nn.Module):
    """Replaces a batch-norm, with the same tensors under the same names."""

    def __init__(self, original: nn.Module, slices: Slices) -> None:
        super().__init__()
        assert isinstance(original, _BatchNorm)
        self.slices, self.eps, self.momentum = slices, original.eps, original.momentum
        for name, parameter in original.named_parameters():
            self.register_parameter(name, parameter)
        for name, buffer in original.named_buffers():
            self.register_buffer(name, buffer)
        self.channels = original.num_features

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor) -> None:
        """Update the running statistics."""
        count = self.get_buffer("num_batches_tracked").add_(1)
        factor = 1 / float(count) if self.momentum is None else self.momentum
        self.get_buffer("running_mean").lerp_(mean, factor)
        self.get_buffer("running_var").lerp_(variance, factor)


class SlicedBatchNorm(_Replaced):
    """Batch-norm over a batch of several devices that normalises each device's samples separately.

    `finish` updates the running statistics of a common layer at the end of a round, for any number of batches and
    ranks: once for every part of the mini-batches, by the mean of the devices' statistics. A model may use the layer
    several times; then also once for every use.
    """

    def __init__(self, original: nn.Module, slices: Slices) -> None:
        super().__init__(original, slices)
        self._statistics: dict[tuple[int, int], Tensor] = {}  # by part and use: the sum so far
        self._used = (0, 0)  # in which batch it was used last, and how many times

    def forward(self, x: Tensor) -> Tensor:
        """Normalise each device's samples and store their statistics."""
        times = len(x) // sum(self.slices.sizes)  # an earlier layer may have merged another axis into the batch
        parts = x.split_with_sizes([size * times for size in self.slices.sizes])
        weight, bias = self._parameters.get("weight"), self._parameters.get("bias")
        outputs, seen = [], []
        for part, share in zip(parts, self.slices.weights, strict=True):
            statistics = x.new_zeros(2, self.channels)  # with momentum 1 the running statistics are the batch's
            mean, variance = statistics
            outputs.append(functional.batch_norm(part, mean, variance, weight, bias, True, 1.0, self.eps))
            seen.append(statistics * share)
        batch, times_used = self._used
        times_used = times_used + 1 if batch == self.slices.batches else 1
        self._used = self.slices.batches, times_used
        key, found = (self.slices.part, times_used), torch.stack(seen).sum(0)
        before = self._statistics.get(key)
        self._statistics[key] = found if before is None else before + found
        return torch.cat(outputs)

    @property
    def uses(self) -> int:
        """How many times it was used in every batch of this round; 0 without any."""
        return max((times_used for _, times_used in self._statistics), default=0)

    @torch.no_grad()
    def round_statistics(self, uses: int = 1) -> Tensor:
        """Return each channel's mean and variance, summed over devices by their shares: (parts · uses, 2, channels)."""
        if self._statistics:
            return torch.stack([self._statistics[key] for key in sorted(self._statistics)])
        like = next((buffer for buffer in self.buffers() if buffer.is_floating_point()), torch.zeros(()))
        return like.new_zeros(self.slices.parts * uses, 2, self.channels)

    def finish(self, statistics: Tensor) -> None:
        """End the round: update the running statistics by those of all ranks."""
        if "running_mean" in self._buffers:
            for mean, variance in statistics:
                self._track(mean, variance)
        self.forget()

    def forget(self) -> None:
        """Discard the statistics of batches that were not trained on."""
        self._statistics.clear()


class RanksBatchNorm(_Replaced):
    """Batch-norm over a batch that is spread over several ranks, normalised as one batch."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise by the statistics of all ranks' samples, and update the running statistics."""
        weight, bias = self._parameters.get("weight"), self._parameters.get("bias")
        outputs: Tensor
        outputs, mean, variance = _OverRanks.apply(x, weight, bias, self.eps, self.slices)  # type: ignore[no-untyped-call]
        if "running_mean" in self._buffers:
            self._track(mean, variance)
        return outputs


class _OverRanks(torch.autograd.Function):
    """(x − mean) / √(variance + ε) · weight + bias, with statistics of all ranks' samples, and the gradient of that."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, slices: Slices) -> Any:
        """Return the outputs, and the mean and unbiased variance of all samples."""
        ranks = slices.ranks
        axes, shape = [k for k in range(x.dim()) if k != 1], [-1 if k == 1 else 1 for k in range(x.dim())]
        channels = x.shape[1]
        row = x.new_zeros(1 + 2 * channels)  # count, means, sums of squares around them
        if not slices.idle:
            local = x.mean(axes)
            squares = (x - local.view(shape)).square().sum(axes)
            row = torch.cat([x.new_tensor([x.numel() / channels]), local, squares])
        (table,) = ranks.stack_rows([row])
        counts, local_means, local_squares = table.split_with_sizes([1, channels, channels], 1)
        count = counts.sum()
        mean = (counts / count * local_means).sum(0)
        squares = (local_squares + counts * (local_means - mean).square()).sum(0)
        inverse = (squares / count + eps).rsqrt()
        normal = (x - mean.view(shape)) * inverse.view(shape)
        ctx.save_for_backward(normal, inverse, weight)
        ctx.idle = slices.idle
        ctx.ranks, ctx.count, ctx.axes, ctx.shape, ctx.biased = ranks, count, axes, shape, bias is not None
        outputs = normal if weight is None else normal * weight.view(shape)
        outputs = outputs if bias is None else outputs + bias.view(shape)
        variance = squares / (count - 1).clamp_min(1)
        ctx.mark_non_differentiable(mean, variance)
        return outputs, mean, variance

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Return the gradient of x, which depends on all ranks' samples, and this rank's part for weight and bias."""
        normal, inverse, weight = ctx.saved_tensors
        gradient = gradients[0]
        sums = torch.stack([gradient.sum(ctx.axes), (gradient * normal).sum(ctx.axes)])
        of_bias, of_weight = sums.clone()
        ctx.ranks.all_reduce_sum([sums])
        plain, along = (sums / ctx.count).view(2, *ctx.shape)
        scale = inverse if weight is None else inverse * weight
        of_x = (gradient - plain - normal * along) * scale.view(ctx.shape)
        if ctx.idle:  # the dummy sample has no gradient
            of_x = torch.zeros_like(of_x)
        return of_x, None if weight is None else of_weight, of_bias if ctx.biased else None, None, None


def slice_batch_norm(module: nn.Module, slices: Slices) -> list[SlicedBatchNorm]:
    """Replace every batch-norm in `module` by a sliced one; return the new ones."""
    sliced = []
    for parent, name, child in _batch_norms(module):
        sliced.append(SlicedBatchNorm(child, slices))
        setattr(parent, name, sliced[-1])
    return sliced


def spread_batch_norm(module: nn.Module, slices: Slices) -> None:
    """Replace every batch-norm in `module` by one that normalises over all ranks' samples."""
    for parent, name, child in _batch_norms(module):
        setattr(parent, name, RanksBatchNorm(child, slices))


def _batch_norms(module: nn.Module) -> list[tuple[nn.Module, str, nn.Module]]:
    """Return every batch-norm with its parent module and its name there."""
    named = [(parent, name, child) for parent in module.modules() for name, child in parent.named_children()]
    return [entry for entry in named if isinstance(entry[2], _BatchNorm)]
