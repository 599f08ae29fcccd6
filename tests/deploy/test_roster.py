"""Who is here, whether they are enough, and what people see of them."""

import asyncio
from collections.abc import Callable

import pytest

from adaptsfl.deploy.parties.edge.roster import Roster
from adaptsfl.deploy.protocol import EdgeProtocol, events
from adaptsfl.deploy.protocol.state import Rules
from adaptsfl.deploy.status.board import Board, Status


def roster(*, quorum: int = 2, by_size: bool = False, say: Callable[[str], None] = lambda _text: None) -> Roster:
    names = ["kitchen", "hall", "attic"]
    protocol = EdgeProtocol(names, Rules(quorum, 60.0))
    return Roster(protocol, by_size=by_size, board=Board(Status("test", 0.0)), say=say)


def connected(found: Roster, *numbers: int) -> None:
    for number in numbers:
        found.protocol.handle(events.Hello(number, number), 0.0)
        found.protocol.handle(events.Ready(number, 10), 0.0)


def test_a_device_whose_connection_is_being_ended_is_not_here() -> None:
    found = roster()
    connected(found, 0, 2)
    assert [device.name for device in found.protocol.here()] == ["kitchen", "attic"]
    found.protocol.handle(events.Closing(0), 0.0)
    assert [device.name for device in found.protocol.here()] == ["attic"]


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
        found.protocol.devices[0].samples, found.protocol.devices[1].samples = 10, 30
        assert found.shares([0, 1]) == shares


def test_people_see_how_every_device_is_in_a_word() -> None:
    found = roster()
    device = found.protocol.devices[1]

    def seen() -> str:
        found.show([1])
        return found.board.status.devices[1].state

    assert [device.state for device in found.board.status.devices] == ["away"] * 3
    connected(found, 1)
    assert seen() == "waiting"
    device.attempt = 7
    assert seen() == "training"
    device.late = True
    assert seen() == "late"
    device.connection = None
    assert seen() == "away"
    device.quarantined = True
    assert seen() == "quarantined"
