"""What a device can do, measured: seconds of every layer, and bits per second of every link."""

import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Literal

import grpc
import torch
from torch import Tensor

from adaptsfl.deploy.identity import Credentials, Party, open_channel
from adaptsfl.deploy.service import ECHO_BYTES, OPTIONS, Calls
from adaptsfl.deploy.transfer import CHUNK_BYTES, Incoming
from adaptsfl.deploy.wire_pb2 import Echo
from adaptsfl.errors import BadMessage, InvalidInput, first_line
from adaptsfl.models import SplitModel
from adaptsfl.training.layers import Layer
from adaptsfl.training.settings import OptimizerSettings

REPEATS = 3
# Sent there and back to measure a link: a little at first, and more while that takes too short a time to trust.
FIRST_BYTES, MOST_BYTES = 2**16, ECHO_BYTES
LONG_ENOUGH_S = 0.2
ECHO_PATIENCE_S = 120.0


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


async def probe_links(
    servers: Mapping[Literal["edge", "fed"], str], credentials: Credentials | None, party: Party
) -> dict[str, LinkRates]:
    """Measure the links to servers that are there now, one after the other."""
    found = {}
    for role, address in servers.items():
        async with open_channel(address, role, credentials, party, OPTIONS) as channel:
            try:
                found[str(role)] = await measure_link(Calls(channel, role.capitalize()), wait=False)
            except grpc.aio.AioRpcError as error:
                problem = f"{address} did not answer: {error.code().name}, {first_line(Exception(error.details()))}"
                raise InvalidInput(f"--{role}", problem, "Check address, name and certificates; is it up?") from None
    return found


async def measure_link(calls: Calls, *, wait: bool = True) -> LinkRates:
    """Send bytes to a server and have as many back: as many as it takes to say how fast that goes.

    Args:
        wait: for a server that is not there yet.
    """
    size = FIRST_BYTES
    while True:
        rates, took_s = await _there_and_back(calls, size, wait=wait)
        if size == MOST_BYTES or took_s > LONG_ENOUGH_S:
            return rates
        size = min(8 * size, MOST_BYTES)


async def _there_and_back(calls: Calls, size: int, *, wait: bool) -> tuple[LinkRates, float]:
    """Return both rates, and the seconds of the quicker of the two ways."""

    async def sent() -> AsyncIterator[Echo]:
        yield Echo()  # from its arrival on the time counts
        for start in range(0, size, CHUNK_BYTES):
            yield Echo(chunk=bytes(min(CHUNK_BYTES, size - start)))

    uplink, incoming = 0.0, None
    async for answer in calls.echo(sent(), wait_for_ready=wait, timeout=ECHO_PATIENCE_S):
        if incoming is None:
            uplink, incoming = float(answer.uplink), Incoming(size)
        else:
            incoming.add(answer.chunk)
    if incoming is None or not incoming.complete:
        raise BadMessage("a server sent back fewer bytes than it was sent")
    quicker_s = min(incoming.seconds, 8 * size / uplink if uplink else 0.0)
    return LinkRates(uplink, incoming.bps), quicker_s
