"""What a device can do, measured: seconds of every layer, and bits per second of every link."""

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

import torch
from torch import Tensor

from adaptsfl.deploy.service import Calls
from adaptsfl.deploy.transfer import CHUNK_BYTES, Incoming
from adaptsfl.deploy.wire_pb2 import Echo
from adaptsfl.models import SplitModel
from adaptsfl.training.layers import Layer
from adaptsfl.training.settings import OptimizerSettings

REPEATS = 3
LINK_BYTES = 2**20  # sent there and back to measure a link


@dataclass(frozen=True)
class LayerTimes:
    """Seconds of every layer for one mini-batch."""

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]


@dataclass(frozen=True)
class LinkRates:
    """Bits per second; 0 where a link is too fast to say."""

    uplink: float
    downlink: float


def time_layers(model: SplitModel, example: Tensor, batch_size: int, repeats: int = REPEATS) -> LayerTimes:
    """Run every layer forward and backward on one mini-batch; the least of its repeats counts."""
    x = example.expand(batch_size, *example.shape[1:]).contiguous()
    forward, backward = [], []
    for piece in model.pieces:
        layer = Layer(piece, OptimizerSettings())
        best = [float("inf"), float("inf")]
        output = x
        for _ in range(repeats):
            given = x.detach().requires_grad_(x.is_floating_point())
            started = time.perf_counter()
            output = layer.piece(given)
            between = time.perf_counter()
            wanted = [*layer.parameters, *([given] if given.requires_grad else [])]
            if wanted and output.requires_grad:
                torch.autograd.grad(output, wanted, torch.ones_like(output), allow_unused=True)
            best = [min(best[0], between - started), min(best[1], time.perf_counter() - between)]
        forward.append(best[0])
        backward.append(best[1])
        x = output.detach()
    return LayerTimes(tuple(forward), tuple(backward))


async def measure_link(calls: Calls, size: int = LINK_BYTES) -> LinkRates:
    """Send bytes to a server and have as many back."""

    async def sent() -> AsyncIterator[Echo]:
        for _ in range(size // CHUNK_BYTES):
            yield Echo(chunk=bytes(CHUNK_BYTES))

    uplink, incoming = 0.0, Incoming(size // CHUNK_BYTES * CHUNK_BYTES)
    async for answer in calls.echo(sent(), wait_for_ready=True, timeout=60.0):
        uplink = uplink or answer.uplink
        if answer.chunk:
            incoming.add(answer.chunk)
    return LinkRates(uplink, incoming.bps)
