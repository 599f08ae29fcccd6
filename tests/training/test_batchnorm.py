"""Sliced batch-norm is one batch-norm per device, their running statistics averaged."""

from copy import deepcopy

import pytest
import torch
from torch import nn

from adaptsfl.training.batchnorm import Slices, mixes_samples, slice_batch_norm


@pytest.mark.parametrize("momentum", [0.1, None])
def test_slices(momentum: float | None) -> None:
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(3, momentum=momentum).double()
    x = torch.randn(7, 3, 4, 4, dtype=torch.float64)
    holder, slices = nn.Sequential(deepcopy(norm)), Slices()
    (sliced,) = slice_batch_norm(holder, slices)
    for _ in range(3):
        copies, outputs = [deepcopy(norm) for _ in range(3)], []
        for copy, part in zip(copies, x.split([2, 4, 1]), strict=True):
            outputs.append(copy(part))
        for chunk, sizes, weights in ((x[:6], (2, 4), (0.2, 0.3)), (x[6:], (1,), (0.5,))):
            slices.begin(sizes, weights)
            assert torch.allclose(holder(chunk), torch.cat(outputs[:2] if len(sizes) == 2 else outputs[2:]))
        sliced.finish(sliced.round_statistics())
        mean = {
            key: sum(weight * copy.state_dict()[key] for weight, copy in zip((0.2, 0.3, 0.5), copies, strict=True))
            for key in ("running_mean", "running_var")
        }
        norm.load_state_dict({**copies[0].state_dict(), **mean})
        for key, value in norm.state_dict().items():
            assert torch.allclose(sliced.state_dict()[key], value), key


def test_what_mixes_samples() -> None:
    assert mixes_samples([nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, track_running_stats=False))])
    assert not mixes_samples([nn.Sequential(nn.Linear(2, 2), nn.GroupNorm(2, 2), nn.LayerNorm(2))])
