"""Processes that start at once: forked from one that has imported torch, gRPC and all of ours.

Each is a process like any other, with its own session, signals, exit code and output; only its imports are done.
"""

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import connection, forkserver
from typing import Any, TextIO

# None of them starts a thread that a forked process would lack, which `test_warm.py` checks.
PRELOADED = (
    "adaptsfl.cli",
    "adaptsfl.deploy.parties.processes",
    "adaptsfl.simulation.experiment",
    "adaptsfl.report.figures",
    "adaptsfl.report.page",
    "sklearn.datasets",
    "torch._dynamo",
    "torch.export._trace",
)
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(list(PRELOADED))


def start_parent() -> None:
    """Start the process that others are forked from, unless it runs."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"  # a pool of threads does not survive a fork
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before


@contextmanager
def instead_of_spawn() -> Iterator[None]:
    """Fork whatever `multiprocessing` would spawn, which starts an interpreter and imports everything anew."""
    get_context = multiprocessing.get_context

    def chosen(method: str | None = None) -> Any:
        return CONTEXT if method == "spawn" else get_context(method)

    start_parent()
    multiprocessing.get_context = chosen
    try:
        yield
    finally:
        multiprocessing.get_context = get_context


class Command:
    """`python -m adaptsfl` with these arguments, used as `subprocess.Popen` is.

    Args:
        env: its whole environment; without it that of this process.
        apart: whether standard error has a pipe of its own; else it goes where standard output goes.
        without: modules that it shall take for not installed.
        first: called in the process before the command: one that can be imported.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        env: Mapping[str, str] | None = None,
        *,
        apart: bool = False,
        without: Sequence[str] = (),
        first: Callable[[], None] | None = None,
    ) -> None:
        start_parent()
        self.args, self.returncode = list(arguments), None
        self._one_reads = threading.Lock()
        self.stdout, out = _pipe()
        self.stderr, err = _pipe() if apart else (None, out)
        surroundings = dict(os.environ if env is None else env)
        self._process = CONTEXT.Process(
            target=_be, args=(self.args, surroundings, os.getcwd(), (out, err), tuple(without), first)
        )
        self._process.start()
        for end in {out, err}:
            end.close()
        self.pid: int = self._process.pid  # type: ignore[assignment]

    returncode: int | None
    stdout: TextIO
    stderr: TextIO | None

    def poll(self) -> int | None:
        """Return its exit code, a negative signal if it was killed by one, or None while it runs."""
        with self._one_reads:
            if self.returncode is None:
                self.returncode = self._process.exitcode
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.poll() is None:
            connection.wait([self._process.sentinel], timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Return all that it, and whoever inherited its pipes, wrote to both."""
        texts: dict[TextIO, str] = {}
        pipes = [pipe for pipe in (self.stdout, self.stderr) if pipe is not None]
        readers = [
            threading.Thread(target=lambda pipe=pipe: texts.update({pipe: pipe.read()}), daemon=True) for pipe in pipes
        ]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join(timeout)
            if reader.is_alive():
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        for pipe in pipes:
            pipe.close()
        self.wait(timeout)
        return texts[self.stdout], "" if self.stderr is None else texts[self.stderr]


def run(arguments: Sequence[str], env: Mapping[str, str] | None = None, *, timeout: float) -> tuple[int, str]:
    """Return the exit code of a command and all that it wrote."""
    command = Command(arguments, env)
    try:
        printed, _ = command.communicate(timeout)
    finally:
        command.kill()
    return command.wait(timeout), printed


def _pipe() -> tuple[TextIO, Any]:
    """Return where to read, as text, and where to write, as something that can be sent to another process."""
    reading, writing = CONTEXT.Pipe(duplex=False)
    return os.fdopen(os.dup(reading.fileno()), encoding="utf-8"), writing


def _be(
    arguments: list[str],
    surroundings: dict[str, str],
    folder: str,
    pipes: tuple[Any, Any],
    without: Sequence[str],
    first: Callable[[], None] | None,
) -> None:
    """Become the command: everything that exec would have made of this process."""
    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(surroundings)
    sys.path[:0] = [path for path in surroundings.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.modules.update(dict.fromkeys(without))
    for end, number in zip(pipes, (1, 2), strict=True):
        os.dup2(end.fileno(), number)
    for end in set(pipes):
        end.close()
    for name, number in (("stdout", 1), ("stderr", 2)):
        stream = open(number, "w", encoding="utf-8", buffering=1 if number == 2 else -1, closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    sys.argv = ["adaptsfl", *arguments]
    if first is not None:
        first()
    runpy.run_module("adaptsfl", run_name="__main__", alter_sys=True)
