"""Rounds in overlapping parts: sooner, and the same is learned."""

from pathlib import Path

import pytest

from adaptsfl.config import Recipe, parse
from adaptsfl.decisions import Decision
from adaptsfl.errors import InvalidInput
from adaptsfl.policies import make_policy
from adaptsfl.runs.loop import BlockLoop
from adaptsfl.simulation.backend import SimulatedBackend
from adaptsfl.simulation.experiment import Experiment
from adaptsfl.simulation.faults import Faults
from adaptsfl.simulation.ghost_batches import check_parts
from adaptsfl.simulation.store import Store
from adaptsfl.simulation.trainers import TRAINERS
from adaptsfl.simulation.world import make_world

GHOSTS = {"ghost_batches": True}


def recipe(norm="group", policy="fixed", **changes) -> Recipe:
    content = {
        "name": "parts",
        "model": {"name": "vgg_digits", "options": {"width": 0.25, "norm": norm}},
        "training": {"batch_size": 8, "learning_rate": 0.05, **changes.pop("training", {})},
        "fleet": {"devices": 3, "redraw": []},
        "run": {"policies": [policy], "rounds": 6, "test_samples": 40, "options": changes.pop("options", {})},
        **changes,
    }
    return parse(Recipe, content)


def ran(folder: Path, **changes):
    (run,) = Experiment(recipe(**changes), folder).execute()
    return run.blocks


def fixed(parts: int) -> dict[str, dict[str, int]]:
    return {"fixed": {"interval": 3, "cut": 2, "micro_batches": parts}}


def test_parts_make_rounds_shorter_and_change_nothing_that_is_learned(tmp_path):
    whole, parts = (ran(tmp_path / str(k), options=fixed(k)) for k in (1, 4))
    assert [block.losses for block in parts] == [block.losses for block in whole]
    assert [block.micro_batches for block in parts] == [4, 4]
    assert parts[-1].time_s < 0.9 * whole[-1].time_s
    assert parts[-1].bits == whole[-1].bits
    assert [block.time_s for block in parts] == pytest.approx(
        [sum(b.predicted_s for b in parts[: k + 1]) for k in (0, 1)]
    )


def test_adaptsfl_chooses_parts_only_where_it_may(tmp_path):
    assert {block.micro_batches for block in ran(tmp_path / "usual", policy="adaptsfl")} == {1}
    free = ran(tmp_path / "auto", policy="adaptsfl", planner={"micro_batches": "auto"})
    assert max(block.micro_batches for block in free) > 1
    norms = ran(tmp_path / "norms", policy="adaptsfl", norm="batch", planner={"micro_batches": "auto"})
    assert {block.micro_batches for block in norms} == {1}


def test_parts_that_cannot_be_are_refused(tmp_path):
    with pytest.raises(InvalidInput, match="micro_batches: is 3, which does not divide the batch size 8"):
        ran(tmp_path / "thirds", options=fixed(3))
    with pytest.raises(InvalidInput, match=r"micro_batches: is 2, but batch-norm .* training.ghost_batches = true"):
        ran(tmp_path / "norm", norm="batch", options=fixed(2))
    with pytest.raises(InvalidInput, match="micro_batches: is 8, which leaves batch-norm 1 sample in every part"):
        ran(tmp_path / "single", norm="batch", options=fixed(8), training=GHOSTS)


def test_ghost_batches_are_charged_as_parts_and_learned_as_parts(tmp_path):
    plain = {"reestimate_statistics": False}  # which takes whole mini-batches, and as long with parts
    usual = ran(tmp_path / "usual", norm="batch", options=fixed(1), training=plain)
    whole, parts = (
        ran(tmp_path / str(k), norm="batch", options=fixed(k), training={**plain, **GHOSTS}) for k in (1, 4)
    )
    assert [block.losses for block in whole] == [block.losses for block in usual]
    assert not {*parts[0].losses, *parts[1].losses} & {*whole[0].losses, *whole[1].losses}
    assert [block.micro_batches for block in parts] == [4, 4]
    assert parts[-1].time_s < 0.9 * whole[-1].time_s
    predicted_s = [block.predicted_s for block in parts]
    assert [block.time_s for block in parts] == pytest.approx([predicted_s[0], sum(predicted_s)])


@pytest.mark.parametrize("norm", ["group", "batch"])
def test_what_is_learned_is_looked_up_by_its_parts_only_where_they_matter(norm):
    """Two runs on one store, with mini-batches in two and in four parts."""
    here, store = make_world(recipe(norm=norm, training=GHOSTS), 0), Store()
    rounds: list[int] = []
    two, four = ([block.losses for block in loop(here, store, None, rounds, parts)] for parts in (2, 4))
    assert rounds == [1, 2, 3, 4, 5, 6] * (1 if norm == "group" else 2)
    assert (two == four) == (norm == "group")


def test_a_run_with_ghost_batches_goes_on_from_its_checkpoint(tmp_path):
    """Stopped after its first block; the second is trained by another process, from the checkpoint."""
    here, store = make_world(recipe(norm="batch", training=GHOSTS), 0), Store()
    expected = [block.losses for block in loop(here, Store(), None)]
    first = loop(here, store, tmp_path)
    assert next(iter(first)).losses == expected[0]
    first.backend.save()
    rounds: list[int] = []
    second = loop(here, store, tmp_path, rounds)
    assert [block.losses for block in second] == expected
    assert rounds == [4, 5, 6]


def loop(here, store: Store, folder: Path | None, rounds: list[int] | None = None, parts: int = 2) -> BlockLoop:
    """Return a run that notes the rounds that it trains."""
    seen, policy = [] if rounds is None else rounds, make_policy("fixed", **fixed(parts)["fixed"])
    backend = SimulatedBackend(
        here, policy, Faults(here.devices), store, folder=folder, on_round=lambda t, _: seen.append(t)
    )
    return BlockLoop(backend, policy)


def test_adaptsfl_chooses_ghost_batches_of_at_least_two_samples(tmp_path):
    free = ran(tmp_path, policy="adaptsfl", norm="batch", planner={"micro_batches": "auto"}, training=GHOSTS)
    assert {2, 4} >= {block.micro_batches for block in free} - {1} != set()


def test_recipes_without_ghost_batches_keep_their_identity():
    assert "ghost_batches" not in recipe().model_dump(mode="json")["training"]
    assert recipe(training=GHOSTS).model_dump(mode="json")["training"]["ghost_batches"]


@pytest.mark.parametrize("trainer", ["turns", "relay", "centralized"])
def test_trainers_without_ghost_batches_refuse_them(trainer):
    decision = Decision((2,) * 3, 3, micro_batches=2)
    training = recipe(training=GHOSTS).training
    check_parts(decision, training, TRAINERS["engine"], batch_norm=True)
    check_parts(decision, training, TRAINERS[trainer], batch_norm=False)
    with pytest.raises(InvalidInput, match=f"batch-norm of trainer '{trainer}' normalises whole mini-batches"):
        check_parts(decision, training, TRAINERS[trainer], batch_norm=True)
