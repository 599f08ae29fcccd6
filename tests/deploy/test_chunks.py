"""Chunks are on the wire what protobuf makes of them, without its copies."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptsfl.deploy import wire_pb2 as wire
from adaptsfl.deploy.transfer import CHUNK_BYTES, LARGEST_MESSAGE, Chunk, Incoming, chunks, parser, serializer
from adaptsfl.errors import BadMessage

KINDS = (wire.FromDevice, wire.ToDevice, wire.LayersPart)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 127, 128, 16_383, 16_384, CHUNK_BYTES])
def test_a_chunk_is_the_message_that_protobuf_would_send(kind: type, size: int) -> None:
    data = bytes(range(256)) * (size // 256 + 1)
    sent = serializer(kind)(Chunk((memoryview(data)[:size],)))
    assert sent == kind(chunk=data[:size]).SerializeToString()
    assert len(sent) <= LARGEST_MESSAGE
    came = parser(kind)(sent)
    assert came.WhichOneof("kind") == "chunk"
    assert bytes(came.chunk) == data[:size]
    assert isinstance(came, Chunk) == (size > 127)  # protobuf reads what is too short to matter


@given(st.sampled_from(KINDS), st.binary(max_size=400))
def test_whatever_comes_is_read_as_protobuf_reads_it(kind: type, data: bytes) -> None:
    try:
        expected = kind.FromString(data)
    except Exception as error:
        with pytest.raises(type(error)):
            parser(kind)(data)
        return
    came = parser(kind)(data)
    assert came.WhichOneof("kind") == expected.WhichOneof("kind")
    if came.WhichOneof("kind") == "chunk":
        assert bytes(came.chunk) == expected.chunk


def test_other_messages_are_left_to_protobuf() -> None:
    hello = wire.FromDevice(hello=wire.Hello(device="device-1", version=1))
    assert parser(wire.FromDevice)(serializer(wire.FromDevice)(hello)) == hello
    echo = wire.Echo(chunk=b"x" * 500, uplink=2.0)
    assert parser(wire.Echo)(serializer(wire.Echo)(echo)) == echo


def test_a_chunk_is_nothing_else() -> None:
    with pytest.raises(BadMessage, match="a chunk came where opening was expected"):
        _ = parser(wire.LayersPart)(serializer(wire.LayersPart)(Chunk((bytes(200),)))).opening


def test_chunks_come_together_again() -> None:
    data = bytes(range(251)) * 10_000
    incoming = Incoming(len(data))
    for chunk in chunks(data):
        incoming.add(chunk.chunk)
    assert incoming.complete
    assert incoming.data == data
    with pytest.raises(BadMessage, match="1 bytes came where 0 were missing"):
        incoming.add(b"x")
