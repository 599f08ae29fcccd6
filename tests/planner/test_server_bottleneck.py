"""The exact solver where the server is the bottleneck: thresholds are charged to devices, and the optimum stays.

In other tests problems are solved before the solver begins to charge; here it charges from the first box on.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adaptsfl import planner
from oracle import CLOSE, check_exact, check_plan
from problems import Small, measured_like, server_bound, small_problems


@contextlib.contextmanager
def charges(*, after: float, bands: int) -> Iterator[None]:
    """Let the exact solver charge thresholds to devices after so many boxes, and give its grids so many bands."""
    with mock.patch("adaptsfl.planner.exact.CHARGED_AFTER", after), mock.patch("adaptsfl.planner.grid.BANDS", bands):
        yield


@pytest.mark.parametrize("form", ["bound", "powers", "table"])
@settings(max_examples=150)
@given(st.data())
def test_exact_equals_exhaustive_where_the_server_is_slow(form, data):
    restricted = data.draw(st.booleans())
    problem = data.draw(small_problems(Small(5, 4, restricted=restricted, rounds=form, slow_server=True)))
    with charges(after=0, bands=data.draw(st.sampled_from([2, 3, 64]))):
        check_exact(problem)


@pytest.mark.parametrize("form", ["bound", "powers", "table"])
@pytest.mark.parametrize("seed", range(8))
def test_exact_equals_exhaustive_where_the_server_is_the_bottleneck(seed, form):
    problem = server_bound(devices=6, seed=seed, layers=5)
    problem = problem if form == "bound" else measured_like(problem, form)
    for bands in (2, 64):
        with charges(after=0, bands=bands):
            check_exact(dataclasses.replace(problem, max_interval=60))


@pytest.mark.parametrize("form", ["bound", "powers", "table"])
@pytest.mark.parametrize("seed", range(3))
def test_charges_save_boxes_and_change_no_optimum(seed, form):
    problem = server_bound(devices=60, seed=seed)
    problem = problem if form == "bound" else measured_like(problem, form)
    with charges(after=np.inf, bands=64):
        plain = planner.plan(problem)
    with charges(after=0, bands=64):
        charged = planner.plan(problem)
    assert plain.status == charged.status == "optimal"
    assert charged.predicted_time_s == pytest.approx(plain.predicted_time_s, rel=CLOSE)
    assert charged.nodes <= plain.nodes


@pytest.mark.parametrize("form", ["bound", "powers", "table"])
def test_a_search_with_charges_that_is_stopped_has_an_honest_bound(form, monkeypatch):
    """Stopped after so many boxes: no bound is above the optimum, and the last bound meets it."""
    problem = server_bound(devices=40, seed=1)
    problem = problem if form == "bound" else measured_like(problem, form)
    best = planner.plan(problem)
    for boxes in (1, 5, 25, 50):
        clock = itertools.count()
        monkeypatch.setattr("adaptsfl.planner.exact.time.perf_counter", lambda clock=clock: float(next(clock)))
        with charges(after=0, bands=64):
            stopped = planner.plan(problem, time_limit_s=boxes)
        assert stopped.lower_bound_s <= best.predicted_time_s * (1 + CLOSE)
        assert stopped.predicted_time_s >= best.predicted_time_s * (1 - CLOSE)
        assert stopped.status == ("optimal" if stopped.gap <= 1e-10 else "limit")
        check_plan(problem, stopped)
