"""The solvers against each other: exhaustive search is the oracle, and exact must equal it everywhere."""

import dataclasses

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from adaptsfl import planner
from adaptsfl.convergence import ConvergenceModel, PowerRounds, RoundsTable
from adaptsfl.costs import CutCosts
from adaptsfl.errors import InfeasiblePlan, InvalidInput, SolverError
from adaptsfl.fleet import Fleet, Server
from adaptsfl.planner import PlanProblem, bcd
from oracle import CLOSE, check_exact, check_plan, solve
from problems import MAX_INTERVAL, Small, by_hand, measured_like, paper_like, small_problems


@settings(max_examples=800)
@given(small_problems())
def test_exact_equals_exhaustive(problem):
    event("infeasible" if solve(problem, "exact") is None else "feasible")
    check_exact(problem)


@settings(max_examples=300)
@given(small_problems(Small(most_devices=6, most_layers=3, restricted=False)))
def test_exact_equals_exhaustive_with_more_devices(problem):
    check_exact(problem)


@settings(max_examples=150)
@given(small_problems(Small(most_devices=2, most_layers=12, restricted=False)))
def test_exact_equals_exhaustive_with_more_layers(problem):
    check_exact(problem)


@pytest.mark.parametrize("form", ["growth", "powers", "table"])
@settings(max_examples=400)
@given(st.data())
def test_exact_equals_exhaustive_for_measured_rounds(form, data):
    problem = data.draw(small_problems(Small(rounds=form)))
    event("infeasible" if solve(problem, "exact") is None else "feasible")
    check_exact(problem)


@pytest.mark.parametrize("form", ["growth", "powers", "table"])
@settings(max_examples=100)
@given(st.data())
def test_exact_equals_exhaustive_for_measured_rounds_with_more_layers(form, data):
    check_exact(data.draw(small_problems(Small(most_devices=2, most_layers=12, restricted=False, rounds=form))))


@pytest.mark.parametrize("form", ["growth", "powers", "table"])
@pytest.mark.parametrize("seed", range(5))
def test_exact_equals_exhaustive_for_measured_rounds_where_the_grid_has_many_values(seed, form, monkeypatch):
    monkeypatch.setattr("adaptsfl.planner.grid.BANDS", 2)
    problem = measured_like(paper_like(devices=4, seed=seed, fleet="heterogeneous"), form)
    check_exact(dataclasses.replace(problem, allowed_cuts=[1, 2, 4, 5, 7, 10, 13, 16], max_interval=200))


@pytest.mark.parametrize("seed", range(10))
def test_exact_equals_exhaustive_where_the_grid_has_many_values(seed, monkeypatch):
    """With bands of several values each, as in large problems: the grid's bounds are then really bounds."""
    monkeypatch.setattr("adaptsfl.planner.grid.BANDS", 2)
    problem = paper_like(devices=4, seed=seed, fleet="heterogeneous")
    few = dataclasses.replace(problem, allowed_cuts=[1, 2, 4, 5, 7, 10, 13, 16], max_interval=200)
    check_exact(few)


# ── Cases by name ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_interval_1_can_be_optimal():
    """With so much drift that a second round undoes the first."""
    problem = by_hand(convergence=ConvergenceModel(0.1, 2.0, [10.0, 10.0, 10.0], 2.0, 1.0))
    check_exact(problem)
    assert planner.plan(problem).interval == 1


def test_cut_l_can_be_optimal():
    """With a server so slow and links so bad that federated learning is best."""
    problem = by_hand(max_interval=MAX_INTERVAL)
    slow = problem.fleet.scaled(1e-3, "server.flops", "uplink_bps", "downlink_bps")
    problem = dataclasses.replace(problem, fleet=slow.scaled(1e6, "fed_uplink_bps", "fed_downlink_bps"))
    check_exact(problem)
    assert planner.plan(problem).cuts.tolist() == [3, 3]


def test_devices_can_have_different_cuts():
    """Device 1 computes fast behind a slow link, device 2 the other way round."""
    fleet = Fleet(
        [1e5, 10.0],
        [1.0, 1e5],
        [1e5, 1e5],
        [1e5, 1e5],
        [1e5, 1e5],
        server=Server(1e4, to_fed_bps=1e5, from_fed_bps=1e5),
    )
    problem = by_hand(fleet=fleet)
    check_exact(problem)
    assert planner.plan(problem).cuts.tolist() == [3, 1]


def test_equal_devices_tie():
    problem = by_hand()
    equal = problem.fleet.with_rates({name: np.full(2, 7.0) for name in ("flops", "uplink_bps", "downlink_bps")})
    check_exact(dataclasses.replace(problem, fleet=equal))


def test_one_device_and_one_layer():
    fleet = Fleet([1.0], [1.0], [1.0], [1.0], [1.0], server=Server(1.0, 1.0, 1.0))
    problem = by_hand(
        fleet=fleet,
        costs=CutCosts([1.0], [2.0], [3.0], [3.0], [4.0]),
        convergence=ConvergenceModel(0.1, 2.0, [0.001], 2.0, 1.0),
    )
    check_exact(problem)
    assert planner.plan(problem).cuts.tolist() == [1]


def test_a_model_that_costs_nothing():
    zeros = np.zeros(3)
    problem = by_hand(costs=CutCosts(zeros, zeros, zeros, zeros, zeros))
    plan = planner.plan(problem)
    assert (plan.status, plan.predicted_time_s, plan.gap) == ("optimal", 0.0, 0.0)


def test_memory_limits_move_the_cut():
    """Unlimited, both devices take the same cut; a device that can hold only layer 1 must take cut 1."""
    problem = by_hand()
    costs = dataclasses.replace(problem.costs, memory_bytes=[10.0, 20.0, 30.0])
    fleet = dataclasses.replace(problem.fleet.scaled(1e-3, "server.flops"), memory_bytes=[np.inf, 15.0])
    limited = dataclasses.replace(problem, costs=costs, fleet=fleet)
    check_exact(limited)
    assert planner.plan(limited).cuts[1] == 1
    assert planner.plan(dataclasses.replace(limited, fleet=dataclasses.replace(fleet, memory_bytes=None))).cuts[1] > 1


def test_fixed_interval_fixed_cuts_and_allowed_cuts():
    assert planner.plan(by_hand(interval=3)).interval == 3
    assert planner.plan(by_hand(cuts=[3, 1])).cuts.tolist() == [3, 1]
    assert set(planner.plan(by_hand(allowed_cuts=[1, 3])).cuts) <= {1, 3}
    for limits in ({"interval": 3}, {"cuts": [3, 1]}, {"allowed_cuts": [1, 3]}, {"interval": 2, "cuts": [2, 2]}):
        check_exact(by_hand(**limits))


def test_more_of_any_resource_never_makes_the_optimum_slower():
    problem = paper_like(devices=20, seed=3, fleet="heterogeneous")
    best = planner.plan(problem).predicted_time_s
    for names in planner.whatif.RESOURCES.values():
        better = dataclasses.replace(problem, fleet=problem.fleet.scaled(1.5, *names))
        assert planner.plan(better).predicted_time_s <= best * (1 + CLOSE)


def test_rounded_sums_do_not_hide_the_optimum():
    """Cuts that leave 1e12 FLOPs, or the last digits of that, to a server for which even those digits count.

    Sums over devices cannot be exact then, and cells of the grid whose corners seem to cost the same need not.
    """
    for seed in range(60):
        rng = np.random.default_rng(seed)
        devices, layers = rng.integers(3, 6, 2)
        left = np.sort(rng.integers(1, 4 * devices, layers - 2))[::-1] * 2.0**-13
        costs = CutCosts(
            np.concatenate(([1.0], 1e12 - left, [1e12])),
            np.zeros(layers),
            *10 ** rng.uniform(1, 5, (2, layers)),
            np.ones(layers),
        )
        links, fast = 10 ** rng.uniform(0, 2, (2, devices)), np.full(devices, 1e9)
        fleet = Fleet(np.full(devices, 1e12), *links, fast, fast, Server(1e-6, 1e9, 1e9))
        check_exact(PlanProblem(fleet, costs, ConvergenceModel(0.1, 2.0, [0.01] * layers, 2.0, 1.0), batch_size=1))


def test_a_root_far_beyond_the_longest_interval():
    """No work at all and hardly any drift: the best interval is the longest, and finding that out must not overflow."""
    zeros = np.zeros(3)
    costs = CutCosts(zeros, zeros, zeros, zeros, [1.0, 2.0, 3.0])
    problem = by_hand(costs=costs, convergence=ConvergenceModel(0.1, 2.0, [1e-12] * 3, 0.1, 1.0), max_interval=1000)
    check_exact(problem)
    assert planner.plan(problem).interval == 1000


@pytest.mark.parametrize("solver", ["exact", "bcd"])
def test_the_unit_of_a_table_changes_no_plan(solver):
    """Rounds in any unit: the plan is the same, and its time in proportion."""
    intervals = np.array([1, 3, 9])
    rounds = np.array([[1.0, 1.1, 1.5], [1.0, 1.3, 2.0], [1.0, 2.0, 8.0]])
    one = planner.plan(by_hand(convergence=RoundsTable(intervals, rounds)), solver)
    many = planner.plan(by_hand(convergence=RoundsTable(intervals, rounds * 1e6)), solver)
    assert (one.interval, one.cuts.tolist()) == (many.interval, many.cuts.tolist())
    assert many.predicted_time_s == pytest.approx(one.predicted_time_s * 1e6)
    assert many.relative_rounds == pytest.approx(one.relative_rounds)


def test_rounds_without_end_take_for_ever_even_if_they_cost_nothing():
    zeros = np.zeros(3)
    free = by_hand(costs=CutCosts(zeros, zeros, zeros, zeros, zeros), convergence=RoundsTable([1, 4], np.ones((3, 2))))
    assert free.time_to_target_s(4, np.array([1, 2])) == 0
    assert free.time_to_target_s(3, np.array([1, 2])) == np.inf


def test_a_table_that_is_a_plateau_is_left_at_its_end():
    """As many rounds up to I = 9: the longest of them costs least. Cuts 1 and 2 then take 26.8 + 9/9 s a round."""
    table = RoundsTable(np.array([1, 3, 9, 27]), np.array([[1.0, 1.0, 1.0, 9.0]] * 3))
    plan = planner.plan(by_hand(convergence=table, cuts=[1, 2]))
    assert (plan.interval, plan.relative_rounds, plan.drift_share) == (9, 1.0, 0.0)
    assert plan.predicted_time_s == pytest.approx(27.8)


def test_powers_worked_by_hand():
    """Cuts 1 and 2, p = 0.1: A = 26.8, B = 9, I' = (9/26.8)·0.9/0.1 = 3.02; Θ(3) = 3^0.1·(26.8 + 3)."""
    plan = planner.plan(by_hand(convergence=PowerRounds([0.1, 0.1, 0.1]), cuts=[1, 2]))
    assert (plan.interval, plan.rounds_model) == (3, "powers")
    assert plan.predicted_time_s == pytest.approx(3**0.1 * 29.8)
    assert plan.rounds == plan.relative_rounds == pytest.approx(3**0.1)


def test_a_deeper_cut_is_charged_for_its_rounds():
    """A server so slow that cut 3 is best, but for a table by which L_c = 3 needs a hundred times the rounds."""
    problem = by_hand(max_interval=MAX_INTERVAL)
    slow = problem.fleet.scaled(1e-3, "server.flops").scaled(1e6, "fed_uplink_bps", "fed_downlink_bps")
    for last, deepest in ((1.0, 3), (100.0, 2)):
        table = RoundsTable(np.array([1]), np.array([[1.0], [1.0], [last]]))
        problem = dataclasses.replace(problem, fleet=slow, convergence=table)
        check_exact(problem)
        assert planner.plan(problem).deepest == deepest


class Logarithmic:
    """R = 1 + L_c·ln(I)/10: a rounds model of one's own, of which the planner knows nothing but the protocol."""

    form, title, achieved, scale = "table", "logarithms", "Done", "slope"
    layers, most = 3, 40

    def rounds(self, interval, deepest):
        return 1 + np.asarray(deepest) * np.log(interval) / 10

    def choices(self, deepest, shortest, longest):
        return range(shortest, min(longest, self.most) + 1)

    def check_feasible(self, interval=1, deepest=1):
        pass


def test_a_rounds_model_of_ones_own_is_planned_with():
    problem = by_hand(convergence=Logarithmic())
    check_exact(problem)
    assert planner.plan(problem).interval > 1
    assert planner.plan(problem, "bcd").predicted_time_s >= planner.plan(problem).predicted_time_s * (1 - CLOSE)


def test_a_model_of_ones_own_without_limits_is_refused(monkeypatch):
    monkeypatch.setattr(Logarithmic, "most", 10**9)
    with pytest.raises(SolverError, match=r"1,000,000,000 intervals to choose from.*Set planner.max_interval"):
        planner.plan(by_hand(convergence=Logarithmic()))
    check_exact(by_hand(convergence=Logarithmic(), max_interval=100))


# ── Infeasible problems ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("solver", planner.SOLVERS)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"convergence": ConvergenceModel(0.1, 2.0, [0.1] * 3, 2.0, 0.0)}, r"budget: is 0"),
        ({"interval": 20}, r"interval 20 and cuts up to 1"),
        (
            {"interval": 7, "convergence": RoundsTable(np.array([1, 4, 16]), np.ones((3, 3)))},
            r"planner.interval: is 7, which convergence.table.intervals does not have; the nearest are 4 and 16",
        ),
        ({"interval": 6, "cuts": [3, 1]}, r"interval 6 and cuts up to 3"),
        ({"cuts": [3, 1], "allowed_cuts": [1, 2]}, r"device 1: planner.cuts gives a cut outside planner.allowed_cuts"),
    ],
)
def test_infeasible_problems_are_explained(solver, changes, message):
    with pytest.raises(InfeasiblePlan, match=message):
        planner.plan(by_hand(**changes), solver)


def test_a_cut_that_is_not_allowed_is_not_blamed_on_memory():
    problem = by_hand()
    costs = dataclasses.replace(problem.costs, memory_bytes=[1.0, 2.0, 3.0])
    fleet = dataclasses.replace(problem.fleet, memory_bytes=[50.0, 50.0])
    stuck = dataclasses.replace(problem, costs=costs, fleet=fleet, cuts=[3, 1], allowed_cuts=[1, 2])
    with pytest.raises(InfeasiblePlan, match=r"device 1: planner.cuts gives a cut outside planner.allowed_cuts"):
        planner.plan(stuck)


def test_device_without_memory_for_any_cut_is_named():
    problem = by_hand()
    costs = dataclasses.replace(problem.costs, memory_bytes=[10e6, 20e6, 30e6])
    fleet = dataclasses.replace(problem.fleet, memory_bytes=[50e6, 5e6])
    with pytest.raises(InfeasiblePlan, match=r"device 2: cut 1 needs 10\.000 MB.*memory_bytes\[1\] is 5e\+06"):
        planner.plan(dataclasses.replace(problem, costs=costs, fleet=fleet))


def test_memory_limits_need_the_memory_of_every_cut():
    problem = by_hand()
    with pytest.raises(InvalidInput, match=r"cuts.memory_bytes: is missing, but devices.memory_bytes sets limits"):
        dataclasses.replace(problem, fleet=dataclasses.replace(problem.fleet, memory_bytes=[1.0, 1.0]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"interval": 0}, r"planner.interval: is 0"),
        ({"interval": 10**9 + 1}, r"planner.interval: is 1000000001. Give a whole number from 1 to 1,000,000,000"),
        ({"interval": 4, "max_interval": 2}, r"planner.interval: is 4. Give a whole number from 1 to 2"),
        ({"max_interval": 10**10}, r"planner.max_interval: is 10000000000"),
        ({"cuts": [1]}, r"planner.cuts: has 1 entries"),
        ({"cuts": [1, 4]}, r"planner.cuts\[1\]: is 4. Give a whole number from 1 to 3"),
        ({"allowed_cuts": []}, r"planner.allowed_cuts: is empty"),
        ({"batch_size": 0}, r"batch_size: is 0"),
        ({"batch_size": 1.5}, r"batch_size: is not a whole number: 1\.5"),
        ({"convergence": ConvergenceModel(0.1, 2.0, [0.1], 2.0, 1.0)}, r"convergence: describes 1 layers"),
        ({"convergence": PowerRounds([0.1])}, r"convergence: describes 1 layers"),
        ({"convergence": RoundsTable([1], [[1.0]] * 4)}, r"convergence: describes 4 layers"),
    ],
)
def test_bad_problems_are_explained(changes, message):
    with pytest.raises(InvalidInput, match=message):
        by_hand(**changes)


def test_unknown_solver_is_explained():
    with pytest.raises(InvalidInput, match=r"solver: is 'magic'. Choose one of: exact, bcd, exhaustive"):
        planner.plan(by_hand(), "magic")


# ── The paper's algorithm ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("form", ["bound", "powers", "table"])
@settings(max_examples=60)
@given(st.data())
def test_bcd_is_never_better_than_exact(form, data):
    problem = data.draw(small_problems(Small(rounds=form)))
    best, descent = solve(problem, "exact"), solve(problem, "bcd")
    assert (best is None) == (descent is None)
    if best is not None and descent is not None:
        assert descent.predicted_time_s >= best.predicted_time_s * (1 - CLOSE)
        assert descent.lower_bound_s <= best.predicted_time_s * (1 + CLOSE)
        check_plan(problem, descent)


@pytest.mark.parametrize("fleet", ["paper", "heterogeneous"])
def test_bcd_comes_near_the_optimum_on_realistic_problems(fleet):
    for seed in range(3):
        problem = paper_like(devices=10, seed=seed, fleet=fleet)
        best, descent = planner.plan(problem), planner.plan(problem, "bcd")
        assert best.predicted_time_s <= descent.predicted_time_s * (1 + CLOSE)
        assert descent.predicted_time_s <= best.predicted_time_s * 1.2


@pytest.mark.parametrize("form", ["bound", "powers", "table"])
@settings(max_examples=40)
@given(st.data())
def test_dinkelbach_finds_the_best_cuts_of_a_fixed_interval(form, data):
    """Algorithm 2 alone is optimal for its subproblem; exhaustive search with the interval fixed is the oracle."""
    problem = data.draw(small_problems(Small(restricted=False, rounds=form)))
    some = list(range(1, 9)) if form != "table" else problem.convergence.intervals.tolist()
    interval = data.draw(st.sampled_from([one for one in some if one <= MAX_INTERVAL]))
    fixed = dataclasses.replace(problem, interval=interval)
    descent, oracle = solve(fixed, "bcd"), solve(fixed, "exhaustive")
    assert (descent is None) == (oracle is None)
    if descent is not None and oracle is not None:
        # HiGHS is exact to about 1e-6 in what it is given, however its tolerances are set.
        assert descent.predicted_time_s == pytest.approx(oracle.predicted_time_s, rel=1e-5, abs=1e-9)


def test_bcd_can_be_started_elsewhere():
    problem = paper_like(devices=5, seed=0)
    plan = bcd.solve(problem, start=np.full(5, 7))
    assert plan.predicted_time_s >= planner.plan(problem).predicted_time_s * (1 - CLOSE)


# ── Limits ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("solver", ["exact", "bcd"])
def test_a_solver_that_is_stopped_says_so_and_keeps_its_best_plan(solver):
    problem = paper_like(devices=30, seed=1, fleet="heterogeneous")
    best = planner.plan(problem)
    stopped = planner.plan(problem, solver, time_limit_s=0.0)
    assert stopped.status == "limit"
    assert stopped.lower_bound_s <= best.predicted_time_s <= stopped.predicted_time_s * (1 + CLOSE)
    check_plan(problem, stopped)


def test_exhaustive_refuses_large_problems():
    with pytest.raises(SolverError, match=r"combinations of cuts.*Use the exact solver"):
        planner.plan(paper_like(devices=20, seed=0), "exhaustive")


def test_exhaustive_refuses_endless_intervals():
    """Nine combinations of cuts only, but powers forbid no interval."""
    with pytest.raises(SolverError, match=r"9 combinations of cuts with up to 1e\+09 intervals"):
        planner.plan(by_hand(convergence=PowerRounds([0.1, 0.2, 0.3])), "exhaustive")


def test_exhaustive_refuses_what_does_not_fit_into_memory():
    """One interval only, but 2^20 combinations of 20 cuts each."""
    problem = dataclasses.replace(paper_like(devices=20, seed=0), allowed_cuts=[1, 2], interval=1)
    with pytest.raises(SolverError, match=r"1.05e\+06 combinations of cuts"):
        planner.plan(problem, "exhaustive")


@pytest.mark.parametrize("form", ["bound", "powers", "table"])
def test_a_large_problem_is_solved_to_the_end(form):
    problem = paper_like(devices=2000, seed=0, fleet="heterogeneous")
    plan = planner.plan(problem if form == "bound" else measured_like(problem, form))
    assert plan.status == "optimal"
    assert plan.gap <= 1e-10
