"""Relays between two parties: they delay bytes, and lead from one network namespace into another.

A token bucket limits a link's rate, but delays nothing; the kernel's own way to delay packets (netem) is missing from
many kernels. A relay works everywhere: it passes bytes on in their order, so many seconds after they have come.
"""

import asyncio
import contextlib
import ctypes
import os
import socket
import struct
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from pathlib import Path
from typing import Any

NAMESPACES = Path("/run/netns")
CLONE_NEWNET = 0x40000000  # in sched.h of Linux
# Bytes that are read at once, and that may wait each way: what a link of 1 Gbit/s and 130 ms holds.
READ_BYTES, MOST_DELAYED_BYTES = 2**16, 2**24
RESET = struct.pack("ii", 1, 0)  # of SO_LINGER: closing the socket resets the connection
STARTING_S = 10.0


class Delays:
    """Seconds by which bytes of a connection are delayed each way; both may change at any time."""

    def __init__(self, there_s: float = 0.0, back_s: float = 0.0) -> None:
        self.there_s, self.back_s = there_s, back_s


class Relay:
    """A thread that accepts connections in one network namespace and passes their bytes on to servers there.

    Args:
        namespace: its name, as `ip netns` has it; None for that of this process.
    """

    def __init__(self, namespace: str | None = None) -> None:
        self._loop = asyncio.new_event_loop()
        self._connections: set[asyncio.Task[None]] = set()
        self._servers: list[asyncio.Server] = []
        started: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(namespace, started), daemon=True)
        self._thread.start()
        started.result(STARTING_S)

    def forward(self, listener: socket.socket | str, target: str, delays: Delays | None = None) -> str:
        """Pass bytes on between all who connect and a server; return the address where they connect.

        Args:
            listener: a listening socket, of any namespace; or a host in this one, on which a free port is taken.
            target: HOST:PORT of the server.
        """
        return self._call(self._listen(listener, target, delays or Delays()))

    def close(self) -> None:
        """End all connections, and the thread."""
        self._call(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(STARTING_S)
        self._loop.close()

    def _call(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(STARTING_S)

    def _run(self, namespace: str | None, started: "Future[None]") -> None:
        try:
            if namespace is not None:
                enter_namespace(namespace)
        except OSError as error:
            self._loop.close()
            started.set_exception(error)
            return
        started.set_result(None)
        self._loop.run_forever()

    async def _listen(self, listener: socket.socket | str, target: str, delays: Delays) -> str:
        def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            def over(task: asyncio.Task[None]) -> None:
                self._connections.discard(task)
                if not writer.is_closing():  # a task that is cancelled before it begins ends nothing itself
                    writer.transport.abort()

            task = self._loop.create_task(_connect(reader, writer, target, delays))
            self._connections.add(task)
            task.add_done_callback(over)

        if isinstance(listener, str):
            server = await asyncio.start_server(accepted, listener, 0)
        else:
            server = await asyncio.start_server(accepted, sock=listener)
        self._servers.append(server)
        host, port = server.sockets[0].getsockname()[:2]
        return f"{host}:{port}"

    async def _close(self) -> None:
        for server in self._servers:
            server.close()
        while others := asyncio.all_tasks() - {asyncio.current_task()}:  # also those that are about to accept
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)


def enter_namespace(namespace: str) -> None:
    """Move this thread into a network namespace; sockets belong to the one in which they are made."""
    descriptor = os.open(NAMESPACES / namespace, os.O_RDONLY)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(descriptor, CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"network namespace {namespace}: {os.strerror(ctypes.get_errno())}")
    finally:
        os.close(descriptor)


async def _connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, target: str, delays: Delays) -> None:
    """Pass bytes on both ways until both sides have ended; a connection that fails on one side is reset on the other.

    If the server is not there, the connection is reset as well: gRPC takes one that is closed in order for a refused
    certificate, and gives up.
    """
    host, _, port = target.rpartition(":")
    ends = [writer]
    try:
        answers, requests = await asyncio.open_connection(host, int(port))
        ends.append(requests)
        async with asyncio.TaskGroup() as both:
            both.create_task(_pass_on(reader, requests, lambda: delays.there_s))
            both.create_task(_pass_on(answers, writer, lambda: delays.back_s))
        for end in (writer, requests):
            end.close()
            await end.wait_closed()  # until all that was written is sent
            ends.remove(end)
    except* OSError:
        for end in ends:
            with contextlib.suppress(OSError):  # it may be closed already
                end.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    finally:
        for end in ends:
            end.transport.abort()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay_s: Callable[[], float]) -> None:
    """Pass bytes on, each after its delay and in their order, until the side that sends them has ended."""
    loop, waiting = asyncio.get_running_loop(), asyncio.Queue[tuple[float, bytes | OSError]]()
    held, room = 0, asyncio.Event()

    async def read() -> None:
        nonlocal held
        data: bytes | OSError = b"begin"
        while data and not isinstance(data, OSError):
            while held > MOST_DELAYED_BYTES:
                room.clear()
                await room.wait()
            try:
                data = await reader.read(READ_BYTES)
                held += len(data)
            except OSError as error:
                data = error
            waiting.put_nowait((loop.time() + delay_s(), data))

    reading = loop.create_task(read())
    try:
        while True:
            due, data = await waiting.get()
            await asyncio.sleep(due - loop.time())
            if isinstance(data, OSError):
                raise data
            if not data:
                writer.write_eof()
                return
            writer.write(data)
            await writer.drain()
            held -= len(data)
            room.set()
    finally:
        reading.cancel()
