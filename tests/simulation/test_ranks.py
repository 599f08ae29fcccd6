"""Runs over several ranks: the records and weights of one process."""

import json

import pytest
from safetensors.torch import load_file

from adaptsfl.simulation.experiment import MODEL
from adaptsfl.simulation.folder import RECORD, find_runs
from ranks import in_threads, on_ranks
from simulation.ranked import alone, executed
from training.cases import largest_difference

SINGLE = 1e-4  # of weights and losses: single precision, summed in another order


def same(found, expected, where="record") -> None:
    """Compare two records: what was decided exactly, what was learned up to rounding."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key in expected:
            same(found[key], expected[key], f"{where}.{key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), where
        for k, (one, other) in enumerate(zip(found, expected, strict=True)):
            same(one, other, f"{where}[{k}]")
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=1e-3, abs=SINGLE, nan_ok=True), where
    else:
        assert found == expected, where


@pytest.mark.parametrize("start", [in_threads, on_ranks], ids=["threads", "processes"])
def test_records_and_weights_are_those_of_one_process(tmp_path, start):
    """With devices that come and go, two ranks, batch-norm over both, and drift measured: the plans are the same."""
    first, second = start(2, executed, tmp_path / "two")
    assert second == {}
    assert list(first) == ["vanilla-sl"]
    assert "lets devices take turns with one model" in first["vanilla-sl"]
    assert alone(tmp_path / "one") == {}
    runs = {run.folder.name: run for run in find_runs([tmp_path / "one"]) if run.policy != "vanilla-sl"}
    assert len(runs) == 3
    for name, run in runs.items():
        files = [folder / name / RECORD for folder in (tmp_path / "two", tmp_path / "one")]
        found, expected = ([json.loads(line) for line in file.read_text().splitlines()] for file in files)
        same(found, expected, name)
        weights = (load_file(folder / name / MODEL) for folder in (tmp_path / "two", tmp_path / "one"))
        assert largest_difference(*weights) < SINGLE
        assert run.whole
