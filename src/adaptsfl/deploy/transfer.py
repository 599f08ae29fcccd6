"""Bytes in chunks: sent piece by piece, received into memory that was promised before, and timed."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from adaptsfl.errors import BadMessage

# The largest message that any party takes: one chunk, or a header with its settings. It is what gRPC takes by itself.
LARGEST_MESSAGE = 2**22
# Every message takes a turn of the event loop at both ends, so most tensors should be one.
CHUNK_BYTES = LARGEST_MESSAGE - 2**10
SHORTEST_S = 2e-3  # what took less was our own doing, and says nothing about a link


@dataclass(frozen=True)
class Chunk:
    """Bytes of something larger. On the wire it is the message whose field `chunk` is set, whatever its type.

    Protobuf would copy the bytes three times on either side, which is most of what a round costs beside the network.

    Attributes:
        parts: what the bytes are put together from.
    """

    parts: tuple[memoryview | bytes, ...]

    @property
    def chunk(self) -> memoryview | bytes:
        """The bytes."""
        return self.parts[0] if len(self.parts) == 1 else b"".join(self.parts)

    def WhichOneof(self, _group: str) -> str:  # noqa: N802 (as messages have it)
        """Return which of a message's fields this is."""
        return "chunk"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise BadMessage(f"a chunk came where {name} was expected")


def chunks(*data: memoryview | bytes) -> Iterator[Chunk]:
    """Yield the bytes of all of these in order, in chunks."""
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
    """Return what turns messages of a type, and chunks in their place, into bytes."""
    tag = _chunk_tag(kind)

    def serialize(message: Any) -> bytes:
        if isinstance(message, Chunk):
            return b"".join((tag, _varint(sum(map(len, message.parts))), *message.parts))
        return bytes(message.SerializeToString())

    return serialize


def parser(kind: Any) -> Callable[[bytes], Any]:
    """Return what reads messages of a type: a message that is nothing but a chunk comes out as one."""
    tag = _chunk_tag(kind)

    def parse(data: bytes) -> Any:
        for size in range(2, 5):  # the chunk's length has as many bytes as it needs, up to four
            length = len(data) - 1 - size
            if length > 0 and data.startswith(tag + _varint(length)) and len(_varint(length)) == size:
                return Chunk((memoryview(data)[1 + size :],))
        return kind.FromString(data)

    return parse if tag else kind.FromString


def _chunk_tag(kind: Any) -> bytes:
    """Return the byte before a chunk in a message of this type; nothing if it may hold something else beside it."""
    field = kind.DESCRIPTOR.fields_by_name.get("chunk")
    return b"" if field is None or field.containing_oneof is None else bytes([field.number << 3 | 2])


def _varint(number: int) -> bytes:
    """Return a length as protobuf writes it: seven bits to a byte, the lowest first, the last without a mark."""
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    found.append(number)
    return bytes(found)


class Meter:
    """How fast bytes come: made when what announces them has come.

    That was sent just before them. So the time from there to the last byte is what all of them took, headers and
    encryption included, whatever the two clocks say and however long a single byte is on its way.

    Attributes:
        size: of what has come.
        came: when the last of it did.
    """

    def __init__(self) -> None:
        self.size = 0
        self._began = self.came = time.perf_counter()

    def count(self, size: int) -> None:
        """Take note of a chunk."""
        self.size += size
        self.came = time.perf_counter()

    @property
    def seconds(self) -> float:
        """From the announcement to the last chunk so far."""
        return self.came - self._began

    @property
    def bps(self) -> float:
        """Bits per second; 0 if it went too fast to say."""
        return 8 * self.size / self.seconds if self.seconds > SHORTEST_S else 0.0


class Incoming(Meter):
    """Bytes on their way in, at first all missing; memory is taken as they come, not as they are announced.

    Attributes:
        data: what has come.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.announced = size
        self.data = bytearray()

    @property
    def complete(self) -> bool:
        """Whether all bytes have come."""
        return self.size == self.announced

    def add(self, chunk: memoryview | bytes) -> None:
        """Take the next chunk."""
        missing = self.announced - self.size
        # No other size, or a sender could make many messages of few bytes.
        if not missing or len(chunk) != min(CHUNK_BYTES, missing):
            raise BadMessage(f"a chunk of {len(chunk)} bytes came where {missing} were missing")
        self.data += chunk
        self.count(len(chunk))
