"""Who is here, whether they are enough, and what people see of them."""

import asyncio
from collections.abc import Callable

import pytest

from adaptsfl.costs import CutCosts
from adaptsfl.deploy.resources import MeasuredFleet
from adaptsfl.deploy.roster import Roster
from adaptsfl.deploy.sessions import Session
from adaptsfl.deploy.status import Board, Status
from adaptsfl.training.settings import OptimizerSettings

COSTS = CutCosts(*([1e6, 2e6],) * 2, *([1e5, 1e4],) * 2, [1e5, 2e5])


def roster(*, quorum: int = 2, by_size: bool = False, say: Callable[[str], None] = lambda _text: None) -> Roster:
    names = ["kitchen", "hall", "attic"]
    measured = MeasuredFleet(COSTS, names, 8, OptimizerSettings())
    return Roster(names, quorum, by_size=by_size, measured=measured, board=Board(Status("test", 0.0)), say=say)


def connected(found: Roster, *numbers: int) -> None:
    for number in numbers:
        found.by_number[number].session = Session(found.by_number[number])


def test_a_device_whose_connection_is_being_ended_is_not_here() -> None:
    found = roster()
    connected(found, 0, 2)
    session = found.by_number[0].session
    assert session is not None
    assert [member.name for member in found.here()] == ["kitchen", "attic"]
    session.close()
    assert [member.name for member in found.here()] == ["attic"]


def test_enough_are_waited_for_as_long_as_is_said() -> None:
    async def main() -> None:
        said: list[str] = []
        found = roster(say=said.append)
        connected(found, 0)
        assert not await found.enough(0.01)
        assert said == ["waiting for devices: 1 of 2 that are needed"]
        waiting = asyncio.create_task(found.enough())
        await asyncio.sleep(0)
        connected(found, 1)
        found.wake()
        assert await waiting

    asyncio.run(main())


def test_whoever_waits_is_told_that_it_was_given_up_once() -> None:
    async def main() -> None:
        found = roster()
        waiting = asyncio.create_task(found.enough())
        await asyncio.sleep(0)
        found.give_up(RuntimeError("enough is enough"))
        with pytest.raises(RuntimeError, match="enough is enough"):
            await waiting
        assert not await found.change(0.01)

    asyncio.run(main())


def test_devices_count_by_their_samples_or_alike() -> None:
    for found, shares in ((roster(), [0.5, 0.5]), (roster(by_size=True), [0.25, 0.75])):
        found.by_number[0].samples, found.by_number[1].samples = 10, 30
        assert found.shares([0, 1]) == shares


def test_people_see_how_every_device_is_in_a_word() -> None:
    found = roster()
    member = found.by_number[1]

    def seen() -> str:
        found.tell_of(member)
        return found.board.status.devices[1].state

    assert [device.state for device in found.board.status.devices] == ["away"] * 3
    connected(found, 1)
    assert seen() == "waiting"
    member.attempt = 7
    assert seen() == "training"
    member.late = True
    assert seen() == "late"
    member.session = None
    assert seen() == "away"
    member.quarantined = True
    assert seen() == "quarantined"
