"""A wire between two parties that a test can hold still or cut, at the byte it chooses."""

import asyncio
import contextlib
import threading
from collections.abc import Coroutine
from typing import Any, Literal

from deploy.deployed import PATIENCE_S

Way = Literal["up", "down"]  # to the server, and from it


class Proxy:
    """Passes bytes on to a server.

    Attributes:
        passed: bytes that went each way, over all connections.
        refusing: whether new connections are closed at once.
    """

    def __init__(self, target: str) -> None:
        self._host, _, self._port = target.rpartition(":")
        self.passed = {"up": 0, "down": 0}
        self.refusing = False
        self.address = ""
        self._limits: dict[str, int] = {}
        self._stands = threading.Event()
        self._writers: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._moving = self._call(self._start())

    def hold(self, way: Way, after: int) -> None:
        """Let so many more bytes pass one way, and then none until `release`."""

        async def set_limit() -> None:
            self._stands.clear()
            self._limits[way] = self.passed[way] + after
            self._moving.set()  # whoever waits looks at the new limit
            self._moving.clear()

        self._call(set_limit())

    def wait_until_held(self) -> None:
        """Wait until bytes are waiting that may not pass."""
        assert self._stands.wait(PATIENCE_S), f"nothing was held; {self.passed} bytes have passed"

    def release(self) -> None:
        """Let everything pass again."""

        async def free() -> None:
            self._limits.clear()
            self._moving.set()

        self._call(free())

    def cut(self) -> None:
        """End all connections, with what they hold; new ones are unhindered."""

        async def end() -> None:
            self._limits.clear()
            for writer in self._writers:
                writer.transport.abort()
            self._writers.clear()
            self._moving.set()

        self._call(end())

    def _call(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(PATIENCE_S)

    async def _start(self) -> asyncio.Event:
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        return asyncio.Event()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if self.refusing:
                raise ConnectionError
            there, back = await asyncio.open_connection(self._host, int(self._port))
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, back}
        await asyncio.gather(self._pump(reader, back, "up"), self._pump(there, writer, "down"))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: Way) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(2**14):
                while data:
                    room = self._limits[way] - self.passed[way] if way in self._limits else len(data)
                    part, data = data[:room], data[room:]
                    self.passed[way] += len(part)
                    if part:
                        writer.write(part)
                        await writer.drain()
                    if data:
                        self._stands.set()
                        await self._moving.wait()
        writer.close()
