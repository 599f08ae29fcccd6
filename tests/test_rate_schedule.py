"""The learning rate of every round by hand, and schedules that cannot be meant."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptsfl.config import Recipe, TrainingConfig, parse
from adaptsfl.errors import InvalidInput
from adaptsfl.rate_schedule import RateSchedule
from adaptsfl.runs.recipe import check_training, optimizer_settings


def at(schedule: RateSchedule, *rounds: int) -> list[float]:
    return [schedule.at(t) for t in rounds]


def test_without_a_schedule_the_learning_rate_stays_exactly_as_it_is() -> None:
    assert at(RateSchedule(), 1, 2, 10**9) == [1.0, 1.0, 1.0]
    settings = optimizer_settings(TrainingConfig(learning_rate=0.3, common_learning_rate=0.7))
    assert (settings.rate(5, common=False), settings.rate(5, common=True)) == (0.3, 0.7)


def test_cosine_by_hand() -> None:
    """floor + (1 - floor)(1 + cos(π p))/2, p = (t - 1)/(rounds - 1): cos(π/3) = 1/2 and cos(π/2) = 0."""
    assert at(RateSchedule("cosine", 7), 1, 3, 4, 5, 7, 8, 100) == pytest.approx([1, 0.75, 0.5, 0.25, 0, 0, 0])
    assert at(RateSchedule("cosine", 7, floor=0.2), 1, 3, 4, 7, 8) == pytest.approx([1, 0.8, 0.6, 0.2, 0.2])


def test_steps_by_hand() -> None:
    """A step is taken after its round: rounds 1 to 200 are as before."""
    schedule = RateSchedule("steps", [200, 400], factor=0.5)
    assert at(schedule, 1, 200, 201, 400, 401, 9999) == [1, 1, 0.5, 0.5, 0.25, 0.25]
    assert at(RateSchedule("steps", [1]), 1, 2) == [1, 0.1]


def test_warmup_by_hand() -> None:
    """Four rounds with fifths of the rate; the decay begins in the fifth, so the cosine is half way in round 7 of 9."""
    assert at(RateSchedule(warmup_rounds=4), 1, 2, 3, 4, 5, 6) == pytest.approx([0.2, 0.4, 0.6, 0.8, 1, 1])
    cosine = RateSchedule("cosine", 9, warmup_rounds=4)
    assert at(cosine, 1, 4, 5, 7, 9) == pytest.approx([0.2, 0.8, 1, 0.5, 0])
    assert [cosine.decay(t) for t in (1, 4, 5, 7)] == pytest.approx([1, 1, 1, 0.5])
    assert at(RateSchedule("steps", [6], warmup_rounds=4), 4, 5, 6, 7) == pytest.approx([0.8, 1, 1, 0.1])


@given(st.integers(2, 500), st.integers(0, 400), st.sampled_from([0.0, 0.01, 0.5, 1.0]), st.integers(1, 1000))
def test_a_cosine_rises_in_the_warmup_and_falls_after_it(more: int, warmup: int, floor: float, round_: int) -> None:
    schedule = RateSchedule("cosine", warmup + more, floor=floor, warmup_rounds=warmup)
    now, following = at(schedule, round_, round_ + 1)
    assert (now < following) if round_ <= warmup else (now >= following - 1e-12)
    assert 0 <= now <= 1 + 1e-12
    assert round_ <= warmup or now >= floor - 1e-12


def test_both_learning_rates_of_a_recipe_follow_its_schedule() -> None:
    training = {"learning_rate": 0.4, "common_learning_rate": 0.2, "schedule": {"kind": "steps", "rounds": [3]}}
    settings = optimizer_settings(parse(Recipe, {"model": {"name": "vgg16"}, "training": training}).training)
    assert [settings.rate(t, common=False) for t in (3, 4)] == pytest.approx([0.4, 0.04])
    assert [settings.rate(t, common=True) for t in (3, 4)] == pytest.approx([0.2, 0.02])


def test_a_schedule_is_part_of_what_a_recipe_is_and_none_leaves_no_trace() -> None:
    """Runs recorded before there were schedules have no such key, and are still true."""
    assert "schedule" not in TrainingConfig().model_dump(mode="json")
    given = {"kind": "steps", "rounds": [3], "floor": None, "factor": 0.5, "warmup_rounds": 0}
    training = parse(TrainingConfig, {"schedule": given})
    assert training.model_dump(mode="json")["schedule"] == given
    assert TrainingConfig.model_validate_json(training.model_dump_json()) == training


def test_numpy_numbers_and_lists_make_a_schedule_of_plain_ones() -> None:
    assert RateSchedule("steps", [np.int64(2), 5]) == RateSchedule("steps", (2, 5))
    assert math.isclose(RateSchedule("cosine", np.int64(3)).at(2), 0.5)
    hash(RateSchedule("steps", [2, 5]))


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ({"kind": "cosine"}, r"schedule.rounds: is missing. Give the round that reaches the floor"),
        ({"kind": "cosine", "rounds": [3, 4]}, r"schedule.rounds: is \[3, 4\]. Give the round"),
        ({"kind": "cosine", "rounds": 1}, r"schedule.rounds: is 1. Give a whole number from 2"),
        ({"kind": "cosine", "rounds": 6, "warmup_rounds": 5}, r"schedule.rounds: is 6. Give a whole number from 7"),
        ({"kind": "cosine", "rounds": 9, "floor": 1.5}, r"schedule.floor: is 1.5. Give a share"),
        ({"kind": "cosine", "rounds": 9, "floor": -0.5}, r"schedule.floor: is -0.5"),
        ({"kind": "cosine", "rounds": 9, "floor": math.nan}, r"schedule.floor: is nan"),
        ({"kind": "cosine", "rounds": 9, "factor": 0.5}, r"schedule.factor: is given, but kind is 'cosine'.*'steps'"),
        ({"kind": "steps"}, r"schedule.rounds: is missing. Give a list of rounds"),
        ({"kind": "steps", "rounds": 5}, r"schedule.rounds: is 5. Give a list of rounds"),
        ({"kind": "steps", "rounds": []}, r"schedule.rounds: is \[\]. Give a list of rounds"),
        ({"kind": "steps", "rounds": [0]}, r"schedule.rounds\[0\]: is 0"),
        ({"kind": "steps", "rounds": [4, 4]}, r"schedule.rounds\[1\]: is 4. Give a whole number from 5"),
        ({"kind": "steps", "rounds": [2], "warmup_rounds": 2}, r"schedule.rounds\[0\]: is 2. Give .* from 3"),
        ({"kind": "steps", "rounds": [4], "factor": 0.0}, r"schedule.factor: is 0. Give a number above zero"),
        (
            {"kind": "steps", "rounds": [4], "factor": 2.0},
            r"schedule.factor: is 2. Give a number above 0 and at most 1",
        ),
        ({"kind": "steps", "rounds": [4], "floor": 0.1}, r"schedule.floor: is given, but kind is 'steps'.*'cosine'"),
        ({"rounds": 5}, r"schedule.rounds: is given, but kind is 'constant'.*'cosine' or 'steps'"),
        ({"warmup_rounds": -1}, r"schedule.warmup_rounds: is -1"),
    ],
)
def test_schedules_that_cannot_be_meant_are_explained(schedule: dict[str, object], message: str) -> None:
    training = parse(TrainingConfig, {"schedule": schedule})
    with pytest.raises(InvalidInput, match=rf"^training\.{message}"):
        check_training(training)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ({"kind": "linear"}, "training.schedule.kind"),
        ({"kind": "cosine", "round": 5}, "training.schedule.round: .*Did you mean 'rounds'"),
        ({"kind": "cosine", "rounds": 5.5}, "training.schedule.rounds"),
    ],
)
def test_a_recipe_names_known_keys_only(schedule: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        parse(Recipe, {"model": {"name": "vgg16"}, "training": {"schedule": schedule}})


def test_an_unknown_kind_is_named() -> None:
    with pytest.raises(InvalidInput, match=r"schedule.kind: 'cosin' is unknown. Did you mean 'cosine'"):
        RateSchedule("cosin", 5)  # type: ignore[arg-type]
