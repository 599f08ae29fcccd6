"""How long a model's layers take on this machine."""

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from adaptsfl.models import SplitModel
from adaptsfl.training.layers import Layer
from adaptsfl.training.settings import OptimizerSettings

REPEATS = 3


@dataclass(frozen=True)
class LayerTimes:
    """Seconds of every layer for one mini-batch."""

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]


def time_layers(model: SplitModel, example: Tensor, batch_size: int, repeats: int = REPEATS) -> LayerTimes:
    """Run every layer forward and backward on one mini-batch; the time is the minimum over repeats."""
    x = example.expand(batch_size, *example.shape[1:]).contiguous()
    forward, backward = [], []
    for piece in model.pieces:
        layer = Layer(piece, OptimizerSettings())
        best = [float("inf"), float("inf")]
        output = x
        for _ in range(repeats):
            given = x.detach().requires_grad_(x.is_floating_point())
            started = _now(x.device)
            output = layer.piece(given)
            between = _now(x.device)
            wanted = [*layer.parameters, *([given] if given.requires_grad else [])]
            if wanted and output.requires_grad:
                torch.autograd.grad(output, wanted, torch.ones_like(output), allow_unused=True)
            best = [min(best[0], between - started), min(best[1], _now(x.device) - between)]
        forward.append(best[0])
        backward.append(best[1])
        x = output.detach()
    return LayerTimes(tuple(forward), tuple(backward))


def _now(device: torch.device) -> float:
    """Return the time after all queued work of the device has finished."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
