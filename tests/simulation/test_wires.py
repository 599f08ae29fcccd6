"""Types of numbers that the plan chooses: what a comparison costs, and that runs with one go on as they were."""

from pathlib import Path

import numpy as np
import pytest

from adaptsfl import latency
from adaptsfl.costs import WIRE_DTYPES
from adaptsfl.decisions import Decision
from adaptsfl.runs.backend import Order
from adaptsfl.runs.record import Block
from adaptsfl.simulation.clock import Clock, parallel_time
from adaptsfl.simulation.experiment import Experiment
from adaptsfl.simulation.faults import Faults
from adaptsfl.simulation.jobs import Job, Watcher
from adaptsfl.simulation.store import Store
from simulation.tiny import learning, recipe, record_of, world

AUTO = {
    "model": {"name": "vgg_digits", "options": {"width": 0.25, "norm": "group"}, "wire_dtype": "auto"},
    "planner": {"micro_batches": "auto", "max_interval": 4},
}


def test_the_first_round_of_a_comparison_is_charged_whole_and_exact_and_the_server_takes_more_turns() -> None:
    here = world(**AUTO)
    order = Order(Decision((1, 2, 1, 2), 2, micro_batches=4, wire_dtype="int8"), 2, 1, compared=("int8", "int4"))
    clock = Clock(here.fleet_at, here.costs, here.batch_size, Faults(4), parallel_time)
    predicted_s = clock.predicted_s(order, here.fleet_at(1))
    start_s, first_s, second_s = clock.charge(order, range(4), 0).ends_s
    cuts = np.array(order.decision.cuts)
    whole = (here.costs, here.fleet_at(1), cuts, here.batch_size)
    first = float(latency.round_s(*whole)) + 2 * float(latency.server_turn_s(*whole))
    small = here.costs.sent_as("int8")
    second = float(latency.round_s(small, here.fleet_at(2), cuts, here.batch_size, 4))
    second += float(latency.aggregation_s(small, here.fleet_at(2), cuts))
    assert first_s - start_s == pytest.approx(first)
    assert second_s - first_s == pytest.approx(second)
    assert predicted_s == pytest.approx(first + second)


def test_adaptsfl_chooses_a_type_by_what_it_costs(tmp_path: Path) -> None:
    blocks = ran(tmp_path / "auto", adapt={"measure_every": 60})
    assert [bool(block.wires) for block in blocks[:2]] == [True, False]
    assert set(blocks[0].wires) == set(WIRE_DTYPES) - {"float32"}
    assert all(1 <= factor < 2 for factor in blocks[0].wires.values())
    assert {block.wire_dtype for block in blocks} <= {"int8", "int4"}
    wires = blocks[1].estimates["wires"]
    assert wires == {"float32": 1.0, **blocks[0].wires}


def test_a_type_that_costs_too_many_rounds_is_not_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the first block int4 is taken for cheap; then it turns out to be dear, and int8 not."""
    factors = {"float16": 1.0, "bfloat16": 1.0, "int8": 1.02, "int4": 9.0}
    monkeypatch.setattr("adaptsfl.training.engine.Engine.wire_factors", lambda *_: factors)
    blocks = ran(tmp_path / "dear")
    assert blocks[0].wire_dtype == "int4"
    assert {block.wire_dtype for block in blocks[1:]} == {"int8"}


def test_types_are_compared_at_every_devices_own_cut_also_where_numbers_are_sent_exactly() -> None:
    """Rounding costs other factors where all devices are cut as deep as the deepest."""
    found = []
    for cuts, wire in (((1, 3, 1, 3), "int8"), ((1, 3, 1, 3), "float32"), ((3, 3, 3, 3), "float32")):
        backend = learning(world(**AUTO), "engine", Store())
        order = Order(Decision(cuts, 2, wire_dtype=wire), 2, 1, (0, 1, 2, 3), compared=("int8", "int4"))
        found.append(backend.learn(order).wires)
    assert found[0] == found[1] != found[2]


def test_only_given_types_are_chosen_and_compared(tmp_path: Path) -> None:
    blocks = ran(tmp_path / "given", planner={"wires": {"float16": 1.0, "float32": 1.0}})
    assert {block.wire_dtype for block in blocks} == {"float16"}
    assert set(blocks[0].wires) == {"float16"}


def test_policies_that_choose_no_type_send_exact_numbers(tmp_path: Path) -> None:
    blocks = ran(tmp_path / "others", run={"policies": ["rma+ms"]})
    assert {block.wire_dtype for block in blocks} == {"float32"}
    assert not any(block.wires for block in blocks)


def test_a_run_that_was_stopped_goes_on_to_the_same_record(tmp_path: Path) -> None:
    """The rest is trained from a checkpoint within a plan that rounds; what is known is looked up."""
    whole = Experiment(recipe(**AUTO, run={"rounds": 16}), tmp_path / "whole")
    whole.execute()
    for stop in (1, 9):

        def stopping(_job: Job, round_: int, _trained: int, stop: int = stop) -> None:
            if round_ == stop:
                raise KeyboardInterrupt

        stopped = Experiment(recipe(**AUTO, run={"rounds": 16}), tmp_path / f"stopped{stop}")
        with pytest.raises(KeyboardInterrupt):
            stopped.execute(Watcher(on_round=stopping))
        again = Experiment(recipe(**AUTO, run={"rounds": 16}), stopped.folder)
        again.execute()
        assert record_of(again) == record_of(whole)


def ran(folder: Path, **changes: object) -> tuple[Block, ...]:
    content = {**AUTO, "run": {"rounds": 12}}
    for section, values in changes.items():
        assert isinstance(values, dict)
        content[section] = {**content.get(section, {}), **values}
    (run,) = Experiment(recipe(**content), folder).execute()
    return run.blocks
