"""A round's timeline against the clock's own formulas."""

import dataclasses

import numpy as np
import pytest

from adaptsfl import latency
from adaptsfl.fleet import RATES, Fleet
from adaptsfl.report.timeline import round_timeline


def test_a_round_is_as_long_as_the_clock_says(runs):
    run = runs[0]
    block = next(block for block in run.blocks if 0 not in block.cuts)
    fleet = Fleet(**{name: np.array(block.resources[name]) for name in RATES}, server=run.server)
    timeline = round_timeline(run, block)
    assert timeline.length_s == pytest.approx(latency.round_s(run.costs, fleet, np.array(block.cuts), run.batch_size))
    assert timeline.devices.tolist() == list(range(len(run.devices)))


def test_a_device_that_is_not_there_has_no_lane(runs):
    run = runs[0]
    block = run.blocks[0]
    cuts = (0, *block.cuts[1:-1], 2)
    resources = {name: (*block.resources[name][:-1], float("nan")) for name in RATES}
    timeline = round_timeline(run, dataclasses.replace(block, cuts=cuts, resources=resources))
    assert timeline.devices.tolist() == list(range(1, len(run.devices) - 1))
    assert timeline.cuts.tolist() == list(cuts[1:-1])


def test_nothing_where_devices_take_turns_or_resources_are_unknown(runs):
    run = runs[0]
    block = run.blocks[0]
    assert round_timeline(dataclasses.replace(run, trainer="relay"), block) is None
    assert round_timeline(run, dataclasses.replace(block, resources={})) is None
    assert round_timeline(run, dataclasses.replace(block, cuts=(0,) * len(block.cuts))) is None


@pytest.mark.parametrize("parts", [1, 2, 4])
@pytest.mark.parametrize("wire_dtype", [None, "int8"])
def test_a_round_in_parts_ends_with_its_last_bar(runs, parts, wire_dtype):
    run = runs[0]
    block = next(block for block in run.blocks if 0 not in block.cuts)
    block = dataclasses.replace(block, micro_batches=parts, wire_dtype=wire_dtype)
    fleet = Fleet(**{name: np.array(block.resources[name]) for name in RATES}, server=run.server)
    costs = run.costs if wire_dtype is None else run.costs.sent_as(wire_dtype)
    timeline = round_timeline(run, block)
    expected = latency.round_s(costs, fleet, np.array(block.cuts), run.batch_size, parts)
    assert timeline.bars[:, 1].max() == pytest.approx(expected)
    assert timeline.length_s == pytest.approx(expected)
    starts, ends = timeline.bars[:, 0], timeline.bars[:, 1]
    assert np.all(starts <= ends)
    if parts == 1:  # one phase after the other
        assert np.all(ends[:-1] <= starts[1:] + 1e-15)
    else:
        assert np.any(ends[0] > starts[1])  # sending begins before computing ends
