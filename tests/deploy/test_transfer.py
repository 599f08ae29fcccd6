"""Bytes in chunks: all of them arrive, and nothing else."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adaptsfl.deploy.transfer import CHUNK_BYTES, LARGEST_MESSAGE, Incoming, Meter, chunks, receive_chunks
from adaptsfl.deploy.wire_pb2 import FromDevice
from adaptsfl.errors import BadMessage


@settings(max_examples=20, deadline=None)
@given(size=st.sampled_from((0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES)))
def test_what_is_cut_into_chunks_comes_together(size: int) -> None:
    data = bytes(range(256)) * (size // 256 + 1)
    pieces = iter(list(chunks(data[:size])))

    async def read() -> bytes:
        return next(pieces)

    assert asyncio.run(receive_chunks(read, size)).data == data[:size]


def test_a_chunk_fits_into_a_message() -> None:
    assert len(FromDevice(chunk=bytes(CHUNK_BYTES)).SerializeToString()) < LARGEST_MESSAGE


def test_memory_is_taken_as_bytes_come() -> None:
    """A size that is only announced costs nothing."""
    incoming = Incoming(2**50)
    incoming.add(bytes(CHUNK_BYTES))
    assert len(incoming.data) == CHUNK_BYTES
    assert not incoming.complete


@pytest.mark.parametrize("size", [0, 1, 99, 101, CHUNK_BYTES])
def test_a_chunk_of_another_size_is_refused(size: int) -> None:
    with pytest.raises(BadMessage, match=f"a chunk of {size} bytes came where 100 were missing"):
        Incoming(100).add(bytes(size))


@pytest.mark.parametrize("size", [0, 1, 1000, CHUNK_BYTES - 1, CHUNK_BYTES + 1])
def test_large_things_come_in_full_chunks(size: int) -> None:
    """Else a device could send megabytes byte by byte, and every byte is a message to be read."""
    with pytest.raises(BadMessage, match=f"a chunk of {size} bytes"):
        Incoming(2 * CHUNK_BYTES).add(bytes(size))


@pytest.mark.parametrize("size", [0, 1])
def test_nothing_comes_after_the_last_chunk(size: int) -> None:
    incoming = Incoming(100)
    incoming.add(bytes(100))
    assert incoming.complete
    with pytest.raises(BadMessage, match="where 0 were missing"):
        incoming.add(bytes(size))


def test_a_rate_needs_two_chunks() -> None:
    meter = Meter()
    assert meter.bps == 0
    meter.count(1000)
    assert meter.bps == 0
    assert meter.size == 1000


def test_a_rate_is_what_came_after_the_first_chunk_over_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """1,000 bytes at 10 s, then 500 by 12 s: 4,000 bits in 2 s."""
    times = iter((10.0, 11.0, 12.0))
    monkeypatch.setattr("adaptsfl.deploy.transfer.time.perf_counter", lambda: next(times))
    meter = Meter()
    for size in (1000, 300, 200):
        meter.count(size)
    assert meter.bps == 2000
