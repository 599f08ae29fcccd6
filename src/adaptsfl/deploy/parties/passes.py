"""How long passes take on this machine, and how much of that does not depend on the number of samples."""

from torch import Tensor

from adaptsfl.models import SplitModel
from adaptsfl.training.timing import LayerTimes, time_layers

FEW = 2  # samples: batch-norm needs more than one


def time_passes(model: SplitModel, example: Tensor, batch_size: int) -> tuple[LayerTimes, float]:
    """Return the times of all layers for a mini-batch, and the fixed seconds of both passes through all of them.

    With mini-batches in parts, fixed seconds are paid for every part: without a first guess of them, the first plan
    would have as many parts as there may be.
    """
    whole = time_layers(model, example, batch_size)
    if batch_size <= FEW:
        return whole, 0.0
    few = time_layers(model, example, FEW)
    whole_s, few_s = (sum(times.forward_s) + sum(times.backward_s) for times in (whole, few))
    return whole, max(0.0, (batch_size * few_s - FEW * whole_s) / (batch_size - FEW))
