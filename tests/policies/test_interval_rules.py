"""Rules for the interval that people already use, by hand: AdaComm, post-local SGD, QSR and FedLAMA."""

import dataclasses
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptsfl.config import PlannerConfig
from adaptsfl.errors import InfeasiblePlan, InvalidInput
from adaptsfl.policies import Decision, make_policy
from adaptsfl.policies.cuts import fastest_cuts
from adaptsfl.training import Schedule
from policies.observations import seen, wide

RULES = {
    "adacomm": {},
    "post-local": {"switch_round": 0},
    "qsr": {},
    "fedlama": {},
}


def intervals(policy, *observations):
    return [policy.decide(observation).interval for observation in observations]


# What all have in common


@pytest.mark.parametrize("name", RULES)
def test_cuts_are_given_or_the_fastest_for_the_interval(name):
    observation = wide()
    decided = make_policy(name, **RULES[name]).decide(observation)
    assert decided.cuts == tuple(fastest_cuts(observation, decided.interval))
    assert decided.interval > 1
    assert decided.cuts != tuple(fastest_cuts(observation, None))  # so the interval matters here
    assert make_policy(name, **RULES[name], cut=2).decide(seen()).cuts == (2, 2)
    assert make_policy(name, **RULES[name], cuts=[1, 3, 1, 2]).decide(seen(present=(1, 3))).cuts == (3, 2)
    with pytest.raises(InvalidInput, match=r"policy.cuts: has 3 entries"):
        make_policy(name, **RULES[name], cuts=[1, 3, 1]).decide(seen(present=(1, 3)))


@pytest.mark.parametrize("name", RULES)
def test_given_cuts_must_fit_into_memory(name):
    fleet = dataclasses.replace(seen().fleet, memory_bytes=[1.0, 2.0])
    costs = dataclasses.replace(seen().costs, memory_bytes=[1.0, 2.0, 3.0])
    with pytest.raises(InfeasiblePlan, match=r"device 1: cut 3 needs"):
        make_policy(name, **RULES[name], cut=3).decide(seen(fleet=fleet, costs=costs))


def test_no_rule_needs_torch():
    program = (
        "import sys; from adaptsfl.policies import make_policy; import adaptsfl.rate_schedule\n"
        f"for name, options in {RULES!r}.items(): make_policy(name, **options)\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


# AdaComm


def after(losses, rate=0.1, **changes):
    """As many rounds done as there are losses."""
    return seen(round=len(losses), losses=np.array(losses), learning_rate=rate, **changes)


def test_adacomm_by_hand():
    """τ₀ = 16: half the loss gives ⌈16/√2⌉ = ⌈11.3⌉ = 12, a quarter 8, a hundredth ⌈1.6⌉ = 2."""
    policy = make_policy("adacomm", tau0=16, every=20)
    first = [4.0] * 10
    steps = [after([]), after(first + [2.0] * 10), after(first + [1.0] * 30), after(first + [0.04] * 50)]
    assert intervals(policy, *steps) == [16, 12, 8, 2]


def test_adacomm_is_computed_every_so_often():
    """In between the interval stays, whatever the loss does and however often it is asked."""
    policy = make_policy("adacomm", tau0=16, every=20)
    losses = [4.0] * 5 + [1.0] * 30
    assert intervals(policy, after([]), *(after(losses[:done]) for done in (6, 15, 19))) == [16] * 4
    assert intervals(policy, after(losses[:20]), after(losses[:20])) == [8, 8]


def test_adacomm_takes_the_mean_of_ten_rounds():
    """(9 · 0.25 + 1.75)/10 = 0.4 of the first loss: ⌈10 √0.4⌉ = ⌈6.3⌉ = 7; the last round alone would give 14."""
    policy = make_policy("adacomm", tau0=10, every=20)
    losses = [1.0] * 10 + [0.25] * 9 + [1.75]
    assert intervals(policy, after([]), after(losses)) == [10, 7]


def test_adacomm_halves_on_a_plateau():
    """16, then 12 by the formula; then it would stay 12, so 6, 3, 2, 1."""
    policy = make_policy("adacomm", tau0=16, every=20)
    losses = [4.0] * 10 + [2.0] * 150
    found = intervals(policy, after([]), *(after(losses[:done]) for done in range(20, 121, 20)))
    assert found == [16, 12, 6, 3, 2, 1, 1]


def test_adacomm_follows_the_learning_rate():
    """A fourth of the rate doubles τ: ⌈√4 · 16/√2⌉ = ⌈22.6⌉ = 23; and that is no plateau."""
    policy = make_policy("adacomm", tau0=16, every=20)
    losses = [4.0] * 10 + [2.0] * 50
    found = intervals(policy, after([]), after(losses[:20], 0.1), after(losses[:40], 0.025), after(losses, 0.0))
    assert found == [16, 12, 23, 1000]


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=30), st.sampled_from([0.0, 1e-30, 0.1]))
def test_adacomm_takes_any_loss(losses, rate):
    policy = make_policy("adacomm", tau0=7, every=1)
    first, later = intervals(policy, after([]), after(losses, rate))
    assert first == 7
    assert 1 <= later <= 1000


# Post-local SGD


def test_post_local_by_hand():
    """The rounds up to the switch are averaged one by one, whoever is there; then the interval holds."""
    policy = make_policy("post-local", interval=5, switch_round=3)
    assert intervals(policy, *(seen(round=done) for done in (0, 1, 2, 3, 8))) == [1, 1, 1, 5, 5]
    assert intervals(policy, seen(round=9, limits=PlannerConfig(max_interval=4))) == [4]


# QSR


def test_qsr_by_hand():
    """α = 0.2: (0.2/0.1)² = 4, (0.2/0.05)² = 16, (0.2/0.03)² = 44.4, (0.2/0.02)² = 100; and at least the base."""
    policy = make_policy("qsr", base=6, alpha=0.2)
    rates = (0.1, 0.05, 0.03, 0.02, 0.1)
    assert intervals(policy, *(seen(learning_rate=rate) for rate in rates)) == [6, 16, 44, 100, 6]


def test_qsr_ends_where_the_learning_rate_is_zero():
    policy = make_policy("qsr", base=6, alpha=0.2)
    assert intervals(policy, *(seen(learning_rate=rate) for rate in (1e-3, 1e-200, 0.0))) == [1000] * 3
    limits = PlannerConfig(max_interval=30)
    assert intervals(policy, seen(learning_rate=0.0, limits=limits)) == [30]


def test_qsr_without_alpha_begins_with_its_base():
    """Then H = base · (η₀/η)²: 3, 12 for half the rate, 300 for a tenth, though 0.3 · 0.1 is a bit more than 0.03."""
    policy = make_policy("qsr", base=3)
    rates = (0.3, 0.3, 0.15, 0.3 * 0.1)
    assert intervals(policy, *(seen(learning_rate=rate) for rate in rates)) == [3, 3, 12, 300]


# FedLAMA


def test_fedlama_by_hand():
    """Layers of 16, 32 and 112 bits; the first block averages all every 4 rounds.

    Divergence 0.3, 0.1 and 0.2: d ∝ 9, 1, 4 (over 4 rounds each). From the least on: layer 2 with 32, layer 3 with 448,
    layer 1 with 144, of 624. δ = 0.051, 0.769, 1 and λ = 0.2, 0.9, 1: only 0.051 < 1 − 0.2 holds, so layer 2 is seldom
    averaged. Then layer 2 was 12 rounds old: its 0.3 counts as 9/12, less than the 4/4 of layer 1 and the 9/4 of layer
    3. δ = 24/292 < 1 − 0.2 for layer 2, (24 + 16)/292 = 0.137 < 1 − 0.3 for layer 1.
    """
    policy = make_policy("fedlama", interval=4, factor=3, cut=3)
    assert policy.decide(seen()) == Decision((3, 3), 4, {1: 4, 2: 4, 3: 4}, rounds=12)
    second = policy.decide(seen(divergence=np.array([0.3, 0.1, 0.2])))
    assert second == Decision((3, 3), 4, {1: 4, 2: 12, 3: 4}, rounds=12)
    third = policy.decide(seen(divergence=np.array([0.2, 0.3, 0.3])))
    assert third == Decision((3, 3), 4, {1: 12, 2: 12, 3: 4}, rounds=12)


def test_fedlama_knows_only_layers_that_had_copies():
    """L_c was 1: layers 2 and 3 are averaged as often as any until their copies were seen. A single one always is."""
    policy = make_policy("fedlama", interval=2, cuts=[3, 3])
    policy.decide(seen())
    assert policy.decide(seen(divergence=np.array([0.1]))).layer_intervals == {1: 2, 2: 2, 3: 2}
    shallow = make_policy("fedlama", interval=2, cut=1)
    shallow.decide(seen())
    assert shallow.decide(seen(divergence=np.array([0.1, 0.2, 0.3]))).layer_intervals == {1: 2}


@given(st.lists(st.one_of(st.just(0.0), st.just(np.inf), st.floats(0, 1e9)), min_size=0, max_size=16))
def test_fedlama_averages_everything_at_the_end_of_a_block(divergence):
    policy = make_policy("fedlama", interval=3, factor=4, cut=16)
    for _ in range(2):
        decided = policy.decide(wide(divergence=np.array(divergence)))
        schedule = Schedule(decided)
        for _ in range(decided.length):
            schedule.advance()
        assert schedule.ages == [0] * 16
        assert set(decided.layer_intervals.values()) <= {3, 12}


def test_fedlama_averages_equal_copies_seldom():
    """Nothing differs: δ = 0 throughout, so all but the last in order of size are left alone."""
    policy = make_policy("fedlama", interval=3, cut=3)
    policy.decide(seen())
    assert policy.decide(seen(divergence=np.zeros(3))).layer_intervals == {1: 6, 2: 6, 3: 3}
