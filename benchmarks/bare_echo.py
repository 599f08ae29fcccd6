"""The least that gRPC needs for a round: clients send bytes, and have them back when all have sent.

Started by benchmarks/deploy.py, every party as a process of its own, and by benchmarks/many_devices.py, all clients in
one process; without torch, so that they start soon.
"""

import argparse
import asyncio
import json
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc

from adaptsfl.deploy.security.identity import SERVER_OPTIONS, Party, listen, load_credentials, open_channel


async def serve(address: str, certs: Path, out: Path, clients: int) -> None:
    """Answer rounds until told to stop, and write how long each took."""
    waiting: list[asyncio.Future[None]] = []
    times: list[float] = []
    last = time.perf_counter()

    async def echo(requests: AsyncIterator[bytes], _context: Any) -> AsyncIterator[bytes]:
        nonlocal last
        async for request in requests:
            turn = asyncio.get_running_loop().create_future()
            waiting.append(turn)
            if len(waiting) == clients:
                now = time.perf_counter()
                times.append(now - last)
                last = now
                for other in waiting:
                    other.set_result(None)
                waiting.clear()
            await turn
            yield request

    server = grpc.aio.server(options=SERVER_OPTIONS)
    handler = grpc.stream_stream_rpc_method_handler(echo)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bare", {"echo": handler}),))
    await listen(server, address, load_credentials(certs, "edge"))
    await server.start()
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    while not stopped.is_set():
        await asyncio.sleep(0.2)
        if times:
            out.write_text(json.dumps(times[1:]))
    await server.stop(0)


async def call(address: str, certs: Path, name: str, size: int) -> None:
    """Send and receive until the server is gone."""
    payload = bytes(size)
    async with open_channel(address, "edge", load_credentials(certs, name), Party("device", name)) as channel:
        stream = channel.stream_stream("/bare/echo")(wait_for_ready=True)
        try:
            while True:
                await stream.write(payload)
                if await stream.read() is grpc.aio.EOF:
                    return
        except grpc.aio.AioRpcError:
            return


async def call_all(address: str, certs: Path, clients: int, size: int) -> None:
    """Be all clients, each with a connection of its own."""
    await asyncio.gather(*(call(address, certs, f"device-{k + 1}", size) for k in range(clients)))


def main() -> None:
    """Be one of the parties."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("party", help="edge, a device's name, or devices: all of them in one process")
    parser.add_argument("--address", required=True)
    parser.add_argument("--certs", type=Path, required=True)
    parser.add_argument("--out", type=Path, help="where the server writes seconds")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--size", type=int, default=2**21)
    options = parser.parse_args()
    if options.party == "edge":
        asyncio.run(serve(options.address, options.certs, options.out, options.clients))
    elif options.party == "devices":
        asyncio.run(call_all(options.address, options.certs, options.clients, options.size))
    else:
        asyncio.run(call(options.address, options.certs, options.party, options.size))


if __name__ == "__main__":
    main()
