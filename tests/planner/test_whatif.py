import pytest

from adaptsfl import planner
from problems import by_hand, paper_like


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
