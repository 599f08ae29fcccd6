import dataclasses
import itertools

import numpy as np
import pytest

from adaptsfl import planner
from adaptsfl.convergence import PowerRounds, RoundsTable
from problems import by_hand, measured_like, paper_like


def test_sensitivity_goes_the_right_way_for_every_resource():
    problem = paper_like(devices=10, seed=2, fleet="heterogeneous")
    plan = planner.plan(problem)
    rows = planner.sensitivity(problem, plan)
    assert len(rows) == 10
    for row in rows:
        ratio = row.best.predicted_time_s / plan.predicted_time_s
        assert ratio >= 1 - 1e-9 if row.factor < 1 else ratio <= 1 + 1e-9
        assert row.best.predicted_time_s <= row.kept_time_s * (1 + 1e-9)
    assert any(abs(row.best.predicted_time_s / plan.predicted_time_s - 1) > 0.1 for row in rows)


def test_sensitivity_worked_by_hand():
    """Cuts 1 and 2, I = 1: 35.8 s a round; a server twice as fast saves half of its 4.8 s."""
    problem = by_hand(interval=1, cuts=[1, 2])
    plan = planner.plan(problem)
    assert plan.predicted_time_s == pytest.approx(40 * 35.8)
    doubled = next(r for r in planner.sensitivity(problem, plan) if (r.resource, r.factor) == ("server compute", 2.0))
    assert doubled.best.predicted_time_s == doubled.kept_time_s == pytest.approx(40 * 33.4)


def test_alternatives_are_never_better_than_the_optimum():
    problem = paper_like(devices=10, seed=2, fleet="heterogeneous")
    plan = planner.plan(problem)
    rows = planner.alternatives(problem, plan)
    assert rows[0].title == "one cut for all"
    assert all(row.ratio >= 1 - 1e-9 for row in rows)
    assert {row.interval - plan.interval for row in rows[1:]} == {-2, -1, 1, 2}


def test_alternatives_keep_to_the_allowed_intervals():
    problem = by_hand(interval=1)
    assert [row.title for row in planner.alternatives(problem, planner.plan(problem))] == ["one cut for all"]


def test_alternatives_to_a_tables_interval_are_the_tables_own():
    table = RoundsTable(np.array([1, 2, 4, 8, 16]), np.ones((3, 5)))
    for longest, others in ((8, [2, 4]), (2, [1])):
        problem = by_hand(convergence=table, max_interval=longest)
        rows = planner.alternatives(problem, planner.plan(problem))
        assert [row.interval for row in rows[1:]] == others


@pytest.mark.parametrize("form", ["bound", "powers", "table"])
def test_other_rounds_go_the_right_way(form):
    problem = paper_like(devices=10, seed=2, fleet="heterogeneous")
    problem = problem if form == "bound" else measured_like(problem, form)
    plan = planner.plan(problem)
    half, double = planner.other_rounds(problem, plan)
    assert (half.factor, double.factor) == (0.5, 2.0)
    assert half.best.predicted_time_s < plan.predicted_time_s < double.best.predicted_time_s
    for row in (half, double):
        assert row.best.predicted_time_s <= row.kept_time_s * (1 + 1e-9)


def test_other_rounds_worked_by_hand():
    """Cuts 1 and 2, I = 4: 26.8 + 9/4 s a round; p = 0.5, so 2 rounds for one, and √2 or 4 with half or double p."""
    problem = by_hand(interval=4, cuts=[1, 2], convergence=PowerRounds([0.5] * 3))
    plan = planner.plan(problem)
    assert plan.relative_rounds == 2.0
    times = [row.kept_time_s for row in planner.other_rounds(problem, plan)]
    assert times == pytest.approx([2**0.5 * 29.05, 4 * 29.05])


def test_no_plan_is_left_where_double_the_drift_eats_all_progress():
    """κ₂ = 0.03, I = 5: D = 0.75 of c = 1."""
    problem = by_hand(interval=5, cuts=[1, 2])
    half, double = planner.other_rounds(problem, planner.plan(problem))
    assert half.best is not None
    assert (double.best, double.kept_time_s) == (None, np.inf)


def test_other_rounds_beyond_what_powers_may_be_are_left_out():
    problem = by_hand(convergence=PowerRounds([0.1, 0.2, 8.0]))
    assert [row.factor for row in planner.other_rounds(problem, planner.plan(problem))] == [0.5]


BOTH = {"micro_batches": (1, 2, 4), "wires": {"float32": 1.0, "int8": 1.01, "int4": 1.1}, "batch_size": 4}


def test_without_a_choice_no_plan_is_faster():
    """Keeping the rest is never faster than planning it anew, nor leaving both out than leaving out one."""
    problem = dataclasses.replace(paper_like(devices=10, seed=2, fleet="heterogeneous"), **BOTH)
    plan = planner.plan(problem)
    rows = {(row.title, row.replanned): row for row in planner.without(problem, plan)}
    titles = ("parts", "smaller types", "both")
    assert set(rows) == set(itertools.product(titles, (False, True)))
    for title in titles:
        assert 1 < rows[title, True].ratio <= rows[title, False].ratio
        assert rows[title, True].ratio <= rows["both", True].ratio
        assert rows[title, False].ratio <= rows["both", False].ratio
    assert (rows["parts", True].plan.micro_batches, rows["smaller types", True].plan.wire_dtype) == (1, "float32")
    neither = planner.plan(dataclasses.replace(problem, micro_batches=(1,), wires=None))
    assert rows["both", True].plan.predicted_time_s == pytest.approx(neither.predicted_time_s)


def test_without_parts_worked_by_hand():
    """Cuts 1 and 2, I = 1: 18.4 s in two parts, 26.8 s undivided (see test_latency.py); an aggregation takes 9 s."""
    problem = by_hand(interval=1, cuts=[1, 2], micro_batches=(1, 2))
    kept, anew = planner.without(problem, planner.plan(problem))
    assert (kept.replanned, anew.replanned) == (False, True)
    assert kept.ratio == anew.ratio == pytest.approx(35.8 / 27.4)


def test_a_plan_that_makes_no_choice_has_nothing_to_leave_out():
    problem = by_hand(interval=1, cuts=[1, 2])
    assert planner.without(problem, planner.plan(problem)) == []
    exact_numbers = by_hand(interval=1, cuts=[1, 2], wires={"float32": 1.0, "int8": 100.0})
    assert planner.without(exact_numbers, planner.plan(exact_numbers)) == []


def test_alternatives_and_sensitivity_keep_to_the_choices():
    problem = dataclasses.replace(paper_like(devices=5, seed=1, fleet="heterogeneous"), **BOTH)
    plan = planner.plan(problem)
    assert all(row.ratio >= 1 - 1e-9 for row in planner.alternatives(problem, plan))
    for row in planner.sensitivity(problem, plan):
        assert row.best.micro_batches in (1, 2, 4)
        assert row.best.predicted_time_s <= row.kept_time_s * (1 + 1e-9)
