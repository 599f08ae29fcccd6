"""Transfers bytes in chunks, checks them against the announced size, and measures the rate."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from adaptsfl.errors import BadMessage

# The largest message that any party accepts: one chunk, or a header with its settings. It is gRPC's default.
LARGEST_MESSAGE = 2**22
# Every message costs an iteration of the event loop at both ends, so most tensors should fit into one.
CHUNK_BYTES = LARGEST_MESSAGE - 2**10
SHORTEST_S = 2e-3  # shorter times are overhead of this process, and say nothing about a link


@dataclass(frozen=True)
class Chunk:
    """A part of a larger body of bytes. On the wire it is a message of any type whose field `chunk` is set.

    Protobuf would copy the bytes three times on either side, which is most of the cost of a round beside the network.

    Attributes:
        parts: the pieces of memory whose concatenation is the chunk.
    """

    parts: tuple[memoryview | bytes, ...]

    @property
    def chunk(self) -> memoryview | bytes:
        """The bytes."""
        return self.parts[0] if len(self.parts) == 1 else b"".join(self.parts)

    def WhichOneof(self, _group: str) -> str:  # noqa: N802 (as messages have it)
        """Return the name of the message's field that is set."""
        return "chunk"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise BadMessage(f"a chunk came where {name} was expected")


def chunks(*data: memoryview | bytes) -> Iterator[Chunk]:
    """Yield the bytes of all arguments in order, in chunks."""
    parts: list[memoryview] = []
    room = CHUNK_BYTES
    for one in data:
        view, start = memoryview(one), 0
        while start < len(view):
            part = view[start : start + room]
            parts.append(part)
            start, room = start + len(part), room - len(part)
            if not room:
                yield Chunk(tuple(parts))
                parts, room = [], CHUNK_BYTES
    if parts:
        yield Chunk(tuple(parts))


def serializer(kind: Any) -> Callable[[Any], bytes]:
    """Return a function that turns messages of a type, or chunks in their place, into bytes."""
    tag = _chunk_tag(kind)

    def serialize(message: Any) -> bytes:
        if isinstance(message, Chunk):
            return b"".join((tag, _varint(sum(map(len, message.parts))), *message.parts))
        return bytes(message.SerializeToString())

    return serialize


def parser(kind: Any) -> Callable[[bytes], Any]:
    """Return a function that parses messages of a type; it returns a message that is only a chunk as `Chunk`."""
    tag = _chunk_tag(kind)

    def parse(data: bytes) -> Any:
        if data.startswith(tag):
            for size in range(2, 5):  # the length of the chunk takes up to four bytes
                length = len(data) - 1 - size
                if length > 0 and data.startswith(found := _varint(length), 1) and len(found) == size:
                    return Chunk((memoryview(data)[1 + size :],))
        return kind.FromString(data)

    return parse if tag else kind.FromString


def _chunk_tag(kind: Any) -> bytes:
    """Return the tag byte before a chunk in a message of this type; empty if the message may hold other fields too."""
    field = kind.DESCRIPTOR.fields_by_name.get("chunk")
    return b"" if field is None or field.containing_oneof is None else bytes([field.number << 3 | 2])


def _varint(number: int) -> bytes:
    """Return a length as protobuf's varint: seven bits per byte, lowest first, the high bit clear in the last byte."""
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    found.append(number)
    return bytes(found)


class Meter:
    """Measures the rate of incoming bytes; created when their announcement arrives.

    The sender sends the announcement just before the bytes. So the time from its arrival to that of the last byte is
    the transfer time, with headers and encryption; it depends neither on the two clocks nor on the latency.

    Attributes:
        size: the number of bytes received.
        came: when the last of them arrived.
    """

    def __init__(self) -> None:
        self.size = 0
        self._began = self.came = time.perf_counter()

    def count(self, size: int) -> None:
        """Count a chunk."""
        self.size += size
        self.came = time.perf_counter()

    @property
    def seconds(self) -> float:
        """The time from the announcement to the last chunk so far."""
        return self.came - self._began

    @property
    def bps(self) -> float:
        """Bits per second; 0 if the time is too short to measure."""
        return 8 * self.size / self.seconds if self.seconds > SHORTEST_S else 0.0


class Incoming(Meter):
    """Collects incoming bytes; memory is allocated as they arrive, not when they are announced.

    Attributes:
        data: the bytes received.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.announced = size
        self.data = bytearray()

    @property
    def complete(self) -> bool:
        """Whether all bytes have arrived."""
        return self.size == self.announced

    def add(self, chunk: memoryview | bytes) -> None:
        """Add the next chunk."""
        missing = self.announced - self.size
        # Other sizes are rejected: a sender could make many messages of few bytes.
        if not missing or len(chunk) != min(CHUNK_BYTES, missing):
            raise BadMessage(f"a chunk of {len(chunk)} bytes came where {missing} were missing")
        self.data += chunk
        self.count(len(chunk))
