"""Links of known rates: a network namespace for every device and one for the servers, joined by a bridge in another.

Whatever a device sends passes a token bucket at its own end, whatever it is sent one at the bridge's. The servers'
link is as fast as this machine. All of it is gone when the block ends; where namespaces may not be made, tests are
skipped.
"""

import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from adaptsfl.deploy.parties.local_fleet import LocalFleet, Say

BURST = "5kb"  # what passes at once after a pause: little beside what a round sends
QUEUE = "300ms"
_numbers = itertools.count()


@dataclass(frozen=True)
class Link:
    """A device's rates in Mbit/s."""

    up: float
    down: float


class Network:
    """Namespaces and the links between them, while they are there."""

    def __init__(self, links: Sequence[Link]) -> None:
        self.links = tuple(links)
        self.mark = f"sfl{os.getpid()}x{next(_numbers)}"
        self.hub, self.servers = f"{self.mark}-hub", f"{self.mark}-servers"
        self._made: list[str] = []

    @property
    def address(self) -> str:
        """Of both servers."""
        return "10.91.0.1"

    def device(self, number: int) -> str:
        """Return the namespace of device 1, 2, …"""
        return f"{self.mark}-{number}"

    def make(self) -> None:
        """Make everything; raises what `ip` or `tc` says."""
        for name in (self.hub, self.servers, *(self.device(k + 1) for k in range(len(self.links)))):
            _run("ip", "netns", "add", name)
            self._made.append(name)
            _run("ip", "-n", name, "link", "set", "lo", "up")
        _run("ip", "-n", self.hub, "link", "add", "br0", "type", "bridge")
        _run("ip", "-n", self.hub, "link", "set", "br0", "up")
        self._join(self.servers, "port0", self.address)
        for k, link in enumerate(self.links, start=1):
            self._join(self.device(k), f"port{k}", f"10.91.0.{k + 1}")
            _shape(self.device(k), "eth0", link.up)
            _shape(self.hub, f"port{k}", link.down)

    def _join(self, name: str, port: str, address: str) -> None:
        """Lay a cable from a namespace to the bridge."""
        _run(
            *("ip", "-n", self.hub, "link", "add", port, "type", "veth"),
            *("peer", "name", "eth0", "netns", name),
        )
        _run("ip", "-n", self.hub, "link", "set", port, "master", "br0", "up")
        _run("ip", "-n", name, "address", "add", f"{address}/24", "dev", "eth0")
        _run("ip", "-n", name, "link", "set", "eth0", "up")

    def remove(self) -> None:
        """Remove all that was made; the links go with their namespaces."""
        while self._made:
            subprocess.run(["ip", "netns", "delete", self._made.pop()], check=False, capture_output=True)


def _shape(name: str, interface: str, mbps: float) -> None:
    shaped = ["tbf", "rate", f"{mbps:g}mbit", "burst", BURST, "latency", QUEUE]
    _run("tc", "-n", name, "qdisc", "add", "dev", interface, "root", *shaped)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")


def need_namespaces() -> None:
    """Skip the test where namespaces, cables and token buckets cannot be had."""
    if not (shutil.which("ip") and shutil.which("tc")):
        pytest.skip("ip and tc are not here: apt-get install iproute2")
    if os.geteuid() != 0:
        pytest.skip("network namespaces are for root")
    trial = Network([Link(10, 10)])
    try:
        trial.make()
    except OSError as error:
        pytest.skip(f"no network namespaces with shaped links here ({error})")
    finally:
        trial.remove()


@contextmanager
def shaped_network(links: Sequence[Link]) -> Iterator[Network]:
    """Make the network, and remove it again whatever happens."""
    network = Network(links)
    try:
        network.make()
        yield network
    finally:
        network.remove()


class ShapedFleet(LocalFleet):
    """All parties of a run, each in its namespace."""

    def __init__(self, network: Network, recipe: Path, folder: Path, say: Say, more: Sequence[str] = ()) -> None:
        super().__init__(recipe, len(network.links), folder, say, status_port=0, more=list(more))
        self.network = network
        self.edge, self.fed = f"{network.address}:7001", f"{network.address}:7002"

    def command(self, party: str) -> list[str]:
        """Return the command line of a party, to be run where it lives."""
        number = party.removeprefix("device-")
        name = self.network.device(int(number)) if number.isdigit() else self.network.servers
        return ["ip", "netns", "exec", name, *super().command(party)]
