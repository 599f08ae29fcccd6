"""Bytes in chunks: all of them arrive, and nothing else."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adaptsfl.deploy.transfer import CHUNK_BYTES, LARGEST_MESSAGE, Incoming, Meter, chunks
from adaptsfl.deploy.wire_pb2 import FromDevice
from adaptsfl.errors import BadMessage


@settings(max_examples=20, deadline=None)
@given(
    size=st.sampled_from((0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES)),
    first=st.sampled_from((0, 1, 512, CHUNK_BYTES)),
)
def test_what_is_cut_into_chunks_comes_together(size: int, first: int) -> None:
    """Also if it lay in several places."""
    data = (bytes(range(256)) * (size // 256 + 1))[:size]
    incoming = Incoming(size)
    for piece in chunks(data[:first], b"", data[first:]):
        assert not incoming.complete
        incoming.add(piece.chunk)
    assert incoming.complete
    assert incoming.data == data


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


def test_nothing_has_no_rate() -> None:
    assert Meter().bps == 0


def test_a_rate_is_what_came_over_its_time_since_it_was_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    """1,500 bytes from 6 s to 12 s: 12,000 bits in 6 s."""
    times = iter((6.0, 10.0, 11.0, 12.0))
    monkeypatch.setattr("adaptsfl.deploy.transfer.time.perf_counter", lambda: next(times))
    meter = Meter()
    for size in (1000, 300, 200):
        meter.count(size)
    assert meter.bps == 2000
