"""The table that closes an experiment."""

import dataclasses
import io
import json
import math

import pytest
from rich.console import Console

from adaptsfl.report.summary import sizes, summary_data, summary_rows, summary_table, times
from adaptsfl.runs.folder import Run


def reaching(run: Run, policy: str, seed: int, *evaluations: tuple[int, float, float]) -> Run:
    """The run as one block that was evaluated at these (round, seconds, accuracy)."""
    rows = tuple((round_, time_s, accuracy, 1.0) for round_, time_s, accuracy in evaluations)
    block = dataclasses.replace(run.blocks[0], evaluations=rows, bits=8e9, first_round=1, rounds=50, time_s=400.0)
    folder = run.folder.parent / f"{policy}-seed{seed}"
    return dataclasses.replace(
        run, folder=folder, policy=policy, title=policy.upper(), seed=seed, blocks=(block,), targets=(0.5, 0.6)
    )


@pytest.fixture
def some(runs: list[Run]) -> list[Run]:
    """Ours reaches both targets; `slow` only the lower one with both seeds; `bad` nothing."""
    first = runs[0]
    return [
        reaching(first, "slow", 0, (20, 200.0, 0.5), (30, 300.0, 0.62)),
        reaching(first, "slow", 1, (30, 400.0, 0.55)),
        reaching(first, "adaptsfl", 0, (10, 90.0, 0.5), (20, 180.0, 0.7)),
        reaching(first, "adaptsfl", 1, (12, 110.0, 0.55), (22, 220.0, 0.65)),
        reaching(first, "bad", 0, (10, 100.0, 0.53), (20, 200.0, 0.49)),
    ]


def test_numbers(some):
    """Ours takes (90 + 110) / 2 = 100 s to 0.5 and `slow` (200 + 400) / 2 = 300 s: a speed-up of 3."""
    data = summary_data(some)
    assert data["first"] == "ADAPTSFL"
    assert data["targets"] == [0.5, 0.6]
    ours, slow, bad = data["policies"]
    assert (ours["label"], slow["label"], bad["label"]) == ("ADAPTSFL", "SLOW", "BAD")
    assert ours["targets"][0]["time_s"] == {"mean": 100.0, "spread": pytest.approx(math.sqrt(200))}
    assert ours["targets"][0]["rounds"]["mean"] == 11
    assert slow["targets"][0]["speed_up"] == pytest.approx(3.0)
    assert ours["final_accuracy"]["mean"] == pytest.approx(0.675)
    assert ours["bytes"] == {"mean": 1e9, "spread": 0.0}
    assert bad["final_accuracy"] == {"mean": 0.49, "spread": None}
    assert json.loads(json.dumps(data, allow_nan=False)) == data


def test_a_seed_that_does_not_get_there_leaves_no_speed_up(some):
    higher = summary_data(some)["policies"][1]["targets"][1]
    assert (higher["reached"], higher["of"], higher["speed_up"]) == (1, 2, None)
    assert higher["time_s"] == {"mean": 300.0, "spread": None}


def test_words(some):
    headings, rows = summary_rows(summary_data(some))
    assert headings == ["policy", "to 50 %", "to 60 %", "final accuracy", "sent", "in all"]
    ours, slow, bad = rows
    assert ours[:3] == ["ADAPTSFL\n2 seeds", "1 min 40 s ± 14.1 s\n11 ± 1 rounds", "3 min 20 s ± 28.3 s\n21 ± 1 rounds"]
    assert ours[3:] == ["67.5 ± 3.5 %", "1.00 ± 0.00 GB", "6 min 40 s\n50 rounds"]
    assert slow[1].endswith("speed-up 3.00×")
    assert slow[2] == "5 min 0 s\n30 rounds\n1 of 2 seeds"
    assert bad[1] == "1 min 40 s\n10 rounds\nspeed-up 1.00×"
    assert bad[2] == "not reached (best 0.53)"


def test_the_table_can_be_printed(some):
    console = Console(file=io.StringIO(), width=120)
    console.print(summary_table(some))
    text = console.file.getvalue()
    assert "speed-up is that of ADAPTSFL" in text
    assert "not reached (best 0.53)" in text


def test_nothing_recorded_yet(runs):
    empty = dataclasses.replace(runs[0], blocks=())
    headings, ((_, *cells),) = summary_rows(summary_data([empty]))
    assert len(headings) == 1 + len(cells)
    assert cells == ["not reached", "not reached", "–", "0 B", "0 ms\n0 rounds"]


def test_units():
    assert sizes({"mean": 1.5e6, "spread": 2e4}) == "1.50 ± 0.02 MB"
    assert sizes({"mean": 12.0, "spread": None}) == "12 B"
    assert times({"mean": 0.25, "spread": 0.002}) == "250 ms ± 2 ms"
    assert times({"mean": 7200.0, "spread": 300.0}) == "2 h 0 min ± 5 min 0 s"
