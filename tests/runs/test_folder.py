"""Runs written and read back."""

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest

from adaptsfl.errors import InvalidInput
from adaptsfl.runs import folder as folders
from adaptsfl.runs.folder import RECORD, RUN, append_block, find_runs, read_run, write_run
from adaptsfl.runs.record import block_line, block_of
from simulated_runs import write_experiment, write_simulated_run


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return write_simulated_run(tmp_path / "adaptsfl-seed0", "adaptsfl", "AdaptSFL", 0, devices=3, blocks=5)


def lines(place: Path) -> list[str]:
    return (place / RECORD).read_text().splitlines()


def rewrite(place: Path, **changes: object) -> None:
    info = json.loads((place / RUN).read_text())
    (place / RUN).write_text(json.dumps({**info, **changes}))


def with_accuracies(place: Path, accuracies: list[float]) -> folders.Run:
    run = read_run(place)
    blocks = [
        dataclasses.replace(block, evaluations=((10 * k, 100.0 * k, accuracy, 1.0),))
        for k, (block, accuracy) in enumerate(zip(run.blocks, accuracies, strict=False), 1)
    ]
    return dataclasses.replace(run, blocks=tuple(blocks))


def test_a_block_survives_its_line(place):
    block = read_run(place).blocks[1]
    odd = dataclasses.replace(
        block, interval=None, cuts=(0, 3, 2), layer_intervals={"3": 9}, resources={"flops": (1.5,)}
    )
    assert block_of(json.loads(block_line(odd))) == odd


def test_what_is_no_number_is_null_in_the_file(place):
    block = dataclasses.replace(read_run(place).blocks[0], loss=math.nan, predicted_s=math.inf)
    line = block_line(block)
    assert "NaN" not in line
    assert "Infinity" not in line
    assert math.isnan(block_of(json.loads(line)).loss)


def test_numpy_numbers_can_be_written(place):
    block = read_run(place).blocks[0]
    arrays = dataclasses.replace(block, cuts=np.array(block.cuts), bits=np.float64(block.bits), rounds=np.int64(7))
    assert json.loads(block_line(arrays))["cuts"] == list(block.cuts)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("block", "1"),
        ("rounds", 1.5),
        ("time_s", "soon"),
        ("cuts", 3),
        ("cuts", [1, 2, "3"]),
        ("bottleneck", ["device 1"]),
        ("evaluations", [[1, 2, 3]]),
        ("seconds", []),
        ("resources", {"flops": 3}),
        ("loss", True),
        ("rounds", 0),
        ("time_s", None),
        ("interval", 0),
        ("cuts", [0, 0, 0]),
        ("deepest", 0),
        ("layer_intervals", {"last": 2}),
        ("evaluations", [[9999, 1.0, 0.5, 1.0]]),
        ("measuring", -1),
        ("present", [[0]] * 99),
    ],
)
def test_a_field_of_another_type_is_named_with_its_line(place, field, value):
    first, second, *rest = lines(place)
    changed = json.dumps({**json.loads(second), field: value})
    (place / RECORD).write_text("\n".join([first, changed, *rest]) + "\n")
    with pytest.raises(InvalidInput, match=rf"record\.jsonl, line 2: {field}: is "):
        read_run(place)


def test_a_missing_field_or_phase_is_named(place):
    data = json.loads(lines(place)[0])
    with pytest.raises(InvalidInput, match="bits: is missing"):
        block_of({key: value for key, value in data.items() if key != "bits"})
    with pytest.raises(InvalidInput, match="seconds: lacks a3"):
        block_of({**data, "seconds": {"a1": 1.0, "a2": 1.0}})
    with pytest.raises(InvalidInput, match="is not a block"):
        block_of([1])


def test_a_run_is_read_as_it_was_written(place):
    run = read_run(place)
    assert (run.policy, run.title, run.seed, run.status, run.ended_by) == ("adaptsfl", "AdaptSFL", 0, "done", "rounds")
    assert run.devices == ("board 1", "phone 2", "phone 3")
    assert run.costs.name(1) == run.layers[0] == "conv1_1"
    assert run.trainer == "engine"
    assert len(run.blocks) == 5
    assert run.rounds == sum(block.rounds for block in run.blocks)
    assert run.time_s == pytest.approx(sum(block.length_s for block in run.blocks))
    assert run.bits == pytest.approx(sum(block.bits for block in run.blocks))
    assert run.evaluations.rounds.tolist() == [block.evaluations[0][0] for block in run.blocks]


def test_time_and_rounds_to_a_target_are_those_of_the_first_evaluation_that_has_it(place):
    run = with_accuracies(place, [0.2, 0.5, 0.4, 0.7, 0.6])
    assert (run.time_to(0.5), run.rounds_to(0.5)) == (200.0, 20)
    assert (run.time_to(0.51), run.rounds_to(0.51)) == (400.0, 40)
    assert (run.time_to(0.71), run.rounds_to(0.71)) == (None, None)
    assert (run.final_accuracy, run.best_accuracy) == (0.6, 0.7)


def test_an_accuracy_that_is_no_number_reaches_nothing(place):
    run = with_accuracies(place, [math.nan, 0.5])
    assert run.time_to(0.0) == 200.0
    assert run.best_accuracy == 0.5


def test_a_run_that_recorded_nothing_yet(place):
    (place / RECORD).unlink()
    run = read_run(place)
    assert (run.rounds, run.time_s, run.bits, run.final_accuracy, run.best_accuracy) == (0, 0.0, 0, None, None)
    assert run.time_to(0.1) is None


def test_a_torn_last_line_does_not_count(place):
    text = (place / RECORD).read_text()
    (place / RECORD).write_text(text[:-40])
    assert [block.block for block in read_run(place).blocks] == [1, 2, 3, 4]
    (place / RECORD).write_text(text[:-1])  # only its end is missing
    assert len(read_run(place).blocks) == 5


def test_damage_elsewhere_is_an_error_with_its_line(place):
    first, second, *rest = lines(place)
    (place / RECORD).write_text("\n".join([first, second[:50], *rest]) + "\n")
    with pytest.raises(InvalidInput, match=r"record\.jsonl, line 2: is damaged: "):
        read_run(place)
    (place / RECORD).write_text(first[:50] + "\n")
    with pytest.raises(InvalidInput, match=r"record\.jsonl, line 1: is damaged: "):
        read_run(place)


def test_a_damaged_run_file_is_named_with_its_line(place):
    (place / RUN).write_text('{\n"format": 1,\n"name": oops}')
    with pytest.raises(InvalidInput, match=r"run\.json, line 3: is damaged"):
        read_run(place)


def test_a_foreign_format_is_refused(place):
    rewrite(place, format=2)
    with pytest.raises(InvalidInput, match=r"run\.json: format: is 2, this version reads 1"):
        read_run(place)
    (place / RUN).write_text("[]")
    with pytest.raises(InvalidInput, match=r"run\.json: format: is None"):
        read_run(place)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": "0"}, "seed: is '0'. Give a whole number"),
        ({"server": {"flops": 1.0}}, "costs: do not fit"),
        ({"targets": [0.5, None]}, r"targets\[1\]: is None. Give a number"),
        ({"wall_s": "long"}, "wall_s: is 'long'"),
        ({"server": {"flops": -1.0, "to_fed_bps": 1.0, "from_fed_bps": 1.0}}, "flops: is -1"),
    ],
)
def test_a_wrong_field_of_the_run_file_is_named(place, changes, message):
    rewrite(place, **changes)
    with pytest.raises(InvalidInput, match=message) as caught:
        read_run(place)
    assert str(place / RUN) in str(caught.value)


def test_a_record_of_another_run_is_noticed(place):
    rewrite(place, devices=["one", "two"])
    with pytest.raises(InvalidInput, match=r"line 1: cuts: has 3 entries for 2 devices"):
        read_run(place)


def test_runs_are_found_once_and_in_the_order_of_their_numbers(tmp_path):
    for seed in (10, 2, 1):
        write_simulated_run(tmp_path / f"adaptsfl-seed{seed}", "adaptsfl", "AdaptSFL", seed, devices=2, blocks=1)
    write_simulated_run(tmp_path / "sfl-seed0", "sfl", "SFL", 0, devices=2, blocks=1)
    (tmp_path / "figures").mkdir()
    found = find_runs([tmp_path, tmp_path / "adaptsfl-seed2"])
    assert [(run.policy, run.seed) for run in found] == [
        ("adaptsfl", 1),
        ("adaptsfl", 2),
        ("adaptsfl", 10),
        ("sfl", 0),
    ]


def test_several_folders(tmp_path):
    write_experiment(tmp_path / "one", policies={"adaptsfl": "AdaptSFL"}, seeds=2, devices=2, blocks=1)
    write_experiment(tmp_path / "two", policies={"rma+rms": "RMA+RMS"}, seeds=1, devices=2, blocks=1)
    found = find_runs([str(tmp_path / "two"), tmp_path / "one" / "adaptsfl-seed1"])
    assert [run.folder.name for run in found] == ["rma+rms-seed0", "adaptsfl-seed1"]


def test_a_folder_without_runs(tmp_path):
    with pytest.raises(InvalidInput, match=r"holds no run: no run\.json"):
        find_runs([tmp_path])
    with pytest.raises(InvalidInput, match="is not a folder"):
        find_runs([tmp_path / "none"])
    with pytest.raises(InvalidInput, match=r"run\.json: cannot be read: No such file"):
        read_run(tmp_path)


def test_a_block_is_on_disk_as_soon_as_it_is_appended(place):
    last = read_run(place).blocks[4]
    with (place / RECORD).open("w") as file:
        append_block(file, last)
        assert read_run(place).blocks == (last,)


def test_a_run_file_is_replaced_whole_or_not_at_all(place, monkeypatch):
    before = (place / RUN).read_text()

    def full(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("adaptsfl.files.os.replace", full)
    with pytest.raises(OSError, match="disk full"):
        write_run(place, {"name": "new"})
    assert (place / RUN).read_text() == before
    assert sorted(path.name for path in place.iterdir()) == sorted([RECORD, RUN])
