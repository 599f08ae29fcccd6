"""Links of given rates and delays on one machine: a network namespace for every party, joined by shaped cables.

Every device has two cables, one to the edge server and one to the fed server, and a third one joins the servers. A
token bucket (tc tbf) at each end of a cable limits the rate of what is sent there; relays add delays. A bucket lets a
packet pass at once after a pause, which would make small messages faster than the link: relays make up for it. All of
it is removed at the end; what a killed process has left, by the next one. Only root may make namespaces.
"""

import itertools
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from adaptsfl.deploy.parties.relay import NAMESPACES, Delays, Relay
from adaptsfl.errors import InvalidInput
from adaptsfl.fleet import Fleet

# The largest packets: small ones over slow links, where a large one would take long. A bucket holds one, or what comes
# between two timers.
SLOW_BPS, SMALL_PACKET, PACKET, LINK_HEADER, BURST_S = 5e6, 576, 1500, 32, 0.001
QUEUE_S, QUEUE_BYTES = 0.3, 250_000  # what may wait in front of a bucket, the larger one: as in routers at home
UNLIMITED_BPS = 30e9  # faster than this machine: links beyond need no bucket
EDGE_PORT, FED_PORT = 7001, 7002
# Networks, in namespaces of their own: devices with the edge server, devices with the fed server, the two servers.
EDGE_HOST, FED_HOST, FED_FOR_EDGE = "10.91.0.1", "10.92.0.1", "10.93.0.2"
REMEDY = "Run it on Linux, as root (sudo) and with iproute2; without --links, links are as fast as this machine"
_numbers = itertools.count()


class ShapedNetwork:
    """The namespaces of one deployment, and the cables between them.

    Args:
        fleet: the rates and fixed seconds of all links; its computing power is that of this machine, whatever it says.

    Attributes:
        fleet: the links as they are now.
        edge, fed: where devices reach the servers, and where these listen.
    """

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self._mark = f"sfl{os.getpid()}x{next(_numbers)}"
        self._hub = f"{self._mark}-hub"
        self.edge: Final = f"{EDGE_HOST}:{EDGE_PORT}"
        self.fed: Final = f"{FED_HOST}:{FED_PORT}"
        rates = (fleet.uplink_bps, fleet.downlink_bps, fleet.fed_uplink_bps, fleet.fed_downlink_bps)
        slowest = min(fleet.server.to_fed_bps, fleet.server.from_fed_bps, *(float(rate.min()) for rate in rates))
        self._packet = SMALL_PACKET if slowest < SLOW_BPS else PACKET
        self._made: list[str] = []
        self._shaped: dict[tuple[str, str], float] = {}  # by namespace and interface: the rate of its bucket
        self._relays: dict[str, Relay] = {}  # by server
        self._delays: dict[tuple[str, str], tuple[str, Delays]] = {}  # by server and party: where to connect

    def namespace(self, party: str) -> str:
        """Return the namespace of "edge", "fed" or a device."""
        return f"{self._mark}-{party.removeprefix('device-')}"

    def command(self, party: str) -> list[str]:
        """Return the beginning of a command line that runs in a party's namespace."""
        return ["ip", "netns", "exec", self.namespace(party)]

    def address(self, server: str, party: str) -> str:
        """Return where a party reaches a server."""
        return self._delays[server, party][0]

    # --- making it ---

    def make(self) -> None:
        """Make everything; raises `OSError` with what `ip` or `tc` says."""
        _remove_left_over()
        devices = [f"device-{k + 1}" for k in range(self.fleet.size)]
        for name in (self._hub, *(self.namespace(party) for party in ("edge", "fed", *devices))):
            self._made.append(name)  # first: this may be interrupted at any time
            _run("ip", "netns", "add", name)
            _run("ip", "-n", name, "link", "set", "lo", "up")
        for bridge in ("br-edge", "br-fed"):
            _run("ip", "-n", self._hub, "link", "add", bridge, "type", "bridge")
            _run("ip", "-n", self._hub, "link", "set", bridge, "up")
        self._join("edge", "eth0", "br-edge", "edge", f"{EDGE_HOST}/16")
        self._join("fed", "eth0", "br-fed", "fed", f"{FED_HOST}/16")
        for k, device in enumerate(devices):
            place = f"{1 + k // 250}.{1 + k % 250}"
            self._join(device, "eth0", "br-edge", f"edge{k}", f"10.91.{place}/16")
            self._join(device, "eth1", "br-fed", f"fed{k}", f"10.92.{place}/16")
        self._join_servers()
        for server in ("edge", "fed"):
            self._relays[server] = Relay(self.namespace(server))
        for device in devices:
            self._add_delays("edge", device, EDGE_HOST, self.edge)
            self._add_delays("fed", device, FED_HOST, self.fed)
        self._add_delays("fed", "edge", FED_FOR_EDGE, f"{FED_FOR_EDGE}:{FED_PORT}")
        self.shape(self.fleet)

    def _join(self, party: str, interface: str, bridge: str, port: str, address: str) -> None:
        """Lay a cable from a party's namespace to a bridge."""
        name = self.namespace(party)
        _run(
            *("ip", "-n", self._hub, "link", "add", port, "type", "veth"),
            *("peer", "name", interface, "netns", name),
        )
        _run("ip", "-n", self._hub, "link", "set", port, "master", bridge, "up")
        _run("ip", "-n", name, "address", "add", address, "dev", interface)
        _run("ip", "-n", name, "link", "set", interface, "mtu", str(self._packet), "up")

    def _join_servers(self) -> None:
        """Lay the cable between the two servers."""
        edge, fed = self.namespace("edge"), self.namespace("fed")
        _run("ip", "-n", edge, "link", "add", "eth1", "type", "veth", "peer", "name", "eth1", "netns", fed)
        for name, address in ((edge, "10.93.0.1"), (fed, FED_FOR_EDGE)):
            _run("ip", "-n", name, "address", "add", f"{address}/24", "dev", "eth1")
            # A bucket drops packets that are larger than itself.
            _run("ip", "-n", name, "link", "set", "eth1", "mtu", str(self._packet), "up")

    def _add_delays(self, server: str, party: str, host: str, target: str) -> None:
        """Lead a party to a server through a relay in the server's namespace."""
        delays = Delays()
        self._delays[server, party] = self._relays[server].forward(host, target, delays), delays

    # --- changing it ---

    def shape(self, fleet: Fleet) -> None:
        """Give all links the rates and fixed seconds of a fleet of as many devices; only changes are carried out."""
        self.fleet, server = fleet, fleet.server
        for k, device in enumerate(fleet):
            name = self.namespace(f"device-{k + 1}")
            there_s = self._limited(name, "eth0", device.uplink_bps)
            back_s = self._limited(self._hub, f"edge{k}", device.downlink_bps)
            self._delay("edge", f"device-{k + 1}", device.uplink_s + there_s, device.downlink_s + back_s)
            there_s = self._limited(name, "eth1", device.fed_uplink_bps)
            back_s = self._limited(self._hub, f"fed{k}", device.fed_downlink_bps)
            self._delay("fed", f"device-{k + 1}", device.fed_uplink_s + there_s, device.fed_downlink_s + back_s)
        there_s = self._limited(self.namespace("edge"), "eth1", server.to_fed_bps)
        back_s = self._limited(self.namespace("fed"), "eth1", server.from_fed_bps)
        self._delay("fed", "edge", server.to_fed_s + there_s, server.from_fed_s + back_s)

    def _limited(self, name: str, interface: str, bps: float) -> float:
        """Limit the rate of what is sent through an interface; return by how many seconds small messages are early."""
        burst = max(self._packet + LINK_HEADER, int(bps / 8 * BURST_S))
        if bps < UNLIMITED_BPS and self._shaped.get((name, interface)) != bps:
            queue = max(QUEUE_BYTES, int(bps / 8 * QUEUE_S)) + burst
            bucket = ("tbf", "rate", f"{max(8, round(bps))}bit", "burst", f"{burst}b", "limit", f"{queue}b")
            _run("tc", "-n", name, "qdisc", "replace", "dev", interface, "root", *bucket)
        elif bps >= UNLIMITED_BPS and self._shaped.get((name, interface), bps) < UNLIMITED_BPS:
            _run("tc", "-n", name, "qdisc", "delete", "dev", interface, "root")
        self._shaped[name, interface] = bps
        return 8 * burst / bps if bps < UNLIMITED_BPS else 0.0

    def _delay(self, server: str, party: str, there_s: float, back_s: float) -> None:
        delays = self._delays[server, party][1]
        delays.there_s, delays.back_s = there_s, back_s

    def expose(self, listener: socket.socket, target: str) -> None:
        """Pass connections that a socket outside of all namespaces accepts on to an address at the edge server."""
        self._relays["edge"].forward(listener, target)

    def remove(self) -> None:
        """Remove everything; cables go with their namespaces."""
        for relay in self._relays.values():
            with suppress(Exception):  # the namespaces have to go in any case
                relay.close()
        self._relays.clear()
        while self._made:
            subprocess.run(["ip", "netns", "delete", self._made.pop()], check=False, capture_output=True)


@contextmanager
def shaped_network(fleet: Fleet) -> Iterator[ShapedNetwork]:
    """Make the network of a fleet, and remove it whatever happens."""
    if not (shutil.which("ip") and shutil.which("tc")):
        raise InvalidInput("--links", "needs the commands ip and tc", REMEDY)
    if os.geteuid() != 0:
        raise InvalidInput("--links", "makes network namespaces, which only root may do", REMEDY)
    network = ShapedNetwork(fleet)
    try:
        try:
            network.make()
        except OSError as error:
            raise InvalidInput("--links", f"cannot be shaped here: {error}", REMEDY) from None
        yield network
    finally:
        network.remove()


def _remove_left_over() -> None:
    """Remove the namespaces of processes that were killed before they could do so."""
    for path in NAMESPACES.glob("sfl*"):
        maker = re.fullmatch(r"sfl(\d+)x\d+-\w+", path.name)
        if maker and not Path("/proc", maker[1]).exists():
            subprocess.run(["ip", "netns", "delete", path.name], check=False, capture_output=True)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")
