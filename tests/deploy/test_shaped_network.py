"""Shaped links: what is made, changed and removed, whatever happens. How fast they are is in `test_links.py`."""

import itertools
import os
import shutil
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from adaptsfl.deploy.parties import shaped_network as module
from adaptsfl.deploy.parties.local_fleet import LocalFleet
from adaptsfl.deploy.parties.relay import NAMESPACES
from adaptsfl.deploy.parties.shaped_network import ShapedNetwork, shaped_network
from adaptsfl.errors import InvalidInput
from adaptsfl.fleet import Fleet
from deploy.deployed import PATIENCE_S, Talk
from deploy.laid import SERVER, laid, link, namespaces_of, need_namespaces

TWO = (link(2, 8, delay_ms=5), link(20, 40))
# Answers one connection: its bytes come back, and then it is over.
ECHO = """
import socket, sys
listener = socket.create_server((sys.argv[1], int(sys.argv[2])))
print("listening", flush=True)
client, _ = listener.accept()
while data := client.recv(2**16):
    client.sendall(data)
"""
ASK = """
import socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2])), float(sys.argv[3])) as server:
    sent = bytes(range(256)) * 200
    server.sendall(sent)
    server.shutdown(socket.SHUT_WR)
    got = b""
    while data := server.recv(2**16):
        got += data
print("the same" if got == sent else f"{len(got)} of {len(sent)} bytes")
"""


def commands_of(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """Return a list that grows by every command that is carried out."""
    found: list[tuple[str, ...]] = []
    run = module._run

    def noted(*command: str) -> None:
        found.append(command)
        run(*command)

    monkeypatch.setattr(module, "_run", noted)
    return found


def place(command: Sequence[str]) -> tuple[str, str]:
    """Return the namespace of a `tc` command without its mark, and the interface."""
    return command[2].partition("-")[2], command[command.index("dev") + 1]


@pytest.mark.parametrize(
    ("server", "party", "host", "port"),
    [("edge", "device-1", "10.91.0.1", 7001), ("fed", "device-2", "0.0.0.0", 7002), ("fed", "edge", "0.0.0.0", 7002)],
)
def test_parties_reach_servers_over_links_however_slow(server: str, party: str, host: str, port: int) -> None:
    """A bucket drops packets that are larger than itself, so that all links need small ones where one is slow."""
    slow = replace(SERVER, to_fed_bps=2e6, from_fed_bps=2e6)
    with laid(Fleet.of(TWO, slow)) as network:
        echo = [*network.command(server), sys.executable, "-c", ECHO, host, str(port)]
        with subprocess.Popen(echo, stdout=subprocess.PIPE, text=True) as serving:
            try:
                assert serving.stdout is not None
                assert serving.stdout.readline() == "listening\n"
                address = network.address(server, party).split(":")
                ask = [*network.command(party), sys.executable, "-c", ASK, *address, str(PATIENCE_S)]
                asked = subprocess.run(ask, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
            finally:
                serving.kill()
        assert asked.stdout == "the same\n", asked.stderr


def test_every_party_has_its_own_namespace_and_way_to_each_server() -> None:
    with laid(Fleet.of(TWO, SERVER)) as network:
        parties = ("edge", "fed", "device-1", "device-2")
        assert len({network.namespace(party) for party in parties}) == 4
        for party in parties:
            assert network.command(party) == ["ip", "netns", "exec", network.namespace(party)]
            assert (NAMESPACES / network.namespace(party)).exists()
        addresses = {(s, p): network.address(s, p) for s in ("edge", "fed") for p in ("device-1", "device-2")}
        addresses["fed", "edge"] = network.address("fed", "edge")
        assert len(set(addresses.values())) == 5  # a relay's port of its own, since each has delays of its own
        hosts = {"edge": "10.91.0.1", "fed": "10.92.0.1"}
        for (server, party), address in addresses.items():
            assert address.split(":")[0] == ("10.93.0.2" if party == "edge" else hosts[server])
        with pytest.raises(KeyError):
            network.address("edge", "device-3")


def test_two_networks_at_once_do_not_meet() -> None:
    with laid(Fleet.of(TWO, SERVER)) as one, laid(Fleet.of(TWO, SERVER)) as other:
        assert one.namespace("edge") != other.namespace("edge")
        assert len(namespaces_of(os.getpid())) == 10
    assert namespaces_of(os.getpid()) == []


def test_only_what_changed_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    with laid(Fleet.of(TWO, SERVER)) as network:
        found = commands_of(monkeypatch)
        network.shape(Fleet.of(TWO, SERVER))
        assert found == []
        faster = replace(TWO[0], uplink_bps=3e6, fed_downlink_bps=9e6)
        network.shape(Fleet.of((faster, TWO[1]), SERVER))
        assert [place(command) for command in found] == [("1", "eth0"), ("hub", "fed0")]
        assert [command[command.index("rate") + 1] for command in found] == ["3000000bit", "9000000bit"]
        found.clear()
        network.shape(Fleet.of((faster, replace(TWO[1], uplink_s=0.5)), SERVER))  # the business of relays
        assert found == []
        delays = network._delays["edge", "device-2"][1]
        assert delays.there_s > 0.5 > delays.back_s
        unlimited = replace(SERVER, to_fed_bps=1e12)
        network.shape(Fleet.of((faster, TWO[1]), unlimited))
        network.shape(Fleet.of((faster, TWO[1]), unlimited))
        assert [(place(command), "delete" in command) for command in found] == [(("edge", "eth1"), True)]
        network.shape(Fleet.of((faster, TWO[1]), SERVER))
        assert [(place(command), "tbf" in command) for command in found[1:]] == [(("edge", "eth1"), True)]
        assert network.fleet.server == SERVER


def test_a_change_that_failed_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with laid(Fleet.of(TWO, SERVER)) as network:
        changed = Fleet.of((replace(TWO[0], uplink_bps=3e6), TWO[1]), SERVER)

        def fail(*command: str) -> None:
            raise OSError(f"{' '.join(command)}: no")

        with monkeypatch.context() as patch:
            patch.setattr(module, "_run", fail)
            with pytest.raises(OSError, match="3000000bit"):
                network.shape(changed)
        found = commands_of(monkeypatch)
        network.shape(changed)
        assert [place(command) for command in found] == [("1", "eth0")]


def test_everything_is_removed_after_an_error() -> None:
    need_namespaces()
    with pytest.raises(ZeroDivisionError), shaped_network(Fleet.of(TWO, SERVER)):
        1 / (len(namespaces_of(os.getpid())) - 5)  # all are there
    assert namespaces_of(os.getpid()) == []


@pytest.mark.parametrize("error", [OSError("tc: no such qdisc"), KeyboardInterrupt()], ids=["error", "interrupt"])
@pytest.mark.parametrize("when", ["netns add", "veth", "tbf"])
def test_everything_is_removed_if_it_cannot_be_made(
    monkeypatch: pytest.MonkeyPatch, when: str, error: BaseException
) -> None:
    """The third command of each kind is carried out, but nobody gets to know."""
    need_namespaces()
    run, times = module._run, 0

    def failing(*command: str) -> None:
        nonlocal times
        run(*command)
        times += when in " ".join(command)
        if times == 3:
            raise error

    monkeypatch.setattr(module, "_run", failing)
    expected: Any = pytest.raises(InvalidInput, match=r"--links: cannot be shaped here: tc: no such qdisc. Run it on")
    if isinstance(error, KeyboardInterrupt):
        expected = pytest.raises(KeyboardInterrupt)
    with expected, shaped_network(Fleet.of(TWO, SERVER)):
        raise AssertionError("was made")
    assert namespaces_of(os.getpid()) == []


def test_what_ip_says_is_passed_on() -> None:
    if shutil.which("ip") is None:
        pytest.skip("needs the command ip")
    with pytest.raises(OSError, match=r"ip -n no-such-namespace link: .+"):
        module._run("ip", "-n", "no-such-namespace", "link")


def test_what_a_killed_process_left_is_removed_by_the_next_and_nothing_else() -> None:
    need_namespaces()
    with subprocess.Popen(["true"]) as gone:
        gone.wait()
    left = [f"sfl{gone.pid}x0-hub", f"sfl{gone.pid}x0-12"]
    others = [f"sfl{os.getppid()}x0-hub", f"sfl{gone.pid}-other"]  # of a process that lives, and not one of ours
    try:
        for name in (*left, *others):
            subprocess.run(["ip", "netns", "add", name], check=True)
        with shaped_network(Fleet.of(TWO, SERVER)) as network:
            there = {path.name for path in NAMESPACES.iterdir()}
            assert there.isdisjoint(left)
            assert there >= {*others, network.namespace("edge")}
    finally:
        for name in (*left, *others):
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def test_the_status_page_is_reachable_from_this_machine(tmp_path: Path) -> None:
    with laid(Fleet.of(TWO, SERVER)) as network:
        fleet = LocalFleet(tmp_path / "recipe.toml", 2, tmp_path / "run", Talk(), network=network)
        page = f"http://127.0.0.1:{fleet.status_port}/"
        with pytest.raises((urllib.error.URLError, ConnectionResetError)):  # no server yet
            urllib.request.urlopen(page, timeout=PATIENCE_S)
        (tmp_path / "index.html").write_text("the page")
        serve = ["-m", "http.server", str(fleet.status_port), "--bind", "127.0.0.1", "--directory", str(tmp_path)]
        command = [*network.command("edge"), sys.executable, "-u", *serve]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as serving:
            try:
                assert serving.stdout is not None
                assert "Serving" in serving.stdout.readline()
                with urllib.request.urlopen(page, timeout=PATIENCE_S) as answer:
                    assert answer.read() == b"the page"
            finally:
                serving.kill()


def test_a_status_port_in_use_is_explained(tmp_path: Path) -> None:
    with laid(Fleet.of(TWO, SERVER)) as network, socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(InvalidInput, match=rf"--status-port: {port} cannot be listened on \(Address already"):
            LocalFleet(tmp_path / "recipe.toml", 2, tmp_path, Talk(), status_port=port, network=network)


def test_parties_are_started_in_their_namespaces_with_their_addresses(tmp_path: Path) -> None:
    with laid(Fleet.of(TWO, SERVER)) as network:
        fleet = LocalFleet(tmp_path / "recipe.toml", 2, tmp_path / "run", Talk(), network=network)
        for party in ("edge", "fed", "device-1", "device-2"):
            command = fleet.command(party)
            assert command[:5] == [*network.command(party), sys.executable]
            options = dict(itertools.pairwise(command))
            if party.startswith("device"):
                assert options["--edge"] == network.address("edge", party)
            if party != "fed":
                assert options["--fed"] == network.address("fed", party) == fleet.address("fed", party)
            if party == "edge":
                assert options["--listen"] == network.edge
    without = LocalFleet(tmp_path / "recipe.toml", 2, tmp_path / "run", Talk())
    assert without.command("device-1")[0] == sys.executable
    assert without.address("edge", "device-1") == without.edge


def test_who_may_not_make_namespaces_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _name: "/sbin/ip")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(
        InvalidInput, match=r"--links: makes network namespaces, which only root may do. Run it on Linux"
    ):
        shaped_network(Fleet.of(TWO, SERVER)).__enter__()


@pytest.mark.parametrize("missing", ["ip", "tc"])
def test_missing_commands_are_named(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None if name == missing else f"/sbin/{name}")
    with pytest.raises(InvalidInput, match=r"--links: needs the commands ip and tc. .* with iproute2"):
        shaped_network(Fleet.of(TWO, SERVER)).__enter__()


def test_nothing_is_made_before_it_is_asked_for() -> None:
    assert ShapedNetwork(Fleet.of(TWO, SERVER)).fleet.size == 2
    assert namespaces_of(os.getpid()) == []
