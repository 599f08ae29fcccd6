"""Runs of one or more experiments side by side, in worker processes.

Every worker does what `Experiment.execute` does, with the same files in the end. The calling process dispatches
the runs and reports their progress. A run that fails, or whose process is killed, does not affect the others. On Ctrl-C
or SIGTERM every worker saves its run as a single process would, and the same call continues it later.

`concurrent.futures.ProcessPoolExecutor` cannot do this: it ends all its processes when one is killed, does not say how
that one ended, and cannot stop running tasks.
"""

import multiprocessing
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from multiprocessing import connection, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, cast

import torch

from adaptsfl import checks
from adaptsfl.errors import InvalidInput, RunFailed, kind_of, message_of, naming
from adaptsfl.files import held
from adaptsfl.runs.folder import Run
from adaptsfl.simulation.experiment import Experiment
from adaptsfl.simulation.jobs import Job, Watcher

REPORT_EVERY_S = 0.3  # rounds of small networks take milliseconds
STOP_TIMEOUT_S = 60.0  # for workers that save what they have
STOPPED = 130  # exit code of a worker that was stopped
SIGNALS = (signal.SIGINT, signal.SIGTERM)

Work = tuple[Experiment, list[Job]]  # sent to a worker at once: a policy with one seed, on all fleets


def execute_side_by_side(
    experiments: Sequence[Experiment], processes: int, watcher: Watcher | None = None
) -> list[list[Run]]:
    """Execute every unfinished run, in `processes` processes; return all runs by experiment, in order.

    Each process gets its share of torch's threads. With `processes` = 1, the calling process executes all runs.
    """
    checks.whole_number("processes", processes)
    _check_folders(experiments)
    for experiment in experiments:
        experiment.forget_worlds()  # files may have changed since the last call
        with naming(str(experiment.folder)) if len(experiments) > 1 else nullcontext():
            experiment.check()
        if len(experiments) > 1 or processes > 1:
            experiment.forget_worlds()
    workers = Workers(experiments, processes, watcher or Watcher())
    with ExitStack() as stack, _sigterm_interrupts():
        for experiment in experiments:
            stack.enter_context(held(experiment.folder))
        for experiment in experiments:
            experiment.claim()
        workers.execute() if processes > 1 else workers.execute_here()
    return [[workers.runs[job] for job in jobs if job in workers.runs] for jobs in workers.jobs]


def _check_folders(experiments: Sequence[Experiment]) -> None:
    """Refuse two experiments in one folder: two processes would write the same files."""
    folders = set()
    for experiment in experiments:
        folder = experiment.folder.resolve()
        if folder in folders:
            raise InvalidInput("experiments", f"two have the folder {experiment.folder}", "Give each its own")
        folders.add(folder)


def _interrupt(_number: int, _frame: object) -> None:
    raise KeyboardInterrupt


@contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    """Handle SIGTERM like Ctrl-C; only the main thread can install signal handlers."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


# ── the calling process ─────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(eq=False)
class Worker:
    """A worker process, the pipe to it, and its remaining jobs, of which the first is running."""

    process: BaseProcess
    pipe: "Connection[Any, Any]"
    jobs: deque[Job] = field(default_factory=deque)


class Workers:
    """Worker processes that execute all jobs of some experiments, and the results.

    Attributes:
        jobs: the jobs of each experiment, with its number.
        runs: by job; only jobs of which something is stored.
    """

    def __init__(self, experiments: Sequence[Experiment], processes: int, watcher: Watcher) -> None:
        self.experiments, self.processes, self.watcher = experiments, processes, watcher
        self.jobs = [[replace(job, experiment=k) for job in made.jobs] for k, made in enumerate(experiments)]
        self.runs: dict[Job, Run] = {}
        self._waiting: deque[deque[Job]] = deque()  # each entry is for one worker
        self._workers: dict[Connection[Any, Any], Worker] = {}
        self._any_began = False  # whether any worker ever sent a message

    def execute_here(self) -> None:
        """Execute all jobs in this process, one after another."""
        for experiment, jobs in zip(self.experiments, self.jobs, strict=True):
            for job in jobs:
                run = experiment.attempt(job, self.watcher)
                if run is not None:
                    self.runs[job] = run
            experiment.forget_worlds()

    def execute(self) -> None:
        """Execute all jobs that are not done yet in workers, and leave no process behind."""
        self._sort_out()
        try:
            while self._waiting or self._workers:
                while self._waiting and len(self._workers) < self.processes:
                    self._start()
                for pipe in connection.wait(list(self._workers)):
                    self._receive(self._workers[cast("Connection[Any, Any]", pipe)])
        finally:
            self._stop()

    def _sort_out(self) -> None:
        """Keep finished runs that are still valid; queue all others for a worker."""
        units: dict[tuple[int, str, int], deque[Job]] = {}
        for job in (job for jobs in self.jobs for job in jobs):
            try:
                run = self.experiments[job.experiment].finished(job, self.watcher.remarks)
            except InvalidInput as error:
                self._failed(job, error)
                continue
            if run is None:
                units.setdefault((job.experiment, job.policy, job.seed), deque()).append(job)
            else:
                self._ended(job, run)
        self._waiting.extend(units.values())

    def _ended(self, job: Job, run: Run) -> None:
        self.runs[job] = run
        self.watcher.ends(job, run)

    def _failed(self, job: Job, error: Exception) -> None:
        """Keep what is stored of a run that failed, if the watcher does not raise the error."""
        self.watcher.fails(job, error)
        run = self.experiments[job.experiment].stored_if_readable(job)
        if run is not None:
            self.runs[job] = run

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        # Divided by the requested processes, not the busy ones: a stopped run continues with as many threads as before.
        threads = max(1, torch.get_num_threads() // self.processes)
        worker = Worker(context.Process(target=_work, args=(theirs, threads)), ours)
        with _signals_blocked():
            worker.process.start()
            self._workers[ours] = worker
        theirs.close()
        self._hand_out(worker)

    def _hand_out(self, worker: Worker) -> None:
        """Send a worker its next jobs, or None, which ends it, if no jobs are left."""
        work: Work | None = None
        if self._waiting:
            worker.jobs = self._waiting.popleft()
            work = (self.experiments[worker.jobs[0].experiment], list(worker.jobs))
        with suppress(OSError):  # it was killed: `_receive` detects that
            worker.pipe.send(work)

    def _receive(self, worker: Worker) -> None:
        """Report a worker's message about its first job to the watcher."""
        try:
            event, *details = worker.pipe.recv()
        except (EOFError, OSError):
            self._lose(worker)
            return
        self._any_began, job = True, worker.jobs[0]
        if event == "begins":
            self.watcher.begins(job, *details)
        elif event == "on_round":
            self.watcher.on_round(job, *details)
        else:
            worker.jobs.popleft()
            if not worker.jobs:
                self._hand_out(worker)
            self._ended(job, *details) if event == "ends" else self._failed(job, RunFailed(*details))

    def _lose(self, worker: Worker) -> None:
        """Remove a worker whose process has ended, as expected or in the middle of a run."""
        worker.process.join()
        worker.pipe.close()
        del self._workers[worker.pipe]
        code = worker.process.exitcode
        how = _how_it_ended(code)
        if not self._any_began and (code is None or code >= 0):  # after a signal, other workers may still start
            remedy = "See what it printed. A script that calls this must do so under if __name__ == '__main__'"
            raise RunFailed("ProcessEnded", f"a worker process {how} before it began. {remedy}.")
        if worker.jobs:
            job = worker.jobs.popleft()
            if worker.jobs:
                self._waiting.appendleft(worker.jobs)
            remedy = "If memory is short, run fewer at once; the same call does this run again"
            self._failed(job, RunFailed("ProcessEnded", f"its process {how}. {remedy}."))

    def _stop(self) -> None:
        """Ask all workers to save their runs and end; kill those that do not end in time."""
        workers = list(self._workers.values())
        try:
            for worker in workers:
                worker.process.terminate()
                worker.pipe.close()
            deadline = time.monotonic() + STOP_TIMEOUT_S
            for worker in workers:
                worker.process.join(max(0.0, deadline - time.monotonic()))
        finally:
            for worker in workers:
                worker.process.kill()
                worker.process.join()


def _how_it_ended(exit_code: int | None) -> str:
    if exit_code is None or exit_code >= 0:
        return f"ended with exit code {exit_code}"
    with suppress(ValueError):
        return f"was ended by {signal.Signals(-exit_code).name}"
    return f"was ended by signal {-exit_code}"


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """Block Ctrl-C and SIGTERM: in the new process until it handles them, in this one until the worker is listed."""
    resource_tracker.ensure_running()  # its start would unblock them
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# ── a worker process ────────────────────────────────────────────────────────────────────────────────────────────────


def _work(pipe: "Connection[Any, Any]", threads: int) -> None:
    """Execute the jobs that come through the pipe until there are no more, or until SIGTERM."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the calling process receives it too, and then sends SIGTERM
    signal.signal(signal.SIGTERM, _interrupt_once)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    try:
        torch.set_num_threads(threads)
        caller, at_hand = Caller(pipe), -1
        while (work := caller.next_work()) is not None:
            given, jobs = work
            if jobs[0].experiment != at_hand:  # otherwise the current experiment already holds its model and data
                at_hand, experiment = jobs[0].experiment, given
            for job in jobs:
                experiment.attempt(job, caller.watcher)
    except KeyboardInterrupt:
        sys.exit(STOPPED)
    finally:
        _ignore_sigterm()


def _interrupt_once(_number: int, _frame: object) -> None:
    """Stop, and ignore further signals while the run is saved."""
    _ignore_sigterm()
    raise KeyboardInterrupt


def _ignore_sigterm() -> None:
    signal.signal(signal.SIGTERM, lambda _number, _frame: None)  # SIG_IGN gives an error if a signal is pending


class Caller:
    """The calling process, as a worker sees it. If it has ended, the worker stops as after SIGTERM.

    Attributes:
        watcher: sends the progress of a run to the calling process.
    """

    def __init__(self, pipe: "Connection[Any, Any]") -> None:
        self.pipe = pipe
        # The calling process itself has already reported which runs are repeated.
        self.watcher = Watcher(
            begins=lambda _job, rounds: self._send("begins", rounds),
            on_round=self._on_round,
            ends=lambda _job, run: self._send("ends", run),
            fails=lambda _job, error: self._send("fails", kind_of(error), message_of(error)),
            remarks=lambda _job, _remark: None,
        )
        self._round, self._trained, self._reported_at = 0, 0, 0.0

    def next_work(self) -> Work | None:
        """Wait for jobs and their experiment; return None if no jobs are left."""
        try:
            work: Work | None = self.pipe.recv()
        except (EOFError, OSError):
            raise KeyboardInterrupt from None
        return work

    def _on_round(self, _job: Job, round_: int, trained: int) -> None:
        self._round, self._trained = round_, self._trained + trained
        if time.monotonic() - self._reported_at >= REPORT_EVERY_S:
            self._report()

    def _report(self) -> None:
        trained, self._trained, self._reported_at = self._trained, 0, time.monotonic()
        if trained:
            self._send("on_round", self._round, trained)

    def _send(self, event: str, *details: object) -> None:
        try:
            if event != "on_round":
                self._report()
            self.pipe.send((event, *details))
        except OSError:
            raise KeyboardInterrupt from None
