"""What tests let other processes do: policies that wait, or end their process, and steps added to one file."""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from multiprocessing.synchronize import Barrier
from pathlib import Path

from adaptsfl.policies import BasePolicy, Decision, Observation
from adaptsfl.policies.adaptsfl import AdaptSFL
from adaptsfl.policies.dama_rms import DepthAware
from adaptsfl.policies.fixed import Fixed
from adaptsfl.runs.backend import Learned
from adaptsfl.simulation.store import Store

PATIENCE_S = 600.0  # a test that waits for what never comes should fail, not hang


def wait_for(happened: Callable[[], bool]) -> None:
    """Wait until something has happened."""
    until = time.monotonic() + PATIENCE_S
    while not happened():
        if time.monotonic() > until:
            raise TimeoutError
        time.sleep(0.01)


class Held(Fixed):
    """Waits before its third block for as long as a file exists."""

    def __init__(self, file: str, cut: int) -> None:
        super().__init__(interval=2, cut=cut)
        self.file = Path(file)

    def decide(self, seen: Observation) -> Decision:
        if seen.block == 2:
            wait_for(lambda: not self.file.exists())
        return super().decide(seen)


class HeldAdaptSFL(AdaptSFL):
    """AdaptSFL that waits near its end while HOLD names it: whoever stops the run is never too late."""

    def decide(self, seen: Observation) -> Decision:
        _wait_near_the_end(self, seen)
        return super().decide(seen)


class HeldDepthAware(DepthAware):
    """The same of DAMA+RMS."""

    def decide(self, seen: Observation) -> Decision:
        _wait_near_the_end(self, seen)
        return super().decide(seen)


def _wait_near_the_end(policy: BasePolicy, seen: Observation) -> None:
    """Wait to be stopped; a process whose caller has ended is stopped by that, as it would be at its next report."""
    if seen.round >= 90 and type(policy).__name__ in os.environ.get("HOLD", ""):
        caller = multiprocessing.parent_process()
        wait_for(lambda: caller is not None and not caller.is_alive())
        raise KeyboardInterrupt


class Deadly(Fixed):
    """Ends its process before its second block, if a file exists; once, as the file goes with it."""

    def __init__(self, file: str) -> None:
        super().__init__(interval=2, cut=2)
        self.file = Path(file)

    def decide(self, seen: Observation) -> Decision:
        if seen.block == 1 and self.file.exists():
            self.file.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().decide(seen)


LONG = 1500  # losses: a line of more than 8 kB


def learned(k: int) -> Learned:
    return Learned(tuple(k + t / 7 for t in range(LONG)), ())


def add_steps(file: Path, name: str, count: int, together: Barrier) -> None:
    """Add `count` steps, all processes at the same time."""
    store = Store(file)
    together.wait(PATIENCE_S)
    for k in range(count):
        store.add(f"{name} {k}", learned(k))
