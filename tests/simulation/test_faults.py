"""Who is there, who takes part, who is slow: deterministic, with the rates that were asked for."""

import tomllib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptsfl.config import FaultsConfig, Recipe, load_recipe, parse
from adaptsfl.errors import InvalidInput
from adaptsfl.fleet import RATES
from adaptsfl.simulation.faults import ComesAndGoes, Faults, Recorded, faults_from, read_presence
from problems import paper_like

NAMES = [f"device {k}" for k in range(1, 6)]


def made(names=NAMES, **config) -> Faults:
    return faults_from(parse(FaultsConfig, config), names)


def test_by_default_nothing_happens():
    faults, fleet = made(), paper_like(5, 0).fleet
    assert faults.present_at(7) == faults.taking_part(7) == faults.still_there(7, 99) == (0, 1, 2, 3, 4)
    assert faults.slowed(fleet, 7) is fleet


# Dropping out


@given(st.lists(st.integers(0, 300), min_size=1, max_size=20), st.integers(0, 5))
def test_a_round_is_the_same_in_whatever_order_it_is_asked_for(rounds, seed):
    options = {"dropout_rate": 0.2, "return_rate": 0.3, "participation": 0.5, "straggler_rate": 0.5, "seed": seed}
    one, fleet = made(**options), paper_like(5, 0).fleet
    for t in rounds:
        other = made(**options)
        assert one.present_at(t) == other.present_at(t)
        assert one.taking_part(t) == other.taking_part(t)
        assert np.array_equal(one.slowed(fleet, t).flops, other.slowed(fleet, t).flops)


def test_devices_leave_and_return_at_their_rates():
    """A chain that leaves with 0.1 and returns with 0.3 is there 0.3/0.4 of the time.

    Of 40,000 steps about 30,000 begin there: the shares below have standard deviations under 0.01.
    """
    faults = made(names=[str(k) for k in range(20)], dropout_rate=0.1, return_rate=0.3)
    there = np.array([np.isin(range(20), faults.present_at(t)) for t in range(2000)])
    assert there[0].all()
    before, after = there[:-1], there[1:]
    assert np.mean(~after[before]) == pytest.approx(0.1, abs=0.01)
    assert np.mean(after[~before]) == pytest.approx(0.3, abs=0.02)
    assert np.mean(there) == pytest.approx(0.75, abs=0.03)
    assert abs(np.corrcoef(there[:, 0], there[:, 1])[0, 1]) < 0.2  # each in its own time


def test_a_certain_dropout_alternates():
    """With both rates at 1 a device is there in every other round."""
    faults = Faults(1, ComesAndGoes(1, 1.0, 1.0, seed=3))
    assert [faults.present_at(t) for t in range(4)] == [(0,), (), (0,), ()]


def test_who_drops_out_is_gone_until_the_next_block():
    """Device 1 is away in rounds 3 and 4, device 2 from 6 on."""
    faults = Faults(3, Recorded(((3, 5), (6,), ())))
    assert [faults.still_there(2, t) for t in range(2, 8)] == [
        (0, 1, 2),
        (1, 2),
        (1, 2),
        (1, 2),
        (2,),
        (2,),
    ]
    assert faults.taking_part(5) == (0, 1, 2)
    assert faults.taking_part(4) == (1, 2)
    assert faults.still_there(4, 5) == (1, 2)


def test_the_last_to_leave_a_block_stays_until_its_end():
    faults = Faults(3, Recorded(((2, 9), (4, 9), (3, 9))))
    assert [faults.still_there(0, t) for t in range(1, 6)] == [(0, 1, 2), (1, 2), (1,), (1,), (1,)]


def test_a_block_that_nobody_can_begin_is_trained_by_whoever_returns_first():
    """Device 2 returns at 6, device 1 at 8; device 2 leaves for good at 7."""
    faults = Faults(2, Recorded(((1, 8), (1, 6, 7))))
    assert faults.present_at(3) == ()
    assert faults.taking_part(3) == (1,)
    assert [faults.still_there(3, t) for t in (3, 6, 7)] == [(1,), (1,), (1,)]


def test_a_fleet_that_nobody_returns_to_is_an_error():
    with pytest.raises(InvalidInput, match="leaves no device from round 4 on"):
        Faults(2, Recorded(((1,), (2,)))).taking_part(4)


@given(st.integers(0, 400), st.integers(0, 60), st.integers(0, 3))
def test_a_round_always_has_a_device_and_a_block_only_loses_some(first, later, seed):
    faults = made(dropout_rate=0.4, return_rate=0.05, participation=0.6, seed=seed)
    members = faults.taking_part(first)
    there = faults.still_there(first, first + later)
    assert there
    assert set(there) <= set(members)
    if later:
        assert set(there) <= set(faults.still_there(first, first + later - 1))


# Taking part, and being slow


def test_a_share_of_those_there_takes_part_each_block():
    faults = made(names=[str(k) for k in range(10)], participation=0.3)
    blocks = [faults.taking_part(t) for t in range(1000)]
    assert {len(block) for block in blocks} == {3}
    assert all(list(block) == sorted(set(block)) for block in blocks)
    shares = np.bincount(np.concatenate(blocks), minlength=10) / 1000  # 0.3 ± 0.0145
    assert np.abs(shares - 0.3).max() < 0.06
    assert made(participation=0.01).taking_part(0)


def test_stragglers_are_slower_in_everything_they_do():
    fleet = paper_like(5, 0).fleet
    faults = made(straggler_rate=0.25, straggler_factor=4.0)
    slow = []
    for t in range(1000):
        then = faults.slowed(fleet, t)
        factors = {rate: getattr(fleet, rate) / getattr(then, rate) for rate in RATES}
        assert all(np.allclose(of_rate, factors["flops"]) for of_rate in factors.values())
        assert then.server == fleet.server
        slow.append(np.isclose(factors["flops"], 4.0))
        assert np.allclose(factors["flops"][~slow[-1]], 1.0)
    assert np.mean(slow) == pytest.approx(0.25, abs=0.03)


# Files


def trace(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "presence.csv"
    file.write_text(text)
    return file


def test_a_recorded_presence_is_replayed(tmp_path):
    rows = "round,device,present\n0,b,0\n2,a,0\n2,b,1\n3,a,false\n4,a,true\n"
    faults = Faults(3, read_presence(trace(tmp_path, rows), ["a", "b", "c"]))
    assert [faults.present_at(t) for t in range(5)] == [(0, 2), (0, 2), (1, 2), (1, 2), (0, 1, 2)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("round,device\n", "present: is missing from the header"),
        ("round,device,present\n1,x,0\n", r"line 2: device: 'x' is unknown"),
        ("round,device,present\n1,a,maybe\n", r"line 2: present: is 'maybe'. Give 0 or 1"),
        ("round,device,present\nsoon,a,0\n", r"line 2: round: is 'soon'"),
        ("round,device,present\n-1,a,0\n", r"line 2: round: is -1"),
        ("round,device,present\n3,a,0\n2,a,1\n", r"line 3: round: is 2 after 3"),
        ("round,device,present\n3,a,0\n3,a,1\n", r"line 3: device: 'a' changes twice in round 3"),
        ("round,device,present\n3,a\n", r"line 2: present: is None"),
    ],
)
def test_what_is_wrong_with_a_trace_is_explained(tmp_path, text, message):
    with pytest.raises(InvalidInput, match=message):
        read_presence(trace(tmp_path, text), ["a", "b"])


def test_a_trace_that_cannot_be_read_is_an_error(tmp_path):
    with pytest.raises(InvalidInput, match="cannot be read"):
        made(trace=str(tmp_path / "none.csv"))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"dropout_rate": 1.5}, "dropout_rate: is 1.5. Give a number ≥ 0 and at most 1"),
        ({"dropout_rate": -0.1}, "dropout_rate: is -0.1"),
        ({"dropout_rate": 0.1, "return_rate": 0.0}, "return_rate: is 0, and with dropouts"),
        ({"dropout_rate": 0.1, "trace": "x.csv"}, "dropout_rate: is given beside trace"),
        ({"straggler_rate": 2.0}, "straggler_rate: is 2"),
        ({"straggler_factor": 0.5}, "straggler_factor: is 0.5"),
        ({"participation": 0.0}, "participation: is 0"),
        ({"participation": 1.1}, "participation: is 1.1"),
        ({"seed": -1}, "seed: is -1"),
    ],
)
def test_wrong_settings_are_explained(config, message):
    with pytest.raises(InvalidInput, match=message):
        made(**config)


def test_a_recipe_has_faults_and_their_trace_lies_beside_it(tmp_path):
    (tmp_path / "recipe.toml").write_text(
        '[model]\nname = "vgg16"\n[convergence]\ninitial_gap = 1.0\n[faults]\ntrace = "who.csv"\nparticipation = 0.5\n'
    )
    faults = load_recipe(tmp_path / "recipe.toml").faults
    assert (faults.trace, faults.participation) == (str(tmp_path / "who.csv"), 0.5)
    wrong = tomllib.loads('[model]\nname = "x"\n[convergence]\ninitial_gap = 1.0\n[faults]\ndropout = 0.1\n')
    with pytest.raises(InvalidInput, match=r"faults.dropout: .*Did you mean 'dropout_rate'"):
        parse(Recipe, wrong)
