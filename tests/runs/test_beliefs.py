"""Beliefs about convergence: which of them a recipe leads to, and what they say."""

from typing import Any

import pytest

from adaptsfl.config import AdaptConfig, Recipe, parse
from adaptsfl.convergence import LONGEST_INTERVAL, RoundsTable
from adaptsfl.decisions import Decision
from adaptsfl.errors import InvalidInput
from adaptsfl.runs.beliefs import UNMEASURED_INTERVAL, Calibrated, Given, PaperBound, beliefs_from

LAYERS = 3
GROWTH = {"growth": {"factors": [0.1, 0.2, 0.3]}}
POWERS = {"powers": [0.1, 0.2, 0.3]}
TABLE = {"table": {"intervals": [1, 4], "rounds": [[1.0, 1.5]] * LAYERS}}
DRIFT = {"initial_gap": 2.0, "budget": 1.0, "drift": {"per_layer": [0.01] * LAYERS, "power": 2.0}}


def beliefs(convergence: dict[str, Any] | None = None, **adapt: Any):
    content: dict[str, Any] = {"model": {"name": "vgg16"}, "fleet": {"devices": 3}}
    if convergence is not None:
        content["convergence"] = convergence
    return beliefs_from(parse(Recipe, content), parse(AdaptConfig, adapt), LAYERS)


def test_which_beliefs_a_recipe_leads_to() -> None:
    assert type(beliefs()) is type(beliefs(GROWTH)) is Calibrated
    assert type(beliefs(mode="paper", target=1.0)) is PaperBound
    for given in (POWERS, TABLE, DRIFT):
        assert type(beliefs(given)) is Given
    for given in (GROWTH, POWERS, TABLE, DRIFT):
        assert type(beliefs(given, mode="paper")) is Given


def test_the_bound_is_not_trusted_before_its_constants_are_measured() -> None:
    trust = beliefs(mode="paper", target=1.0).trust()
    assert trust.longest_interval == trust.longest_averaging == UNMEASURED_INTERVAL


def test_the_growth_of_a_recipe_is_where_the_estimate_begins() -> None:
    assert beliefs(GROWTH).model(3).factors == pytest.approx([0.1, 0.2, 0.3], rel=0.01)
    assert beliefs().model(3).factors[-1] == pytest.approx(0.15, rel=0.05)


def test_a_table_is_believed() -> None:
    found = beliefs(TABLE)
    assert isinstance(found.model(3), RoundsTable)
    assert found.trust().longest_interval == LONGEST_INTERVAL
    assert found.data(Decision((1, 1, 1), 4)) == {}


def test_what_is_wrong_with_a_recipes_convergence_is_said_at_once() -> None:
    for wrong in (
        {"growth": {"factors": [0.1]}},
        {"powers": [0.1]},
        {**DRIFT, "drift": {"per_layer": [0.1], "power": 1.0}},
        {"table": {"intervals": [2], "rounds": [[1.0]] * LAYERS}},
    ):
        with pytest.raises(InvalidInput, match=r"convergence\.(growth|powers|table|drift)"):
            beliefs(wrong)


def test_the_record_tells_the_rounds_of_the_plan_with_their_range() -> None:
    found = beliefs()
    data = found.data(Decision((1, 3, 2), 16))
    assert data["relative_rounds_low"] < data["relative_rounds"] < data["relative_rounds_high"]
    growth = data["growth"]
    assert data["relative_rounds"] == pytest.approx(1 + growth["factors"][2] * (16 ** growth["power"] - 1))
    assert found.data(Decision((1, 1, 1), 1))["relative_rounds"] == 1
    assert "relative_rounds" not in found.data(Decision((1, 1, 1), None, rounds=5))


def test_constants_of_the_estimate_can_be_varied() -> None:
    assert beliefs(calibration={"prior_kappa": 2.0}).estimate.kappa == pytest.approx(2.0, rel=0.05)
    assert beliefs(calibration={"long_block": 16}).trust().longest_interval == 16
    with pytest.raises(InvalidInput, match=r"calibration\.prior_kappa: is 0"):
        beliefs(calibration={"prior_kappa": 0.0})
