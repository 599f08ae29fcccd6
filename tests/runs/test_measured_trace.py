"""What a run measured of its fleet, written as a trace and read back."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from adaptsfl.cli import app
from adaptsfl.errors import InvalidInput
from adaptsfl.fleet import RATES, Server, read_trace
from adaptsfl.runs.folder import Run, find_runs
from adaptsfl.runs.measured_trace import write_measured
from simulated_runs import write_experiment, write_simulated_run

NAN = float("nan")


def make_run(folder: Path) -> Run:
    (run,) = find_runs([write_simulated_run(folder / "run", "adaptsfl", "AdaptSFL", 0, devices=6, blocks=4)])
    return run


def test_a_trace_replays_what_every_block_was_planned_with(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    write_measured(run, tmp_path / "fleet.csv")
    replayed = read_trace(tmp_path / "fleet.csv")
    assert len(run.blocks) > 1
    for block in run.blocks:
        fleet = replayed.at(block.first_round - 1)
        for name in RATES:
            recorded = np.array(block.resources[name])
            here = np.isfinite(recorded)
            np.testing.assert_array_equal(getattr(fleet, name)[here], recorded[here])
        assert fleet.names == tuple(run.devices)
        assert fleet.server == run.server


def test_absent_devices_are_as_they_were_before_or_later(tmp_path: Path) -> None:
    """Device 2 has rates 2 and 3 in the second and third of four blocks; it has fixed seconds too."""
    run = make_run(tmp_path)
    known = [NAN, 2.0, 3.0, NAN]
    server = Server(1.0, 2.0, 3.0, turn_s=4.0, averaging_bps=5.0)
    blocks = []
    for block, rate in zip(run.blocks, known, strict=True):
        resources = {name: (values[0], rate, *values[2:]) for name, values in block.resources.items()}
        resources |= {"uplink_s": tuple(0.25 * np.isfinite(values) for values in resources["flops"])}
        restart = {"server": dataclasses.asdict(server)}
        blocks.append(dataclasses.replace(block, resources=resources, restart=restart))
    write_measured(dataclasses.replace(run, blocks=tuple(blocks)), tmp_path / "fleet.csv")
    replayed = read_trace(tmp_path / "fleet.csv")
    fleets = [replayed.at(block.first_round - 1) for block in blocks]
    assert [fleet.flops[1] for fleet in fleets] == [2.0, 2.0, 3.0, 3.0]
    assert all(fleet.server == server for fleet in fleets)
    assert fleets[0].uplink_s[0] == 0.25


def test_runs_without_resources_or_without_a_device_are_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    empty = [dataclasses.replace(block, resources={}) for block in run.blocks]
    with pytest.raises(InvalidInput, match="resources: are not in the record"):
        write_measured(dataclasses.replace(run, blocks=tuple(empty)), tmp_path / "fleet.csv")
    gone = [
        dataclasses.replace(block, resources={name: (NAN, *values[1:]) for name, values in block.resources.items()})
        for block in run.blocks
    ]
    with pytest.raises(InvalidInput, match="was never there"):
        write_measured(dataclasses.replace(run, blocks=tuple(gone)), tmp_path / "fleet.csv")
    assert not (tmp_path / "fleet.csv").exists()


def test_the_command_takes_one_run(tmp_path: Path) -> None:
    folder, trace = (
        write_experiment(tmp_path / "two", policies={"adaptsfl": "AdaptSFL"}, blocks=2),
        tmp_path / "fleet.csv",
    )
    answer = CliRunner().invoke(app, ["report", str(folder), "--trace", str(trace)])
    assert answer.exit_code == 1
    assert "--trace: is given with 2 runs. Give one run" in answer.stderr
    assert not trace.exists()
    answer = CliRunner().invoke(app, ["report", str(folder / "adaptsfl-seed0"), "--trace", str(trace)])
    assert answer.exit_code == 0, answer.output
    assert read_trace(trace).at(0).size == 20
