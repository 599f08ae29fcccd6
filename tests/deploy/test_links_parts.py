"""Mini-batches in parts, and types of numbers, over links of known rates: rounds take as long as predicted."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from adaptsfl.fleet import Device
from deploy.laid import link
from deploy.test_links import DELAYED, LINKS, measured_s, predicted_s, run_over

PARTS, TYPES = (1, 2, 4, 8), {"float32": 0, "float16": 1, "int8": 3}
PLAN, REPEATS = 41111, 2
WARM_UP = ((42222, 10), (PLAN, 10))
WAYS = tuple(10 * parts + index for index in TYPES.values() for parts in PARTS)
# The device's rate is what parts have to follow: the first cut has the largest activations.
PLANS = (*WARM_UP, *((PLAN, way) for _ in range(REPEATS) for way in WAYS))


def run_in_parts(
    folder: Path, links: Sequence[Device], plans: Sequence[tuple[int, int]], rounds: int, *changes: str
) -> list[dict[str, Any]]:
    """Return the record of a run that follows one plan after another, each sent in its own way."""
    cuts, sent = [plan for plan, _ in plans], [way for _, way in plans]
    options = f'run.options={{"scripted_policy:Scripted"={{plans={cuts},sent={sent}}}}}'
    return run_over(folder, links, cuts, rounds, options, *changes)


def test_no_more_is_measured_of_links_than_there_is_if_mini_batches_come_in_parts(tmp_path: Path) -> None:
    links = (link(up=1, down=4, delay_ms=5), link(up=5, down=12))
    found = run_in_parts(tmp_path, links, ((311, 43), (311, 20)), 6, "training.batch_size=16")
    assert [(block["micro_batches"], block["wire_dtype"]) for block in found] == [(4, "int8"), (2, "float32")]
    for name in ("uplink_bps", "downlink_bps"):
        for k, device in enumerate(links):
            rates = [block["resources"][name][k] for block in found]
            assert 0 < statistics.median(rates) < 1.1 * getattr(device, name), (name, device, rates)


@pytest.mark.slow
@pytest.mark.parametrize("links", [LINKS, DELAYED], ids=["rates", "rates and delays"])
def test_rounds_in_parts_take_as_long_as_predicted(links: Sequence[Device], tmp_path: Path) -> None:
    """Of every way the better one of its blocks: other programs of this machine may stall one of them."""
    record = run_in_parts(tmp_path, links, PLANS, 4 * len(PLANS))
    table: dict[int, list[float]] = {}
    for (_, way), block in zip(PLANS[len(WARM_UP) :], record[len(WARM_UP) :], strict=True):
        table.setdefault(way, []).append(measured_s(block, "a") / predicted_s(block, "a"))
    for way, ratios in table.items():
        print(f"{way // 10} parts in type {way % 10}: measured over predicted", *(f"{ratio:.2f}" for ratio in ratios))
    for way, ratios in table.items():
        assert min(abs(ratio - 1) for ratio in ratios) < 0.15, (way, ratios)


@pytest.mark.slow
def test_parts_hide_the_time_of_uploads_behind_downloads(tmp_path: Path) -> None:
    """Links as fast up as down: with 8 parts a round takes 9/16 of the time that it takes undivided, or little more."""
    links = [link(2, 2)] * 2
    plans = ((411, 10), (411, 10), (411, 80), (411, 80))
    record = run_in_parts(tmp_path, links, plans, 16)
    took = {way: min(measured_s(block, "a") for block in record[k : k + 2]) for way, k in ((10, 0), (80, 2))}
    assert took[80] < 0.7 * took[10], took
