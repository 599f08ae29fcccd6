"""Starts one party in this process, and ends it cleanly."""

import asyncio
import ctypes
import signal
from collections.abc import AsyncIterator, Callable, Collection, Coroutine
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import grpc

from adaptsfl.config import Recipe
from adaptsfl.deploy.parties.device.party import RETRY_S, DeviceParty
from adaptsfl.deploy.parties.edge.conductor import Conductor
from adaptsfl.deploy.parties.edge.service import EdgeService
from adaptsfl.deploy.parties.fed.server import FedServer
from adaptsfl.deploy.security.identity import SERVER_OPTIONS, Credentials, Party, listen, open_channel
from adaptsfl.deploy.service import OPTIONS, Calls, Service
from adaptsfl.deploy.status.server import serve_status
from adaptsfl.deploy.terms import Terms
from adaptsfl.errors import Stopped
from adaptsfl.files import held

# Limits of one connection: concurrent calls, handshake timeout, and how long it may stay without a call.
CONNECTIONS = (
    ("grpc.max_concurrent_streams", 16),
    ("grpc.server_handshake_timeout_ms", 30_000),
    ("grpc.max_connection_idle_ms", 300_000),
)
SHUTDOWN_S = 3.0  # for the last messages to arrive
SETTLE_S = 0.1  # for gRPC's own tasks, which print a traceback if the loop ends before them
# Reconnect soon after a server is restarted; by default that may take two minutes.
RECONNECTING = (("grpc.initial_reconnect_backoff_ms", 500), ("grpc.max_reconnect_backoff_ms", 5_000))

# Options of `mallopt` in malloc.h of glibc: smaller blocks stay on the heap, which keeps up to so many free bytes.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
KEPT_MEMORY = ((M_MMAP_THRESHOLD, 2**25), (M_TRIM_THRESHOLD, 2**28))

Say = Callable[[str], None]
T = TypeVar("T")


async def serve_fed(recipe: Recipe, address: str, credentials: Credentials | None, folder: Path, say: Say) -> None:
    """Serve until the complete model is written."""

    async def work() -> None:
        fed = FedServer(Terms.of(recipe), folder, say)
        async with _serving(fed, address, credentials, say):
            await fed.finished.wait()
        if fed.failure is not None:
            raise fed.failure

    keep_freed_memory()
    with held(folder):
        await _until_stopped(work())


async def serve_edge(
    recipe: Recipe,
    address: str,
    fed: str,
    credentials: Credentials | None,
    folder: Path,
    say: Say,
    *,
    status_port: int | None = None,
) -> str:
    """Train until the recipe's end; return what ended it."""

    async def work() -> str:
        async with open_channel(fed, "fed", credentials, Party("edge", "edge"), (*OPTIONS, *RECONNECTING)) as channel:
            conductor = Conductor(recipe, folder, Calls(channel, "Fed"), say=say)
            status = None
            if status_port is not None:
                status = serve_status(conductor.board, port=status_port)
                say(f"status on http://127.0.0.1:{status.port}")
            try:
                async with _serving(EdgeService(conductor), address, credentials, say):
                    return await conductor.run()
            finally:
                conductor.shut_down()
                if status is not None:
                    status.close()

    keep_freed_memory()
    with held(folder):
        return str(await _until_stopped(work()))


async def join(
    party: Party,
    edge: str,
    fed: str,
    credentials: Credentials | None,
    say: Say,
    *,
    data: Path | None = None,
    allowed: Collection[str] = (),
    floor: int = 1,
    retry_s: float = RETRY_S,
    probe_links: bool = True,
) -> str:
    """Take part as a device until the run is over; return why it is."""
    keep_freed_memory()
    device = DeviceParty(
        party,
        edge,
        fed,
        credentials,
        data=data,
        allowed=allowed,
        floor=floor,
        retry_s=retry_s,
        probe_links=probe_links,
        say=say,
    )
    return str(await _until_stopped(device.run()))


@asynccontextmanager
async def _serving(
    service: Service, address: str, credentials: Credentials | None, say: Say
) -> AsyncIterator[grpc.aio.Server]:
    server = grpc.aio.server(options=(*SERVER_OPTIONS, *OPTIONS, *CONNECTIONS))
    server.add_generic_rpc_handlers((service.handlers(),))
    port = await listen(server, address, credentials)
    await server.start()
    host = address.rpartition(":")[0]
    say(f"listening on {host}:{port}" + ("" if credentials is not None else ", without TLS"))
    try:
        yield server
    finally:
        await server.stop(SHUTDOWN_S)
        await asyncio.sleep(SETTLE_S)


def keep_freed_memory() -> None:
    """Make this process keep memory that it frees: the next round needs as much.

    Where a round moves much and computes little, getting new pages from the system costs as much as filling them.
    """
    with suppress(OSError, AttributeError):  # another operating system or C library
        mallopt = ctypes.CDLL(None).mallopt
        for setting, size in KEPT_MEMORY:
            mallopt(setting, size)


async def _until_stopped(work: Coroutine[Any, Any, T]) -> T:
    """Do the work; Ctrl-C and SIGTERM end it cleanly."""
    loop, task = asyncio.get_running_loop(), asyncio.ensure_future(work)
    stopped: list[str] = []

    def stop(name: str) -> None:
        stopped.append(name)
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, number.name)
    try:
        return await task
    except asyncio.CancelledError:
        if stopped:
            raise Stopped("stopped; the same command goes on from the last checkpoint.") from None
        raise
