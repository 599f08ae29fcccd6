"""Rounds in overlapping parts: sooner, and the same is learned."""

from pathlib import Path

import pytest

from adaptsfl.config import Recipe, parse
from adaptsfl.errors import InvalidInput
from adaptsfl.simulation.experiment import Experiment


def recipe(norm="group", policy="fixed", **changes) -> Recipe:
    content = {
        "name": "parts",
        "model": {"name": "vgg_digits", "options": {"width": 0.25, "norm": norm}},
        "training": {"batch_size": 8, "learning_rate": 0.05},
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
    with pytest.raises(InvalidInput, match="micro_batches: is 2, but batch-norm looks at all samples"):
        ran(tmp_path / "norm", norm="batch", options=fixed(2))
