"""Runs all parties on this machine, each as a process of its own: for a first try, and for tests."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import FrameType

from adaptsfl.deploy.parties.shaped_network import EDGE_HOST, EDGE_PORT, FED_PORT, ShapedNetwork, shaped_network
from adaptsfl.deploy.security.certs import make_certificates
from adaptsfl.errors import InvalidInput, RunFailed
from adaptsfl.fleet import Resources
from adaptsfl.runs.folder import RECORD

TIMEOUT_S = 10.0  # for a party to end by itself after a signal
FOLLOW_S = 0.1  # how often links are compared with the round that the run has reached

Say = Callable[[str, str], None]  # the party's name, and a line of its output


def free_port() -> int:
    """Return a free port of this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class LocalFleet:
    """The processes of one run on this machine.

    Args:
        network: the links between them; without it they are as fast as this machine.

    Attributes:
        processes: by party.
    """

    def __init__(
        self,
        recipe: Path,
        devices: int,
        folder: Path,
        say: Say,
        *,
        status_port: int = 0,
        more: Sequence[str] = (),
        network: ShapedNetwork | None = None,
    ) -> None:
        self.recipe, self.devices, self.folder, self.say, self.more = recipe, devices, folder, say, more
        self.network, self.status_port = network, status_port
        self.edge, self.fed = (f"127.0.0.1:{free_port()}" for _ in range(2))
        if network is not None:
            self.edge, self.fed = f"{EDGE_HOST}:{EDGE_PORT}", f"0.0.0.0:{FED_PORT}"  # of their own namespaces
            self.status_port = self._exposed_status(network)
        self.certs = folder / "certs"
        self.processes: dict[str, subprocess.Popen[str]] = {}
        self._last_lines: dict[str, str] = {}  # the last line of each party's output
        self._record_bytes = self._rounds = 0  # of the record when it was last read
        self.names = [f"device-{k + 1}" for k in range(devices)]
        make_certificates(self.certs, self.names)

    def _exposed_status(self, network: ShapedNetwork) -> int:
        """Make the status page, which the edge server serves in its namespace, available on this machine too."""
        try:
            listener = socket.create_server(("127.0.0.1", self.status_port))
        except OSError as error:
            problem = f"{self.status_port} cannot be listened on ({error.strerror})"
            raise InvalidInput("--status-port", problem, "Give another port, or 0 for any that is free") from None
        port = int(listener.getsockname()[1])
        network.expose(listener, f"127.0.0.1:{port}")
        return port

    def address(self, server: str, party: str) -> str:
        """Return where a party reaches the "edge" or the "fed" server."""
        if self.network is not None:
            return self.network.address(server, party)
        return self.edge if server == "edge" else self.fed

    def command(self, party: str) -> list[str]:
        """Return the command line of a party."""
        common = ["--certs", str(self.certs)]
        # These names replace the recipe's.
        recipe = [str(self.recipe), "--set", f"fleet.devices={self.devices}"]
        recipe += ["--set", f"deploy.devices={json.dumps(self.names)}"]
        for text in self.more:
            recipe += ["--set", text]
        if party == "fed":
            mine = ["serve", "fed", *recipe, "--listen", self.fed, "--out", str(self.folder / "fed")]
        elif party == "edge":
            mine = [
                "serve",
                "edge",
                *recipe,
                "--listen",
                self.edge,
                "--fed",
                self.address("fed", party),
                "--out",
                str(self.folder / "edge"),
            ]
            mine += ["--status-port", str(self.status_port)]
        else:
            addresses = ["--edge", self.address("edge", party), "--fed", self.address("fed", party)]
            mine = ["join", *addresses, "--name", party]
        place = [] if self.network is None else self.network.command(party)
        return [*place, sys.executable, "-m", "adaptsfl", *mine, *common]

    def start(self, party: str) -> None:
        """Start one party."""
        # One thread for every device: they share this machine.
        threads = {} if party in ("edge", "fed") else {"OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            self.command(party),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            env={**os.environ, **threads},
            start_new_session=True,  # this process passes Ctrl-C on
        )
        self.processes[party] = process
        threading.Thread(target=self._relay, args=(party, process), daemon=True).start()

    def _relay(self, party: str, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with process.stdout as lines:
            for line in lines:
                self._last_lines[party] = line.rstrip()
                self.say(party, line.rstrip())

    def start_all(self) -> None:
        """Start all parties."""
        for party in ("fed", "edge", *self.names):
            self.start(party)

    def wait(self) -> None:
        """Wait until the edge server has ended, then until all parties have; report if a server failed."""
        while self.processes["edge"].poll() is None:
            for server in ("edge", "fed"):
                code = self.processes[server].poll()
                if code:
                    raise RunFailed(
                        "Fleet", f"the {server} server ended with code {code}: {self._last_lines.get(server, '')}"
                    )
            codes = [process.poll() for name, process in self.processes.items() if name.startswith("device")]
            if None not in codes and 0 not in codes:  # 0: the device was informed that the run is over
                self._settle("edge")
                if self.processes["edge"].poll() is None:
                    lines = {self._last_lines.get(name, "") for name in self.processes if "device" in name}
                    last = "; ".join(sorted(lines))
                    raise RunFailed("Fleet", f"all devices have ended: {last}")
            time.sleep(0.1)
        code = self.processes["edge"].returncode
        if code:
            raise RunFailed("Fleet", f"the edge server ended with code {code}: {self._last_lines.get('edge', '')}")
        for party in self.processes:
            self._settle(party)

    def _settle(self, party: str) -> None:
        try:
            self.processes[party].wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return

    def stop(self) -> None:
        """End all parties that still run, devices first."""
        for process in reversed(self.processes.values()):
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
        for name, process in self.processes.items():
            try:
                process.wait(TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self.say(name, "does not end: killed")
                process.kill()
                process.wait()

    @property
    def rounds(self) -> int:
        """The rounds up to the last averaging on record."""
        record = self.folder / "edge" / RECORD
        # A line that is being written, or no record yet, leaves the rounds as they were.
        with suppress(OSError, ValueError, LookupError):
            size = record.stat().st_size
            if size != self._record_bytes:  # it grows long, and is asked for often
                block = json.loads(record.read_text(encoding="utf-8").splitlines()[-1])
                self._rounds = int(block["first_round"] + block["rounds"] - 1)
                self._record_bytes = size
        return self._rounds


@contextmanager
def fleet_up(
    recipe: Path,
    devices: int,
    folder: Path,
    say: Say,
    *,
    status_port: int = 0,
    more: Sequence[str] = (),
    links: Resources | None = None,
) -> Iterator[LocalFleet]:
    """Start all parties; at the end, stop those that still run.

    Args:
        links: whose rates and fixed seconds the links between parties have in every round.
    """
    laid = nullcontext() if links is None else shaped_network(links.at(0))
    with _ended_by_sigterm(), laid as network:
        fleet = LocalFleet(recipe, devices, folder, say, status_port=status_port, more=more, network=network)
        try:
            with nullcontext() if links is None else _followed(fleet, links):
                fleet.start_all()
                yield fleet
        finally:
            fleet.stop()


@contextmanager
def _followed(fleet: LocalFleet, links: Resources) -> Iterator[None]:
    """Let links follow the rounds of a run meanwhile."""
    over = threading.Event()
    thread = threading.Thread(target=_follow, args=(fleet, links, over), daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()  # before links are removed


def _follow(fleet: LocalFleet, links: Resources, over: threading.Event) -> None:
    """Give the links what they have in the round that the run has reached, block by block."""
    assert fleet.network is not None
    shaped = 0
    while not over.wait(FOLLOW_S):
        if (rounds := fleet.rounds) > shaped:
            shaped = rounds
            try:
                fleet.network.shape(links.at(rounds))
            except OSError as error:
                fleet.say("links", f"not changed as they should be after round {rounds}: {error}")


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Handle SIGTERM like Ctrl-C: else this process would end, and the parties would run on."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
