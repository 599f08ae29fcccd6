"""Real links of known rates: what is measured of them, whether predictions come true, and whether plans pay.

The only tests in which seconds are compared with seconds, always of the same run. Links are so slow that bytes, not this
machine's other work, decide how long a round takes.
"""

import os
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deploy.deployed import HERE, Talk, record_of
from deploy.shaped import Link, ShapedFleet, need_namespaces, shaped_network

LINKS = (Link(up=2, down=10), Link(up=4, down=15), Link(up=10, down=30), Link(up=20, down=50))
# Activations of a mini-batch at cuts 1 … 6: 524, 131, 262, 66, 33 and 5 kB; layers 1 … cut: 1, 10, 29, 67, 84 and 84 kB.
RECIPE = """
name = "links"
[model]
name = "vgg_digits"
options = { width = 0.5, norm = "group" }
[training]
batch_size = 128
learning_rate = 0.05
[data]
name = "digits"
[fleet]
devices = 4
[planner]
interval = 2
[convergence]
initial_gap = 2.3
budget = 1.0
drift = { power = 1.0, per_layer = [0, 0, 0, 0, 0, 0] }
[run]
policies = ["scripted_policy:Scripted"]
evaluate_every = 1000
test_samples = 4
[deploy]
private_start = false
round_deadline_s = 120.0
start_deadline_s = 240.0
"""
WARM_UP, STEADY, GRID = 31123, 61123, (21111, 22222, 23333, 24444, 25555, 26666)
SWEEPS = 2
PLANS = (WARM_UP, STEADY, *((0, *GRID) * SWEEPS))


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[dict[str, Any]]]:
    """Run everything once: starting six processes takes longer than a few rounds."""
    need_namespaces()
    folder = tmp_path_factory.mktemp("links")
    file, talk = folder / "recipe.toml", Talk()
    file.write_text(RECIPE)
    rounds = 3 + 6 + 2 * SWEEPS * (1 + len(GRID))
    more = [f'run.options={{"scripted_policy:Scripted"={{plans={list(PLANS)}}}}}', f"run.rounds={rounds}"]
    with pytest.MonkeyPatch.context() as patch, shaped_network(LINKS) as network:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")])))
        patch.setenv("OMP_NUM_THREADS", "1")
        fleet = ShapedFleet(network, file, folder / "run", talk, more)
        try:
            for server in ("fed", "edge"):
                fleet.start(server)
            for server in ("fed", "edge"):
                talk.wait_for(server, "listening")
            for number in range(1, len(LINKS) + 1):
                fleet.start(f"device-{number}")
            for number in range(1, len(LINKS) + 1):
                talk.wait_for(f"device-{number}", "the run is over")
        finally:
            fleet.stop()
    found = record_of(fleet)
    assert len(found) == len(PLANS), talk.everything()
    yield found


def test_rates_are_measured(record: list[dict[str, Any]]) -> None:
    """Of a link's rate, TCP, TLS and HTTP/2 take a few percent; a busy machine may take more."""
    for block in record:
        for name, direction in (("uplink_bps", "up"), ("downlink_bps", "down")):
            for rate, link in zip(block["resources"][name], LINKS, strict=True):
                assert 0.7 * getattr(link, direction) < rate / 1e6 < 1.05 * getattr(link, direction)


def test_rounds_take_as_long_as_predicted(record: list[dict[str, Any]]) -> None:
    block = record[1]
    predicted = sum(seconds for phase, seconds in block["estimates"]["predicted"].items() if phase.startswith("a"))
    measured = statistics.median(block["estimates"]["measured"]["rounds_s"])
    assert len(block["estimates"]["measured"]["rounds_s"]) == 5
    assert measured == pytest.approx(predicted, rel=0.15)


def test_phases_add_up_to_what_the_clock_shows(record: list[dict[str, Any]]) -> None:
    for before, block in zip(record, record[1:], strict=False):
        measured = block["estimates"]["measured"]
        wall_s = block["time_s"] - before["time_s"]
        assert measured["wall_s"] == pytest.approx(wall_s, abs=0.2)
        assert sum(block["seconds"].values()) + measured["other_s"] == pytest.approx(measured["wall_s"], abs=1e-3)
    steady = record[1]
    assert sum(steady["seconds"].values()) > 0.85 * steady["estimates"]["measured"]["wall_s"]
    assert steady["bottleneck"] == ["device-1", "a2"]


def test_the_plan_pays(record: list[dict[str, Any]]) -> None:
    """The same number of rounds under every plan, in turns: AdaptSFL's cuts against the same cut for all."""
    seconds: dict[int, list[float]] = {}
    for plan, block in zip(PLANS, record, strict=True):
        seconds.setdefault(plan, []).append(block["estimates"]["measured"]["wall_s"])
    least = {plan: min(times) for plan, times in seconds.items()}
    grid = [least[plan] for plan in GRID]
    print({plan: [round(value, 2) for value in times] for plan, times in seconds.items()})
    print([block["cuts"] for plan, block in zip(PLANS, record, strict=True) if not plan])
    assert least[0] < 0.8 * max(grid)
    assert least[0] < 1.1 * min(grid)
