"""Measures the rates of links by sending bytes there and back."""

import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import grpc

from adaptsfl.deploy.security.identity import Credentials, Party, open_channel
from adaptsfl.deploy.service import ECHO_BYTES, OPTIONS, Calls
from adaptsfl.deploy.transfer import CHUNK_BYTES, Incoming
from adaptsfl.deploy.wire_pb2 import Echo
from adaptsfl.errors import BadMessage, InvalidInput, first_line

# Bytes sent there and back to measure a link: few at first, and more while the time is too short for a measurement.
FIRST_BYTES, MOST_BYTES = 2**16, ECHO_BYTES
LONG_ENOUGH_S = 0.2
ROUND_TRIPS = 4  # of one byte; the shortest counts
ECHO_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class LinkRates:
    """Bits per second, 0 where a link is too fast to be measured; and the seconds that even the smallest message takes.

    Without a common clock only the round trip can be measured: each direction gets half of it.
    """

    uplink: float
    downlink: float
    uplink_s: float = 0.0
    downlink_s: float = 0.0


async def probe_links(
    servers: Mapping[Literal["edge", "fed"], str], credentials: Credentials | None, party: Party
) -> dict[str, LinkRates]:
    """Measure the links to running servers, one after the other."""
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
    """Send bytes to a server that returns as many; send more until the time is long enough to measure.

    Args:
        wait: whether to wait for a server that does not run yet.
    """
    round_trips = []
    for _ in range(ROUND_TRIPS):
        began = time.perf_counter()
        await _there_and_back(calls, 1, wait=wait)
        round_trips.append(time.perf_counter() - began)
    one_way_s, size = min(round_trips) / 2, FIRST_BYTES  # the first one may open the connection
    while True:
        rates, took_s = await _there_and_back(calls, size, wait=wait)
        if size == MOST_BYTES or took_s > LONG_ENOUGH_S:
            return replace(rates, uplink_s=one_way_s, downlink_s=one_way_s)
        size = min(8 * size, MOST_BYTES)


async def _there_and_back(calls: Calls, size: int, *, wait: bool) -> tuple[LinkRates, float]:
    """Return both rates, and the seconds of the faster direction."""

    async def sent() -> AsyncIterator[Echo]:
        yield Echo()  # the time counts from its arrival
        for start in range(0, size, CHUNK_BYTES):
            yield Echo(chunk=bytes(min(CHUNK_BYTES, size - start)))

    uplink, incoming = 0.0, None
    async for answer in calls.echo(sent(), wait_for_ready=wait, timeout=ECHO_TIMEOUT_S):
        if incoming is None:
            uplink, incoming = float(answer.uplink), Incoming(size)
        else:
            incoming.add(answer.chunk)
    if incoming is None or not incoming.complete:
        raise BadMessage("a server sent back fewer bytes than it was sent")
    quicker_s = min(incoming.seconds, 8 * size / uplink if uplink else 0.0)
    return LinkRates(uplink, incoming.bps), quicker_s
