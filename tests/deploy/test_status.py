"""The board that an edge server's state is pinned to."""

import dataclasses
import json
import sys
import threading

import numpy as np
import pytest

from adaptsfl.config import AdaptConfig
from adaptsfl.decisions import Decision
from adaptsfl.deploy.status import board as status_module
from adaptsfl.deploy.status.board import Board, DeviceStatus, RoundsBelief, Status, status_data
from adaptsfl.fleet import Device, Fleet, Server
from adaptsfl.latency import PHASES
from adaptsfl.runs.beliefs import Calibrated


@pytest.fixture
def board() -> Board:
    return Board(Status(run="test", started_at=1.0))


def test_a_snapshot_stays_as_it_was(board):
    board.update_device("a", state="training")
    before = board.status
    board.update(round=7)
    board.update_device("a", state="late")
    board.add_loss(7, 0.5)
    assert (before.round, before.devices[0].state, before.losses) == (0, "training", ())
    assert (board.status.round, board.status.devices[0].state, board.status.losses) == (7, "late", ((7, 0.5),))
    with pytest.raises(dataclasses.FrozenInstanceError):
        before.round = 3


def test_devices_keep_their_place_and_what_is_not_changed(board):
    board.update_device("b", cut=3)
    board.update_device("a", rounds=2)
    board.update_device("b", state="waiting")
    assert board.status.devices == (DeviceStatus("b", "waiting", cut=3), DeviceStatus("a", rounds=2))


def test_a_name_that_is_no_field_is_a_bug(board):
    with pytest.raises(TypeError, match="rounds_plannned"):
        board.update(rounds_plannned=3)
    with pytest.raises(TypeError, match="cuts"):
        board.update_device("a", cuts=3)
    assert board.status == Status(run="test", started_at=1.0)


@pytest.mark.parametrize(
    ("state", "present"),
    [("away", False), ("waiting", True), ("training", True), ("late", True), ("quarantined", False)],
)
def test_who_can_be_counted_on(state, present):
    assert DeviceStatus("a", state).present is present


def test_errors_are_shortened(board):
    board.update(last_error="x" * 10_000)
    board.update_device("a", last_error="y" * 10_000)
    assert board.status.last_error == "x" * 499 + "…"
    assert board.status.devices[0].last_error == "y" * 499 + "…"
    board.update(last_error="z" * 500)
    assert board.status.last_error == "z" * 500


@pytest.mark.parametrize("rounds", [50, 51, 99, 137, 1000])
def test_curves_are_thinned_out_evenly(board, monkeypatch, rounds):
    monkeypatch.setattr(status_module, "MOST_POINTS", 50)
    for round in range(1, rounds + 1):
        board.add_loss(round, 1 / round)
        board.add_evaluation(round, round / rounds)
    kept = [round for round, _ in board.status.losses]
    assert len(kept) == 50
    assert (kept[0], kept[-1]) == (1, rounds)
    gaps = np.diff(kept)
    assert gaps.min() >= 1
    assert gaps.max() <= 2 * gaps[:-1].min()  # the newest may be nearer
    assert all(loss == 1 / round for round, loss in board.status.losses)
    assert len(board.status.evaluations) == 50


def test_a_round_that_is_done_once_more_takes_back_those_after_it(board):
    for round in range(1, 6):
        board.add_loss(round, float(round))
    board.add_loss(3, 30.0)
    assert board.status.losses == ((1, 1.0), (2, 2.0), (3, 30.0))


def test_the_status_is_json(board):
    board.update(phases=(("a1", 0.5, None), ("b3", None, float("inf"))), round_s=np.float32(0.25), deepest=np.int64(3))
    board.update_device("a", forward_s=float("nan"), cut=2)
    board.add_loss(1, float("nan"))
    data = json.loads(json.dumps(status_data(board.status), allow_nan=False))
    assert data["losses"] == [[1, None]]
    assert data["devices"][0]["forward_s"] is None
    assert data["devices"][0]["cut"] == 2
    assert (data["round_s"], data["deepest"]) == (0.25, 3)
    assert data["phases"] == [
        {"phase": "a1", "title": PHASES["a1"], "predicted_s": 0.5, "measured_s": None},
        {"phase": "b3", "title": PHASES["b3"], "predicted_s": None, "measured_s": None},
    ]
    assert set(data) == {field.name for field in dataclasses.fields(Status)}


SERVER = Server(3e10, to_fed_bps=2e9, from_fed_bps=1e9, turn_s=0.001, averaging_s=0.002, averaging_bps=4e9)
ESTIMATES = Calibrated(4, AdaptConfig()).data(Decision((1, 3), 8))


def test_what_is_believed_is_what_the_block_was_planned_with(board):
    """All numbers of the fleet and of the loop's beliefs; a device that is away keeps what was last believed of it."""
    both = Fleet.of([Device(name, 1e9, 2e6, 3e6, 4e6, 5e6, uplink_s=0.25) for name in ("a", "b")], SERVER)
    board.update_device("a", rounds=2)
    board.update_beliefs(ESTIMATES, both)
    board.update_beliefs(ESTIMATES, both.subset([1]).scaled(2.0, "uplink_bps"))
    data = json.loads(json.dumps(status_data(board.status), allow_nan=False))
    assert data["rounds_believed"] == {key: value for key, value in ESTIMATES.items() if key != "growth"}
    assert data["server"] == dataclasses.asdict(SERVER)
    assert [device["believed"]["uplink_bps"] for device in data["devices"]] == [2e6, 4e6]
    assert data["devices"][0]["believed"] == dataclasses.asdict(both.device(0))
    assert data["devices"][0]["rounds"] == 2


def test_where_kappa_is_not_estimated_nothing_is_believed_of_it(board):
    board.update_beliefs(ESTIMATES, Fleet.of([Device("a", 1e9, 2e6, 3e6, 4e6, 5e6)], SERVER))
    board.update_beliefs({"smoothness": 3.0}, Fleet.of([Device("a", 1e9, 2e6, 3e6, 4e6, 5e6)], SERVER))
    assert board.status.rounds_believed is None
    never = RoundsBelief.of(Calibrated(4, AdaptConfig()).data(Decision((1, 3), None, rounds=5)))
    assert never is not None
    assert (never.relative_rounds, never.averagings) == (None, 0)


def test_phases_of_a_round_leave_those_of_an_averaging(board):
    predicted = dict.fromkeys(PHASES, 1.0)
    board.update_phases(predicted, {"b1": 2.0, "b3": 4.0})
    board.update_phases(predicted, {"a5": 3.0})
    board.update_phases({**predicted, "b3": 1.5}, {"b3": 5.0})
    assert board.status.phases == (("a5", 1.0, 3.0), ("b1", 1.0, 2.0), ("b3", 1.5, 5.0))


def test_threads_do_not_undo_each_others_changes(board):
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=_count, args=(board, f"device {k}")) for k in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert sorted((device.name, device.rounds) for device in board.status.devices) == [
        (f"device {k}", 300) for k in range(4)
    ]


def _count(board: Board, name: str) -> None:
    for rounds in range(1, 301):
        board.update_device(name, rounds=rounds)
