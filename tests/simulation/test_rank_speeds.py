"""Ranks are timed once, get devices by their speed, and keep them over restarts."""

import json
from pathlib import Path

import pytest

from adaptsfl.errors import InvalidInput
from adaptsfl.simulation import rank_speeds
from adaptsfl.simulation.experiment import Experiment
from adaptsfl.simulation.rank_speeds import SPEEDS, VARIABLE, RankSpeeds, speeds_of
from adaptsfl.training.ranks import ALONE, Ranks
from ranks import in_threads
from simulation.ranked import small


def found(ranks: Ranks, folder: Path) -> tuple[float, ...]:
    timed = RankSpeeds(small(), folder, ranks)
    if ranks.first:
        timed.keep()
    return timed.speeds


@pytest.fixture
def timings(monkeypatch) -> list[float]:
    """Return seconds that timing takes one after the other, whichever rank asks."""
    seconds: list[float] = []
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(rank_speeds, "_seconds", lambda _recipe: seconds.pop())
    return seconds


def test_one_process_times_nothing(tmp_path, timings):
    assert found(ALONE, tmp_path) == (1.0,)
    assert not (tmp_path / SPEEDS).exists()


def test_what_was_timed_is_kept_for_the_same_machines(tmp_path, timings, monkeypatch):
    timings += [1.0, 4.0]
    first, again = (in_threads(2, found, tmp_path)[0] for _ in range(2))
    assert sorted(first) == [0.25, 1.0]
    assert first == again
    assert not timings
    monkeypatch.setattr("socket.gethostname", lambda: "elsewhere")
    timings += [1.0, 2.0]
    assert sorted(in_threads(2, found, tmp_path)[1]) == [0.5, 1.0]
    timings += [1.0, 1.0, 1.0]
    assert in_threads(3, found, tmp_path)[2] == (1.0, 1.0, 1.0)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"hosts": [], "speeds": 3}', '{"hosts": HOSTS, "speeds": [1, -2]}'])
def test_a_damaged_file_is_timed_again(tmp_path, timings, text, monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: "here")
    (tmp_path / SPEEDS).write_text(text.replace("HOSTS", '["here", "here"]'))
    timings += [1.0, 1.0]
    assert in_threads(2, found, tmp_path) == [(1.0, 1.0)] * 2
    assert json.loads((tmp_path / SPEEDS).read_text()) == {"hosts": ["here", "here"], "speeds": [1.0, 1.0]}


@pytest.mark.parametrize(
    ("seconds", "speeds"),
    [([1, 1.2], (1, 1)), ([2, 1], (0.5, 1)), ([1, 0], (1, 1)), ([3, 1, 1.1], (0.333, 1, 1))],
    ids=["nearly equal", "slower", "unknown", "three"],
)
def test_nearly_equal_ranks_are_equal(seconds, speeds):
    assert speeds_of(seconds) == speeds


def test_a_model_is_timed(tmp_path, monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    assert rank_speeds._seconds(small()) > 0
    broken = small().model_copy(update={"model": small().model.model_copy(update={"name": "nothing:at_all"})})
    assert rank_speeds._seconds(broken) == 0


@pytest.mark.parametrize("text", ["1", "1,2,3", "1,-1", "1,nan", "fast"])
def test_speeds_that_make_no_sense_are_refused(tmp_path, monkeypatch, text):
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(InvalidInput, match=f"{VARIABLE}: is '{text}'. Give a positive number for each of the 2 ranks"):
        in_threads(2, found, tmp_path)


def shared_out(ranks: Ranks, folder: Path, policy: str) -> tuple[int, ...]:
    experiment = Experiment(small(), folder, policies=[policy], ranks=ranks)
    experiment.execute()
    (world,) = experiment._worlds.values()
    return world.data.mine


@pytest.mark.parametrize(("policy", "first"), [("sfl", (2,)), ("centralized", (0, 1, 2, 3))])
def test_a_slow_rank_trains_and_loads_fewer_devices(tmp_path, monkeypatch, policy, first):
    """But the one that has all samples is the first rank's even if another one is faster."""
    monkeypatch.setenv(VARIABLE, "0.4,1")
    assert in_threads(2, shared_out, tmp_path, policy) == [first, (0, 1, 3)]
