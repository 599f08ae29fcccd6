"""A device's calls over connections that may break: to the fed server, and its stream to the edge server."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import grpc

from adaptsfl.deploy import wire_pb2 as wire
from adaptsfl.deploy.parties.fed.client import PASSING
from adaptsfl.deploy.transfer import chunks

FIRST_WAIT_S, FED_ATTEMPTS = 0.5, 5
T = TypeVar("T")


async def retried(call: Callable[[], Awaitable[T]]) -> T | None:
    """Call the fed server, with retries if the connection breaks; return None if the call does not fit its state."""
    wait = FIRST_WAIT_S
    for _ in range(FED_ATTEMPTS - 1):
        try:
            return await _known(call())
        except grpc.aio.AioRpcError as error:
            if error.code() not in PASSING:
                raise
        await asyncio.sleep(wait)
        wait *= 2
    return await _known(call())


async def _known(call: Awaitable[T]) -> T | None:
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        if error.code() == grpc.StatusCode.FAILED_PRECONDITION:
            return None
        raise


async def read_to_end(stream: Any) -> None:
    """Wait until the other side has ended a stream."""
    while await stream.read() is not grpc.aio.EOF:
        pass


async def write(stream: Any, header: wire.Activations, parts: list[memoryview]) -> None:
    """Send activations: a header, followed by the bytes."""
    await stream.write(wire.FromDevice(activations=header))
    for chunk in chunks(*parts):
        await stream.write(chunk)
