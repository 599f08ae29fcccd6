import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptsfl.config import CalibrationConfig, ConvergenceConfig, DriftConfig, parse
from adaptsfl.convergence import (
    LONGEST_INTERVAL,
    Constants,
    ConvergenceModel,
    GrowthRounds,
    PowerRounds,
    RoundsTable,
    gradient_bound,
    model_from,
    noise_floor,
)
from adaptsfl.errors import InfeasiblePlan, InvalidInput

CONSTANTS = Constants(
    smoothness=2.0, gradient_moment=[1.0, 3.0], gradient_variance=[2.0, 4.0], initial_gap=5.0, target=2.0
)
PAPER = ConvergenceModel.from_constants(CONSTANTS, learning_rate=0.1, devices=3)


def test_theorem_1_worked_by_hand():
    """β = 2, γ = 0.1, N = 3, ϑ = 5, R = 50, I = 4, L_c = 2.

    2ϑ/(γR) = 10/5 = 2.   βγΣσ²/N = 2·0.1·6/3 = 0.4.   4β²γ²I²ΣG² = 4·4·0.01·16·4 = 10.24.
    """
    assert gradient_bound(CONSTANTS, 0.1, 3, rounds=50, interval=4, deepest=2) == pytest.approx(12.64, rel=1e-14)


def test_theorem_1_has_no_drift_at_interval_1():
    """The indicator 1{I>1}: 2 + 0.4, however deep the cut."""
    assert gradient_bound(CONSTANTS, 0.1, 3, rounds=50, interval=1, deepest=2) == pytest.approx(2.4, rel=1e-14)


def test_theorem_1_counts_only_client_specific_layers():
    """L_c = 1: 4·4·0.01·16·1 = 2.56."""
    assert gradient_bound(CONSTANTS, 0.1, 3, rounds=50, interval=4, deepest=1) == pytest.approx(4.96, rel=1e-14)


def test_corollary_1_worked_by_hand():
    """c = 2 − 0.4 = 1.6; at I = 2 and L_c = 1, D = 0.16·4 = 0.64, so R = 10 / (0.1·0.96) = 104.1666…"""
    assert PAPER.budget == pytest.approx(1.6, rel=1e-14)
    assert float(PAPER.rounds(2, 1)) == pytest.approx(10 / (0.1 * 0.96), rel=1e-13)
    assert float(PAPER.rounds(1, 2)) == pytest.approx(10 / (0.1 * 1.6), rel=1e-13)


@given(st.integers(1, 30), st.integers(1, 2), st.floats(0.5, 100))
def test_corollary_1_inverts_theorem_1(interval, deepest, target):
    """After R rounds the bound is the target, wherever R is finite."""
    constants = Constants(2.0, [1.0, 3.0], [2.0, 4.0], 5.0, target)
    rounds = float(ConvergenceModel.from_constants(constants, 0.1, 3).rounds(interval, deepest))
    if np.isfinite(rounds):
        assert gradient_bound(constants, 0.1, 3, rounds, interval, deepest) == pytest.approx(target, rel=1e-9)
    else:
        assert gradient_bound(constants, 0.1, 3, 1e300, interval, deepest) >= target * (1 - 1e-12)


@given(
    st.floats(0.1, 4),
    st.floats(1e-6, 10),
    st.floats(1e-3, 10),
)
def test_largest_interval_is_the_last_one_that_makes_progress(power, slope, budget):
    model = ConvergenceModel(0.1, 1.0, [slope], power, budget)
    largest = model.largest_interval(1)
    assert 1 <= largest <= LONGEST_INTERVAL
    assert model.progress(largest, 1) > 0
    if largest < LONGEST_INTERVAL:
        assert model.progress(largest + 1, 1) <= 0


def test_without_drift_any_interval_makes_progress():
    assert ConvergenceModel(0.1, 1.0, [0.0, 1.0], 2.0, 0.5).largest_interval(1) == LONGEST_INTERVAL


def test_infeasible_target_names_the_smallest_feasible_one():
    """The noise floor is 0.4, so a target of 0.4 is never reached and one just above it is."""
    assert noise_floor(CONSTANTS, 0.1, 3) == pytest.approx(0.4)
    for target in (0.3, 0.4):
        model = ConvergenceModel.from_constants(Constants(2.0, [1.0, 3.0], [2.0, 4.0], 5.0, target), 0.1, 3)
        with pytest.raises(InfeasiblePlan, match=r"convergence.target: is 0\.[34].*Raise target above 0\.4"):
            model.check_feasible()
    ConvergenceModel.from_constants(Constants(2.0, [1.0, 3.0], [2.0, 4.0], 5.0, 0.401), 0.1, 3).check_feasible()


def test_infeasible_interval_names_the_target_it_would_need():
    """At I = 4 and L_c = 1 the drift is 2.56: with the noise, 2.96 is needed and 2 is given."""
    with pytest.raises(InfeasiblePlan, match=r"interval 4 and cuts up to 1.*Raise target above 2\.96"):
        PAPER.check_feasible(interval=4, deepest=1)


@pytest.mark.parametrize("budget", [0.0, -1.0])
def test_budget_that_is_not_positive_is_infeasible(budget):
    with pytest.raises(InfeasiblePlan, match=r"convergence.budget: is .*Give a budget above zero"):
        ConvergenceModel(0.1, 1.0, [0.1], 1.0, budget).check_feasible()


def test_drift_too_small_to_matter_is_none():
    tiny = Constants(1e-30, [1.0, 3.0], [2.0, 4.0], 5.0, 2.0)
    assert ConvergenceModel.from_constants(tiny, 0.1, 3).drift_per_layer.tolist() == [0.0, 0.0]


def test_drift_too_large_to_mean_anything_names_the_smoothness():
    with pytest.raises(InvalidInput, match=r"smoothness: is 1e\+40, and with it the drift"):
        ConvergenceModel.from_constants(Constants(1e40, [1.0], [2.0], 5.0, 2.0), 0.1, 3)


def test_paper_is_a_case_of_the_general_form():
    """κ_j = 4β²γ²G_j² = 4·4·0.01·(1, 3) = (0.16, 0.48), p = 2, c = 1.6."""
    config = ConvergenceConfig(initial_gap=5.0, drift=DriftConfig(per_layer=[0.16, 0.48], power=2.0), budget=1.6)
    general = model_from(config, 0.1, 3, layers=2)
    for interval in (1, 2, 3, 5):
        for deepest in (1, 2):
            np.testing.assert_allclose(general.rounds(interval, deepest), PAPER.rounds(interval, deepest), rtol=1e-13)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"budget": 1.0}, r"drift: is missing"),
        ({"smoothness": 1.0, "target": 1.0, "gradient_moment": [1.0]}, r"gradient_variance: is missing"),
        ({"smoothness": 1.0, "budget": 1.0}, r"smoothness: is given beside budget"),
        ({"budget": 1.0, "drift": {"per_layer": [1.0, 1.0], "power": 2.0}}, r"drift.per_layer: has 2 entries"),
        ({"budget": 1.0, "drift": {"per_layer": [-1.0], "power": 2.0}}, r"drift.per_layer\[0\]: is -1"),
        ({"budget": 1.0, "drift": {"per_layer": [1.0], "power": 0.0}}, r"drift.power: is 0"),
        ({"budget": float("nan"), "drift": {"per_layer": [1.0], "power": 1.0}}, r"budget: is nan"),
        ({}, r"smoothness: is missing. Give all of: initial_gap, smoothness"),
        ({"powers": [0.1]}, r"initial_gap: is given beside powers. Give one of: growth; powers; table;"),
    ],
)
def test_bad_sections_are_explained(config, message):
    with pytest.raises(InvalidInput, match=message):
        model_from(parse(ConvergenceConfig, {"initial_gap": 1.0, **config}), 0.1, 3, layers=1)


# ── Powers and tables ───────────────────────────────────────────────────────────────────────────────────────────────


def measured(**config):
    return model_from(parse(ConvergenceConfig, config), 0.1, 3, layers=2)


def test_growth_worked_by_hand():
    """c = 0.1 and 0.5, q = ½: R(16, 2) = 1 + 0.5·3, and at I = 1 nothing is lost, however deep the cut."""
    model = measured(growth={"factors": [0.1, 0.5], "power": 0.5})
    assert isinstance(model, GrowthRounds)
    assert model.rounds(16, np.array([1, 2])).tolist() == pytest.approx([1.3, 2.5])
    assert model.rounds(np.array([1.0, 4.0, 9.0]), 2).tolist() == [1.0, 1.5, 2.0]
    assert measured(growth={"factors": [0.1, 0.5]}).power == CalibrationConfig().power


@pytest.mark.parametrize(("shortest", "longest"), [(1, 1), (1, 16), (5, 12), (37, 37), (3, 1000), (41, 43), (9, 8)])
def test_intervals_of_a_growth_are_few_and_near_to_all(shortest, longest):
    """Every interval of the range is within a twentieth of one that may be chosen, and both ends may."""
    choices = np.array(measured(growth={"factors": [0.1, 0.5]}).choices(2, shortest, longest))
    every = np.arange(shortest, longest + 1)
    assert set(choices) <= set(every)
    assert (np.diff(choices) > 0).all()
    if every.size:
        nearest = np.abs(np.log(every[:, None] / choices)).min(axis=1)
        assert nearest.max() < 0.055
        assert nearest[every <= 32].max(initial=0) == nearest[0] == nearest[-1] == 0


def test_powers_worked_by_hand():
    """p = 0 and 0.5: R(16, 1) = 1, R(16, 2) = 4, and at I = 1 nothing is lost, however deep the cut."""
    model = measured(powers=[0, 0.5])
    assert isinstance(model, PowerRounds)
    assert model.rounds(16, np.array([1, 2])).tolist() == [1.0, 4.0]
    assert model.rounds(np.array([1.0, 4.0, 9.0]), 2).tolist() == [1.0, 2.0, 3.0]
    assert model.choices(2, 3, 6) == range(3, 7)


def test_tables_are_looked_up():
    model = measured(table={"intervals": [1, 4, 16], "rounds": [[10, 10, 12], [10, 11, 50]]})
    assert isinstance(model, RoundsTable)
    assert model.rounds(np.array([1.0, 4.0, 16.0]), 2).tolist() == [10, 11, 50]
    assert model.rounds(16, np.array([1, 2])).tolist() == [12, 50]
    assert model.choices(1, 2, 20) == [4, 16]


def test_a_table_knows_nothing_of_other_intervals():
    model = measured(table={"intervals": [1, 4, 16], "rounds": [[1, 1, 1], [1, 1, 1]]})
    assert model.rounds(np.array([2.0, 5.0, 17.0, 1e9]), 1).tolist() == [np.inf] * 4
    for interval, nearest in ((7, "are 4 and 16"), (99, "is 16")):
        with pytest.raises(InfeasiblePlan, match=rf"planner.interval: is {interval}, which .* the nearest {nearest}\."):
            model.check_feasible(interval, 1)


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_what_is_scaled(factor):
    """The drift of the bound, c, p, and of a table log R, so that a table of powers is scaled as powers are."""
    np.testing.assert_allclose(PAPER.scaled(factor).drift(3, 2), factor * PAPER.drift(3, 2))
    assert GrowthRounds([0.1, 0.4], 0.8).scaled(factor).factors.tolist() == [0.1 * factor, 0.4 * factor]
    powers = PowerRounds([0.1, 0.4])
    assert powers.scaled(factor).powers.tolist() == [0.1 * factor, 0.4 * factor]
    intervals, every_cut = np.array([1, 4, 16]), np.array([[1], [2]])
    table = RoundsTable(intervals, 7 * powers.rounds(intervals.astype(float), every_cut))
    expected = 7 * powers.scaled(factor).rounds(intervals.astype(float), every_cut)
    np.testing.assert_allclose(table.scaled(factor).table, expected, rtol=1e-14)


def test_a_scaled_table_still_falls_nowhere():
    """Twice the rounds beyond R(1, L_c) of each row would: 1 + 2·(3 − 1) = 5 above 3."""
    table = RoundsTable(np.array([1, 4]), np.array([[1.0, 3.0], [3.0, 3.0]]))
    np.testing.assert_allclose(table.scaled(2.0).table, [[1.0, 9.0], [9.0, 9.0]])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, r"^: is empty. Give one of: growth; powers; table; initial_gap, drift and budget"),
        ({"growth": {"factors": [0.1]}}, r"growth.factors: has 1 entries, expected 2. Give 2, one per L_c"),
        ({"growth": {"factors": [-0.1, 0.1]}}, r"growth.factors\[0\]: is -0.1"),
        ({"growth": {"factors": [0.3, 0.1]}}, r"growth.factors\[1\]: is 0.1, below 0.3 before it"),
        ({"growth": {"factors": [0.1, 0.2], "power": 0}}, r"growth.power: is 0"),
        ({"growth": {"factors": [0.1, 0.2], "power": 11}}, r"growth.power: is 11. Give a power of at most 10"),
        ({"growth": {"factors": [0.1, 0.2]}, "powers": [0.1, 0.2]}, r"powers: is given beside growth"),
        ({"powers": [0.1]}, r"powers: has 1 entries, expected 2. Give 2, one per L_c"),
        ({"powers": [-0.1, 0.1]}, r"powers\[0\]: is -0.1"),
        ({"powers": [0.1, float("nan")]}, r"powers\[1\]: is nan"),
        ({"powers": [0.1, 11]}, r"powers\[1\]: is 11. Give powers of at most 10"),
        ({"powers": [0.3, 0.1]}, r"powers\[1\]: is 0.1, below 0.3 before it. Give numbers that do not fall with L_c"),
        ({"powers": [0.1, 0.2], "table": {"intervals": [1], "rounds": [[1], [1]]}}, r"powers: is given beside table"),
        ({"powers": [0.1, 0.2], "budget": 1.0}, r"budget: is given beside powers"),
        ({"table": {"intervals": [1], "rounds": [[1]]}}, r"table.rounds: has 1 rows, expected 2. Give 2, one per L_c"),
        ({"table": {"intervals": [1, 4], "rounds": [[1, 1], [1]]}}, r"table.rounds\[1\]: has 1 entries, expected 2"),
        ({"table": {"intervals": [], "rounds": [[], []]}}, r"table.intervals: is empty. Begin with 1"),
        ({"table": {"intervals": [2, 4], "rounds": [[1, 1]] * 2}}, r"table.intervals\[0\]: is 2. Begin with 1"),
        ({"table": {"intervals": [1, 4, 4], "rounds": [[1, 1, 1]] * 2}}, r"table.intervals\[2\]: is 4, after 4"),
        ({"table": {"intervals": [1, 4, 2], "rounds": [[1, 1, 1]] * 2}}, r"table.intervals\[2\]: is 2, after 4"),
        ({"table": {"intervals": [1, 10**10], "rounds": [[1, 1]] * 2}}, r"table.intervals\[1\]: is 10000000000"),
        ({"table": {"intervals": [1, 4], "rounds": [[1, 0], [1, 1]]}}, r"table.rounds\[0\]\[1\]: is 0"),
        ({"table": {"intervals": [1, 4], "rounds": [[1, float("inf")], [1, 1]]}}, r"table.rounds\[0\]\[1\]: is inf"),
        (
            {"table": {"intervals": [1, 4], "rounds": [[1, 1], [1, 0.96]]}},
            r"table.rounds\[1\]\[1\]: is 0.96, below 1 of the shorter interval 1. .*a running maximum will do",
        ),
        (
            {"table": {"intervals": [1, 4], "rounds": [[1, 1.5], [1, 1.4]]}},
            r"table.rounds\[1\]\[1\]: is 1.4, below 1.5 of the shallower L_c 1. Give rounds that do not fall with L_c",
        ),
    ],
)
def test_bad_powers_and_tables_are_explained(config, message):
    with pytest.raises(InvalidInput, match=message):
        measured(**config)
