"""Batch-norm's running statistics, estimated for a model whose weights are the mean of copies.

Every copy's running statistics describe that copy. Their mean describes no model: the mean model's activations are not
the mean of the copies' activations, and the mean of variances leaves out how far the means lie apart. So some samples
of every device run forward through the mean model, and the moments of each batch-norm's inputs are merged.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from adaptsfl.models.pieces import tracked_norms
from adaptsfl.models.trace import mode
from adaptsfl.training.ranks import ALONE, Ranks

_OWN_ORDER = ("input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps", "cudnn_enabled")
# The functions of batch-norm, in a module or in a traced graph, and the order of their arguments.
BATCH_NORM: Mapping[Any, tuple[str, ...]] = {
    functional.batch_norm: ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps"),
    torch.batch_norm: _OWN_ORDER,
    torch.ops.aten.batch_norm.default: _OWN_ORDER,
}

Norm = tuple[int, str]  # the layer's number, from 1, and the name of the batch-norm in it


@dataclass(frozen=True)
class Moments:
    """Mean and variance of a batch-norm's inputs per channel, in double precision.

    Attributes:
        weight: the weight of these inputs when moments are merged.
        count: numbers per channel.
        mean, variance: of each channel; the variance around their own mean, divided by `count`.
    """

    weight: float
    count: float
    mean: Tensor
    variance: Tensor

    @classmethod
    def of(cls, x: Tensor, weight: float | None = None) -> "Moments":
        """Return the moments of a batch-norm's input, channels second; the weight is the count by default."""
        variance, mean = torch.var_mean(x, [axis for axis in range(x.dim()) if axis != 1], correction=0)
        count = x.numel() / x.shape[1]
        return cls(count if weight is None else weight, count, mean.double(), variance.double())

    @classmethod
    def merged(cls, parts: Sequence["Moments"]) -> "Moments":
        """Return the moments of all parts together, each by its weight: exactly those of the pooled numbers.

        Variances are merged around the common mean (the parallel-variance formula), which avoids cancellation.
        """
        weight = sum(part.weight for part in parts)
        mean = torch.stack([part.weight / weight * part.mean for part in parts]).sum(0)
        spread = [part.weight / weight * (part.variance + (part.mean - mean).square()) for part in parts]
        return cls(weight, sum(part.count for part in parts), mean, torch.stack(spread).sum(0))

    def weighing(self, weight: float) -> "Moments":
        """Return the same moments with another weight."""
        return replace(self, weight=weight)

    @property
    def running(self) -> tuple[Tensor, Tensor]:
        """Batch-norm's running statistics: the mean, and the unbiased variance."""
        return self.mean, self.variance * (self.count / max(1.0, self.count - 1))


class Recorder(TorchFunctionMode):
    """While active, lets models in evaluation mode normalise by the current batch, and records its moments.

    Evaluation mode turns dropout off, and nothing in the model changes.

    Args:
        pieces: layers by number. Their batch-norms with running statistics are recorded, all others run as usual.
        pool: takes the moments of a batch-norm's input; returns the moments to normalise by and to record.

    Attributes:
        found: the moments by batch-norm, in the order of execution; merged if a batch-norm ran several times.
    """

    def __init__(self, pieces: Mapping[int, nn.Module], pool: Callable[[Moments], Moments] = lambda own: own) -> None:
        super().__init__()
        self._norms: dict[int, Norm] = {}
        for number, piece in pieces.items():
            buffers = dict(piece.named_buffers())
            self._norms |= {id(buffers[mean]): (number, name) for name, (mean, _) in tracked_norms(piece).items()}
        self._pool = pool
        self.found: dict[Norm, Moments] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run every torch function unchanged, except the recorded batch-norms."""
        order, given = BATCH_NORM.get(func), kwargs or {}
        if order is None:
            return func(*args, **given)
        named = {**dict(zip(order, args, strict=False)), **given}
        norm = self._norms.get(id(named["running_mean"]))
        if norm is None:
            return func(*args, **given)
        x = named["input"]
        seen = self._pool(Moments.of(x))
        self.found[norm] = Moments.merged([self.found[norm], seen]) if norm in self.found else seen
        mean, variance = seen.mean.to(x.dtype), seen.variance.to(x.dtype)
        weight, bias, eps = named.get("weight"), named.get("bias"), named.get("eps", 1e-5)
        return functional.batch_norm(x, mean, variance, weight, bias, False, 0.0, eps)


@torch.no_grad()
def recorded(
    pieces: Mapping[int, nn.Module], x: Tensor, pool: Callable[[Moments], Moments] = lambda own: own
) -> tuple[dict[Norm, Moments], Tensor]:
    """Run samples through layers, normalised by their own moments; return these by batch-norm, and the output.

    The layers are not changed, whichever mode they are in.
    """
    with ExitStack() as stack:
        for piece in pieces.values():
            stack.enter_context(mode(piece, False))
        recorder = stack.enter_context(Recorder(pieces, pool))
        for piece in pieces.values():
            x = piece(x)
    return recorder.found, x


@torch.no_grad()
def evaluated(pieces: Mapping[int, nn.Module], running: Mapping[int, Mapping[str, Tensor]], x: Tensor) -> Tensor:
    """Run samples through layers in evaluation mode, with the running statistics replaced by `running`.

    Args:
        running: by layer, statistics by the names of its buffers.
    """
    for number, piece in pieces.items():
        with mode(piece, False):
            x = functional_call(piece, dict(running.get(number, {})), (x,))
    return x


def tracks_statistics(pieces: Sequence[nn.Module]) -> bool:
    """Whether any batch-norm of a model has running statistics that training updates."""
    return any(tracked_norms(piece) for piece in pieces)


def reestimated(
    pieces: Sequence[nn.Module],
    own: int,
    inputs: Sequence[Tensor],
    shares: Sequence[float],
    *,
    pooled: bool,
    ranks: Ranks = ALONE,
) -> list[dict[str, Tensor]]:
    """Return the running statistics of a model on some samples: for every layer, by the names of its buffers.

    As in training, each device's samples are normalised separately in the client-specific layers; in the common layers
    together if `pooled`, else also separately.

    Args:
        pieces: all layers of the mean model; they are not changed.
        own: L_c, how many of them are client-specific.
        inputs: one batch per device; on several ranks those of the rank's own devices, which may be none.
        shares: the share of each of these devices, as in averages.
        pooled: whether the common layers normalise all devices' samples together.
    """
    apart = own if pooled else len(pieces)
    merged, outputs = _by_device(dict(enumerate(pieces[:apart], start=1)), inputs, shares, ranks)
    if tracks_statistics(pieces[apart:]):
        merged |= _together(dict(enumerate(pieces[apart:], start=apart + 1)), outputs, ranks)
    return [running_buffers(piece, number, merged) for number, piece in enumerate(pieces, start=1)]


def running_buffers(piece: nn.Module, number: int, merged: Mapping[Norm, Moments]) -> dict[str, Tensor]:
    """Return the running statistics of one layer by the names and in the types of its buffers."""
    buffers = dict(piece.named_buffers())
    found: dict[str, Tensor] = {}
    for norm, names in tracked_norms(piece).items():
        if (number, norm) in merged:
            values = merged[number, norm].running
            found |= {name: value.to(buffers[name].dtype) for name, value in zip(names, values, strict=True)}
    return found


def _by_device(
    pieces: Mapping[int, nn.Module], inputs: Sequence[Tensor], shares: Sequence[float], ranks: Ranks
) -> tuple[dict[Norm, Moments], list[Tensor]]:
    """Run each device's samples separately; return the merged moments, and each device's activations."""
    buffers = {number: dict(piece.named_buffers()) for number, piece in pieces.items()}
    norms = {
        (number, norm): buffers[number][mean]
        for number, piece in pieces.items()
        for norm, (mean, _) in tracked_norms(piece).items()
    }
    parts: dict[Norm, list[Moments]] = {norm: [] for norm in norms}
    outputs = []
    for x, share in zip(inputs, shares, strict=True):
        found, output = recorded(pieces, x)
        outputs.append(output)
        for norm, seen in found.items():
            parts[norm].append(seen.weighing(share))
    local = [Moments.merged(found) if found else None for found in parts.values()]
    merged = zip(norms, _over_ranks(local, list(norms.values()), ranks), strict=True)
    return {norm: found for norm, found in merged if found is not None}, outputs


def _together(pieces: Mapping[int, nn.Module], inputs: Sequence[Tensor], ranks: Ranks) -> dict[Norm, Moments]:
    """Run the samples of all devices, on all ranks, as one batch; return the moments."""
    shapes = ranks.all_gather((tuple(inputs[0].shape[1:]), inputs[0].dtype, inputs[0].device) if inputs else None)
    size, dtype, device = next(shape for shape in shapes if shape is not None)
    # A rank without samples runs a dummy sample: every batch-norm is an all-reduce over ranks.
    x = torch.cat(list(inputs)) if inputs else torch.zeros(1, *size, dtype=dtype, device=device)

    def pool(own: Moments) -> Moments:
        (found,) = _over_ranks([own if inputs else None], [own.mean], ranks)
        assert found is not None, "some rank has samples"
        return found

    found, _ = recorded(pieces, x, pool)
    return found


def _over_ranks(own: Sequence[Moments | None], like: Sequence[Tensor], ranks: Ranks) -> list[Moments | None]:
    """Merge every entry with the other ranks' entries; None where no rank has one.

    Args:
        like: for every entry, a tensor with as many channels.
    """
    if ranks.size == 1:
        return list(own)
    rows = [tensor.new_zeros(2 + 2 * len(tensor), dtype=torch.float64) for tensor in like]
    for row, moments in zip(rows, own, strict=True):
        if moments is not None:
            row.copy_(torch.cat([row.new_tensor([moments.weight, moments.count]), moments.mean, moments.variance]))
    gathered = [[_from_row(row) for row in table if row[0] > 0] for table in ranks.stack_rows(rows)]
    return [Moments.merged(found) if found else None for found in gathered]


def _from_row(row: Tensor) -> Moments:
    mean, variance = row[2:].chunk(2)
    return Moments(float(row[0]), float(row[1]), mean, variance)
