"""Plans that also choose the number of parts of a mini-batch and the type of numbers on the wire."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from adaptsfl import planner
from adaptsfl.planner.choices import Floor, every_choice, worthwhile
from adaptsfl.planner.grid import Grid
from adaptsfl.planner.interval import Rules
from oracle import CLOSE, check_exact, solve
from problems import Small, by_hand, measured_like, paper_like, server_bound, small_problems

FORMS = ("bound", "growth", "powers", "table")
FACTORS = {"float32": 1.0, "float16": 1.0, "bfloat16": 1.0, "int8": 1.01, "int4": 1.1}


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=250)
@given(st.data())
def test_exact_equals_exhaustive_with_both_choices(form, data):
    problem = data.draw(small_problems(Small(3, 3, rounds=form, choices=True)))
    best = solve(problem, "exact")
    event("infeasible" if best is None else f"{best.micro_batches} parts, {best.wire_dtype}")
    check_exact(problem)


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=100)
@given(st.data())
def test_exact_equals_exhaustive_with_both_choices_where_the_server_is_slow(form, data):
    problem = data.draw(small_problems(Small(4, 3, restricted=False, rounds=form, slow_server=True, choices=True)))
    check_exact(problem)


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=100)
@given(st.data(), st.sampled_from([2, 3, 64]))
def test_exact_equals_exhaustive_with_both_choices_and_charges(form, data, bands):
    problem = data.draw(small_problems(Small(4, 4, restricted=False, rounds=form, slow_server=True, choices=True)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("adaptsfl.planner.exact.CHARGED_AFTER", 0)
        patch.setattr("adaptsfl.planner.grid.BANDS", bands)
        check_exact(problem)


def with_fixed(problem: planner.PlanProblem, seed: int) -> planner.PlanProblem:
    """The problem with fixed seconds of the size of its phases, so that more parts are not always faster."""
    rng = np.random.default_rng(seed)
    fleet, typical = problem.fleet, float(np.median(problem.round_s(np.full((1, problem.devices), 4)))) / 20
    fixed = {
        name: typical * rng.random(problem.devices) for name in ("forward_s", "backward_s", "uplink_s", "downlink_s")
    }
    server = dataclasses.replace(fleet.server, turn_s=typical * rng.random())
    return dataclasses.replace(problem, fleet=dataclasses.replace(fleet, server=server, **fixed))


@pytest.mark.parametrize("form", ["bound", "powers", "table"])
@pytest.mark.parametrize("seed", range(12))
def test_exact_equals_exhaustive_on_networks_with_both_choices(seed, form, monkeypatch):
    """VGG-16 or a slow server, with fixed seconds or without, in bands of several values each."""
    monkeypatch.setattr("adaptsfl.planner.grid.BANDS", 2 + seed % 3)
    monkeypatch.setattr("adaptsfl.planner.exact.CHARGED_AFTER", 24 * (seed % 2))
    if seed % 3 == 2:
        problem = server_bound(devices=4, seed=seed, layers=5)
    else:
        problem = paper_like(devices=3, seed=seed, fleet=("paper", "heterogeneous")[seed % 3])
        problem = dataclasses.replace(problem, allowed_cuts=[1, 2, 4, 5, 7, 10, 13, 16])
    problem = problem if seed % 2 else with_fixed(problem, seed)
    problem = problem if form == "bound" else measured_like(problem, form)
    check_exact(dataclasses.replace(problem, max_interval=60, micro_batches=(1, 2, 4, 8), wires=FACTORS))


def names(choices):
    return {(choice.micro_batches, choice.wire_dtype) for choice in choices}


def test_choices_that_are_never_better_are_left_out():
    """Without fixed seconds the most parts; the first of two equal types, and no type that only has more bits."""
    problem = dataclasses.replace(paper_like(devices=5, seed=0), micro_batches=(4, 1, 8), wires=FACTORS)
    types = ("float16", "int8", "int4")
    assert names(worthwhile(problem, every_choice(problem))) == {(8, dtype) for dtype in types}
    fixed = with_fixed(problem, 0)
    assert names(worthwhile(fixed, every_choice(fixed))) == set(itertools.product((1, 4, 8), types))
    free = dataclasses.replace(problem, wires=dict.fromkeys(FACTORS, 1.5))
    assert names(worthwhile(free, every_choice(free))) == {(8, "int4")}


@settings(max_examples=150)
@given(small_problems(Small(3, 3, choices=True)))
def test_the_floor_is_below_every_plan_of_its_choice(problem):
    """Exhaustive search for one number of parts and one type is the oracle."""
    rules = Rules(problem)
    if solve(problem, "exact") is None:
        return
    floor = Floor(problem, rules, choices=2)
    for choice in every_choice(problem):
        alone = dataclasses.replace(choice.problem, micro_batches=(choice.micro_batches,))
        best_s = planner.plan(alone, "exhaustive").predicted_time_s
        assert floor.bounds_s(choice).min() <= best_s * (1 + CLOSE)


def test_of_plans_that_tie_the_simplest_is_chosen():
    """A model that sends nothing: parts and types make no difference."""
    nothing = np.zeros(3)
    costs = dataclasses.replace(by_hand().costs, activation_bits=nothing, gradient_bits=nothing, forward_flops=nothing)
    costs = dataclasses.replace(costs, backward_flops=nothing)
    plan = planner.plan(by_hand(costs=costs, micro_batches=(2, 1), wires={"float32": 1.0, "int8": 1.0}))
    assert (plan.micro_batches, plan.wire_dtype) == (1, "float32")


@pytest.mark.parametrize("bands", [2, 3, 64])
@pytest.mark.parametrize("seed", range(6))
def test_boxes_that_are_cut_along_the_time_of_a_round_lose_no_plan(seed, bands, monkeypatch):
    """The search that cuts boxes along the maxima alone is the oracle, on problems too large for exhaustive search."""
    problem = server_bound(devices=15, seed=seed)
    problem = with_fixed(problem, seed) if seed % 2 else problem
    problem = dataclasses.replace(problem, batch_size=8, micro_batches=(2, 8), wires={"float32": 1.0, "int8": 1.01})
    monkeypatch.setattr("adaptsfl.planner.grid.BANDS", bands)
    best = planner.plan(problem)
    monkeypatch.setattr(Grid, "_axes", lambda grid: np.argsort(-grid._effects(grid.box.low, grid.high))[:2].tolist())
    along_maxima = planner.plan(problem)
    assert (best.status, along_maxima.status) == ("optimal", "optimal")
    assert best.predicted_time_s == pytest.approx(along_maxima.predicted_time_s, rel=CLOSE)


@pytest.mark.parametrize("kept", [0, 10**9])
def test_tables_that_are_dropped_between_turns_change_nothing(kept, monkeypatch):
    problem = dataclasses.replace(server_bound(devices=12, seed=2), micro_batches=(1, 2, 4, 8), wires=FACTORS)
    problem = with_fixed(problem, 2)
    expected = planner.plan(problem)
    monkeypatch.setattr("adaptsfl.planner.exact.KEPT", kept)
    monkeypatch.setattr("adaptsfl.planner.exact.FIRST_TURN", 1)
    plan = planner.plan(problem)
    assert (plan.status, expected.status) == ("optimal", "optimal")
    assert plan.predicted_time_s == pytest.approx(expected.predicted_time_s, rel=CLOSE)


@settings(max_examples=100)
@given(small_problems(Small(3, 3, choices=True)), st.data())
def test_more_to_choose_from_is_never_slower(problem, data):
    """With one of the numbers of parts alone, and with one of the types alone, the best plan is no faster."""
    best = solve(problem, "exact")
    if best is None:
        return
    k = data.draw(st.sampled_from(list(problem.micro_batches)))
    wire = data.draw(st.sampled_from(list(problem.wire_dtypes)))
    for fewer in (dataclasses.replace(problem, micro_batches=(k,)), problem.sent_as(wire)):
        assert planner.plan(fewer).predicted_time_s >= best.predicted_time_s * (1 - CLOSE)


def test_one_part_and_one_type_are_the_problem_without_choices():
    problem = paper_like(devices=10, seed=1, fleet="heterogeneous")
    plain, chosen = planner.plan(problem), planner.plan(dataclasses.replace(problem, wires={"float32": 1.0}))
    assert (plain.predicted_time_s, plain.interval) == (chosen.predicted_time_s, chosen.interval)
    assert plain.cuts.tolist() == chosen.cuts.tolist()


def test_a_factor_multiplies_the_rounds_and_the_time():
    problem = paper_like(devices=10, seed=1)
    once, twice = (planner.plan(dataclasses.replace(problem, wires={"int8": factor})) for factor in (1.0, 2.0))
    assert twice.predicted_time_s == pytest.approx(2 * once.predicted_time_s)
    assert twice.rounds == pytest.approx(2 * once.rounds)
    assert twice.relative_rounds == once.relative_rounds


@pytest.mark.parametrize("boxes", [1, 3, 10, 30, 100])
def test_a_search_with_choices_that_is_stopped_has_a_valid_bound(boxes, monkeypatch):
    """However early it stops, the optimum lies between its bound and its plan."""
    problem = dataclasses.replace(server_bound(devices=30, seed=1), micro_batches=(1, 2, 4, 8), wires=FACTORS)
    problem = with_fixed(problem, 1)
    best = planner.plan(problem)
    clock = iter(range(10**9))
    monkeypatch.setattr("adaptsfl.planner.exact.time.perf_counter", lambda: float(next(clock)))
    stopped = planner.plan(problem, time_limit_s=boxes)
    assert stopped.lower_bound_s <= best.predicted_time_s * (1 + CLOSE)
    assert stopped.predicted_time_s >= best.predicted_time_s * (1 - CLOSE)
    assert stopped.status == ("optimal" if stopped.gap <= 1e-10 else "limit")


def test_by_hand_in_two_parts():
    """Cuts 1 and 2 take 18.4 s in two parts (see tests/test_latency.py), 26.8 s undivided; an aggregation takes 9 s."""
    problem = by_hand(interval=1, cuts=[1, 2], micro_batches=(1, 2))
    plan = planner.plan(problem)
    assert plan.micro_batches == 2
    assert plan.predicted_time_s == pytest.approx(40 * (18.4 + 9))
