"""How far an experiment is, while it runs: a live view on a terminal, a line now and then elsewhere."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from adaptsfl.config import RunConfig
from adaptsfl.report.plan_report import seconds
from adaptsfl.report.summary import percent
from adaptsfl.runs.ending import rounds_planned
from adaptsfl.runs.folder import Run
from adaptsfl.runs.record import Block
from adaptsfl.simulation.experiment import Job, Watcher
from adaptsfl.simulation.world import World

QUIET_S = 10.0  # between two lines where there is no terminal
BAR_WIDTH = 40


class Progress:
    """Told by a `Watcher` how an experiment goes, and tells people.

    Args:
        jobs: all runs, in order.
        quiet: tell nothing but failures, and which runs are done again.
        clock: real time, in seconds.
    """

    def __init__(
        self,
        console: Console,
        jobs: Sequence[Job],
        *,
        quiet: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.console, self.jobs, self.clock = console, list(jobs), clock
        self.quiet, self.live = quiet, console.is_terminal and not quiet
        self.failures: list[tuple[Job, Exception]] = []
        self._number = 0  # of the run, from 1 on
        self._job: Job | None = None
        self._goal: RunConfig | None = None
        self._rounds_total: int | None = None
        self._round = 0
        self._block: Block | None = None
        self._accuracy: float | None = None
        self._trained, self._trained_s = 0, 0.0  # rounds, and what they took
        self._ticked = self._told = self.clock()

    @contextmanager
    def watching(self) -> Iterator[Watcher]:
        """Give who is to be told, and show what they are told until the end."""
        watcher = Watcher(self._begins, self._on_round, self._on_block, self._ends, self._fails, self._remarks)
        if not self.live:
            yield watcher
            return
        with Live(console=self.console, get_renderable=self._view, refresh_per_second=4, transient=True):
            yield watcher

    def _begins(self, job: Job, world: World) -> None:
        self._number, self._job, self._goal = self.jobs.index(job) + 1, job, world.run
        self._rounds_total = rounds_planned(world.run, world.batch_size)
        self._round, self._block, self._accuracy = 0, None, None
        self._ticked = self.clock()

    def _on_round(self, round_: int, _loss: float) -> None:
        now = self.clock()
        self._trained, self._trained_s = self._trained + 1, self._trained_s + now - self._ticked
        self._round, self._ticked = round_, now
        self._tell_sometimes()

    def _on_block(self, block: Block) -> None:
        self._block, self._round = block, block.first_round + block.rounds - 1
        if block.evaluations:
            self._accuracy = block.evaluations[-1][2]
        self._ticked = self.clock()
        self._tell_sometimes()

    def _ends(self, job: Job, run: Run) -> None:
        self._number, self._job = self.jobs.index(job) + 1, None
        self._tell(f"{self._name(job)}: {outcome(run)}")

    def _fails(self, job: Job, error: Exception) -> None:
        self.failures.append((job, error))
        self._number, self._job = self.jobs.index(job) + 1, None
        self._tell(f"{self._name(job)}: failed, {type(error).__name__}")

    def _remarks(self, job: Job, remark: str) -> None:
        self.console.print(f"{job.folder_name}: {remark}", markup=False, highlight=False, soft_wrap=True)

    def _tell_sometimes(self) -> None:
        if not self.live and self.clock() - self._told >= QUIET_S and self._job is not None:
            self._tell(f"{self._name(self._job)}: {self.state()}")

    def _tell(self, text: str) -> None:
        self._told = self.clock()
        if not self.quiet:
            self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _name(self, job: Job) -> str:
        fleet = f" on {job.fleet}" if job.fleet else ""
        return f"[{self._number}/{len(self.jobs)}] {job.policy}{fleet}, seed {job.seed}"

    def state(self) -> str:
        """Return the run of the moment in words."""
        total = "" if self._rounds_total is None else f" of {self._rounds_total:,}"
        words = [f"round {self._round:,}{total}"]
        if self._block is not None:
            block = self._block
            cuts = sorted({cut for cut in block.cuts if cut})
            often = "never averaged" if block.interval is None else f"I {block.interval}"
            words += [f"virtual {seconds(block.time_s)}", f"{often}, cuts {span(cuts)}, L_c {block.deepest}"]
        if self._accuracy is not None:
            words.append(f"accuracy {percent(self._accuracy)}")
        left = self.left_s()
        if left is not None:
            words.append(f"about {rough(left)} left")
        return ", ".join(words)

    def left_s(self) -> float | None:
        """Return the real seconds until all runs are done, if rounds end them and go on as they went; else None."""
        if self._rounds_total is None or not self._trained:
            return None
        runs_after = len(self.jobs) - self._number
        rounds = max(self._rounds_total - self._round, 0) + runs_after * self._rounds_total
        return rounds * self._trained_s / self._trained

    def share(self) -> float | None:
        """Return how much of the run is done, by whichever end is nearer; None where nobody can know."""
        shares = []
        if self._rounds_total is not None:
            shares.append(self._round / self._rounds_total)
        if self._goal is not None and self._goal.seconds is not None:
            shares.append((self._block.time_s if self._block is not None else 0.0) / self._goal.seconds)
        return min(max(shares), 1.0) if shares else None

    def _view(self) -> Group:
        if self._job is None:
            return Group(Text("preparing …"))
        share = self.share()
        bar = ProgressBar(total=None if share is None else 1.0, completed=share or 0.0, width=BAR_WIDTH)
        head = Table.grid(padding=(0, 2))
        head.add_row(Text(self._name(self._job), style="bold"), bar)
        return Group(head, Text(self.state()))


def outcome(run: Run) -> str:
    """Return what came of a run that is done, in words."""
    reached = "not evaluated" if run.final_accuracy is None else f"accuracy {percent(run.final_accuracy)}"
    return f"done, {run.rounds:,} rounds, virtual {seconds(run.time_s)}, {reached}"


def span(cuts: Sequence[int]) -> str:
    """Return 2 … 5 for cuts from 2 to 5."""
    return f"{cuts[0]}" if cuts[0] == cuts[-1] else f"{cuts[0]} … {cuts[-1]}"


def rough(left_s: float) -> str:
    """Return a time as nobody needs it more exactly: 40 s, 3 min, 2.5 h."""
    if left_s < 60:
        return f"{left_s:.0f} s"
    return f"{left_s / 60:.0f} min" if left_s < 5400 else f"{left_s / 3600:.1f} h"
