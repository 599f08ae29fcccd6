"""A device's calls over connections that may break: to the fed server, and its stream to the edge server."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import grpc

from adaptsfl.deploy import wire_pb2 as wire
from adaptsfl.deploy.parties.fed.client import PASSING
from adaptsfl.deploy.parties.probe import LinkRates
from adaptsfl.deploy.transfer import Incoming, chunks
from adaptsfl.errors import BadMessage
from adaptsfl.training.timing import LayerTimes

FIRST_WAIT_S, FED_ATTEMPTS = 0.5, 5
MOST_READ_AHEAD = 16  # messages, with their bytes
T = TypeVar("T")
Job = Coroutine[Any, Any, None]
EOF: Any = grpc.aio.EOF
Message = tuple[Any, Incoming | None]


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

    Messages are read ahead, with the bytes that follow them: they arrive while the device computes. Messages that
    belong together are written without others in between, whoever writes them.

    Args:
        expected: returns how many bytes follow the header of gradients; raises `BadMessage` if none should have come.
    """

    def __init__(self, call: Any, expected: Callable[[wire.Gradients], int]) -> None:
        self._call, self._expected, self._writing = call, expected, asyncio.Lock()
        self._inbox: asyncio.Queue[Message | Exception] = asyncio.Queue(MOST_READ_AHEAD)
        self._ahead = asyncio.create_task(self._read_ahead())
        self._reading: asyncio.Task[Message | Exception] | None = None
        self._job: asyncio.Task[None] | None = None
        self._posted: deque[tuple[wire.Activations, list[memoryview]]] = deque()
        self._posting: asyncio.Task[None] | None = None

    async def read(self, idle: Callable[[], Job | None] = lambda: None) -> Message:
        """Return the next message, and the bytes that followed it if any; `EOF` once the edge server ended the stream.

        Args:
            idle: returns a job that is done while no message is there, if any. It goes on when a message arrives, and
                no other job begins before it has ended.
        """
        if self._reading is None:
            self._reading = asyncio.get_running_loop().create_task(self._inbox.get())
        while self._inbox.empty() and not self._reading.done():
            if self._job is None and self._posting is None:
                job = idle()
                if job is None:
                    break
                self._job = asyncio.create_task(job)
            busy = {task for task in (self._job, self._posting) if task is not None}
            await asyncio.wait({self._reading, *busy}, return_when=asyncio.FIRST_COMPLETED)
            if self._job is not None and self._job.done():
                await self._end_job()
        found = await self._reading
        self._reading = None
        if isinstance(found, Exception):
            raise found
        return found

    async def read_to_end(self) -> None:
        """Wait until the edge server has ended the stream."""
        while (await self.read())[0] is not EOF:
            pass

    async def _read_ahead(self) -> None:
        try:
            while True:
                message, body = await self._call.read(), None
                if message is not EOF and message.WhichOneof("kind") == "gradients":
                    message, body = await self._with_body(message)
                await self._inbox.put((message, body))
                if message is EOF:
                    return
        except Exception as error:
            await self._inbox.put(error)

    async def _with_body(self, message: Any) -> Message:
        body = Incoming(self._expected(message.gradients))
        while not body.complete:
            more = await self._call.read()
            if more is EOF:
                return EOF, None
            if more.WhichOneof("kind") != "chunk":
                raise BadMessage("the edge server stopped amid gradients")
            body.add(more.chunk)
        return message, body

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

    def post(self, header: wire.Activations, parts: list[memoryview]) -> None:
        """Send activations after those that were posted before, without waiting for it."""
        self._posted.append((header, parts))
        if self._posting is None:
            self._posting = asyncio.create_task(self._post_all())

    async def _post_all(self) -> None:
        try:
            while self._posted:
                await self.send(*self._posted.popleft())
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            self._posted.clear()  # the connection was lost while we wrote; reading raises the cause
        finally:
            self._posting = None

    async def done_writing(self) -> None:
        """Tell the edge server that nothing more is sent, after the job under way."""
        await self._end_job()
        await self._call.done_writing()

    async def _end_job(self) -> None:
        job, self._job = self._job, None
        if job is not None:
            await job

    async def end(self) -> None:
        """Cancel the job under way, and drop the messages that were read ahead."""
        for task in (self._job, self._posting, self._reading, self._ahead):
            if task is not None:
                task.cancel()
                await asyncio.wait([task])
                if not task.cancelled():
                    task.exception()  # retrieved only because asyncio warns of errors that were never retrieved


def ready_message(samples: int, times: LayerTimes, fixed_s: float, edge: LinkRates, fed: LinkRates) -> wire.Ready:
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
    return wire.Ready(
        samples=samples, forward_s=times.forward_s, backward_s=times.backward_s, rates=rates, fixed_s=fixed_s
    )
