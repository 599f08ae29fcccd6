"""The fed server, seen by devices and by the edge server."""

import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

from adaptsfl.deploy.layers_file import LayerStates, Template, to_bytes, without_optimizer
from adaptsfl.deploy.service import Calls
from adaptsfl.deploy.transfer import SHORTEST_S, Chunk, Incoming, chunks
from adaptsfl.deploy.wire_pb2 import Closed, Closing, Final, Layers, LayersPart, Opening, Wanted
from adaptsfl.errors import BadMessage

# How long to wait for an answer, beside the time that the layers take on the slowest link that is borne with. Calls
# fail at once if the server is away: callers know best what to do then.
PATIENCE_S = 120.0
SLOWEST_BPS = 100e3


@dataclass(frozen=True)
class Moved:
    """Layers that went over a link, and how fast: bits per second, 0 if that is not known."""

    size: int
    bps: float
    states: LayerStates


class FedClient:
    """Calls of service Fed."""

    def __init__(self, calls: Calls, template: Template) -> None:
        self.calls, self.template = calls, template

    async def open(self, opening: Opening, brought: LayerStates) -> bool:
        """Begin a block, with the layers that become client-specific; return whether it was not known there."""
        data = to_bytes(brought) if brought else b""
        first, last = min(brought, default=0), max(brought, default=0)
        header = Layers(attempt=opening.attempt, first=first, last=last, size=len(data))
        parts = _parts(LayersPart(opening=opening), LayersPart(header=header), data)
        opened = await self.calls.open(parts, timeout=_patience(len(data)))
        return bool(opened.anew)

    async def fetch(self, attempt: int, first: int, last: int) -> Moved:
        """Return averaged layers."""
        layers = range(first, last + 1)
        wanted = Wanted(attempt=attempt, first=first, last=last)
        stream = self.calls.fetch(wanted, timeout=_patience(self.template.largest_bytes(layers)))
        incoming: Incoming | None = None
        async for part in stream:
            if incoming is None:
                if part.WhichOneof("kind") != "header" or part.header.size > self.template.largest_bytes(layers):
                    raise BadMessage("the fed server sent no header of layers, or one of too many bytes")
                incoming = Incoming(part.header.size)
            else:
                incoming.add(part.chunk)
        if incoming is None or not incoming.complete:
            raise BadMessage("the fed server's answer ended before all bytes had come")
        return Moved(len(incoming.data), incoming.bps, self.template.from_bytes(incoming.data, layers))

    async def deliver(self, attempt: int, device: str, states: LayerStates) -> Moved:
        """Bring a device's copies; what the optimiser keeps stays here if averaging drops it anyway."""
        if self.template.settings.at_averaging == "reset":
            states = {number: without_optimizer(state) for number, state in states.items()}
        data = to_bytes(states)
        header = Layers(attempt=attempt, device=device, first=min(states), last=max(states), size=len(data))
        started = time.perf_counter()
        await self.calls.deliver(_parts(LayersPart(header=header), data), timeout=_patience(len(data)))
        seconds = time.perf_counter() - started
        return Moved(len(data), 8 * len(data) / max(seconds, SHORTEST_S), {})

    async def close(self, attempt: int, weights: Mapping[str, float]) -> Closed:
        """Let the copies be averaged."""
        request = Closing(attempt=attempt, weights=weights)
        closed: Closed = await self.calls.close(request, timeout=PATIENCE_S)
        return closed

    async def finish(self, version: int, common: LayerStates) -> None:
        """Bring the common layers, so that the model can be put together."""
        data = to_bytes(common) if common else b""
        header = Layers(first=min(common, default=0), last=max(common, default=0), size=len(data))
        parts = _parts(LayersPart(final=Final(version=version)), LayersPart(header=header), data)
        await self.calls.finish(parts, timeout=_patience(len(data)))


def _patience(size: int) -> float:
    return PATIENCE_S + 8 * size / SLOWEST_BPS


async def _parts(*parts: Any) -> AsyncIterator[LayersPart | Chunk]:
    """Yield messages, and bytes among them as chunks."""
    for part in parts:
        if isinstance(part, bytes):
            for chunk in chunks(part):
                yield chunk
        else:
            yield part
