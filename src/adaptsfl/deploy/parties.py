"""Starting one party in this process, and ending it cleanly."""

import asyncio
import signal
from collections.abc import Callable, Collection, Coroutine
from pathlib import Path
from typing import Any

import grpc

from adaptsfl.config import Recipe
from adaptsfl.deploy.device import DeviceParty
from adaptsfl.deploy.edge import EdgeServer
from adaptsfl.deploy.fed import FedServer
from adaptsfl.deploy.identity import SERVER_OPTIONS, Credentials, Party, listen, open_channel
from adaptsfl.deploy.service import OPTIONS, Calls, Service
from adaptsfl.deploy.status_server import serve_status
from adaptsfl.deploy.terms import Terms
from adaptsfl.errors import Stopped

# Of one connection: calls at a time, how long it may take to say who it is, and how long it may stay without a call.
CONNECTIONS = (
    ("grpc.max_concurrent_streams", 16),
    ("grpc.server_handshake_timeout_ms", 30_000),
    ("grpc.max_connection_idle_ms", 300_000),
)
FAREWELL_S = 3.0  # for what was sent last to arrive

Say = Callable[[str], None]


async def serve_fed(recipe: Recipe, address: str, credentials: Credentials | None, folder: Path, say: Say) -> None:
    """Serve until the model is put together."""
    fed = FedServer(Terms.of(recipe), folder, say)
    server = await _serving(fed, address, credentials, say)
    await _until_stopped(fed.finished.wait(), server)


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
    async with open_channel(fed, "fed", credentials, Party("edge", "edge"), OPTIONS) as channel:
        edge = EdgeServer(recipe, folder, Calls(channel, "Fed"), say=say)
        status = None
        if status_port is not None:
            status = serve_status(edge.board, port=status_port)
            say(f"status on http://127.0.0.1:{status.port}")
        try:
            server = await _serving(edge, address, credentials, say)
            return str(await _until_stopped(edge.run(), server))
        finally:
            edge.shut_down()
            if status is not None:
                status.close()


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
) -> str:
    """Take part as a device until the run is over; return why it is."""
    device = DeviceParty(party, edge, fed, credentials, data=data, allowed=allowed, floor=floor, say=say)
    return str(await _until_stopped(device.run(), None))


async def _serving(service: Service, address: str, credentials: Credentials | None, say: Say) -> grpc.aio.Server:
    server = grpc.aio.server(options=(*SERVER_OPTIONS, *OPTIONS, *CONNECTIONS))
    server.add_generic_rpc_handlers((service.handlers(),))
    port = await listen(server, address, credentials)
    await server.start()
    host = address.rpartition(":")[0]
    say(f"listening on {host}:{port}" + ("" if credentials is not None else ", without TLS"))
    return server


async def _until_stopped(work: Coroutine[Any, Any, Any], server: grpc.aio.Server | None) -> Any:
    """Do the work; Ctrl-C and SIGTERM end it, and the server, in order."""
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
    finally:
        if server is not None:
            await server.stop(FAREWELL_S)
