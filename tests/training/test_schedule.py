"""Rounds, ages and boundaries."""

import pytest

from adaptsfl.decisions import Decision
from adaptsfl.errors import InvalidInput
from adaptsfl.training import Schedule


def averaged(schedule: Schedule, rounds: int) -> list[list[int]]:
    return [schedule.advance() for _ in range(rounds)]


def test_all_layers_are_averaged_at_every_interval() -> None:
    schedule = Schedule(Decision((1, 2), 3))
    assert averaged(schedule, 6) == [[], [], [1, 2], [], [], [1, 2]]


def test_without_an_interval_no_layer_is_averaged() -> None:
    schedule = Schedule(Decision((2, 2), None))
    assert averaged(schedule, 3) == [[], [], []]
    assert schedule.at_boundary


def test_layers_have_their_own_interval() -> None:
    schedule = Schedule(Decision((3, 1), 2, {2: 3, 3: 6}))
    assert averaged(schedule, 6) == [[], [1], [2], [1], [], [1, 2, 3]]


def test_ages_carry_over_a_change_of_plan() -> None:
    """Layer 3 was not averaged for 2 rounds when its interval became 5: it is due 3 rounds later."""
    schedule = Schedule(Decision((3, 3), 2, {3: 6}))
    averaged(schedule, 2)
    schedule.change(Decision((4, 1), 4, {3: 5}))
    assert averaged(schedule, 4) == [[], [], [3], [1, 2, 4]]


def test_a_lone_round_needs_equal_copies_that_all_are_averaged() -> None:
    schedule = Schedule(Decision((2, 2), 1, {2: 2}))
    assert not schedule.lone_round
    averaged(schedule, 2)
    schedule.change(Decision((2, 2), 1))
    assert schedule.lone_round
    averaged(schedule, 1)
    assert schedule.lone_round


def test_a_plan_changes_at_a_boundary_only() -> None:
    schedule = Schedule(Decision((1,), 4))
    averaged(schedule, 5)
    with pytest.raises(InvalidInput, match=r"plan: changes 1 round\(s\) after the last averaging. Change it 3 round"):
        schedule.change(Decision((1,), 2))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((), 1), "decision.cuts: is empty"),
        (((0, 1), 1), r"decision.cuts\[0\]: is 0"),
        (((1, 2), 0), "decision.interval: is 0"),
        (((1, 2), 3, {3: 1}), "decision.layer_intervals: names layer 3, but client-specific are 1 to 2"),
        (((1, 2), 3, {2: 0}), r"decision.layer_intervals\[2\]: is 0"),
    ],
)
def test_impossible_plans_are_refused(arguments: tuple, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        Decision(*arguments)
