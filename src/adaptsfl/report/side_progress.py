"""How far runs are that several processes do: a live table on a terminal, a line now and then elsewhere."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from adaptsfl.errors import kind_of
from adaptsfl.report.progress import BAR_WIDTH, QUIET_S, outcome, rough
from adaptsfl.runs.ending import rounds_planned
from adaptsfl.runs.folder import Run
from adaptsfl.simulation.experiment import Experiment
from adaptsfl.simulation.side_by_side import SideWatcher, Task

RATE_OVER_S = 60.0  # rounds per second are those of the last minute
DRAW_EVERY_S = 0.25


@dataclass
class Running:
    """A run of the moment.

    Attributes:
        planned: after how many rounds it ends at the latest; None if rounds do not end it.
        ticked: when it was last heard of.
    """

    planned: int | None
    ticked: float
    round: int = 0

    @property
    def state(self) -> str:
        """Where it is, in words."""
        if not self.round:
            return "begins"
        return f"round {self.round:,}" + ("" if self.planned is None else f" of {self.planned:,}")


@dataclass
class Pace:
    """Rounds of one experiment that were trained, and the seconds that this took one process."""

    rounds: int = 0
    seconds: float = 0.0


class SideProgress:
    """Told by a `SideWatcher` how experiments go, and tells people.

    Args:
        experiments: all that run, in order.
        titles: what they are called, if there are several.
        quiet: tell nothing but failures, and which runs are done again.
        clock: real time, in seconds.

    Attributes:
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
        self.failures: list[tuple[Task, Exception]] = []
        self._total = sum(len(experiment.jobs) for experiment in experiments)
        self._waiting = [len(experiment.jobs) for experiment in experiments]  # runs that did not begin yet
        self._planned = [_planned(experiment) for experiment in experiments]
        self._running: dict[Task, Running] = {}
        self._most_at_once = 1
        self._paces = [Pace() for _ in experiments]
        self._trained: deque[tuple[float, int]] = deque()  # when, and how many rounds, in the last minute
        self._began: float | None = None  # when the first run did
        self._told = self._drawn = self.clock()
        self._screen: Live | None = None

    @contextmanager
    def watching(self) -> Iterator[SideWatcher]:
        """Give who is to be told, and show what they are told until the end."""
        watcher = SideWatcher(self._begins, self._on_round, self._ends, self._fails, self._remarks)
        if not self.live:
            yield watcher
            return
        # Drawn when something is told, not by a thread of its own, which would find all this in the middle of changes.
        with Live(console=self.console, get_renderable=self._view, auto_refresh=False, transient=True) as self._screen:
            self._screen.refresh()
            yield watcher
        self._screen = None

    @property
    def done(self) -> int:
        """How many runs ended or failed."""
        return self._total - sum(self._waiting) - len(self._running)

    def _begins(self, task: Task, rounds: int | None) -> None:
        self._waiting[task.experiment] -= 1
        self._running[task] = Running(rounds, now := self.clock())
        self._began = now if self._began is None else self._began
        self._most_at_once = max(self._most_at_once, len(self._running))
        self._draw()

    def _on_round(self, task: Task, round_: int, trained: int) -> None:
        now, run, pace = self.clock(), self._running[task], self._paces[task.experiment]
        pace.rounds, pace.seconds = pace.rounds + trained, pace.seconds + now - run.ticked
        run.round, run.ticked = round_, now
        self._trained.append((now, trained))
        if now - self._drawn >= DRAW_EVERY_S:
            self._draw()
        if not self.live and now - self._told >= QUIET_S:
            running = "; ".join(f"{self.name(task)}: {run.state}" for task, run in self._running.items())
            self._tell(f"{self.state()} ({running})")

    def _ends(self, task: Task, run: Run) -> None:
        self._leaves(task)
        self._tell(f"[{self.done}/{self._total}] {self.name(task)}: {outcome(run)}")

    def _fails(self, task: Task, error: Exception) -> None:
        self.failures.append((task, error))
        self._leaves(task)
        self._tell(f"[{self.done}/{self._total}] {self.name(task)}: failed, {kind_of(error)}")

    def _remarks(self, task: Task, remark: str) -> None:
        title = f"{self.titles[task.experiment]}: " if self.titles else ""
        self.console.print(f"{title}{task.job.folder_name}: {remark}", markup=False, highlight=False, soft_wrap=True)

    def _leaves(self, task: Task) -> None:
        if self._running.pop(task, None) is None:  # it was done before, or failed before it began
            self._waiting[task.experiment] -= 1
        self._draw()

    def _tell(self, text: str) -> None:
        self._told = self.clock()
        if not self.quiet:
            self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _draw(self) -> None:
        self._drawn = self.clock()
        if self._screen is not None:
            self._screen.refresh()

    def name(self, task: Task) -> str:
        """Return a run as people call it."""
        title = f"{self.titles[task.experiment]}: " if self.titles else ""
        fleet = f" on {task.job.fleet}" if task.job.fleet else ""
        return f"{title}{task.job.policy}{fleet}, seed {task.job.seed}"

    def state(self) -> str:
        """Return how far everything is, in words."""
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
        """Return the real seconds until all runs are done, if rounds end them and go on as they went; else None."""
        rounds, seconds = (sum(getattr(pace, name) for pace in self._paces) for name in ("rounds", "seconds"))
        if not rounds:
            return None
        work_s = 0.0
        for number, pace in enumerate(self._paces):
            per_round_s = pace.seconds / pace.rounds if pace.rounds else seconds / rounds
            for left in self._rounds_left(number):
                if left is None:
                    return None
                work_s += left * per_round_s
        return work_s / max(1, min(self._most_at_once, self._total - self.done))

    def _rounds_left(self, number: int) -> Iterator[int | None]:
        """Yield the rounds that every run of an experiment has still to do; None if nobody can know."""
        yield from [self._planned[number]] * self._waiting[number]
        for task, run in self._running.items():
            if task.experiment == number:
                yield None if run.planned is None else max(run.planned - run.round, 0)

    def _view(self) -> Group:
        table = Table.grid(padding=(0, 2))
        for task, run in self._running.items():
            total = None if run.planned is None else float(run.planned)
            bar = ProgressBar(total=total, completed=run.round, width=BAR_WIDTH // 2)
            table.add_row(Text(self.name(task), style="bold"), bar, Text(run.state))
        return Group(Text(self.state() if self.done or self._running else "preparing …"), table)


def _planned(experiment: Experiment) -> int | None:
    recipe = experiment.recipe
    return None if recipe.run is None else rounds_planned(recipe.run, recipe.training.batch_size)
