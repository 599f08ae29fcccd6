"""Bytes in chunks: sent piece by piece, received into memory that was promised before, and timed."""

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

from adaptsfl.errors import BadMessage

CHUNK_BYTES = 2**18
# The largest message that any party takes: one chunk, or a header with its settings.
LARGEST_MESSAGE = 2**20
SHORTEST_S = 1e-4  # what is measured in less says nothing about a rate


def chunks(data: memoryview | bytes) -> Iterator[bytes]:
    """Yield the bytes in order, in chunks."""
    view = memoryview(data)
    for start in range(0, len(view), CHUNK_BYTES):
        yield bytes(view[start : start + CHUNK_BYTES])


class Incoming:
    """Bytes on their way in, at first all missing.

    Attributes:
        data: what has come.
    """

    def __init__(self, size: int) -> None:
        self.data = bytearray(size)
        self._come = 0
        self._first: tuple[float, int] | None = None  # when the first chunk had come, and how much that was
        self._last = 0.0

    @property
    def complete(self) -> bool:
        """Whether all bytes have come."""
        return self._come == len(self.data)

    def add(self, chunk: bytes) -> None:
        """Take the next chunk."""
        end = self._come + len(chunk)
        if not chunk or end > len(self.data):
            raise BadMessage(f"a chunk of {len(chunk)} bytes came where {len(self.data) - self._come} were missing")
        self.data[self._come : end] = chunk
        self._come, self._last = end, time.perf_counter()
        if self._first is None:
            self._first = self._last, end

    @property
    def bps(self) -> float:
        """Bits per second between the first chunk and the last; 0 if that was too short to say."""
        if self._first is None:
            return 0.0
        seconds, bits = self._last - self._first[0], 8 * (self._come - self._first[1])
        return bits / seconds if seconds > SHORTEST_S and bits else 0.0


async def receive_chunks(read: Callable[[], Awaitable[bytes]], size: int) -> Incoming:
    """Read chunks until `size` bytes have come."""
    incoming = Incoming(size)
    while not incoming.complete:
        incoming.add(await read())
    return incoming


async def drained(stream: AsyncIterator[bytes], limit: int) -> bytearray:
    """Return all that a stream of chunks holds, at most `limit` bytes."""
    data = bytearray()
    async for chunk in stream:
        data += chunk
        if len(data) > limit:
            raise BadMessage(f"more than {limit} bytes came")
    return data
