"""The client of the fed server, for devices and for the edge server."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc

from adaptsfl.deploy import moments_file
from adaptsfl.deploy.layers_file import LARGEST, LayerStates, Template, to_bytes, without_optimizer
from adaptsfl.deploy.moments_file import MomentsTemplate, NormMoments
from adaptsfl.deploy.service import Calls, NotNow
from adaptsfl.deploy.transfer import SHORTEST_S, Chunk, Incoming, chunks
from adaptsfl.deploy.wire_pb2 import Closed, Closing, Final, Layers, LayersPart, Merged, Merging, Opening, Wanted
from adaptsfl.errors import BadMessage, InvalidInput, first_line
from adaptsfl.training.statistics import Moments, Norm

# Timeout of a call, beside the time that the layers take on the slowest supported link. Calls fail at once if the
# server cannot be reached: the caller decides whether to retry.
TIMEOUT_S = 120.0
SLOWEST_BPS = 100e3
FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 5.0  # between two attempts to reach the fed server
# Transient errors, such as a broken connection: they end once the fed server is reached or restarted.
PASSING = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.INTERNAL,  # gRPC's status if a connection breaks while it writes
)
# The fed server's limit for copies whose mean is zero or close to it, where the simulator may return infinity.
LARGEST_DIVERGENCE = 1e9
FULL = grpc.StatusCode.RESOURCE_EXHAUSTED  # its disk is full, until somebody frees space
OTHER_FOLDERS = "Give both servers the folders that they had, or begin anew with two empty ones"
T = TypeVar("T")


@dataclass(frozen=True)
class Moved:
    """Layers that were transferred, and the rate: bits per second, 0 if it is not known."""

    size: int
    bps: float
    states: LayerStates


class FedClient:
    """Calls of service Fed."""

    def __init__(self, calls: Calls, template: Template) -> None:
        self.calls, self.template = calls, template
        self.moments = MomentsTemplate(template.model)

    async def open(self, opening: Opening, brought: LayerStates) -> bool:
        """Open a block, with the layers that become client-specific; return whether it was new to the fed server."""
        data = await asyncio.to_thread(to_bytes, brought) if brought else b""
        first, last = min(brought, default=0), max(brought, default=0)
        header = Layers(attempt=opening.attempt, first=first, last=last, size=len(data))
        parts = _parts(LayersPart(opening=opening), LayersPart(header=header), data)
        opened = await self.calls.open(parts, timeout=_timeout_s(len(data)))
        return bool(opened.anew)

    async def fetch(self, attempt: int, first: int, last: int) -> Moved:
        """Return averaged layers."""
        layers, wanted = range(first, last + 1), Wanted(attempt=attempt, first=first, last=last)
        incoming = await _fetched(self.calls.fetch, wanted, self.template.largest_bytes(layers))
        states = await asyncio.to_thread(self.template.from_bytes, incoming.data, layers)
        return Moved(len(incoming.data), incoming.bps, states)

    async def deliver(self, attempt: int, device: str, states: LayerStates) -> Moved:
        """Deliver a device's copies, without the optimiser state if averaging resets it."""
        if self.template.settings.at_averaging == "reset":
            states = {number: without_optimizer(state) for number, state in states.items()}
        data = await asyncio.to_thread(to_bytes, states)  # gradients are still being sent meanwhile
        header = Layers(attempt=attempt, device=device, first=min(states), last=max(states), size=len(data))
        started = time.perf_counter()
        await self.calls.deliver(_parts(LayersPart(header=header), data), timeout=_timeout_s(len(data)))
        seconds = time.perf_counter() - started
        return Moved(len(data), 8 * len(data) / max(seconds, SHORTEST_S), {})

    async def close(self, attempt: int, weights: Mapping[str, float], *, measured: int = 0) -> Closed:
        """Have the copies averaged.

        Args:
            measured: L_c, if the divergence of layers 1 … L_c is measured before averaging; 0 if not.
        """
        request = Closing(attempt=attempt, weights=weights, divergence=measured > 0)
        closed: Closed = await self.calls.close(request, timeout=TIMEOUT_S)
        _check_divergence(closed.divergence, 0 if closed.missing else measured)
        return closed

    async def bring_moments(self, attempt: int, device: str, layers: range, moments: NormMoments) -> None:
        """Deliver the moments of batch-norm in some layers: those of a device, or those that run at the edge server."""
        data = moments_file.to_bytes(moments)
        header = Layers(attempt=attempt, device=device, first=layers[0], last=layers[-1], size=len(data))
        await self.calls.bring_moments(_parts(LayersPart(header=header), data), timeout=_timeout_s(len(data)))

    async def merge_moments(self, attempt: int, weights: Mapping[str, float]) -> list[str]:
        """Have moments merged; return devices whose moments are missing, in which case nothing was merged."""
        merged: Merged = await self.calls.merge_moments(Merging(attempt=attempt, weights=weights), timeout=TIMEOUT_S)
        return list(merged.missing)

    async def fetch_moments(self, attempt: int, layers: range) -> dict[Norm, Moments]:
        """Return the merged moments of batch-norm in some layers."""
        if not self.moments.norms(layers):
            return {}
        wanted = Wanted(attempt=attempt, first=layers[0], last=layers[-1])
        incoming = await _fetched(self.calls.fetch_moments, wanted, self.moments.largest_bytes(layers))
        return self.moments.from_bytes(incoming.data, layers, 2 * LARGEST)

    async def finish(self, version: int, common: LayerStates, *, statistics: bool = False) -> None:
        """Deliver the common layers, and have the complete model written.

        Args:
            statistics: whether the other layers get the batch-norm statistics that were merged last.
        """
        data = to_bytes(common) if common else b""
        header = Layers(first=min(common, default=0), last=max(common, default=0), size=len(data))
        final = Final(version=version, statistics=statistics)
        parts = _parts(LayersPart(final=final), LayersPart(header=header), data)
        await self.calls.finish(parts, timeout=_timeout_s(len(data)))


class RetryingFedClient(FedClient):
    """Retries every call until the fed server answers.

    Args:
        waiting: called with what is being waited for.
    """

    def __init__(self, calls: Calls, template: Template, waiting: Callable[[str], None]) -> None:
        super().__init__(calls, template)
        self.waiting = waiting

    async def retry(self, call: Callable[[], Awaitable[T]]) -> T:
        """Retry a call until it is answered; raise `NotNow` if it does not fit the fed server's state."""
        wait = FIRST_WAIT_S
        while True:
            try:
                return await call()
            except grpc.aio.AioRpcError as error:
                if error.code() == grpc.StatusCode.FAILED_PRECONDITION:
                    raise NotNow(str(error.details())) from None
                if error.code() not in (*PASSING, FULL):
                    problem = f"{error.code().name}: {error.details()}"
                    raise InvalidInput("fed server", problem, "Check its log, certificates and recipe") from None
                self.waiting(f"the fed server ({first_line(Exception(error.details()))})")
            await asyncio.sleep(wait)
            wait = min(2 * wait, LONGEST_WAIT_S)

    async def open_block(
        self, opening: Opening, brought: LayerStates, *, still: Callable[[], bool] = lambda: True
    ) -> bool:
        """Open a block, if that is `still` wanted; return whether it was new to the fed server.

        After a retry this is uncertain: the answer to a call that opened it may have been lost. Then it counts as new;
        at worst, layers are delivered once more than needed.
        """
        interrupted = False

        async def call() -> bool:
            nonlocal interrupted
            before, interrupted = interrupted, True
            return still() and (await self.open(opening, brought) or before)

        try:
            return await self.retry(call)
        except NotNow as error:
            raise InvalidInput("fed server", str(error), OTHER_FOLDERS) from None

    async def fetch_of(self, opening: Opening, brought: LayerStates, first: int, last: int) -> tuple[Moved, bool]:
        """Return averaged layers of a block, and whether it was opened again at a fed server that was restarted."""
        forgotten = False
        while True:
            try:
                return await self.retry(lambda: self.fetch(opening.attempt, first, last)), forgotten
            except NotNow:
                forgotten = await self.open_block(opening, brought) or forgotten


def _check_divergence(found: Sequence[float], layers: int) -> None:
    """Reject divergences that are not one plausible number per layer."""
    if len(found) != layers:
        raise BadMessage(f"the fed server sent the divergence of {len(found)} layers, {layers} were expected")
    for number, apart in enumerate(found, start=1):
        if not 0 <= apart <= LARGEST_DIVERGENCE:  # False for NaN too
            raise BadMessage(f"the fed server sent {apart:g} as the divergence of layer {number}")


async def _fetched(call: Any, wanted: Wanted, most: int) -> Incoming:
    """Return the file in the fed server's answer, of at most `most` bytes."""
    incoming: Incoming | None = None
    async for part in call(wanted, timeout=_timeout_s(most)):
        if incoming is None:
            if part.WhichOneof("kind") != "header" or part.header.size > most:
                raise BadMessage("the fed server sent no header of layers, or one of too many bytes")
            incoming = Incoming(part.header.size)
        else:
            incoming.add(part.chunk)
    if incoming is None or not incoming.complete:
        raise BadMessage("the fed server's answer ended before all bytes had come")
    return incoming


def _timeout_s(size: int) -> float:
    return TIMEOUT_S + 8 * size / SLOWEST_BPS


async def _parts(*parts: Any) -> AsyncIterator[LayersPart | Chunk]:
    """Yield messages as they are, and bytes as chunks."""
    for part in parts:
        if isinstance(part, bytes):
            for chunk in chunks(part):
                yield chunk
        else:
            yield part
