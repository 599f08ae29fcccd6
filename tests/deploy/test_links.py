"""Real links of known rates: what is measured of them, whether predictions come true, and whether plans pay.

The only tests in which seconds are compared with seconds, always of the same run. Links are so slow that bytes, not
other work of this machine, decide how long a round takes. That takes minutes, so that `make test` has one short run:
what it finds out is true on any machine, however busy.
"""

import itertools
import os
import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from adaptsfl.deploy.parties.local_fleet import LocalFleet
from adaptsfl.deploy.parties.shaped_network import ShapedNetwork, shaped_network
from adaptsfl.errors import InvalidInput
from adaptsfl.fleet import Device, Fleet, Server
from deploy.deployed import HERE, Talk, record_of


def link(up: float, down: float, delay_ms: float = 0.0) -> Device:
    """Return a device whose links to both servers have these rates in Mbit/s, and this delay each way."""
    rates, delay_s = (up * 1e6, down * 1e6), delay_ms / 1e3
    return Device("device", 1.0, *rates, *rates, None, 0.0, 0.0, delay_s, delay_s, delay_s, delay_s)


LINKS = (link(up=0.5, down=2.5), link(up=1, down=4), link(up=2.5, down=8), link(up=5, down=12))
# Activations of a mini-batch at cuts 1 … 6: 262, 66, 131, 33, 8 and 3 kB; layers 1 … cut: 1, 10, 29, 67, 84 and 84 kB.
# Averaged after every round, neither the first cut nor the last is the best.
RECIPE = """
name = "links"
[model]
name = "vgg_digits"
options = { width = 0.5, norm = "group" }
[training]
batch_size = 64
learning_rate = 0.05
[data]
name = "digits"
[fleet]
devices = 4
[planner]
interval = 1
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
round_deadline_s = 1200.0
start_deadline_s = 1200.0
"""
WARM_UP, STEADY, GRID = 32123, 62123, (11111, 12222, 13333, 14444, 16666)
SWEEPS = 3
PLANS = (WARM_UP, STEADY, *((0, *GRID) * SWEEPS))


@contextmanager
def laid(fleet: Fleet) -> Iterator[ShapedNetwork]:
    """Lay the links of a fleet; skip the test where that cannot be done."""
    with ExitStack() as stack:
        try:
            network = stack.enter_context(shaped_network(fleet))
        except InvalidInput as error:
            pytest.skip(str(error))
        yield network


def run_over(
    folder: Path, links: Sequence[Device], plans: Sequence[int], rounds: int, *changes: str
) -> list[dict[str, Any]]:
    """Return the record of a run over such links, every party a process in a network of its own."""
    file, talk = folder / "recipe.toml", Talk()
    file.write_text(RECIPE)
    more = [f'run.options={{"scripted_policy:Scripted"={{plans={list(plans)}}}}}', f"run.rounds={rounds}", *changes]
    server = Server(1.0, 100e6, 100e6, to_fed_s=links[-1].uplink_s, from_fed_s=links[-1].downlink_s)
    with pytest.MonkeyPatch.context() as patch, laid(Fleet.of(links, server)) as network:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")])))
        patch.setenv("OMP_NUM_THREADS", "1")
        fleet = LocalFleet(file, len(links), folder / "run", talk, more=more, network=network)
        try:
            for server in ("fed", "edge"):
                fleet.start(server)
            for server in ("fed", "edge"):
                talk.wait_for(server, "listening")
            for number in range(1, len(links) + 1):
                fleet.start(f"device-{number}")
            for number in range(1, len(links) + 1):
                talk.wait_for(f"device-{number}", "the run is over")
        finally:
            fleet.stop()
    found = record_of(fleet)
    assert len(found) == len(plans), talk.everything()
    return found


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Run everything once: starting six processes takes longer than a few rounds."""
    rounds = 3 + 6 + SWEEPS * (1 + len(GRID))
    return run_over(tmp_path_factory.mktemp("links"), LINKS, PLANS, rounds)


def test_a_fleet_trains_over_links_of_which_no_more_is_measured_than_there_is(tmp_path: Path) -> None:
    links = (link(up=1, down=4), link(up=5, down=12))
    found = run_over(tmp_path, links, (312, 321), 6, "training.batch_size=16")
    for name in ("uplink_bps", "downlink_bps"):
        for k, device in enumerate(links):
            rates = [block["resources"][name][k] for block in found]
            assert 0 < statistics.median(rates) < 1.1 * getattr(device, name), (name, device, rates)


@pytest.mark.slow
def test_rates_are_measured(record: list[dict[str, Any]]) -> None:
    """Of a link's rate, TCP, TLS and HTTP/2 take a few percent; a busy machine takes more now and then, never less."""
    for name in ("uplink_bps", "downlink_bps"):
        for k, device in enumerate(LINKS):
            rates, true = [block["resources"][name][k] for block in record], getattr(device, name)
            assert statistics.median(rates) < 1.1 * true, (name, device, rates)
            assert max(rates) > 0.75 * true, (name, device, rates)


@pytest.mark.slow
def test_rounds_take_as_long_as_predicted(record: list[dict[str, Any]]) -> None:
    block = record[1]
    predicted = sum(seconds for phase, seconds in block["estimates"]["predicted"].items() if phase.startswith("a"))
    measured = statistics.median(block["estimates"]["measured"]["rounds_s"])
    assert len(block["estimates"]["measured"]["rounds_s"]) == 5
    assert measured == pytest.approx(predicted, rel=0.15)


@pytest.mark.slow
def test_phases_add_up_to_what_the_clock_shows(record: list[dict[str, Any]]) -> None:
    for before, block in itertools.pairwise(record):
        measured = block["estimates"]["measured"]
        wall_s = block["time_s"] - before["time_s"]
        assert measured["wall_s"] == pytest.approx(wall_s, abs=0.2)
        assert sum(block["seconds"].values()) + measured["other_s"] == pytest.approx(measured["wall_s"], abs=1e-3)
    steady = record[1]
    assert sum(steady["seconds"].values()) > 0.85 * steady["estimates"]["measured"]["wall_s"]
    assert steady["bottleneck"] == ["device-2", "a2"]


@pytest.mark.slow
def test_the_plan_pays(record: list[dict[str, Any]]) -> None:
    """The same number of rounds under every plan, in turns: AdaptSFL's cuts against the same cut for all."""
    seconds: dict[int, list[float]] = {}
    for plan, block in zip(PLANS, record, strict=True):
        seconds.setdefault(plan, []).append(block["estimates"]["measured"]["wall_s"])
    least = {plan: min(times) for plan, times in seconds.items()}
    grid = [least[plan] for plan in GRID]
    assert least[0] < 0.8 * max(grid), seconds
    if os.environ.get("ADAPTSFL_QUIET_MACHINE"):  # elsewhere a tenth is less than what other programs take
        assert least[0] < 1.1 * min(grid), seconds
