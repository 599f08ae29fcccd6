"""A device's calls over connections that may break: to the fed server, and its stream to the edge server."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import grpc

from adaptsfl.deploy import wire_pb2 as wire
from adaptsfl.deploy.parties.fed.client import PASSING
from adaptsfl.deploy.parties.probe import LinkRates
from adaptsfl.deploy.transfer import chunks
from adaptsfl.training.timing import LayerTimes

FIRST_WAIT_S, FED_ATTEMPTS = 0.5, 5
T = TypeVar("T")
Job = Coroutine[Any, Any, None]


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


class EdgeStream:
    """The stream of messages to and from the edge server.

    One message is read ahead, so that it is known at once whether one has arrived. Messages that belong together are
    written without others in between, whoever writes them.
    """

    def __init__(self, call: Any) -> None:
        self._call, self._writing = call, asyncio.Lock()
        self._reading: asyncio.Future[Any] | None = None
        self._job: asyncio.Task[None] | None = None

    async def read(self, idle: Callable[[], Job | None] = lambda: None) -> Any:
        """Return the next message; `grpc.aio.EOF` once the edge server has ended the stream.

        Args:
            idle: returns a job that is done while no message is there, if any. It goes on when a message arrives, and
                no other job begins before it has ended.
        """
        if self._reading is None:
            self._reading = asyncio.ensure_future(self._call.read())
        while not self._reading.done():
            if self._job is None:
                job = idle()
                if job is None:
                    break
                self._job = asyncio.create_task(job)
            await asyncio.wait([self._reading, self._job], return_when=asyncio.FIRST_COMPLETED)
            if self._job.done():
                await self._end_job()
        message = await self._reading
        if message is not grpc.aio.EOF:
            self._reading = asyncio.ensure_future(self._call.read())
        return message

    async def read_to_end(self) -> None:
        """Wait until the edge server has ended the stream."""
        while await self.read() is not grpc.aio.EOF:
            pass

    async def write(self, message: wire.FromDevice) -> None:
        """Send a message."""
        async with self._writing:
            await self._call.write(message)

    async def send(self, header: wire.Activations, parts: list[memoryview]) -> None:
        """Send activations: a header, followed by the bytes."""
        async with self._writing:
            await self._call.write(wire.FromDevice(activations=header))
            for chunk in chunks(*parts):
                await self._call.write(chunk)

    async def done_writing(self) -> None:
        """Tell the edge server that nothing more is sent, after the job under way."""
        await self._end_job()
        await self._call.done_writing()

    async def _end_job(self) -> None:
        job, self._job = self._job, None
        if job is not None:
            await job

    async def end(self) -> None:
        """Cancel the job under way, and drop the message that was read ahead."""
        for task in (self._job, self._reading):
            if task is not None:
                task.cancel()
                await asyncio.wait([task])
                if not task.cancelled():
                    task.exception()  # retrieved only because asyncio warns of errors that were never retrieved


def ready_message(samples: int, times: LayerTimes, edge: LinkRates, fed: LinkRates) -> wire.Ready:
    """Return the message with a device's samples and measurements."""
    rates = wire.Rates(
        uplink=edge.uplink,
        downlink=edge.downlink,
        fed_uplink=fed.uplink,
        fed_downlink=fed.downlink,
        uplink_s=edge.uplink_s,
        downlink_s=edge.downlink_s,
        fed_uplink_s=fed.uplink_s,
        fed_downlink_s=fed.downlink_s,
    )
    return wire.Ready(samples=samples, forward_s=times.forward_s, backward_s=times.backward_s, rates=rates)
