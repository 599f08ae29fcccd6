import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptsfl.convergence import ConvergenceModel, PowerRounds, RoundsTable
from adaptsfl.planner.interval import EnvelopeRule, IntervalRule, best_interval, interval_rule
from adaptsfl.planner.problem import total_s
from problems import by_hand, rounds_models, whole_if_tiny


def rule(*, slope=0.01, power=2.0, budget=1.0, **limits) -> IntervalRule:
    model = ConvergenceModel(0.1, 2.0, [slope, slope, slope], power, budget)
    return interval_rule(by_hand(convergence=model, **limits), 1)


def all_times(rule: IntervalRule, A: float, B: float) -> dict[int, float]:
    """Θ for every interval that makes progress."""
    return {i: (A + B / i) / float(rule.model.progress(i, 1)) for i in range(rule.shortest, int(rule.longest) + 1)}


def test_root_solves_the_papers_cubic():
    """With p = 2, Ξ(I) = 2AκI³ + 3BκI² − Bc: at A = 3, B = 20, κ = 0.01, c = 1, Ξ(I') = 0.06·I'³ + 0.6·I'² − 20."""
    root = float(rule().root(np.float64(3.0), np.float64(20.0)))
    assert 0.06 * root**3 + 0.6 * root**2 - 20 == pytest.approx(0, abs=1e-11)
    assert 4 < root < 5


def test_theorem_2_worked_by_hand():
    """A = 3, B = 20, κ = 0.01, c = 1, γ/2ϑ = 0.025, so Θ(I) = 40·(3 + 20/I) / (1 − 0.01·I²) for I ≥ 2.

    Θ(1) = 40·23 = 920; Θ(4) = 40·8/0.84 = 380.95…; Θ(5) = 40·7/0.75 = 373.33…; Θ(6) = 40·6.33…/0.64 = 395.83…
    """
    assert float(rule().best(np.float64(3.0), np.float64(20.0))) == 5
    assert float(rule().best_time_s(np.float64(3.0), np.float64(20.0))) == pytest.approx(40 * 7 / 0.75, rel=1e-14)


def test_the_ceiling_is_not_taken_beyond_the_pole():
    """κ = 0.3, c = 1: the pole lies at 1.83, so 2 rounds make no progress and I = 1 is all there is."""
    assert float(rule(slope=0.3).best(np.float64(1.0), np.float64(1e9))) == 1


def test_interval_1_pays_no_drift():
    """κ = 0.2: Θ(2) = 40·(1 + B/2)/0.2 against Θ(1) = 40·(1 + B): for no B does the second round pay."""
    assert float(rule(slope=0.2).best(np.float64(1.0), np.float64(1000.0))) == 1


def test_without_drift_the_interval_is_as_long_as_allowed():
    assert float(rule(slope=0.0, max_interval=77).best(np.float64(1.0), np.float64(1.0))) == 77
    assert float(rule(slope=0.0, max_interval=77).best(np.float64(1.0), np.float64(0.0))) == 1


positive = st.floats(1e-4, 1e4)


@given(positive, positive, st.floats(1e-4, 1), st.sampled_from([0.3, 0.5, 1, 1.5, 2, 3]), st.floats(0.01, 5))
def test_best_interval_is_the_best_of_all(A, B, slope, power, budget):
    tried = rule(slope=slope, power=float(power), budget=budget, max_interval=400)
    times = all_times(tried, A, B)
    assert float(tried.best_time_s(np.float64(A), np.float64(B))) == pytest.approx(min(times.values()), rel=1e-12)
    assert times[int(tried.best(np.float64(A), np.float64(B)))] == pytest.approx(min(times.values()), rel=1e-12)


@given(st.lists(st.tuples(positive, positive), min_size=1, max_size=5), st.floats(0, 1).map(whole_if_tiny))
def test_many_cases_at_once_equal_one_at_a_time(cases, slope):
    A, B = np.array(cases).T
    tried = rule(slope=slope)
    alone = [float(tried.best_time_s(np.float64(a), np.float64(b))) for a, b in cases]
    np.testing.assert_array_equal(tried.best_time_s(A, B), alone)


def test_many_deepest_cuts_at_once_equal_one_at_a_time():
    problem = by_hand(convergence=ConvergenceModel(0.1, 2.0, [0.0, 0.1, 2.0], 1.5, 1.0), max_interval=1000)
    A, B = np.array([1.0, 2.0, 3.0]), np.array([50.0, 60.0, 70.0])
    together = interval_rule(problem, np.array([1, 2, 3])).best_time_s(A, B)
    alone = [float(interval_rule(problem, m).best_time_s(A[m - 1], B[m - 1])) for m in (1, 2, 3)]
    np.testing.assert_array_equal(together, alone)


@given(positive, positive, st.floats(0, 1).map(whole_if_tiny), st.sampled_from([0.5, 1, 2, 3]), st.floats(1.0001, 3))
def test_caps_are_where_the_best_time_meets_the_limit(A, B, slope, power, room):
    """Just below the cap the limit is still beaten, just above it no longer."""
    tried = rule(slope=slope, power=float(power), max_interval=400)
    limit = float(tried.best_time_s(np.float64(A), np.float64(B))) * room
    round_cap, aggregation_cap = tried.round_cap_s(limit, B), tried.aggregation_cap_s(limit, A)
    assert round_cap >= A * (1 - 1e-9)
    assert aggregation_cap >= B * (1 - 1e-9)
    for a, b in ((round_cap, B), (A, aggregation_cap)):
        assert float(tried.best_time_s(np.float64(a), np.float64(b))) == pytest.approx(limit, rel=1e-9)


# ── Powers and tables ───────────────────────────────────────────────────────────────────────────────────────────────


def test_powers_have_a_closed_form():
    """p = 0.5, A = 1, B = 20: I' = 20·0.5/0.5 = 20, where Θ = √20·(1 + 1)."""
    tried = interval_rule(by_hand(convergence=PowerRounds([0.5] * 3)), 1)
    assert float(tried.best(np.float64(1.0), np.float64(20.0))) == 20
    assert float(tried.best_time_s(np.float64(1.0), np.float64(20.0))) == pytest.approx(2 * 20**0.5, rel=1e-14)


@pytest.mark.parametrize(
    ("power", "A", "B", "interval"),
    [(0.0, 1.0, 1.0, 77), (0.0, 1.0, 0.0, 1), (0.5, 0.0, 1.0, 77), (1.0, 1.0, 1e9, 1), (1.5, 0.0, 1e9, 1)],
)
def test_powers_at_their_ends(power, A, B, interval):
    """Without any cost of longer intervals the longest is best, if averaging costs anything; from p = 1 on, 1 is."""
    tried = interval_rule(by_hand(convergence=PowerRounds([power] * 3), max_interval=77), 1)
    assert float(tried.best(np.float64(A), np.float64(B))) == interval


def test_the_envelope_worked_by_hand():
    """R = 1, 1.2, 3 at I = 1, 4, 5: lines 1 + x, 1.2 + 0.3x and 3 + 0.6x, of which the last is never lowest.

    The first two meet at x = B/A = 0.2/0.7 = 0.2857.
    """
    table = RoundsTable(np.array([1, 4, 5]), np.array([[1.0, 1.2, 3.0]] * 3))
    tried = interval_rule(by_hand(convergence=table), 1)
    assert tried.best(np.ones(4), np.array([0.0, 0.28, 0.29, 1e9])).tolist() == [1, 1, 4, 4]
    assert float(tried.best(np.float64(0.0), np.float64(1.0))) == 4


seconds = st.just(0.0) | positive


@pytest.mark.parametrize("form", ["bound", "growth", "powers", "table"])
@given(st.data(), st.lists(st.tuples(seconds, seconds), min_size=1, max_size=5), st.none() | st.integers(1, 9))
def test_the_best_interval_is_the_best_of_all_choices(form, data, cases, fixed):
    model = data.draw(rounds_models(form, 3).filter(lambda model: getattr(model, "budget", 1) > 0))
    problem = by_hand(convergence=model, max_interval=60, interval=fixed)
    A, B = np.array(cases).T
    for deepest in (1, 2, 3):
        chosen, times = interval_rule(problem, deepest).choose(A, B)
        every = [total_s(model.rounds(i, deepest), i, A, B) for i in model.choices(deepest, *problem.intervals)]
        np.testing.assert_allclose(times, np.min(every, axis=0) if every else np.inf, rtol=1e-12)
        if every:
            assert set(chosen) <= set(model.choices(deepest, *problem.intervals))


@pytest.mark.parametrize("form", ["bound", "powers"])
@given(st.data(), positive, positive, st.floats(1.0001, 3))
def test_an_envelope_of_all_intervals_equals_the_closed_forms(form, data, A, B, room):
    model = data.draw(rounds_models(form, 3).filter(lambda model: getattr(model, "budget", 1) > 0))
    problem = by_hand(convergence=model, max_interval=100)
    closed, lines = interval_rule(problem, 2), EnvelopeRule(problem, model, 2)
    A, B = np.float64(A), np.float64(B)
    np.testing.assert_allclose(closed.best_time_s(A, B), lines.best_time_s(A, B), rtol=1e-12)
    limit = float(closed.best_time_s(A, B)) * room
    assert closed.round_cap_s(limit, B) == pytest.approx(lines.round_cap_s(limit, B), rel=1e-9)
    assert closed.aggregation_cap_s(limit, A) == pytest.approx(lines.aggregation_cap_s(limit, A), rel=1e-9)


@pytest.mark.parametrize("form", ["growth", "powers", "table"])
@given(st.data(), positive, positive, st.floats(1.0001, 3))
def test_caps_of_measured_rounds_are_where_the_best_time_meets_the_limit(form, data, A, B, room):
    problem = by_hand(convergence=data.draw(rounds_models(form, 3)), max_interval=60)
    tried = interval_rule(problem, 2)
    limit = float(tried.best_time_s(np.float64(A), np.float64(B))) * room
    round_cap, aggregation_cap = tried.round_cap_s(limit, B), tried.aggregation_cap_s(limit, A)
    assert round_cap >= A * (1 - 1e-9)
    assert aggregation_cap >= B * (1 - 1e-9)
    for a, b in ((round_cap, B), (A, aggregation_cap)):
        assert float(tried.best_time_s(np.float64(a), np.float64(b))) == pytest.approx(limit, rel=1e-9)


@pytest.mark.parametrize("form", ["growth", "powers", "table"])
@given(st.data(), st.lists(st.tuples(positive, positive), min_size=3, max_size=3))
def test_many_deepest_cuts_of_measured_rounds_at_once_equal_one_at_a_time(form, data, cases):
    problem = by_hand(convergence=data.draw(rounds_models(form, 3)), max_interval=50)
    A, B = np.array(cases).T
    together = interval_rule(problem, np.array([1, 2, 3])).choose(A, B)
    alone = [interval_rule(problem, m).choose(A[m - 1], B[m - 1]) for m in (1, 2, 3)]
    np.testing.assert_array_equal(together, np.array(alone).T)


def test_best_interval_of_given_cuts():
    """Cuts 1 and 2 take 26.8 s a round and 9 s an aggregation; κ₂ = 0.03: Θ(2) = 40·31.3/0.88, Θ(1) = 40·35.8."""
    assert best_interval(by_hand(), np.array([1, 2])) == 2
    assert best_interval(by_hand(interval=4), np.array([1, 2])) == 4
