"""Relays: bytes arrive unchanged, in order and no sooner than they may, and connections end as they would without."""

import asyncio
import contextlib
import gc
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from adaptsfl.deploy.parties import relay
from adaptsfl.deploy.parties.device.party import CLOSED, HANDSHAKE
from adaptsfl.deploy.parties.local_fleet import free_port
from adaptsfl.deploy.parties.relay import Delays, Relay
from adaptsfl.deploy.security.certs import make_certificates
from adaptsfl.deploy.security.identity import Party, load_credentials, open_channel
from adaptsfl.deploy.service import OPTIONS, Calls
from adaptsfl.fleet import Fleet
from deploy.deployed import PATIENCE_S
from deploy.laid import SERVER, laid, link

NARROW = 4096  # bytes that a socket holds


@pytest.fixture
def between(caplog: pytest.LogCaptureFixture) -> Iterator["Between"]:
    with contextlib.closing(Between()) as ends:
        yield ends
    gc.collect()  # asyncio reports a task that failed when it is forgotten
    assert [record.getMessage() for when in ("call", "teardown") for record in caplog.get_records(when)] == []


class Between:
    """A relay, and a server behind it whose connections a test holds in its hands."""

    def __init__(self) -> None:
        self.relay, self.delays = Relay(), Delays()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = self.relay.forward("127.0.0.1", name_of(self.listener), self.delays)
        self.open: list[socket.socket] = [self.listener]
        self.closed = False

    def narrow(self) -> str:
        """Return another address of the relay, where its sockets hold only a few kB."""
        listener = socket.create_server(("127.0.0.1", 0))
        for buffer in (socket.SO_RCVBUF, socket.SO_SNDBUF):
            listener.setsockopt(socket.SOL_SOCKET, buffer, NARROW)
        return self.relay.forward(listener, name_of(self.listener), self.delays)

    def connect(self, address: str = "") -> tuple[socket.socket, socket.socket]:
        """Return both ends of a connection through the relay: the client's and the server's."""
        client = connected(address, NARROW) if address else connected(self.address)
        self.listener.settimeout(PATIENCE_S)
        server, _ = self.listener.accept()
        server.settimeout(PATIENCE_S)
        self.open += [client, server]
        return client, server

    def close_relay(self) -> None:
        if not self.closed:
            self.closed = True
            self.relay.close()

    def close(self) -> None:
        self.close_relay()
        for end in self.open:
            end.close()


def name_of(end: socket.socket) -> str:
    host, port = end.getsockname()
    return f"{host}:{port}"


def connected(address: str, buffer: int | None = None) -> socket.socket:
    client = socket.socket()
    client.settimeout(PATIENCE_S)
    if buffer is not None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    host, _, port = address.rpartition(":")
    try:
        client.connect((host, int(port)))
    except OSError:
        client.close()
        raise
    return client


def received(end: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count:
        data = end.recv(count - len(found))
        assert data, f"the connection ended after {len(found)} of {count} bytes"
        found += data
    return found


def to_the_end(end: socket.socket) -> bytes:
    found = b""
    while data := end.recv(2**16):
        found += data
    return found


def in_background(work: threading.Thread) -> threading.Thread:
    work.start()
    return work


def test_bytes_pass_unchanged_and_in_order_both_ways_at_once(between: Between) -> None:
    there, back = os.urandom(3_000_001), os.urandom(2_000_003)
    client, server = between.connect()
    sending = [threading.Thread(target=end.sendall, args=(data,)) for end, data in ((client, there), (server, back))]
    for thread in sending:
        thread.start()
    got: dict[str, bytes] = {}
    reading = in_background(threading.Thread(target=lambda: got.update(back=received(client, len(back)))))
    assert received(server, len(there)) == there
    for thread in (*sending, reading):
        thread.join(PATIENCE_S)
    assert got["back"] == back


def test_connections_do_not_mix(between: Between) -> None:
    pairs = [between.connect() for _ in range(3)]
    for k, (client, server) in enumerate(pairs):
        client.sendall(bytes([k]) * 1000)
        server.sendall(bytes([10 + k]) * 1000)
    for k, (client, server) in enumerate(pairs):
        assert received(server, 1000) == bytes([k]) * 1000
        assert received(client, 1000) == bytes([10 + k]) * 1000


def test_one_side_may_end_and_still_listen(between: Between) -> None:
    client, server = between.connect()
    client.sendall(b"a question")
    client.shutdown(socket.SHUT_WR)
    assert to_the_end(server) == b"a question"
    server.sendall(b"an answer")
    server.close()
    assert to_the_end(client) == b"an answer"


def test_what_was_sent_before_the_end_arrives_however_late_it_is_read(between: Between) -> None:
    """Where sockets hold little, a relay that ended at once would drop what is still in its own buffer."""
    data = os.urandom(50_000)
    client, server = between.connect(between.narrow())
    client.shutdown(socket.SHUT_WR)
    assert to_the_end(server) == b""
    sending = in_background(threading.Thread(target=lambda: (server.sendall(data), server.close())))
    sending.join(0.2)  # by then the relay most probably has everything
    assert to_the_end(client) == data
    sending.join(PATIENCE_S)


def test_a_server_that_is_not_there_looks_refused_and_is_found_once_it_is_there(between: Between) -> None:
    """Reset, not closed in order, which devices take for a refused certificate."""
    target = f"127.0.0.1:{free_port()}"
    address = between.relay.forward("127.0.0.1", target)
    for _ in range(3):
        with pytest.raises(ConnectionResetError), connected(address) as client:
            client.recv(1)
    host, _, port = target.rpartition(":")
    with socket.create_server((host, int(port))) as listener, connected(address) as client:
        listener.settimeout(PATIENCE_S)
        server, _ = listener.accept()
        with server:
            server.sendall(b"here")
            assert received(client, 4) == b"here"


def test_devices_do_not_take_a_server_that_is_not_there_for_one_that_refuses_them(
    between: Between, tmp_path: Path
) -> None:
    """They retry for ever if there is no server, but give up if one closes their connections."""
    make_certificates(tmp_path, ["device-1"])
    credentials, device = load_credentials(tmp_path, "device-1"), Party("device", "device-1")

    async def call(address: str) -> str:
        async with open_channel(address, "edge", credentials, device, OPTIONS) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await Calls(channel, "Edge").echo().read()
        return str(caught.value.details())

    for address in (between.relay.forward("127.0.0.1", f"127.0.0.1:{free_port()}"), f"127.0.0.1:{free_port()}"):
        details = asyncio.run(call(address))
        assert not all(words in details for words in CLOSED), details
        assert not any(word in details for word in HANDSHAKE), details


@pytest.mark.parametrize("who", ["client", "server"])
def test_a_reset_is_passed_on(between: Between, who: str) -> None:
    client, server = between.connect()
    client.sendall(b"first")
    assert received(server, 5) == b"first"
    fails, other = (client, server) if who == "client" else (server, client)
    fails.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    fails.close()
    with pytest.raises(ConnectionResetError):
        other.recv(1)


def test_closing_ends_connections_and_the_thread(between: Between) -> None:
    between.delays.there_s = PATIENCE_S  # bytes that wait are no reason to stay
    client, server = between.connect()
    client.sendall(b"never to arrive")
    between.close_relay()
    assert not between.relay._thread.is_alive()
    for end in (client, server):
        with contextlib.suppress(ConnectionResetError):
            assert end.recv(1) == b""
    with pytest.raises(ConnectionRefusedError):
        connected(between.address)


def test_bytes_are_delayed_each_way_by_its_own_delay(between: Between) -> None:
    between.delays.there_s, between.delays.back_s = 0.2, 0.05
    client, server = between.connect()
    for sender, receiver, delay_s in ((client, server, 0.2), (server, client, 0.05)):
        sent = time.monotonic()
        sender.sendall(b"x")
        assert received(receiver, 1) == b"x"
        assert time.monotonic() - sent >= delay_s


def test_the_end_of_a_connection_is_delayed_too(between: Between) -> None:
    between.delays.there_s = 0.1
    client, server = between.connect()
    ended = time.monotonic()
    client.shutdown(socket.SHUT_WR)
    assert to_the_end(server) == b""
    assert time.monotonic() - ended >= 0.1


def test_delays_that_change_keep_the_order(between: Between) -> None:
    """A byte sent later, with a shorter delay, does not overtake; and the new delay holds for what comes then."""
    client, server = between.connect()
    between.delays.there_s = 0.2
    sent = time.monotonic()
    client.sendall(b"slow")
    time.sleep(0.05)  # read by itself, most probably; if not, both are slow, in order as well
    between.delays.there_s = 0.0
    client.sendall(b"fast")
    assert received(server, 8) == b"slowfast"
    assert time.monotonic() - sent >= 0.2
    between.delays.there_s = 0.1
    sent = time.monotonic()
    client.sendall(b"last")
    assert received(server, 4) == b"last"
    assert time.monotonic() - sent >= 0.1


def test_a_delay_limits_no_rate_where_bytes_come_in_small_pieces(between: Between) -> None:
    """As from slow links: all pieces wait at the same time, however many they are. A relay that stopped would hang."""
    between.delays.there_s = PATIENCE_S
    client, server = between.connect(between.narrow())
    client.sendall(bytes(4_000_000))  # ends only if the relay reads on while it delays
    server.setblocking(False)
    with pytest.raises(BlockingIOError):
        server.recv(1)


def test_a_side_that_does_not_read_stops_the_other(between: Between, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "MOST_DELAYED_BYTES", 2**18)
    client, server = between.connect()
    data, sent = os.urandom(2**20), 0
    client.settimeout(0.2)
    with contextlib.suppress(TimeoutError):
        while sent < 2**28:
            sent += client.send(data)
    assert sent < 2**28, "the relay takes everything"
    client.close()
    assert len(to_the_end(server)) == sent


def test_a_relay_in_a_namespace_leaves_the_rest_of_the_process_where_it_was() -> None:
    def where() -> str:
        return str(Path("/proc/thread-self/ns/net").readlink())

    def of_threads() -> set[str]:
        places = set()
        for task in Path("/proc/self/task").iterdir():
            with contextlib.suppress(OSError):  # a thread that has just ended
                places.add(str((task / "ns" / "net").readlink()))
        return places

    with laid(Fleet.of([link(10, 10)], SERVER)) as network:  # has two relays of its own
        before, known = where(), of_threads()
        inside = Relay(network.namespace("device-1"))
        seen: list[str] = []
        try:
            assert where() == before
            in_background(threading.Thread(target=lambda: seen.append(where()))).join()
            assert len(of_threads() - known) == 1  # that of the relay's own thread
            address = inside.forward("127.0.0.1", "127.0.0.1:1")
            with pytest.raises(ConnectionRefusedError):
                connected(address)  # the relay's loopback is not ours
        finally:
            inside.close()
        assert seen == [before]
        with socket.create_server(("127.0.0.1", 0)) as listener:
            connected(name_of(listener)).close()


def test_a_namespace_that_is_not_there_is_an_error_and_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    with pytest.raises(FileNotFoundError, match="no-such-namespace"):
        Relay("no-such-namespace")
    for thread in set(threading.enumerate()) - before:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
