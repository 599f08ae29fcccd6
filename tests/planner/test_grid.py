import dataclasses
import itertools
import math
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptsfl.planner.bound import cut_times
from adaptsfl.planner.choices import Choice, Floor
from adaptsfl.planner.exact import Incumbent, _Search
from adaptsfl.planner.grid import Box, Grid, _summable, deepest_cuts, fitting
from adaptsfl.planner.interval import Rules
from adaptsfl.planner.terms import ROUND, Terms
from problems import measured_like, server_bound, whole_if_tiny


@given(st.lists(st.floats(0, 1e15).map(whole_if_tiny), min_size=1, max_size=20), st.integers(1, 1000))
def test_summable_values_have_exact_sums_in_any_order(values, devices):
    rounded = _summable(np.array(values), devices)
    several = np.resize(rounded, devices)
    assert np.cumsum(several)[-1] == math.fsum(several)
    assert np.cumsum(np.concatenate((several, -several[::-1])))[-1] == 0
    assert (rounded <= values).all()
    assert (np.array(values) - rounded).max() <= devices * max(values) * 2.0**-51


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=20), st.integers(1, 100_000))
def test_whole_numbers_stay_as_they_are(values, devices):
    np.testing.assert_array_equal(_summable(np.array(values, dtype=float), devices), values)


@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("form", ["bound", "powers", "table"])
@given(st.integers(0, 2**32 - 1))
def test_no_plan_is_faster_than_the_bound_of_its_cell(form, parts, seed):
    """Plans of a box, with their best intervals, against the bounds of the cells they are in, with charges and without.

    Only plans count in which every device takes its deepest cut within the plan's own maxima: others are no better.
    """
    rng = np.random.default_rng(seed)
    problem = server_bound(devices=4, seed=seed, layers=4)
    problem = problem if form == "bound" else measured_like(problem, form)
    # Aggregations and the exchange between servers matter in one problem and not in the other.
    fleet = problem.fleet.scaled(10 ** rng.uniform(-2, 1), "fed_uplink_bps", "fed_downlink_bps")
    problem = dataclasses.replace(problem, fleet=fleet.scaled(10 ** rng.uniform(-2, 1), "server.to_fed_bps"))
    cuts = np.array(list(itertools.product(range(1, 5), repeat=4)))
    cuts = cuts[cuts.max(axis=1) == 4]
    maxima = cut_times(problem, Terms(parts))[:, cuts - 1, np.arange(4)].max(axis=2)  # (terms, plans)
    ends = maxima[:, rng.integers(0, len(cuts), 3)]
    rules = Rules(problem)
    search = _Search(Choice(problem, Terms(parts)), Incumbent(), rules, Floor(problem, rules, choices=1))
    search.begin()
    settled = search.settle(Box(4, ends.min(axis=1), ends.max(axis=1), np.arange(4)), search.table)
    if settled is None or not settled[0].active.size:
        return
    rule = search.rule(4)
    times = rule.best_time_s(problem.round_s(cuts, parts), problem.aggregation_s(cuts))
    with mock.patch("adaptsfl.planner.grid.BANDS", int(rng.choice([2, 4, 64]))):
        plain = Grid(*settled, rule, search.server, np.inf, charged=False)
        charged = Grid(*settled, rule, search.server, np.inf, charged=True)
    assert (charged.bound_s >= plain.bound_s).all()
    inside = ((maxima >= plain.box.low[:, None]) & (maxima <= plain.high[:, None])).all(axis=0)
    for plan in np.flatnonzero(inside):
        if not np.array_equal(deepest_cuts(fitting(search.table, maxima[:, plan])), cuts[plan]):
            continue
        round_s = float(problem.round_s(cuts[plan], parts))
        row, column = (
            int(np.searchsorted(bands.low, round_s, side="right")) - 1
            if term == ROUND
            else int(np.searchsorted(bands.high, maxima[term, plan]))
            for term, bands in zip(plain.axes, plain.bands, strict=True)
        )
        assert charged.bound_s[row, column] <= times[plan] * (1 + 1e-12)
