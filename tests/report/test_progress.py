"""What people see while they wait."""

import io
from types import SimpleNamespace

import pytest
from rich.console import Console

from adaptsfl.config import RunConfig
from adaptsfl.latency import PHASES
from adaptsfl.report.progress import Progress, rough, span
from adaptsfl.runs.ending import rounds_planned
from adaptsfl.runs.record import Block
from adaptsfl.simulation.experiment import Job

JOBS = [Job("adaptsfl", 0), Job("rma+rms", 0, "slow [x]")]


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

    def __init__(self, *, terminal: bool = False, quiet: bool = False) -> None:
        self.now, self.file = 0.0, io.StringIO()
        console = Console(file=self.file, force_terminal=terminal, width=120)
        self.progress = Progress(console, JOBS, quiet=quiet, clock=lambda: self.now)

    def printed(self) -> list[str]:
        return self.file.getvalue().splitlines()

    def run(self, **ends) -> None:
        """The first job: ten rounds of two seconds each, in blocks of five."""
        with self.progress.watching() as watcher:
            watcher.begins(JOBS[0], SimpleNamespace(run=RunConfig(**ends), batch_size=16))
            for round_ in range(1, 11):
                self.now += 2.0
                watcher.on_round(round_, 1.0)
                if round_ % 5 == 0:
                    watcher.on_block(block(round_ - 4, 5, 0.625))


def test_without_a_terminal_a_line_every_ten_seconds():
    setting = Setting()
    setting.run(rounds=20)
    assert setting.printed() == [
        "[1/2] adaptsfl, seed 0: round 5 of 20, about 1 min left",
        "[1/2] adaptsfl, seed 0: round 10 of 20, virtual 1 min 30 s, I 5, cuts 2 … 4, L_c 4, accuracy 62.5 %, "
        "about 1 min left",
    ]


def test_one_line_for_every_run_that_ends_or_fails():
    setting = Setting()
    with setting.progress.watching() as watcher:
        watcher.ends(JOBS[0], SimpleNamespace(final_accuracy=0.5, rounds=1200, time_s=3.0))
        watcher.fails(JOBS[1], ValueError("no"))
    assert setting.printed() == [
        "[1/2] adaptsfl, seed 0: done, 1,200 rounds, virtual 3 s, accuracy 50 %",
        "[2/2] rma+rms on slow [x], seed 0: failed, ValueError",
    ]
    assert [job for job, _ in setting.progress.failures] == [JOBS[1]]


def test_quiet_is_quiet():
    setting = Setting(quiet=True)
    setting.run(rounds=20)
    assert setting.printed() == []


def test_a_terminal_shows_the_run_of_the_moment():
    setting = Setting(terminal=True)
    setting.run(rounds=20)
    shown = setting.file.getvalue()
    assert "adaptsfl, seed 0" in shown
    assert "━round" not in shown  # each on its own line
    assert "round 10 of 20, virtual 1 min 30 s, I 5, cuts 2 … 4, L_c 4, accuracy 62.5 %" in shown


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
    setting = Setting()
    setting.run(**ends)
    assert setting.progress.share() == share
    assert setting.progress.left_s() == left


def test_words():
    assert (rough(12.3), rough(150), rough(9000)) == ("12 s", "2 min", "2.5 h")
    assert (span([2, 3, 5]), span([4])) == ("2 … 5", "4")
    assert rounds_planned(RunConfig(rounds=5, samples=33), 16) == 3
