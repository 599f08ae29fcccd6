"""What every policy decides, and what each decides by hand."""

import dataclasses
import itertools
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptsfl import latency, planner
from adaptsfl.config import PlannerConfig
from adaptsfl.convergence import PowerRounds, RoundsTable
from adaptsfl.errors import InfeasiblePlan, InvalidInput
from adaptsfl.policies import POLICIES, BasePolicy, Decision, Trust, make_policy
from adaptsfl.policies.cuts import fastest_cuts
from adaptsfl.policies.rma_ams import balanced_cuts
from adaptsfl.policies.trust import trusted_plan
from adaptsfl.training import Schedule
from policies.observations import of, seen, wide
from problems import Small, by_hand, paper_like, small_problems

OPTIONS = {"fixed": {"interval": 4, "cut": 2}, "post-local": {"switch_round": 2}}
CONVERGING = ["adaptsfl", "ma+rms"]
RULES = ["adacomm", "post-local", "qsr", "fedlama"]


def made(name: str):
    return make_policy(name, **OPTIONS.get(name, {}))


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_gives_a_plan_that_training_accepts(name):
    policy, observation = made(name), wide()
    for block in range(4):
        decided = policy.decide(dataclasses.replace(observation, block=block, divergence=np.array([0.1 * block])))
        decided.check(observation.devices, observation.layers)
        schedule = Schedule(decided)
        for _ in range(decided.length):
            schedule.advance()
        schedule.change(decided)  # refused anywhere but after an averaging
        assert decided.interval is None or not any(schedule.ages)


@pytest.mark.parametrize("name", POLICIES)
def test_the_same_seed_gives_the_same_decision(name):
    assert made(name).decide(wide(seed=5)) == made(name).decide(wide(seed=5))


@pytest.mark.parametrize("name", ["rma+ms", "ma+rms", "rma+rms", "dama+rms", "rma+ams"])
def test_another_seed_gives_another_decision(name):
    assert len({str(made(name).decide(wide(seed=seed))) for seed in range(8)}) > 1


@pytest.mark.parametrize("name", [name for name in POLICIES if name not in ("fixed", "fedavg", "centralized")])
def test_memory_limits_hold(name):
    """Devices that can hold one, two and three layers; what is cut in truth must fit."""
    problem = by_hand()
    costs = dataclasses.replace(problem.costs, memory_bytes=[1.0, 2.0, 3.0])
    for seed in range(20):
        fleet = dataclasses.replace(problem.fleet, memory_bytes=[1.0, 2.0])
        decided = made(name).decide(seen(seed, fleet=fleet, costs=costs))
        assert decided.placement[0] == 1
        assert decided.placement[1] <= 2


@pytest.mark.parametrize("name", [name for name in POLICIES if name != "centralized"])
def test_a_device_without_any_cut_is_an_error_that_names_it(name):
    problem = by_hand()
    costs = dataclasses.replace(problem.costs, memory_bytes=[1.0, 2.0, 3.0])
    fleet = dataclasses.replace(problem.fleet, memory_bytes=[3.0, 0.5])
    with pytest.raises(InfeasiblePlan, match=r"device 2: cut \d needs"):
        made(name).decide(seen(fleet=fleet, costs=costs))


@pytest.mark.parametrize("name", ["adaptsfl", "rma+ms", "ma+rms", "rma+rms", "dama+rms", "rma+ams", *RULES])
def test_the_recipes_limits_hold(name):
    for seed in range(5):
        fixed = PlannerConfig(interval=3, cuts=[2, 1])
        decided = made(name).decide(seen(seed, limits=fixed))
        assert decided.interval == 3
        assert decided.placement == (2, 1)
        short = made(name).decide(seen(seed, limits=PlannerConfig(max_interval=2, allowed_cuts=[1, 3])))
        assert short.interval <= 2
        assert set(short.cuts) <= {1, 3}


def test_cuts_fixed_for_the_whole_fleet_are_those_of_the_devices_present():
    limits = PlannerConfig(cuts=[3, 2, 1, 1])
    observation = seen(limits=limits, present=(1, 3))
    assert made("adaptsfl").decide(observation).cuts == (2, 1)
    assert make_policy("fixed", interval=2, cuts=[1, 3, 1, 2]).decide(seen(present=(1, 3))).cuts == (3, 2)
    with pytest.raises(InvalidInput, match=r"policy.cuts: has 3 entries"):
        make_policy("fixed", interval=2, cuts=[1, 3, 1]).decide(seen(present=(1, 3)))
    with pytest.raises(InvalidInput, match=r"policy.cuts: has 3 entries"):
        make_policy("fixed", interval=2, cuts=[1, 3, 1]).decide(seen())


# Planned


@given(small_problems())
def test_adaptsfl_is_the_planners_optimum_or_its_error(problem):
    try:
        best = planner.plan(problem, "exhaustive")
    except InfeasiblePlan:
        return
    limits = PlannerConfig(
        interval=problem.interval,
        max_interval=problem.max_interval,
        cuts=problem.cuts,
        allowed_cuts=problem.allowed_cuts,
    )
    decided = made("adaptsfl").decide(of(problem, limits=limits))
    found = float(problem.time_to_target_s(decided.interval, np.array(decided.placement)))
    assert found == pytest.approx(best.predicted_time_s, rel=1e-9)
    assert decided.length == decided.interval


@pytest.mark.parametrize("name", CONVERGING)
def test_without_drift_nothing_is_averaged_but_decided_again_after_a_while(name):
    model = dataclasses.replace(by_hand().convergence, drift_per_layer=np.zeros(3))
    decided = made(name).decide(seen(convergence=model))
    assert decided.interval is None
    assert decided.length == 25


@pytest.mark.parametrize("name", CONVERGING)
def test_a_target_out_of_reach_is_an_error(name):
    with pytest.raises(InfeasiblePlan, match="budget"):
        made(name).decide(seen(convergence=dataclasses.replace(by_hand().convergence, budget=-1.0)))


def test_rma_ms_plans_the_cuts_for_the_interval_drawn():
    for seed in range(10):
        observation = wide(seed)
        decided = made("rma+ms").decide(observation)
        best = planner.plan(observation.problem(interval=decided.interval))
        assert decided.placement == tuple(best.cuts)


def test_rma_ms_takes_the_fastest_cuts_where_the_interval_makes_no_progress():
    """With a drift of 1 per layer and a budget of 1, any interval above 1 is infeasible."""
    model = dataclasses.replace(by_hand().convergence, drift_per_layer=np.ones(3))
    limits = PlannerConfig(interval=9)
    decided = made("rma+ms").decide(seen(convergence=model, limits=limits))
    problem = by_hand()
    every = np.array(list(itertools.product([1, 2, 3], repeat=2)))
    seconds = problem.round_s(every) + problem.aggregation_s(every) / 9
    assert decided.interval == 9
    assert decided.placement == tuple(every[np.argmin(seconds)])


def test_ma_rms_takes_the_best_interval_for_its_cuts():
    for seed in range(10):
        observation = wide(seed)
        decided = made("ma+rms").decide(observation)
        times = [float(observation.problem().time_to_target_s(i, np.array(decided.placement))) for i in range(1, 400)]
        assert decided.interval == int(np.argmin(times)) + 1


def rounds_per_averaging(cut: int) -> float:
    """B/A of the fleet by hand with one cut for both."""
    problem, cuts = by_hand(), np.full(2, cut)
    return float(problem.aggregation_s(cuts) / problem.round_s(cuts))


@pytest.mark.parametrize("name", CONVERGING)
def test_an_interval_is_as_long_as_it_is_trusted(name):
    """Or as long as one averaging takes, where that is longer; a given interval counts in any case."""
    level = PowerRounds(np.zeros(3))  # by which the longest interval is best
    fixed = PlannerConfig(cuts=2)
    for trusted in (1, 3, 50):
        decided = made(name).decide(seen(convergence=level, limits=fixed, trust=Trust(longest_interval=trusted)))
        assert decided.interval == max(trusted, int(rounds_per_averaging(2)))
    given = PlannerConfig(cuts=2, interval=70)
    assert made(name).decide(seen(convergence=level, limits=given, trust=Trust(longest_interval=3))).interval == 70


def test_an_averaging_that_takes_long_lengthens_the_interval_of_its_own_cuts_only():
    """The best cuts of all have an averaging of many rounds; the best of those with shorter intervals may not."""
    level = PowerRounds(np.zeros(16))
    for rounds in (0, 16, 150, 1000):
        trust = Trust(longest_interval=max(8, rounds // 4), longest_averaging=max(16, rounds // 2))
        observation = wide(convergence=level, trust=trust)
        plan = trusted_plan(observation)
        problem = observation.problem()
        averaging = float(problem.aggregation_s(plan.cuts) / problem.round_s(plan.cuts))
        assert plan.interval <= max(trust.longest_interval, min(averaging, trust.longest_averaging))


def test_rounds_may_take_as_long_as_a_few_averagings():
    """Where nothing speaks against longer intervals, the limit is that many times B/A."""
    level, fixed = PowerRounds(np.zeros(3)), PlannerConfig(cuts=2)
    for averagings in (1.0, 2.5, 7.0):
        trust = Trust(longest_interval=1, averagings=averagings)
        decided = made("adaptsfl").decide(seen(convergence=level, limits=fixed, trust=trust))
        assert decided.interval == max(1, int(averagings * rounds_per_averaging(2)))


def test_an_interval_beyond_experience_must_pay_in_the_worst_plausible_case_too():
    """No drift is the best guess, and then the longest interval is best; if p may be 1, it is not risked."""
    level, fixed = PowerRounds(np.zeros(3)), PlannerConfig(cuts=2)
    risked = int(100 * rounds_per_averaging(2))
    for pessimistic, interval in ((None, risked), (level, risked), (PowerRounds(np.ones(3)), 3)):
        trust = Trust(longest_interval=3, averagings=100.0, pessimistic=pessimistic)
        decided = made("adaptsfl").decide(seen(convergence=level, limits=fixed, trust=trust))
        assert decided.interval == interval


def test_a_block_probes_where_plans_may_be_much_too_careful():
    """Who plans I = 1 learns nothing about longer intervals; probed only if they may matter."""
    careful, level = PowerRounds(np.full(3, 2.0)), PowerRounds(np.zeros(3))
    trust = Trust(probe=8, optimistic=level, probe_gain=0.1)
    assert made("adaptsfl").decide(seen(convergence=careful, trust=trust)).interval == 8
    for other, limits in (
        (dataclasses.replace(trust, probe=1), PlannerConfig()),  # enough is known
        (dataclasses.replace(trust, optimistic=careful), PlannerConfig()),  # nothing to hope for
        (dataclasses.replace(trust, probe_gain=0.99), PlannerConfig()),  # little to hope for
        (trust, PlannerConfig(max_interval=7)),
        (trust, PlannerConfig(interval=1)),
    ):
        assert made("adaptsfl").decide(seen(convergence=careful, trust=other, limits=limits)).interval == 1


def test_a_plan_is_kept_unless_another_gains_enough():
    """The second moment's own plan is a little faster, the third's much."""
    powers = [PowerRounds(np.full(3, p)) for p in (0.1, 0.15, 0.02)]
    plans = [planner.plan(seen(convergence=model).problem()).interval for model in powers]
    assert len(set(plans)) == 3
    policy = made("adaptsfl")
    trust = Trust(kept_gain=0.05)
    found = [policy.decide(seen(convergence=model, trust=trust)).interval for model in powers]
    assert found == [plans[0], plans[0], plans[2]]
    policy = made("adaptsfl")
    assert [policy.decide(seen(convergence=model)).interval for model in powers] == plans


def test_a_plan_for_other_devices_is_not_kept():
    policy, trust = made("adaptsfl"), Trust(kept_gain=0.9)
    model = PowerRounds(np.full(3, 0.3))
    first = policy.decide(seen(convergence=model, trust=trust, present=(0, 1)))
    steep = PowerRounds(np.full(3, 2.0))
    assert policy.decide(seen(convergence=steep, trust=trust, present=(0, 1))) == first
    assert policy.decide(seen(convergence=steep, trust=trust, present=(1, 2))).interval == 1


POWERS = PowerRounds([0.1, 0.1, 0.2])
TABLE = RoundsTable([1, 3, 9], [[1.0, 1.1, 1.5], [1.0, 1.1, 2.0], [1.2, 2.0, 9.0]])


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("model", [POWERS, TABLE], ids=["powers", "table"])
def test_every_policy_takes_measured_rounds(name, model):
    for seed in range(5):
        decided = made(name).decide(seen(seed, convergence=model))
        decided.check(2, 3)
        if name in CONVERGING:
            assert decided.interval in model.choices(3, 1, 1000)


@pytest.mark.parametrize("name", CONVERGING)
def test_of_a_table_the_longest_interval_is_chosen_that_is_trusted(name):
    level = RoundsTable([1, 3, 9], [[1.0, 1.0, 1.0]] * 3)
    for trusted, interval in ((2, 1), (8, 3), (9, 9)):
        limits = PlannerConfig(cuts=1)
        assert rounds_per_averaging(1) < 2
        observation = seen(convergence=level, limits=limits, trust=Trust(longest_interval=trusted))
        assert made(name).decide(observation).interval == interval


def test_cuts_that_are_blind_to_convergence_are_the_same_whatever_the_rounds():
    """L_c = 3 needs a thousand times the rounds, and 7 is no interval of the table."""
    steep = RoundsTable([1, 3, 9], [[1.0] * 3, [1.0] * 3, [1000.0] * 3])
    for model in (PowerRounds([0.0, 0.0, 10.0]), steep):
        for interval in (None, 1, 7):
            assert (fastest_cuts(seen(convergence=model), interval) == fastest_cuts(seen(), interval)).all()
        assert make_policy("fixed", interval=7, cut=3).decide(seen(convergence=model)) == Decision((3, 3), 7)


def test_estimates_are_asked_for_by_those_who_look_at_them():
    assert {name for name, policy in POLICIES.items() if policy.estimates} == {"adaptsfl", "rma+ms", "ma+rms"}


# Random


def test_random_intervals_are_uniform_on_1_to_25_and_cuts_on_all_layers():
    """4000 draws: a share of 1/25 is 0.04 ± 0.0031 (one standard deviation), one of 1/3 is 0.333 ± 0.0075."""
    rng = np.random.default_rng(0)
    observation = seen(rng=rng)
    decided = [made("rma+rms").decide(observation) for _ in range(4000)]
    shares = np.bincount([one.interval for one in decided], minlength=27) / 4000
    assert shares[0] == shares[26] == 0
    assert np.abs(shares[1:26] - 0.04).max() < 0.014
    cuts = np.bincount([one.cuts[0] for one in decided], minlength=4) / 4000
    assert np.abs(cuts[1:] - 1 / 3).max() < 0.03


def test_the_longest_random_interval_is_an_option():
    for name in ("rma+ms", "rma+rms", "rma+ams"):
        drawn = {make_policy(name, longest=2).decide(seen(seed)).interval for seed in range(20)}
        assert drawn == {1, 2}


# RMA+AMS


@given(small_problems(Small(restricted=False)), st.integers(0, 10))
def test_balanced_cuts_are_the_best_of_all_thresholds(problem, seed):
    """The rule as the notes state it, threshold by threshold."""
    observation = of(problem, seed)
    column = np.arange(1, problem.layers + 1)[:, None]
    moment = (problem.costs, problem.fleet, column, problem.batch_size)
    own = latency.to_server_s(*moment) + latency.from_server_s(*moment)
    best = np.inf
    for threshold in own.flat:
        if (own <= threshold).any(axis=0).all():
            cuts = np.array([max(np.flatnonzero(own[:, k] <= threshold)) + 1 for k in range(problem.devices)])
            server_s = latency.server_turn_s(problem.costs, problem.fleet, cuts, problem.batch_size)
            best = min(best, threshold + server_s)
    cuts = balanced_cuts(observation)
    reached = max(own[cut - 1, k] for k, cut in enumerate(cuts))
    server_s = latency.server_turn_s(problem.costs, problem.fleet, cuts, problem.batch_size)
    assert reached + server_s == pytest.approx(best, rel=1e-9, abs=1e-12)


def test_balanced_cuts_by_hand():
    """d_i(j) = b (ρ + ϖ)/f + b ψ/r^U + b χ/r^D, b = 2, and T_s = 2 Σ remaining / 1000.

    Device 1: 6 + 10 + 5 = 21, 18 + 4 + 2 = 24, 36 + 1 + 0.5 = 37.5. Device 2: 3 + 20 + 10 = 33, 9 + 8 + 4 = 21,
    18 + 2 + 1 = 21. Remaining flops: 1500, 900, 0. With T = 21: cuts 1 and 3, 21 + 3 = 24. With T = 24: cuts 2 and 3,
    24 + 1.8 = 25.8. With T = 37.5: both 3, 37.5. So T = 21.
    """
    assert tuple(balanced_cuts(seen())) == (1, 3)


# DAMA+RMS


def test_dama_averages_the_shallow_half_three_times_as_often():
    decided = made("dama+rms").decide(seen(limits=PlannerConfig(cuts=[3, 1])))
    assert decided == Decision((3, 1), 5, {3: 15}, rounds=15)
    one_layer = made("dama+rms").decide(seen(limits=PlannerConfig(cuts=1)))
    assert one_layer == Decision((1, 1), 5, rounds=15)


def test_dama_moves_by_one_against_the_moving_average():
    """Averages with decay 0.5: 1, then (1 + 3)/2 = 2, then (2 + 1)/2 = 1.5; equal divergence changes nothing."""
    policy = make_policy("dama+rms", first=5, decay=0.5)
    steps = [(np.zeros(0), 5), ([1.0, 1.0], 5), ([2.0, 4.0], 4), ([1.0], 5), ([1.5], 5), ([0.1], 6)]
    for divergence, expected in steps:
        assert policy.decide(seen(divergence=np.array(divergence))).interval == expected


def test_dama_stays_between_one_and_the_longest():
    up, down = make_policy("dama+rms", first=24), make_policy("dama+rms", first=2)
    for k in range(10):
        longest = up.decide(seen(divergence=np.array([2.0**-k]))).interval
        shortest = down.decide(seen(divergence=np.array([2.0**k]))).interval
    assert (longest, shortest) == (25, 1)


# Classical


def test_sfl_and_psl_take_the_fastest_cuts_or_those_given():
    problem = by_hand()
    every = np.array(list(itertools.product([1, 2, 3], repeat=2)))
    round_s = problem.round_s(every)
    sfl, psl = made("sfl").decide(seen()), made("psl").decide(seen())
    assert problem.round_s(np.array(psl.cuts)) == round_s.min()
    both = round_s + problem.aggregation_s(every)
    assert sfl.cuts == tuple(every[np.argmin(both)])
    assert (sfl.interval, sfl.length) == (1, 1)
    assert (psl.interval, psl.length) == (None, 25)
    assert make_policy("sfl", cut=2).decide(seen()).cuts == (2, 2)
    assert make_policy("psl", cuts=[3, 1], rounds=4).decide(seen()) == Decision((3, 1), None, rounds=4)


@pytest.mark.parametrize("name", ["sfl", "psl", "rma+rms", "rma+ams", "rma+ms", "splitfed-v1", *RULES])
def test_policies_blind_to_convergence_do_not_mind_a_target_out_of_reach(name):
    made(name).decide(seen(convergence=dataclasses.replace(by_hand().convergence, budget=-1.0)))


def test_fixed_takes_what_is_not_given_from_the_recipe():
    limits = PlannerConfig(interval=6, cuts=[3, 1])
    assert make_policy("fixed").decide(seen(limits=limits)) == Decision((3, 1), 6)
    assert make_policy("fixed", interval=2, cut=1).decide(seen(limits=limits)) == Decision((1, 1), 2)
    with pytest.raises(InvalidInput, match=r"policy.interval: is missing"):
        make_policy("fixed", cut=1).decide(seen())
    with pytest.raises(InvalidInput, match=r"policy.cut: is missing"):
        make_policy("fixed", interval=1).decide(seen())


def test_fedavg_has_every_cut_at_the_last_layer():
    assert make_policy("fedavg", interval=3).decide(seen()) == Decision((3, 3), 3)
    assert make_policy("fedavg").decide(seen()) == Decision((3, 3), 7)


def test_splitfed():
    assert make_policy("splitfed-v1", cut=2).decide(seen()) == Decision((3, 3), 7, placed=(2, 2))
    assert make_policy("splitfed-v2", cut=2).decide(seen()) == Decision((2, 2), 7)
    assert make_policy("splitfed-v2", cut=2).trainer == "turns"


def test_one_cut_for_all_is_the_fastest_and_is_kept():
    """By hand (tests/test_latency.py has the formulas): seconds of a round with both devices at cut 1, 2, 3."""
    policy, observation = made("splitfed-v2"), seen()
    problem = by_hand()
    seconds = [problem.round_s(np.array([j, j])) + problem.aggregation_s(np.array([j, j])) / 7 for j in (1, 2, 3)]
    first = policy.decide(observation)
    assert first.cuts == (int(np.argmin(seconds)) + 1,) * 2
    slow_server = dataclasses.replace(
        observation.fleet, server=dataclasses.replace(observation.fleet.server, flops=1.0)
    )
    moved = dataclasses.replace(observation, fleet=slow_server)
    assert policy.decide(moved).cuts == first.cuts
    assert made("splitfed-v2").decide(moved).cuts == (3, 3)


def test_vanilla_split_learning_and_centralized():
    relay, central = made("vanilla-sl"), made("centralized")
    assert (relay.trainer, central.trainer) == ("relay", "centralized")
    assert relay.decide(seen()).interval is None
    assert central.decide(seen()).interval == 1
    assert make_policy("vanilla-sl", cut=3, rounds=2).decide(seen()) == Decision((3, 3), None, rounds=2)


# Decisions, names and options


def test_a_decision_lasts_a_whole_number_of_intervals():
    assert Decision((1,), 4).length == 4
    assert Decision((1,), 4, rounds=8).length == 8
    with pytest.raises(InvalidInput, match="rounds: is 6, but layers are averaged every 4"):
        Decision((1,), 4, rounds=6)
    with pytest.raises(InvalidInput, match="rounds: is missing, and nothing is ever averaged"):
        _ = Decision((1,), None).length
    with pytest.raises(InvalidInput, match="placed: has 2 entries"):
        Decision((1,), 4, placed=(1, 1))


def test_titles_are_the_papers():
    assert [policy.title for policy in POLICIES.values()][:6] == [
        "AdaptSFL",
        "RMA+MS",
        "MA+RMS",
        "RMA+RMS",
        "DAMA+RMS",
        "RMA+AMS",
    ]
    assert len({policy.title for policy in POLICIES.values()}) == len(POLICIES)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("rma+mz", {}, r"policy: 'rma\+mz' is unknown. Did you mean 'rma\+ms'\?"),
        ("fixed", {"intervall": 3}, "policy.intervall: .*Did you mean 'interval'.*fixed takes: interval, cut, cuts"),
        ("adaptsfl", {"cut": 3}, "policy.cut: .*adaptsfl takes: mode, target"),
        ("ma+rms", {"cut": 3}, r"policy.cut: .*ma\+rms takes no options"),
        ("sfl", {"cuts": 5}, "policy.cuts: is 5. Give a list"),
        ("sfl", {"cuts": "1, 2"}, "policy.cuts: is '1, 2'. Give a list"),
        ("fixed", {"interval": 0}, "policy.interval: is 0"),
        ("fixed", {"cut": 1, "cuts": [1]}, "policy.cuts: is given beside cut"),
        ("sfl", {"cuts": [1, 0]}, r"policy.cuts\[1\]: is 0"),
        ("dama+rms", {"first": 30}, "policy.first: is 30"),
        ("dama+rms", {"decay": 1.0}, "policy.decay: is 1"),
        ("psl", {"rounds": 0}, "policy.rounds: is 0"),
        ("adacomm", {"tau0": 0}, "policy.tau0: is 0"),
        ("adacomm", {"tau0": 1001}, "policy.tau0: is 1001"),
        ("adacomm", {"every": 0}, "policy.every: is 0"),
        ("post-local", {"interval": 4}, "policy.switch_round: is missing. Give the last round"),
        ("post-local", {"interval": 0, "switch_round": 4}, "policy.interval: is 0"),
        ("post-local", {"switch_round": -1}, "policy.switch_round: is -1"),
        ("qsr", {"base": 0}, "policy.base: is 0"),
        ("qsr", {"alpha": 0.0}, "policy.alpha: is 0. Give a number above zero"),
        ("qsr", {"cut": 1, "cuts": [1]}, "policy.cuts: is given beside cut"),
        ("fedlama", {"factor": 1}, "policy.factor: is 1. Give a whole number from 2"),
        ("fedlama", {"interval": 2.5}, "policy.interval: is not a whole number"),
        ("rma+rms", {"longest": "many"}, "policy.longest: is not a whole number"),
    ],
)
def test_wrong_names_and_options_are_explained(name, options, message):
    with pytest.raises(InvalidInput, match=message):
        make_policy(name, **options)


def test_a_cut_beyond_the_model_is_an_error():
    with pytest.raises(InvalidInput, match=r"policy.cut\[0\]: is 4"):
        make_policy("sfl", cut=4).decide(seen())


def test_a_policy_of_the_users_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_policy.py").write_text(
        "from adaptsfl.policies import BasePolicy, Decision\n"
        "class Mine(BasePolicy):\n"
        "    def __init__(self, cut=1):\n"
        "        self.cut = cut\n"
        "    def decide(self, seen):\n"
        "        return Decision((self.cut,) * seen.devices, 2)\n"
        "class NoPolicy:\n"
        "    title = 'none'\n"
    )
    mine = make_policy("own_policy:Mine", cut=3)
    assert (mine.title, mine.trainer) == ("Mine", "engine")
    assert mine.decide(seen()) == Decision((3, 3), 2)
    with pytest.raises(InvalidInput, match=r"policy: .*'cutt'"):
        make_policy("own_policy:Mine", cutt=3)
    with pytest.raises(
        InvalidInput, match=r"policy: own_policy:NoPolicy gives something without 'trainer'.*BasePolicy"
    ):
        make_policy("own_policy:NoPolicy")
    with pytest.raises(InvalidInput, match="Did you mean 'Mine'"):
        make_policy("own_policy:Mime")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("title = 5", "has the title 5. Give it a text"),
        ("trainer = 'turn'", "'turn' is unknown. Did you mean 'turns'"),
        ("adapt = None", "has None as adapt"),
    ],
)
def test_what_a_policy_of_the_users_own_says_about_itself_is_checked(tmp_path, monkeypatch, line, message):
    monkeypatch.syspath_prepend(tmp_path)
    name = f"odd_{line.split()[0]}"
    text = f"from adaptsfl.policies import BasePolicy\nclass Odd(BasePolicy):\n    {line}\n"
    (tmp_path / f"{name}.py").write_text(text)
    with pytest.raises(InvalidInput, match=message):
        make_policy(f"{name}:Odd")


def test_numpy_numbers_make_a_decision_of_plain_ones():
    one = np.int64(1)
    decided = Decision((one, one), np.int64(2), {one: np.int64(4)}, rounds=np.int64(4), placed=(one, one))
    plain = [decided.interval, decided.length, *decided.placement, *decided.layer_intervals]
    assert json.dumps(plain) == "[2, 4, 1, 1, 1]"
    assert type(decided.layer_intervals[1]) is int


def test_a_base_policy_alone_decides_nothing():
    with pytest.raises(NotImplementedError):
        BasePolicy().decide(seen())


def test_balancing_many_devices_is_a_walk():
    """RMA+AMS walks all d_i(j) once: 500 devices of 16 layers are 8000 steps."""
    observation = of(paper_like(500, 0))
    assert len(made("rma+ams").decide(observation).cuts) == 500
