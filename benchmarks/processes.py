"""Processes that a benchmark compares: what they cost, and turns that they take on a machine that others use too."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

Process = subprocess.Popen[Any]

START_S = 300.0  # for all parties to begin


def take_turns(sides: Mapping[str, Sequence[Process]], turns: int, turn_s: float, say: Callable[[str], None]) -> None:
    """Let each side run alone, `turns` times for `turn_s` seconds; the others are stopped by a signal meanwhile."""
    for turn in range(turns):
        for name, runs in sides.items():
            for other, waits in sides.items():
                if other != name:
                    send(waits, signal.SIGSTOP)
            send(runs, signal.SIGCONT)
            time.sleep(turn_s)
            say(f"turn {turn + 1} of {turns}: {name}")
    for side in sides.values():
        send(side, signal.SIGCONT)


def send(processes: Sequence[Process], number: signal.Signals) -> None:
    """Send a signal to those that still run."""
    for process in processes:
        if process.poll() is None:
            process.send_signal(number)


def kill(processes: Sequence[Process]) -> None:
    """End processes that have nothing to save."""
    send(processes, signal.SIGCONT)
    for process in processes:
        process.kill()
        process.wait()


def wait_until(what: Callable[[], bool], otherwise: str, lines: list[str]) -> None:
    """Wait until something is true; if that takes too long, raise an error with the last lines that parties wrote."""
    deadline = time.monotonic() + START_S
    while not what():
        if time.monotonic() > deadline:
            raise RuntimeError("\n".join([otherwise, *lines[-20:]]))
        time.sleep(0.1)


def cpu_s(*processes: Process) -> float:
    """Return the CPU seconds that processes have had so far, all together."""
    total = 0
    for process in processes:
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK")


def memory_mb(process: Process) -> tuple[float, float]:
    """Return the resident memory of a process, and how much of it is its own: files of libraries are shared."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    status = dict(line.split(":", 1) for line in lines)
    resident, own = (int(status[name].split()[0]) / 1024 for name in ("VmRSS", "RssAnon"))
    return resident, own
