"""What a server may tell a device: a recipe of known parts, no code, no paths, nothing that breaks the device."""

import json
from pathlib import Path
from typing import Any

import pytest

from adaptsfl.config import Recipe, load_recipe, parse
from adaptsfl.deploy.terms import Terms
from adaptsfl.errors import AdaptSFLError, BadMessage, InvalidInput
from deploy.in_process import RECIPE


@pytest.fixture
def terms(tmp_path: Path) -> Terms:
    file = tmp_path / "recipe.toml"
    file.write_text(RECIPE)
    return Terms.of(load_recipe(file, ('data.path="/srv/secret"', 'data.cache="/srv/cache"', "run.seed=7")))


def told(terms: Terms, **changes: Any) -> str:
    """What a server tells, with some of it changed: `recipe__data__path` is a key within keys."""
    content = json.loads(terms.to_json())
    for place, value in changes.items():
        *outer, last = place.split("__")
        inner = content
        for key in outer:
            inner = inner[key]
        inner[last] = value
    return json.dumps(content)


def test_both_sides_mean_the_same(terms: Terms) -> None:
    heard = Terms.from_json(terms.to_json())
    assert heard.to_json() == terms.to_json()
    assert (heard.devices, heard.seed, heard.batch_size, heard.test_samples) == (4, 7, 8, 40)


def test_a_schedule_is_told_and_heard_and_none_is_not_mentioned(terms: Terms) -> None:
    """Devices of before schedules take terms without one."""
    assert "schedule" not in terms.to_json()
    heard = Terms.from_json(told(terms, recipe__training__schedule={"kind": "steps", "rounds": [3], "factor": 0.5}))
    assert heard.optimizer.rate(4, common=False) == heard.optimizer.rate(3, common=False) / 2
    assert Terms.from_json(heard.to_json()).optimizer == heard.optimizer


def test_a_servers_paths_are_not_told(terms: Terms) -> None:
    assert terms.recipe.data is not None
    assert terms.recipe.data.path == "/srv/secret"
    assert "/srv" not in terms.to_json()
    assert "policies" not in terms.to_json()


def test_a_servers_paths_are_not_followed(terms: Terms) -> None:
    """Else a server could have a device read anything, and write its cache anywhere."""
    heard = Terms.from_json(told(terms, recipe__data__path="/etc", recipe__data__cache="/home/me/.ssh"))
    assert heard.recipe.data is not None
    assert heard.recipe.data.path is None
    assert heard.recipe.data.cache is None


def test_files_of_a_partition_are_not_followed(terms: Terms) -> None:
    text = told(terms, recipe__data__partition={"kind": "files", "files": ["/etc/passwd"] * 4})
    with pytest.raises(InvalidInput, match=r"data.partition.kind: is 'files'"):
        Terms.from_json(text)


@pytest.mark.parametrize("section", ["model", "data"])
def test_a_factory_runs_only_if_the_owner_allows_it(terms: Terms, section: str) -> None:
    text = told(terms, **{f"recipe__{section}__name": "os:system"})
    with pytest.raises(InvalidInput, match=rf"{section}.name: .*os:system to run on this machine.*--allow os:system"):
        Terms.from_json(text)
    with pytest.raises(InvalidInput, match="os:system"):
        Terms.from_json(text, ["os:systems", "system", "os"])
    assert getattr(Terms.from_json(text, ["os:system"]).recipe, section).name == "os:system"


def test_a_factorys_name_cannot_paint_the_terminal(terms: Terms) -> None:
    with pytest.raises(InvalidInput) as caught:
        Terms.from_json(told(terms, recipe__model__name="a:\x1b[2J" + "b" * 1000))
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "null",
        "3",
        "[]",
        '"recipe"',
        "{}",
        '{"recipe": null}',
        '{"recipe": []}',
        '{"recipe": {}, "seed": 0, "devices": 1, "test_samples": null}',
        "NaN",
        "[" * 100_000,
        '{"recipe":' * 100_000,
        '{"recipe": ' + "[" * 900 + "]" * 900 + "}",
        "1" * 10_000,
        "\x1b[2J",
    ],
    ids=range(16),
)
def test_nonsense_is_refused_in_words_that_can_be_shown(text: str) -> None:
    with pytest.raises(BadMessage, match="the edge server's settings cannot be read") as caught:
        Terms.from_json(text)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("devices", 0),
        ("devices", -1),
        ("devices", 2**40),
        ("devices", "4"),
        ("devices", 4.0),
        ("devices", True),
        ("devices", None),
        ("seed", -1),
        ("seed", 2**64),
        ("seed", "0"),
        ("seed", float("nan")),
        ("test_samples", 0),
        ("test_samples", "all"),
        ("test_samples", [1]),
        ("extra", 1),
        ("recipe__extra", 1),
        ("recipe__fleet", {"trace": "/etc/passwd"}),
        ("recipe__run", {"policies": ["os:system"]}),
        ("recipe__model", "vgg"),
        ("recipe__model__name", 3),
        ("recipe__model__wire_dtype", "pickle"),
        ("recipe__model__extra", 3),
        ("recipe__model__options", {"a": {"b": 1}}),
        ("recipe__training__batch_size", 2**40),
        ("recipe__training__batch_size", 0),
        ("recipe__training__batch_size", "8"),
        ("recipe__deploy__cut_floor", "1"),
        ("recipe__data", []),
    ],
)
def test_wrong_types_and_absurd_numbers_are_refused(terms: Terms, place: str, value: object) -> None:
    with pytest.raises(BadMessage, match="the edge server's settings cannot be read"):
        Terms.from_json(told(terms, **{place: value}))


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ("recipe__deploy__cut_floor", 0, "deploy.cut_floor"),
        ("recipe__deploy__quorum", 0.0, "deploy.quorum"),
        ("recipe__deploy__round_deadline_s", -1.0, "deploy.round_deadline_s"),
        ("recipe__training__learning_rate", float("nan"), "learning_rate"),
        ("recipe__training__learning_rate", float("inf"), "learning_rate"),
        ("recipe__training__schedule", {"kind": "cosine"}, r"training\.schedule\.rounds: is missing"),
    ],
)
def test_rules_hold_on_a_device_too(terms: Terms, place: str, value: object, message: str) -> None:
    with pytest.raises(AdaptSFLError, match=message):
        Terms.from_json(told(terms, **{place: value}))


def test_a_floor_below_which_the_model_has_no_layers(terms: Terms) -> None:
    with pytest.raises(InvalidInput, match=r"deploy.cut_floor: is 99"):
        Terms.from_json(told(terms, recipe__deploy__cut_floor=99)).model()


def test_devices_have_the_names_that_the_recipe_gives() -> None:
    given = parse(Recipe, {"model": {"name": "vgg_digits"}, "deploy": {"devices": ["kitchen", "hall"]}})
    terms = Terms.of(given)
    assert terms.names == ["kitchen", "hall"]
    assert terms.devices == 2
    assert "kitchen" not in terms.to_json()


@pytest.mark.parametrize("names", [[], ["a", "a"], ["edge"], ["no good"]])
def test_names_that_no_certificate_could_have_are_refused(names: list[str]) -> None:
    with pytest.raises(InvalidInput, match=r"deploy\.devices"):
        Terms.of(parse(Recipe, {"model": {"name": "vgg_digits"}, "deploy": {"devices": names}}))
