"""An edge server whose deadlines pass when a test says so, by SIGUSR1, and not because the machine is slow."""

import asyncio
import signal
import time
from types import SimpleNamespace
from typing import Any

from adaptsfl.deploy.parties import processes
from adaptsfl.deploy.parties.edge import conductor as conducting
from adaptsfl.deploy.parties.edge import executor as executing
from deploy.deployed import PATIENCE_S

LONG_S = 1e6  # longer than any deadline


def by_signal() -> None:
    """Let the deadline that the conductor waits for pass with every SIGUSR1; the shutdown lasts until a test fails."""
    passed = [0.0]
    known: list[tuple[asyncio.AbstractEventLoop, conducting.Conductor]] = []

    class Told(conducting.Conductor):
        async def run(self) -> str:
            known.append((asyncio.get_running_loop(), self))
            return await super().run()

    def pass_now(_number: int, _frame: Any) -> None:
        passed[0] += LONG_S
        for loop, conductor in known:
            loop.call_soon_threadsafe(conductor.executor.tick)

    clock = {name: getattr(time, name) for name in ("time", "perf_counter")}
    told = SimpleNamespace(monotonic=lambda: time.monotonic() + passed[0], **clock)
    conducting.time = executing.time = told  # type: ignore[assignment]
    conducting.SHUTDOWN_S = PATIENCE_S
    processes.Conductor = Told  # type: ignore[misc]
    signal.signal(signal.SIGUSR1, pass_now)
