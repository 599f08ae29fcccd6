"""What people see while several processes work."""

import io
from types import SimpleNamespace

from rich.console import Console

from adaptsfl.config import RunConfig
from adaptsfl.errors import RunFailed
from adaptsfl.report.side_progress import SideProgress
from adaptsfl.simulation.experiment import Job
from adaptsfl.simulation.side_by_side import Task

SFL, PSL = Job("sfl", 0), Job("psl", 0, "slow [x]")
RUN = SimpleNamespace(final_accuracy=0.5, rounds=1200, time_s=3.0)


def experiment(jobs: list[Job], **ends):
    recipe = SimpleNamespace(run=RunConfig(**ends), training=SimpleNamespace(batch_size=16))
    return SimpleNamespace(jobs=jobs, recipe=recipe)


class Setting:
    """A progress whose clock is turned by hand."""

    def __init__(self, *experiments, titles=(), terminal: bool = False, quiet: bool = False) -> None:
        self.now, self.file = 0.0, io.StringIO()
        console = Console(file=self.file, force_terminal=terminal, width=120)
        self.progress = SideProgress(console, experiments, titles, quiet=quiet, clock=lambda: self.now)

    def printed(self) -> list[str]:
        return self.file.getvalue().splitlines()

    def train(self, watcher) -> None:
        """Both runs for 11 s: the first with a round per second, the second with two."""
        first, second = Task(0, SFL), Task(1, PSL)
        watcher.begins(first, 20)
        watcher.begins(second, 40)
        for _ in range(11):
            self.now += 1.0
            watcher.on_round(first, int(self.now), 1)
            watcher.on_round(second, 2 * int(self.now), 2)


def two(**options) -> Setting:
    experiments = experiment([SFL], rounds=20), experiment([PSL, SFL], samples=640)
    return Setting(*experiments, titles=["one", "accuracy/two"], **options)


def test_without_a_terminal_a_line_every_ten_seconds():
    """After 10 s, 10 + 18 rounds. Left: 10 rounds of 1 s, and 22 + 40 of ½ s, for two processes."""
    setting = two()
    with setting.progress.watching() as watcher:
        setting.train(watcher)
    assert setting.printed() == [
        "0 of 3 runs done, 2.8 rounds/s, about 20 s left "
        "(one: sfl, seed 0: round 10 of 20; accuracy/two: psl on slow [x], seed 0: round 18 of 40)"
    ]


def test_one_line_for_every_run_that_ends_or_fails():
    """The last was done before it could begin."""
    setting = two()
    with setting.progress.watching() as watcher:
        watcher.begins(Task(1, PSL), 40)
        watcher.begins(Task(0, SFL), 20)
        watcher.fails(Task(1, PSL), RunFailed("TrainingDiverged", "the loss is nan"))
        watcher.ends(Task(0, SFL), RUN)
        watcher.ends(Task(1, SFL), RUN)
    assert setting.printed() == [
        "[1/3] accuracy/two: psl on slow [x], seed 0: failed, TrainingDiverged",
        "[2/3] one: sfl, seed 0: done, 1,200 rounds, virtual 3 s, accuracy 50 %",
        "[3/3] accuracy/two: sfl, seed 0: done, 1,200 rounds, virtual 3 s, accuracy 50 %",
    ]
    assert [task for task, _ in setting.progress.failures] == [Task(1, PSL)]


def test_quiet_is_quiet():
    setting = two(quiet=True)
    with setting.progress.watching() as watcher:
        setting.train(watcher)
        watcher.ends(Task(0, SFL), RUN)
    assert setting.printed() == []


def test_a_terminal_shows_every_run_of_the_moment():
    """As it was when the first of them was last heard, after 11 s: 11 + 20 rounds; then without it."""
    setting = two(terminal=True)
    with setting.progress.watching() as watcher:
        assert "preparing …" in setting.file.getvalue()
        setting.train(watcher)
        shown = setting.file.getvalue().splitlines()
        watcher.ends(Task(0, SFL), RUN)
        after = setting.file.getvalue().splitlines()[len(shown) - 1 :]
    assert any("0 of 3 runs done, 2.82 rounds/s, about 20 s left" in line for line in shown[-3:])
    assert any("one: sfl, seed 0" in line and "round 11 of 20" in line for line in shown[-3:])
    assert any("accuracy/two: psl on slow [x], seed 0" in line and "round 20 of 40" in line for line in shown[-3:])
    assert any("1 of 3 runs done, 3 rounds/s, about 14 s left" in line for line in after)
    assert any("[1/3] one: sfl, seed 0: done" in line for line in after)


def test_nobody_knows_how_long_runs_take_that_rounds_do_not_end():
    setting = Setting(experiment([SFL], converged=True))
    with setting.progress.watching() as watcher:
        watcher.begins(Task(0, SFL), None)
        setting.now += 4.0
        watcher.on_round(Task(0, SFL), 2, 2)
    assert setting.progress.state() == "0 of 1 runs done, 0.5 rounds/s"
    assert setting.progress.left_s() is None


def test_the_pace_is_that_of_the_last_minute():
    setting = Setting(experiment([SFL], rounds=100))
    with setting.progress.watching() as watcher:
        assert setting.progress.rate() is None
        watcher.begins(Task(0, SFL), 100)
        for _ in range(10):
            setting.now += 30.0
            watcher.on_round(Task(0, SFL), 60, 6)
    assert setting.progress.rate() == 3 * 6 / 60  # those 60, 30 and 0 seconds ago
