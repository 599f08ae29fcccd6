"""How far apart the copies of one layer are: measured by the engine in a simulation, else by the fed server."""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from adaptsfl.training.ranks import ALONE, Ranks


@torch.no_grad()
def divergence(
    parameters: Iterable[Sequence[Tensor]], shares: Sequence[float], ranks: Ranks = ALONE, root: int = 0
) -> float:
    """Return the mean of ‖w_i - w̄‖ / ‖w̄‖ over the copies with a share, w̄ their mean; 0 if all are equal.

    On several ranks all call it, each with its own copies; `root` is a rank that holds a copy with a share.

    Args:
        parameters: of every parameter of the layer, trained or not, one copy per device.
        shares: how much every device counts in both means; they sum to 1.
    """
    here = [k for k, share in enumerate(shares) if share]
    squares, length = torch.zeros(len(here), dtype=torch.float64), 0.0  # ‖w_i - w̄‖², ‖w̄‖²
    for rows in parameters:
        # Differences from one of the copies, not from zero, so that rounding adds nothing between equal copies.
        first = rows[here[0]].double() if ranks.rank == root else torch.zeros_like(rows[0], dtype=torch.float64)
        ranks.all_reduce_sum([first])
        off = sum((shares[k] * (rows[k] - first) for k in here), torch.zeros_like(first))
        ranks.all_reduce_sum([off])
        if here:
            squares += torch.stack([(rows[k] - first - off).square().sum().cpu() for k in here])
        length += float((first + off).square().sum())
    local = math.fsum(shares[k] * math.sqrt(square) for k, square in zip(here, squares.tolist(), strict=True))
    (apart,) = ranks.sum_numbers([local])
    if apart == 0:
        return 0.0
    return apart / math.sqrt(length) if length else math.inf
