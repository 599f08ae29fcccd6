"""What people see while they wait, for one experiment or several, one run at a time or several."""

import io
from dataclasses import replace
from types import SimpleNamespace

import pytest
from rich.console import Console

from adaptsfl.config import RunConfig
from adaptsfl.errors import RunFailed
from adaptsfl.latency import PHASES
from adaptsfl.report.progress import Progress, rough, span
from adaptsfl.runs.ending import rounds_planned
from adaptsfl.runs.record import Block
from adaptsfl.simulation.jobs import Job

JOBS = [Job("adaptsfl", 0), Job("rma+rms", 0, "slow [x]")]
SFL, PSL = Job("sfl", 0), Job("psl", 0, "slow [x]")
RUN = SimpleNamespace(final_accuracy=0.5, rounds=1200, time_s=3.0)


def experiment(jobs: list[Job], **ends):
    recipe = SimpleNamespace(run=RunConfig(**ends), training=SimpleNamespace(batch_size=16))
    return SimpleNamespace(jobs=jobs, recipe=recipe)


def block(first: int, rounds: int, accuracy: float | None) -> Block:
    evaluations = () if accuracy is None else ((first, 1.0, accuracy, 0.5),)
    return Block(
        block=1,
        first_round=first,
        rounds=rounds,
        time_s=90.0,
        interval=5,
        cuts=(2, 0, 4),
        deepest=4,
        layer_intervals={},
        seconds=dict.fromkeys(PHASES, 1.0),
        bottleneck=("device 1", "a1"),
        bits=8.0,
        loss=1.0,
        evaluations=evaluations,
        estimates={},
        resources={},
        predicted_s=8.0,
    )


class Setting:
    """A progress whose clock is turned by hand."""

    def __init__(self, *experiments, titles=(), terminal: bool = False, quiet: bool = False) -> None:
        self.now, self.file = 0.0, io.StringIO()
        console = Console(file=self.file, force_terminal=terminal, width=130)
        self.progress = Progress(console, experiments, titles, quiet=quiet, clock=lambda: self.now)

    def printed(self) -> list[str]:
        return self.file.getvalue().splitlines()

    def train_one(self, watcher, planned: int | None) -> None:
        """The first job: ten rounds of two seconds each, in blocks of five."""
        watcher.begins(JOBS[0], planned)
        for round_ in range(1, 11):
            self.now += 2.0
            watcher.on_round(JOBS[0], round_, 1)
            if round_ % 5 == 0:
                watcher.on_block(JOBS[0], block(round_ - 4, 5, 0.625))

    def train_two(self, watcher) -> None:
        """Both runs for 11 s: the first with a round per second, the second with two."""
        first, second = SFL, replace(PSL, experiment=1)
        watcher.begins(first, 20)
        watcher.begins(second, 40)
        for _ in range(11):
            self.now += 1.0
            watcher.on_round(first, int(self.now), 1)
            watcher.on_round(second, 2 * int(self.now), 2)


def one(ends=None, **options) -> Setting:
    return Setting(experiment(JOBS, **(ends or {"rounds": 20})), **options)


def two(**options) -> Setting:
    experiments = experiment([SFL], rounds=20), experiment([PSL, SFL], samples=640)
    return Setting(*experiments, titles=["one", "accuracy/two"], **options)


# ── one run at a time ───────────────────────────────────────────────────────────────────────────────────────────────


def test_without_a_terminal_a_line_every_ten_seconds():
    setting = one()
    with setting.progress.watching() as watcher:
        setting.train_one(watcher, 20)
    assert setting.printed() == [
        "0 of 2 runs done, 0.5 rounds/s, about 1 min left (adaptsfl, seed 0: round 5 of 20)",
        "0 of 2 runs done, 0.5 rounds/s, about 1 min left "
        "(adaptsfl, seed 0: round 10 of 20, virtual 1 min 30 s, I 5, cuts 2 … 4, L_c 4, accuracy 62.5 %)",
    ]


def test_one_line_for_every_run_that_ends_or_fails():
    setting = one()
    with setting.progress.watching() as watcher:
        watcher.ends(JOBS[0], RUN)
        watcher.fails(JOBS[1], ValueError("no"))
    assert setting.printed() == [
        "[1/2] adaptsfl, seed 0: done, 1,200 rounds, virtual 3 s, accuracy 50 %",
        "[2/2] rma+rms on slow [x], seed 0: failed, ValueError",
    ]
    assert [job for job, _ in setting.progress.failures] == [JOBS[1]]


def test_quiet_is_quiet():
    setting = one(quiet=True)
    with setting.progress.watching() as watcher:
        setting.train_one(watcher, 20)
    assert setting.printed() == []


def test_a_terminal_shows_the_run_of_the_moment():
    setting = one(terminal=True)
    with setting.progress.watching() as watcher:
        setting.train_one(watcher, 20)
        setting.now += 1.0
        watcher.on_round(JOBS[0], 11, 1)
    shown = setting.file.getvalue()
    assert "adaptsfl, seed 0" in shown
    assert "round 11 of 20, virtual 1 min 30 s, I 5, cuts 2 … 4, L_c 4, accuracy 62.5 %" in shown


def test_a_narrow_terminal_hides_nothing():
    setting = one(terminal=True)
    setting.progress.console.width = 80
    with setting.progress.watching() as watcher:
        setting.train_one(watcher, 20)
        setting.now += 1.0
        watcher.on_round(JOBS[0], 11, 1)
    assert "accuracy 62.5 %" in setting.file.getvalue()


@pytest.mark.parametrize(
    ("ends", "share", "left"),
    [
        ({"rounds": 20}, 0.5, 2.0 * (10 + 20)),
        ({"samples": 400}, 10 / 25, 2.0 * (15 + 25)),
        ({"seconds": 180.0}, 0.5, None),
        ({"rounds": 40, "seconds": 100.0}, 0.9, 2.0 * (30 + 40)),
        ({"converged": True}, None, None),
    ],
)
def test_how_much_is_done_and_left(ends, share, left):
    setting = one(ends)
    with setting.progress.watching() as watcher:
        setting.train_one(watcher, rounds_planned(RunConfig(**ends), 16))
        assert setting.progress.running[JOBS[0]].share == share
        assert setting.progress.left_s() == left


def test_words():
    assert (rough(12.3), rough(150), rough(9000)) == ("12 s", "2 min", "2.5 h")
    assert (span([2, 3, 5]), span([4])) == ("2 … 5", "4")
    assert rounds_planned(RunConfig(rounds=5, samples=33), 16) == 3


# ── several runs at once ────────────────────────────────────────────────────────────────────────────────────────────


def test_a_line_every_ten_seconds_names_all_that_run():
    """After 10 s, 10 + 18 rounds. Left: 10 rounds of 1 s, and 22 + 40 of ½ s, for two processes."""
    setting = two()
    with setting.progress.watching() as watcher:
        setting.train_two(watcher)
    assert setting.printed() == [
        "0 of 3 runs done, 2.8 rounds/s, about 20 s left "
        "(one: sfl, seed 0: round 10 of 20; accuracy/two: psl on slow [x], seed 0: round 18 of 40)"
    ]


def test_one_line_for_every_run_of_every_experiment():
    """The last was done before it could begin."""
    setting = two()
    with setting.progress.watching() as watcher:
        watcher.begins(replace(PSL, experiment=1), 40)
        watcher.begins(SFL, 20)
        watcher.fails(replace(PSL, experiment=1), RunFailed("TrainingDiverged", "the loss is nan"))
        watcher.ends(SFL, RUN)
        watcher.ends(replace(SFL, experiment=1), RUN)
    assert setting.printed() == [
        "[1/3] accuracy/two: psl on slow [x], seed 0: failed, TrainingDiverged",
        "[2/3] one: sfl, seed 0: done, 1,200 rounds, virtual 3 s, accuracy 50 %",
        "[3/3] accuracy/two: sfl, seed 0: done, 1,200 rounds, virtual 3 s, accuracy 50 %",
    ]
    assert [job for job, _ in setting.progress.failures] == [replace(PSL, experiment=1)]


def test_quiet_is_quiet_about_several_runs():
    setting = two(quiet=True)
    with setting.progress.watching() as watcher:
        setting.train_two(watcher)
        watcher.ends(SFL, RUN)
    assert setting.printed() == []


def test_a_terminal_shows_every_run_of_the_moment():
    """As it was when the first of them was last heard, after 11 s: 11 + 20 rounds; then without it."""
    setting = two(terminal=True)
    with setting.progress.watching() as watcher:
        assert "preparing …" in setting.file.getvalue()
        setting.train_two(watcher)
        shown = setting.file.getvalue().splitlines()
        watcher.ends(SFL, RUN)
        after = setting.file.getvalue().splitlines()[len(shown) - 1 :]
    assert any("0 of 3 runs done, 2.82 rounds/s, about 20 s left" in line for line in shown[-3:])
    assert any("one: sfl, seed 0" in line and "round 11 of 20" in line for line in shown[-3:])
    assert any("accuracy/two: psl on slow [x], seed 0" in line and "round 20 of 40" in line for line in shown[-3:])
    assert any("1 of 3 runs done, 3 rounds/s, about 14 s left" in line for line in after)
    assert any("[1/3] one: sfl, seed 0: done" in line for line in after)


def test_nobody_knows_how_long_runs_take_that_rounds_do_not_end():
    setting = Setting(experiment([SFL], converged=True))
    with setting.progress.watching() as watcher:
        watcher.begins(SFL, None)
        setting.now += 4.0
        watcher.on_round(SFL, 2, 2)
    assert setting.progress.state() == "0 of 1 runs done, 0.5 rounds/s"
    assert setting.progress.left_s() is None


def test_the_pace_is_that_of_the_last_minute():
    setting = Setting(experiment([SFL], rounds=100))
    with setting.progress.watching() as watcher:
        assert setting.progress.rate() is None
        watcher.begins(SFL, 100)
        for _ in range(10):
            setting.now += 30.0
            watcher.on_round(SFL, 60, 6)
    assert setting.progress.rate() == 3 * 6 / 60  # those 60, 30 and 0 seconds ago
