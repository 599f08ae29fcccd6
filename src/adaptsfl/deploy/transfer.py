"""Bytes in chunks: sent piece by piece, received into memory that was promised before, and timed."""

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

from adaptsfl.errors import BadMessage

# The largest message that any party takes: one chunk, or a header with its settings.
LARGEST_MESSAGE = 2**20
# Every message takes a turn of the event loop at both ends, so chunks are as large as may be.
CHUNK_BYTES = LARGEST_MESSAGE - 2**10
SHORTEST_S = 2e-3  # what took less was our own doing, and says nothing about a link


def chunks(data: memoryview | bytes) -> Iterator[bytes]:
    """Yield the bytes in order, in chunks."""
    view = memoryview(data)
    for start in range(0, len(view), CHUNK_BYTES):
        yield bytes(view[start : start + CHUNK_BYTES])


class Incoming:
    """Bytes on their way in, at first all missing: made when what announces them has come.

    That was sent just before them. So the time from there to the last byte is what all of them took, headers and
    encryption included, whatever the two clocks say and however long a single byte is on its way.

    Attributes:
        data: what has come.
        came: when its last chunk did.
    """

    def __init__(self, size: int) -> None:
        self.data = bytearray(size)
        self._come = 0
        self._began = self.came = time.perf_counter()

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
        self._come, self.came = end, time.perf_counter()

    @property
    def bps(self) -> float:
        """Bits per second; 0 if it went too fast to say."""
        return 8 * self._come / self.seconds if self.seconds > SHORTEST_S else 0.0

    @property
    def seconds(self) -> float:
        """From the announcement to the last chunk so far."""
        return self.came - self._began


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
