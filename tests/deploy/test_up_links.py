"""`adaptsfl up --links`: a run over links that change under way, what is refused, and what is left by signals."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import warm
from adaptsfl.cli import app, deployment
from adaptsfl.deploy.parties import local_fleet
from adaptsfl.deploy.parties.local_fleet import LocalFleet, fleet_up
from adaptsfl.deploy.parties.relay import enter_namespace
from adaptsfl.deploy.parties.shaped_network import ShapedNetwork
from adaptsfl.fleet import Fleet, read_trace
from deploy.deployed import HERE, PATIENCE_S, Talk
from deploy.laid import namespaces_of, need_namespaces

ROOT = HERE.parents[1]
RECIPE = """
name = "links"
[model]
name = "vgg_digits"
options = { width = 0.25, norm = "group" }
[training]
batch_size = 8
learning_rate = 0.05
[data]
name = "digits"
[run]
policies = ["scripted_policy:Scripted"]
options = { "scripted_policy:Scripted" = { plans = [223] } }
rounds = 8
evaluate_every = 100
test_samples = 4
[deploy]
private_start = false
round_deadline_s = 1200.0
start_deadline_s = 1200.0
"""
HEADER = "round,device,flops,uplink_bps,downlink_bps,fed_uplink_bps,fed_downlink_bps\n"
TRACE = HEADER + "0,server,1,,,1e9,1e9\n0,phone,1,2e8,4e8,2e8,4e8\n0,board,1,1e8,2e8,1e8,2e8\n"
CHANGES = "4,phone,,1e8,,,\n6,phone,,5e7,,,\n6,server,,,,5e8,\n"


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with a recipe and a trace, in which commands are run."""
    (tmp_path / "recipe.toml").write_text(RECIPE)
    (tmp_path / "links.csv").write_text(TRACE + CHANGES)
    before = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(HERE), before])))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def start_at_once(fleet: LocalFleet, party: str) -> None:
    """Start a party with its imports done, in the namespace in which its command line runs."""
    *in_namespace, name, _python, _m, _adaptsfl = fleet.command(party)[:7]
    assert in_namespace == ["ip", "netns", "exec"]
    process = warm.Command(fleet.command(party)[7:], without=["matplotlib"], first=partial(enter_namespace, name))
    fleet.processes[party] = process  # type: ignore[assignment]
    threading.Thread(target=fleet._relay, args=(party, process), daemon=True).start()


def what_changes(fleet: Fleet) -> list[float]:
    return [*fleet.uplink_bps, fleet.server.to_fed_bps]


def up(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["up", "recipe.toml", *arguments])


def test_a_run_over_links_that_change_with_its_rounds(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are of 2 rounds: links change between two of them, by the last averaging on record."""
    need_namespaces()
    shaped: list[tuple[int, list[float]]] = []
    shape = ShapedNetwork.shape

    def noted(network: ShapedNetwork, fleet: Fleet) -> None:
        record = files / "out" / "edge" / "record.jsonl"
        shaped.append((len(record.read_text().splitlines()) if record.exists() else 0, what_changes(fleet)))
        shape(network, fleet)

    monkeypatch.setattr(ShapedNetwork, "shape", noted)
    monkeypatch.setattr(LocalFleet, "start", start_at_once)
    monkeypatch.setattr(local_fleet, "FOLLOW_S", 0.001)
    done = up("--links", "links.csv", "--out", "out")
    assert done.exit_code == 0, done.output
    assert (files / "out" / "fed" / "model.safetensors").exists()
    blocks = [json.loads(line) for line in (files / "out" / "edge" / "record.jsonl").read_text().splitlines()]
    assert [(block["first_round"], block["rounds"]) for block in blocks] == [(1, 2), (3, 2), (5, 2), (7, 2)]
    assert len(blocks[0]["resources"]["uplink_bps"]) == 2  # as many devices as the trace has
    rates = [what_changes(read_trace(files / "links.csv").at(2 * blocks_done)) for blocks_done in range(5)]
    assert rates[1] == rates[0] != rates[2] != rates[3] == rates[4]
    assert shaped[0] == (0, rates[0])
    for recorded, fleet in shaped[1:]:  # never ahead of the record; a block may have ended since it was read
        assert fleet in rates[1 : recorded + 1]
    assert shaped[-1][1] == rates[-1]
    assert namespaces_of(os.getpid()) == []
    assert "Traceback" not in done.output


def test_the_ready_example_shapes_as_many_links_as_there_are_devices() -> None:
    links = ROOT / "recipes" / "links.toml"
    for devices in (None, 3, 9):
        count, resources = deployment._links(links, devices)
        assert count == resources.at(0).size == (devices or 4)
    first, later = resources.at(0), resources.at(7)
    assert (first.uplink_bps != later.uplink_bps).any()  # links change from round to round
    assert first.uplink_s.min() > 0
    assert first.uplink_bps.max() < 1e9


def test_a_recipe_with_a_trace_has_as_many_devices_as_the_trace(files: Path) -> None:
    (files / "traced.toml").write_text('[fleet]\ntrace = "links.csv"\n')
    count, resources = deployment._links(files / "traced.toml", None)
    assert (count, resources.at(4).names) == (2, ("phone", "board"))


@pytest.mark.parametrize(
    ("name", "text", "more", "message"),
    [
        ("nowhere.csv", None, (), "--links nowhere.csv: cannot be read: No such file or directory. Check the path"),
        ("nowhere.toml", None, (), "--links nowhere.toml: cannot be read: No such file"),
        ("links.json", "{}", (), "--links links.json: is neither a recipe (.toml) nor a trace (.csv). Give one"),
        ("links.toml", TRACE, (), "--links links.toml: is not valid TOML"),
        ("links.csv", "[fleet]\ndevices = 2\n", (), "--links links.csv: round: is missing from the header"),
        ("links.csv", TRACE + "0,phone,1,1,1,1,1\n", (), "--links links.csv, line 5: device: 'phone' has two rows"),
        ("links.csv", TRACE, ("--devices", "3"), "--links links.csv: --devices: is 3, but the trace has 2. Leave --d"),
        ("none.toml", RECIPE, (), "--links none.toml: fleet: is missing. Say in [fleet] how fast links are"),
        ("none.toml", 'name = "x"\n', (), "--links none.toml: fleet: is missing"),
        ("links.toml", "[fleet]\nuplink_mbps = -1\n", (), "--links links.toml: fleet.uplink_mbps[0]: is -1"),
        ("links.toml", '[fleet]\nbase = "x"\n', (), "--links links.toml: fleet.base: is 'x'"),
    ],
)
def test_links_that_cannot_be_used_are_explained(
    files: Path, name: str, text: str | None, more: tuple[str, ...], message: str
) -> None:
    if text is not None:
        (files / name).write_text(text)
    done = up("--links", name, *more)
    assert done.exit_code == 1
    assert message in " ".join(done.stderr.split())
    assert len(done.stderr.splitlines()) == 1
    assert not (files / "runs").exists()


def test_who_is_not_root_is_told_so(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: f"/sbin/{name}")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    done = up("--links", "links.csv")
    assert done.exit_code == 1
    assert "--links: makes network namespaces, which only root may do. Run it on Linux, as root (sudo)" in done.stderr
    assert not (files / "runs").exists()


def test_without_ip_and_tc_links_are_refused(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(files))
    done = up("--links", "links.csv")
    assert done.exit_code == 1
    assert "--links: needs the commands ip and tc" in done.stderr


# ── Signals ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def until(what: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Wait until something is true while a process runs."""
    deadline = time.monotonic() + PATIENCE_S
    while not what():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_while_links_are_laid_leave_nothing(files: Path, number: int) -> None:
    """Many devices, so that it takes a while; the first namespaces are there when the signal comes."""
    need_namespaces()
    command = [sys.executable, "-m", "adaptsfl", "up", "recipe.toml", "--devices", "40"]
    command += ["--links", str(ROOT / "recipes" / "links.toml")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            until(lambda: len(namespaces_of(process.pid)) >= 3, process)
            process.send_signal(number)
            text, _ = process.communicate(timeout=PATIENCE_S)
        finally:
            process.kill()
    assert process.returncode == 130, text
    assert "stopped" in text
    assert "Traceback" not in text
    assert namespaces_of(process.pid) == []


# ── Following a run ─────────────────────────────────────────────────────────────────────────────────────────────────


def block(first_round: int, rounds: int) -> str:
    return json.dumps({"first_round": first_round, "rounds": rounds}) + "\n"


def test_rounds_are_those_of_the_last_whole_line_of_the_record(tmp_path: Path) -> None:
    fleet = LocalFleet(tmp_path / "recipe.toml", 1, tmp_path, Talk())
    assert fleet.rounds == 0
    record = tmp_path / "edge" / "record.jsonl"
    record.parent.mkdir()
    for text, rounds in (("", 0), (block(1, 3), 3), (block(4, 2)[:9], 3), (block(4, 2)[9:], 5), (block(6, 1), 6)):
        with record.open("a") as file:
            file.write(text)
        assert fleet.rounds == rounds, text


def test_links_that_cannot_be_changed_are_reported_and_followed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "links.csv").write_text(TRACE + "2,phone,,3e6,,,\n5,phone,,2e6,,,\n")
    trace = read_trace(tmp_path / "links.csv")
    changed: list[Fleet] = []

    def shape(_network: ShapedNetwork, fleet: Fleet) -> None:
        changed.append(fleet)
        if fleet is trace.at(2):
            raise OSError("tc: no")

    need_namespaces()
    monkeypatch.setattr(LocalFleet, "start_all", lambda _fleet: None)
    monkeypatch.setattr(ShapedNetwork, "shape", shape)
    monkeypatch.setattr(local_fleet, "FOLLOW_S", 0.001)
    record, talk = tmp_path / "run" / "edge" / "record.jsonl", Talk()
    with fleet_up(tmp_path / "recipe.toml", 2, tmp_path / "run", talk, links=trace):
        record.parent.mkdir()
        record.write_text(block(1, 2))
        talk.wait_for("links", "not changed as they should be after round 2: tc: no")
        record.write_text(block(1, 2) + block(3, 3))
        deadline = time.monotonic() + PATIENCE_S
        while len(changed) < 3 and time.monotonic() < deadline:
            time.sleep(0.001)
    assert changed == [trace.at(0), trace.at(2), trace.at(5)]
    assert namespaces_of(os.getpid()) == []
