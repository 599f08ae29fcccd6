"""Bytes in chunks: sent piece by piece, received into memory that was promised before, and timed."""

import time
from collections.abc import Awaitable, Callable, Iterator

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


class Meter:
    """How fast bytes come.

    Attributes:
        size: of what has come.
    """

    def __init__(self) -> None:
        self.size = 0
        self._first: tuple[float, int] | None = None  # when the first chunk had come, and how much that was
        self._last = 0.0

    def count(self, size: int) -> None:
        """Take note of a chunk."""
        self.size += size
        self._last = time.perf_counter()
        if self._first is None:
            self._first = self._last, size

    @property
    def bps(self) -> float:
        """Bits per second between the first chunk and the last; 0 if that was too short to say."""
        if self._first is None:
            return 0.0
        seconds, bits = self._last - self._first[0], 8 * (self.size - self._first[1])
        return bits / seconds if seconds > SHORTEST_S and bits else 0.0


class Incoming:
    """Bytes on their way in, at first all missing; memory is taken as they come, not as they are announced.

    Attributes:
        data: what has come.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.data = bytearray()
        self._meter = Meter()

    @property
    def complete(self) -> bool:
        """Whether all bytes have come."""
        return len(self.data) == self.size

    def add(self, chunk: bytes) -> None:
        """Take the next chunk."""
        missing = self.size - len(self.data)
        # No other size, or a sender could make many messages of few bytes.
        if not missing or len(chunk) != min(CHUNK_BYTES, missing):
            raise BadMessage(f"a chunk of {len(chunk)} bytes came where {missing} were missing")
        self.data += chunk
        self._meter.count(len(chunk))

    @property
    def bps(self) -> float:
        """Bits per second, as `Meter` has them."""
        return self._meter.bps


async def receive_chunks(read: Callable[[], Awaitable[bytes]], size: int) -> Incoming:
    """Read chunks until `size` bytes have come."""
    incoming = Incoming(size)
    while not incoming.complete:
        incoming.add(await read())
    return incoming
