"""Progress of running experiments: a live table on a terminal, elsewhere a line every few seconds."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from rich import progress
from rich.console import Console
from rich.table import Column

from adaptsfl.errors import kind_of
from adaptsfl.report.plan_report import seconds
from adaptsfl.report.summary import percent
from adaptsfl.runs.ending import rounds_planned
from adaptsfl.runs.folder import Run
from adaptsfl.runs.record import Block
from adaptsfl.simulation.experiment import Experiment
from adaptsfl.simulation.jobs import Job, Watcher

LINE_EVERY_S = 10.0  # where there is no terminal
DRAW_EVERY_S = 0.25
RATE_OVER_S = 60.0  # rounds per second are those of the last minute
BAR_WIDTH = 20


@dataclass
class Running:
    """A run that is under way.

    Attributes:
        bar: its row of the live table.
        planned: the most rounds that it trains; None if rounds do not end it.
        limit_s: the most virtual seconds that it takes; None if they do not end it.
        updated: when its last round was reported.
        block: its last block, if this process trains it.
    """

    bar: progress.TaskID
    planned: int | None
    limit_s: float | None
    updated: float
    round: int = 0
    block: Block | None = None
    accuracy: float | None = None

    @property
    def share(self) -> float | None:
        """The share that is done, by the nearest limit; None if neither rounds nor seconds end the run."""
        shares = [] if self.planned is None else [self.round / self.planned]
        if self.limit_s is not None:
            shares.append(0.0 if self.block is None else self.block.time_s / self.limit_s)
        return min(max(shares), 1.0) if shares else None

    @property
    def state(self) -> str:
        """The progress of the run, in words."""
        if not self.round:
            return "begins"
        words = [f"round {self.round:,}" + ("" if self.planned is None else f" of {self.planned:,}")]
        if self.block is not None:
            cuts = sorted({cut for cut in self.block.cuts if cut})
            often = "never averaged" if self.block.interval is None else f"I {self.block.interval}"
            words += [f"virtual {seconds(self.block.time_s)}", f"{often}, cuts {span(cuts)}, L_c {self.block.deepest}"]
            if self.block.wire_dtype not in (None, "float32"):
                words.append(str(self.block.wire_dtype))
            if self.block.micro_batches > 1:
                words.append(f"{self.block.micro_batches} parts")
        if self.accuracy is not None:
            words.append(f"accuracy {percent(self.accuracy)}")
        return ", ".join(words)


@dataclass
class Pace:
    """Trained rounds of one experiment, and their seconds, summed over processes."""

    rounds: int = 0
    seconds: float = 0.0


class Progress:
    """Shows the progress of experiments, which call its `Watcher`.

    Args:
        experiments: all experiments that run, in order.
        titles: their names, if there are several.
        quiet: print remarks only, for example which runs are done again, and why.
        clock: real time, in seconds.

    Attributes:
        running: the runs that are under way.
        failures: the runs that failed so far, and why.
    """

    def __init__(
        self,
        console: Console,
        experiments: Sequence[Experiment],
        titles: Sequence[str] = (),
        *,
        quiet: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.console, self.titles, self.clock = console, list(titles), clock
        self.quiet, self.live = quiet, console.is_terminal and not quiet
        self.failures: list[tuple[Job, Exception]] = []
        self._recipes = [experiment.recipe for experiment in experiments]
        self._total = sum(len(experiment.jobs) for experiment in experiments)
        self._waiting = [len(experiment.jobs) for experiment in experiments]  # runs that have not begun yet
        self.running: dict[Job, Running] = {}
        self._most_at_once = 1
        self._paces = [Pace() for _ in experiments]
        self._trained: deque[tuple[float, int]] = deque()  # (when, how many rounds) of the last minute
        self._began: float | None = None  # when the first run began
        self._printed = self._drawn = self.clock()
        self._table = progress.Progress(
            progress.TextColumn("{task.description}", style="bold", markup=False),
            progress.BarColumn(BAR_WIDTH),
            progress.TextColumn("{task.fields[state]}", markup=False, table_column=Column(no_wrap=False)),
            console=console,
            auto_refresh=False,  # drawn on changes: a refresh thread would read a state that is half updated
            transient=True,
            disable=not self.live,
        )
        self._all = self._table.add_task("all runs", total=self._total, state="preparing …")

    @contextmanager
    def watching(self) -> Iterator[Watcher]:
        """Yield the callbacks, and show what they report until the context ends."""
        with self._table:
            self._table.refresh()
            yield Watcher(self._begins, self._on_round, self._on_block, self._ends, self._fails, self._remarks)

    @property
    def done(self) -> int:
        """How many runs ended or failed."""
        return self._total - sum(self._waiting) - len(self.running)

    def _begins(self, job: Job, rounds: int | None) -> None:
        now, run = self.clock(), self._recipes[job.experiment].run
        bar = self._table.add_task(self.name(job), total=None, state="begins")
        self._waiting[job.experiment] -= 1
        self.running[job] = Running(bar, rounds, None if run is None else run.seconds, now)
        self._began = now if self._began is None else self._began
        self._most_at_once = max(self._most_at_once, len(self.running))
        self._draw()

    def _on_round(self, job: Job, round_: int, trained: int) -> None:
        now, run, pace = self.clock(), self.running[job], self._paces[job.experiment]
        pace.rounds, pace.seconds = pace.rounds + trained, pace.seconds + now - run.updated
        run.round, run.updated = round_, now
        self._trained.append((now, trained))
        self._draw_sometimes()

    def _on_block(self, job: Job, block: Block) -> None:
        run = self.running[job]
        run.block, run.round = block, block.last_round
        if block.evaluations:
            run.accuracy = block.evaluations[-1][2]
        self._draw_sometimes()

    def _ends(self, job: Job, run: Run) -> None:
        reached = "not evaluated" if run.final_accuracy is None else f"accuracy {percent(run.final_accuracy)}"
        self._leaves(job, f"done, {run.rounds:,} rounds, virtual {seconds(run.time_s)}, {reached}")

    def _fails(self, job: Job, error: Exception) -> None:
        self.failures.append((job, error))
        self._leaves(job, f"failed, {kind_of(error)}")

    def _leaves(self, job: Job, how: str) -> None:
        run = self.running.pop(job, None)
        if run is None:  # the run was done before, or failed before it began
            self._waiting[job.experiment] -= 1
        else:
            self._table.remove_task(run.bar)
        self._draw()
        self._print(f"[{self.done}/{self._total}] {self.name(job)}: {how}")

    def _remarks(self, job: Job, remark: str) -> None:
        text = f"{self._title(job)}{job.folder_name}: {remark}"
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _print(self, text: str) -> None:
        self._printed = self.clock()
        if not self.quiet:
            self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _draw_sometimes(self) -> None:
        now = self.clock()
        if now - self._drawn >= DRAW_EVERY_S:
            self._draw()
        if not self.live and now - self._printed >= LINE_EVERY_S:
            running = "; ".join(f"{self.name(job)}: {run.state}" for job, run in self.running.items())
            self._print(f"{self.state()} ({running})")

    def _draw(self) -> None:
        self._drawn = self.clock()
        for run in self.running.values():
            share = run.share
            total = None if share is None else 1.0
            self._table.update(run.bar, total=total, completed=share or 0.0, state=run.state)
        self._table.update(self._all, completed=self.done, state=self.state())
        self._table.refresh()

    def _title(self, job: Job) -> str:
        return f"{self.titles[job.experiment]}: " if self.titles else ""

    def name(self, job: Job) -> str:
        """Return the displayed name of a run."""
        fleet = f" on {job.fleet}" if job.fleet else ""
        return f"{self._title(job)}{job.policy}{fleet}, seed {job.seed}"

    def state(self) -> str:
        """Return the progress of all runs, in words."""
        words = [f"{self.done} of {self._total} runs done"]
        rate, left = self.rate(), self.left_s()
        if rate is not None:
            words.append(f"{rate:.3g} rounds/s")
        if left is not None:
            words.append(f"about {rough(left)} left")
        return ", ".join(words)

    def rate(self) -> float | None:
        """Return the rounds per second of all processes together, over the last minute; None if there were none."""
        now = self.clock()
        while self._trained and self._trained[0][0] < now - RATE_OVER_S:
            self._trained.popleft()
        over_s = 0.0 if self._began is None else min(RATE_OVER_S, now - self._began)
        return sum(count for _, count in self._trained) / over_s if self._trained and over_s > 0 else None

    def left_s(self) -> float | None:
        """Estimate the real seconds left from the pace so far; None before any round, or if rounds do not end a run."""
        rounds = sum(pace.rounds for pace in self._paces)
        if not rounds:
            return None
        mean_s = sum(pace.seconds for pace in self._paces) / rounds
        work_s = 0.0
        for number, pace in enumerate(self._paces):
            for left in self._rounds_left(number):
                if left is None:
                    return None
                work_s += left * (pace.seconds / pace.rounds if pace.rounds else mean_s)
        return work_s / max(1, min(self._most_at_once, self._total - self.done))

    def _rounds_left(self, number: int) -> Iterator[int | None]:
        """Yield the rounds that every run of an experiment has still to do; None if rounds do not end it."""
        recipe = self._recipes[number]
        planned = None if recipe.run is None else rounds_planned(recipe.run, recipe.training.batch_size)
        yield from [planned] * self._waiting[number]
        for job, run in self.running.items():
            if job.experiment == number:
                yield None if run.planned is None else max(run.planned - run.round, 0)


def span(cuts: Sequence[int]) -> str:
    """Return 2 … 5 for cuts from 2 to 5."""
    return f"{cuts[0]}" if cuts[0] == cuts[-1] else f"{cuts[0]} … {cuts[-1]}"


def rough(left_s: float) -> str:
    """Return a rounded time: 40 s, 3 min, 2.5 h."""
    if left_s < 60:
        return f"{left_s:.0f} s"
    return f"{left_s / 60:.0f} min" if left_s < 5400 else f"{left_s / 3600:.1f} h"
