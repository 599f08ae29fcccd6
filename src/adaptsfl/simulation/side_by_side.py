"""Runs of one or more experiments side by side, in processes.

Every process does what `Experiment.execute` does, with the same files in the end. The one that called hands out the
work, hears how it goes, and reads the results from the folders. A run that fails, or whose process is killed, is lost
alone. Stopped by Ctrl-C or SIGTERM, every process leaves its run as a single one would, and the same call goes on.
"""

import multiprocessing
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import connection, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, cast

import torch

from adaptsfl import checks
from adaptsfl.errors import InvalidInput, RunFailed, kind_of, message_of, naming
from adaptsfl.files import held
from adaptsfl.runs.ending import rounds_planned
from adaptsfl.runs.folder import Run
from adaptsfl.simulation.experiment import Experiment, Job, Watcher, warn

TELL_EVERY_S = 0.3  # rounds of small networks take milliseconds; nobody looks as often
PATIENCE_S = 60.0  # with processes that were told to stop, while they save what they have
STOPPED = 130  # exit code of a process that was told to stop
SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True)
class Task:
    """One run among several experiments: the experiment's number from 0 on, and which of its runs."""

    experiment: int
    job: Job


Unit = deque[Task]  # runs for one process, one after another: a policy with one seed on all fleets
Work = tuple[int, Experiment, list[Job]]  # the same as it is handed out


def _give_up(_task: Task, error: Exception) -> None:
    """Let the error of a run stop all others."""
    raise error


def _warn(task: Task, remark: str) -> None:
    """Let people know about a run, where nobody else does."""
    warn(task.job, remark)


@dataclass(frozen=True)
class SideWatcher:
    """Who is told how things go, in the process that called.

    Attributes:
        begins: when a run begins; with the rounds after which it ends at the latest, if rounds end it.
        on_round: a few times per second while a run trains; with the last round, and how many since last told.
        ends: after a run, also one that was done before.
        fails: when a run fails. If it returns, the other runs go on; by default it does not.
        remarks: what people should know: which run is done again, and why.
    """

    begins: Callable[[Task, int | None], None] = lambda _task, _rounds: None
    on_round: Callable[[Task, int, int], None] = lambda _task, _round, _trained: None
    ends: Callable[[Task, Run], None] = lambda _task, _run: None
    fails: Callable[[Task, Exception], None] = _give_up
    remarks: Callable[[Task, str], None] = _warn


def execute_side_by_side(
    experiments: Sequence[Experiment], processes: int, watcher: SideWatcher | None = None
) -> list[list[Run]]:
    """Do every run that is not done yet, in so many processes; return all that there are, by experiment, in order.

    Each process gets its share of torch's threads. If there is only one, it is the one that calls.
    """
    checks.whole_number("processes", processes)
    _check_folders(experiments)
    for experiment in experiments:
        experiment.forget_worlds()  # files may have changed since the last call
        with naming(str(experiment.folder)) if len(experiments) > 1 else nullcontext():
            experiment.check()
        if len(experiments) > 1 or processes > 1:
            experiment.forget_worlds()
    results = Results(experiments, watcher or SideWatcher())
    with ExitStack() as stack, _stopped_by_sigterm():
        for experiment in experiments:
            stack.enter_context(held(experiment.folder))
        for experiment in experiments:
            experiment.claim()
        if processes == 1:
            _one_after_another(experiments, results.told)
        else:
            Workers(results, processes).work()
    return results.in_order()


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
def _stopped_by_sigterm() -> Iterator[None]:
    """Let SIGTERM do what Ctrl-C does, where signals can be taken: in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


def _one_after_another(experiments: Sequence[Experiment], told: SideWatcher) -> None:
    for number, experiment in enumerate(experiments):
        for job in experiment.jobs:
            experiment.attempt(job, _watching(Task(number, job), told))
        experiment.forget_worlds()


def _watching(task: Task, told: SideWatcher) -> Watcher:
    """Return who passes on how one run goes."""
    return Watcher(
        begins=lambda _job, world: told.begins(task, rounds_planned(world.run, world.batch_size)),
        on_round=lambda round_, _loss: told.on_round(task, round_, 1),
        ends=lambda _job, run: told.ends(task, run),
        fails=lambda _job, error: told.fails(task, error),
        remarks=lambda _job, remark: told.remarks(task, remark),
    )


class Results:
    """What came of every run.

    Attributes:
        told: the watcher, by way of these results.
    """

    def __init__(self, experiments: Sequence[Experiment], watcher: SideWatcher) -> None:
        self.experiments, self._watcher = experiments, watcher
        self.told = replace(watcher, ends=self.ended, fails=self.failed)
        self._runs: dict[Task, Run] = {}

    def what_is_left(self) -> deque[Unit]:
        """Return what is to be done, in order; runs that were done before, and are still true, end here and now."""
        units: dict[tuple[int, str, int], Unit] = {}
        for task in self._tasks():
            try:
                run = self.experiments[task.experiment].finished(task.job, partial(self._remark, task))
            except InvalidInput as error:
                self.failed(task, error)
                continue
            if run is not None:
                self.ended(task, run)
            else:
                units.setdefault((task.experiment, task.job.policy, task.job.seed), deque()).append(task)
        return deque(units.values())

    def _remark(self, task: Task, _job: Job, remark: str) -> None:
        self._watcher.remarks(task, remark)

    def ended(self, task: Task, run: Run) -> None:
        """Keep a run that is done."""
        self._runs[task] = run
        self._watcher.ends(task, run)

    def read(self, task: Task) -> None:
        """Keep a run that another process has done."""
        experiment = self.experiments[task.experiment]
        run = experiment.found(task.job)
        if run is not None:
            self.ended(task, run)
            return
        folder = str(experiment.folder / task.job.folder_name)
        problem = "was done, but right after its files were damaged or gone"
        self.failed(task, InvalidInput("", problem, "Leave them alone while it runs, and run again", source=folder))

    def failed(self, task: Task, error: Exception) -> None:
        """Keep what there is of a run that failed, if the watcher lets the others go on."""
        self._watcher.fails(task, error)
        run = self.experiments[task.experiment].remains(task.job)
        if run is not None:
            self._runs[task] = run

    def in_order(self) -> list[list[Run]]:
        """Return the runs of every experiment."""
        runs: list[list[Run]] = [[] for _ in self.experiments]
        for task in self._tasks():
            if task in self._runs:
                runs[task.experiment].append(self._runs[task])
        return runs

    def _tasks(self) -> Iterator[Task]:
        for number, experiment in enumerate(self.experiments):
            yield from (Task(number, job) for job in experiment.jobs)


# ── the process that called ─────────────────────────────────────────────────────────────────────────────────────────


@dataclass(eq=False)
class Worker:
    """A process, the way to talk to it, and the runs that it has still to do, the first of them now."""

    process: BaseProcess
    pipe: "Connection[Any, Any]"
    unit: Unit


class Workers:
    """Processes that do all that is left to do."""

    def __init__(self, results: Results, processes: int) -> None:
        self.results, self.processes = results, processes
        # By the number asked for, not by how many have work: a run that was stopped goes on with as many as before.
        self.threads = max(1, torch.get_num_threads() // processes)
        self._units = results.what_is_left()
        self._workers: list[Worker] = []
        self._heard = False  # whether any process ever said a word

    def work(self) -> None:
        """Do it all, and leave no process behind."""
        try:
            while self._units or self._workers:
                while self._units and len(self._workers) < self.processes:
                    self._hire()
                pipes = {worker.pipe: worker for worker in self._workers}
                for pipe in connection.wait(list(pipes)):
                    self._hear(pipes[cast("Connection[Any, Any]", pipe)])
        finally:
            self._dismiss()

    def _hire(self) -> None:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_work, args=(theirs, self.threads))
        worker = Worker(process, ours, deque())
        with _signals_held():
            process.start()
            self._workers.append(worker)
        theirs.close()
        self._hand_out(worker)

    def _hand_out(self, worker: Worker) -> None:
        """Give a process its next runs, or let it end if none are left."""
        work: Work | None = None
        if self._units:
            worker.unit = self._units.popleft()
            number = worker.unit[0].experiment
            work = (number, self.results.experiments[number], [task.job for task in worker.unit])
        with suppress(OSError):  # it died: whoever listens for its next word finds out
            worker.pipe.send(work)

    def _hear(self, worker: Worker) -> None:
        try:
            message = worker.pipe.recv()
        except (EOFError, OSError):
            self._lose(worker)
            return
        self._heard = True
        match message:
            case ("begins", rounds):
                self.results.told.begins(worker.unit[0], rounds)
            case ("trained", round_, count):
                self.results.told.on_round(worker.unit[0], round_, count)
            case ("ends",):
                self.results.read(worker.unit.popleft())
            case ("fails", kind, text):
                self.results.failed(worker.unit.popleft(), RunFailed(kind, text))
            case ("idle",):
                self._hand_out(worker)

    def _lose(self, worker: Worker) -> None:
        """Go on without a process that ended: as it should, or with a run that nobody will hear of again."""
        worker.process.join()
        worker.pipe.close()
        self._workers.remove(worker)
        code = worker.process.exitcode
        how = _how_it_ended(code)
        if not self._heard and (code is None or code >= 0):  # a signal is no reason to expect the same of others
            remedy = "See what it printed. A script that calls this must do so under if __name__ == '__main__'"
            raise RunFailed("ProcessEnded", f"a process of our own {how} before it began. {remedy}.")
        if worker.unit:
            task = worker.unit.popleft()
            if worker.unit:
                self._units.appendleft(worker.unit)
            remedy = "If memory is short, run fewer at once; the same call does this run again"
            self.results.failed(task, RunFailed("ProcessEnded", f"its process {how}. {remedy}."))

    def _dismiss(self) -> None:
        """Let all processes save what they have and end; those that do not are killed."""
        try:
            for worker in self._workers:
                worker.process.terminate()
                worker.pipe.close()
            patient_until = time.monotonic() + PATIENCE_S
            for worker in self._workers:
                worker.process.join(max(0.0, patient_until - time.monotonic()))
        finally:
            for worker in self._workers:
                worker.process.kill()
                worker.process.join()


def _how_it_ended(exit_code: int | None) -> str:
    if exit_code is None or exit_code >= 0:
        return f"ended with exit code {exit_code}"
    with suppress(ValueError):
        return f"was ended by {signal.Signals(-exit_code).name}"
    return f"was ended by signal {-exit_code}"


@contextmanager
def _signals_held() -> Iterator[None]:
    """Let Ctrl-C and SIGTERM wait: for a process that begins, until it can take them; here, until it is known."""
    resource_tracker.ensure_running()  # which would let them through
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# ── the processes that work ─────────────────────────────────────────────────────────────────────────────────────────


def _work(pipe: "Connection[Any, Any]", threads: int) -> None:
    """Do what is handed out until nothing is left, or until told to stop."""
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:  # as it is for commands in the background of a script
            signal.signal(number, _interrupt_once)
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        torch.set_num_threads(threads)
        _do_what_is_handed_out(Caller(pipe))
    except KeyboardInterrupt:
        sys.exit(STOPPED)
    finally:
        _hear_no_signals()


def _do_what_is_handed_out(caller: "Caller") -> None:
    last: int | None = None
    while (work := caller.next_work()) is not None:
        number, given, jobs = work
        if number != last:  # else the one at hand has model and data already
            last, experiment = number, given
        for job in jobs:
            experiment.attempt(job, _watching(Task(number, job), caller.told))
        caller.tell("idle")


def _interrupt_once(_number: int, _frame: object) -> None:
    """Stop, and let nothing disturb what is saved then: Ctrl-C on a terminal comes twice, from there and the caller."""
    _hear_no_signals()
    raise KeyboardInterrupt


def _hear_no_signals() -> None:
    for number in SIGNALS:
        signal.signal(
            number, lambda _number, _frame: None
        )  # Python complains where it is SIG_IGN and one was on its way


class Caller:
    """The process that called, as those see it that work. When it is gone, they stop as if it had told them to.

    Attributes:
        told: tells it how a run goes.
    """

    def __init__(self, pipe: "Connection[Any, Any]") -> None:
        self.pipe = pipe
        self.told = SideWatcher(
            self._begins, self._on_round, self._ends, self._fails, remarks=lambda _task, _remark: None
        )  # the caller has told people which runs are done again
        self._round, self._trained, self._told_at = 0, 0, 0.0

    def next_work(self) -> Work | None:
        """Wait for work; none if nothing is left."""
        try:
            work: Work | None = self.pipe.recv()
        except (EOFError, OSError):
            raise KeyboardInterrupt from None
        return work

    def tell(self, *message: object) -> None:
        """Say something; a word and what belongs to it, as `Workers` hear it."""
        try:
            self.pipe.send(message)
        except OSError:
            raise KeyboardInterrupt from None

    def _begins(self, _task: Task, rounds: int | None) -> None:
        self.tell("begins", rounds)

    def _on_round(self, _task: Task, round_: int, count: int) -> None:
        self._round, self._trained = round_, self._trained + count
        if time.monotonic() - self._told_at >= TELL_EVERY_S:
            self._tell_rounds()

    def _tell_rounds(self) -> None:
        if self._trained:
            self.tell("trained", self._round, self._trained)
            self._trained, self._told_at = 0, time.monotonic()

    def _ends(self, _task: Task, _run: Run) -> None:
        self._tell_rounds()
        self.tell("ends")

    def _fails(self, _task: Task, error: Exception) -> None:
        self._tell_rounds()
        self.tell("fails", kind_of(error), message_of(error))
