"""Runs all parties on this machine, each as a process of its own: for a first try, and for tests."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from adaptsfl.deploy.security.certs import make_certificates
from adaptsfl.errors import RunFailed

TIMEOUT_S = 10.0  # for a party to end by itself after a signal

Say = Callable[[str, str], None]  # the party's name, and a line of its output


def free_port() -> int:
    """Return a free port of this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class LocalFleet:
    """The processes of one run on this machine.

    Attributes:
        processes: by party.
    """

    def __init__(
        self, recipe: Path, devices: int, folder: Path, say: Say, *, status_port: int, more: list[str]
    ) -> None:
        self.recipe, self.devices, self.folder, self.say, self.more = recipe, devices, folder, say, more
        self.status_port = status_port
        self.edge, self.fed = (f"127.0.0.1:{free_port()}" for _ in range(2))
        self.certs = folder / "certs"
        self.processes: dict[str, subprocess.Popen[str]] = {}
        self._last_lines: dict[str, str] = {}  # the last line of each party's output
        self.names = [f"device-{k + 1}" for k in range(devices)]
        make_certificates(self.certs, self.names)

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
                self.fed,
                "--out",
                str(self.folder / "edge"),
            ]
            mine += ["--status-port", str(self.status_port)]
        else:
            mine = ["join", "--edge", self.edge, "--fed", self.fed, "--name", party]
        return [sys.executable, "-m", "adaptsfl", *mine, *common]

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


@contextmanager
def fleet_up(
    recipe: Path, devices: int, folder: Path, say: Say, *, status_port: int = 0, more: list[str] | None = None
) -> Iterator[LocalFleet]:
    """Start all parties; at the end, stop those that still run."""
    fleet = LocalFleet(recipe, devices, folder, say, status_port=status_port, more=more or [])
    with _ended_by_sigterm():
        try:
            fleet.start_all()
            yield fleet
        finally:
            fleet.stop()


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
