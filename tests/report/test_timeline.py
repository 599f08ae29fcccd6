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
