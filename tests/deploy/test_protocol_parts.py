"""The edge server's rules for mini-batches that come in parts: races and faults between the parts of a round."""

from typing import Any

import pytest

from adaptsfl.deploy.protocol import actions, events
from adaptsfl.deploy.sending import Sending
from deploy.protocol_world import World


def training(devices: int = 2, quorum: int = 1, parts: int = 3, rounds: int = 2, exact: int = 0) -> World:
    """A world in which all devices have their plans to read, and have sent nothing yet."""
    world = World(devices, quorum)
    for number in range(devices):
        world.connect(number)
    world.open_block(rounds, sending=Sending(parts, exact_round=exact))
    while world.finish(actions.GiveLayers):
        pass
    return world


def of(world: World, kind: type[actions.Action]) -> list[Any]:
    return [action for action in world.log if isinstance(action, kind)]


def trained(world: World) -> list[tuple[int, int, tuple[int, ...]]]:
    """Rounds, parts and devices of all that was trained, in its order."""
    return [(action.round, action.part, action.devices) for action in of(world, actions.TrainRound)]


def test_every_part_is_trained_by_itself_and_its_gradients_are_sent_at_once() -> None:
    world = training(rounds=1)
    world.read_all()
    for part in range(3):
        assert trained(world)[-1] == (1, part, (0, 1))
        world.finish(actions.TrainRound)
        sent = [(action.device, action.part) for action in of(world, actions.SendGradients)]
        assert sent == [(device, known) for known in range(part + 1) for device in (0, 1)]
        assert world.protocol.rounds == (part == 2)
    world.settle()
    assert (world.averaged, world.ended) == ([(0, 1)], [1])
    assert [device.learned for device in world.devices] == [1, 1]


def test_a_part_waits_for_all_devices_and_later_ones_for_it() -> None:
    world = training()
    world.slow = {1: {1, 2}}
    world.read_all()
    assert trained(world) == [(1, 0, (0, 1))]
    world.settle()
    assert trained(world) == [(1, 0, (0, 1))]
    assert len(of(world, actions.UseActivations)) == 4
    for part in (1, 2):
        world.do(events.Activations(2, 1, 1, part=part))
        world.finish(actions.TrainRound)
    assert trained(world) == [(1, part, (0, 1)) for part in range(3)]


def test_the_exact_round_of_a_block_is_not_divided() -> None:
    world = training(exact=1)
    world.settle()
    assert trained(world) == [(1, 0, (0, 1)), *((2, part, (0, 1)) for part in range(3))]
    assert [action.parts for action in of(world, actions.TrainRound)] == [1, 3, 3, 3]


# --- devices that are lost between parts ---


def test_who_reconnects_between_parts_goes_on_where_it_was() -> None:
    """Of the parts that it sends again one is answered once more, and none is used twice."""
    world = training(quorum=2)
    world.slow = {1: {2}}
    world.read_all()
    world.finish(actions.TrainRound)
    world.lose(1)  # the gradients of its first part are lost on the way
    assert trained(world)[-1] == (1, 1, (0, 1))
    world.slow = {}
    connection = world.connect(1)
    world.settle()
    assert actions.SendGradients(connection, 1, 1, 0) in world.log
    assert of(world, actions.DropRound) == of(world, actions.SendSkip) == []
    assert trained(world) == [(number, part, (0, 1)) for number in (1, 2) for part in range(3)]


def test_who_misses_a_part_is_left_out_until_the_next_round_and_told_once() -> None:
    world = training(3, quorum=2)
    world.slow = {2: {1, 2}}
    world.read_all()
    world.settle(0, 1)
    assert trained(world) == [(1, 0, (0, 1, 2))]
    world.wait()
    assert world.now == 10.0
    assert actions.Say("round 1 goes on without device-3") in world.log
    world.slow = {}
    for part in (1, 2):
        world.do(events.Activations(3, 1, 1, part=part))  # too late, both of them
    assert of(world, actions.SendSkip) == []
    world.settle(0, 1)
    assert of(world, actions.SendSkip) == [actions.SendSkip(3, next_round=2)]
    world.settle()
    assert trained(world) == [
        (1, 0, (0, 1, 2)),
        (1, 1, (0, 1)),
        (1, 2, (0, 1)),
        *((2, part, (0, 1, 2)) for part in range(3)),
    ]
    assert world.protocol.devices[2].rounds == 1


def test_who_misses_a_part_of_the_last_round_is_averaged_only_if_too_few_others_are() -> None:
    world = training(3, quorum=2, rounds=1)
    world.slow = {2: {2}}
    world.read_all()
    world.settle(0, 1)
    world.wait()
    world.settle()
    assert trained(world)[-1] == (1, 2, (0, 1))
    assert world.averaged == [(0, 1)]


def test_a_part_has_its_share_of_the_deadline_even_if_the_first_one_came_late() -> None:
    world = training(3, quorum=1)
    world.slow = {0: {1, 2}, 2: {0, 1, 2}}
    world.read_all()
    world.wait()
    assert (world.now, trained(world)) == (10.0, [(1, 0, (0, 1))])
    world.now = 12.0
    world.finish(actions.TrainRound)
    assert world.protocol.wake_at == pytest.approx(12.0 + 10.0 / 3)  # else device-1 would be left out at once
    world.do(events.Activations(1, 1, 1, part=1))
    assert trained(world)[-1] == (1, 1, (0, 1))


def test_a_round_begins_again_if_too_few_of_its_devices_are_left() -> None:
    """Nothing was updated anywhere, so nothing is lost but time; gradients of the first attempt are not sent again."""
    world = training(quorum=2, rounds=1)
    world.slow = {1: {1, 2}}
    world.read_all()
    world.finish(actions.TrainRound)
    world.slow = {}
    world.connect(1, anew=True)
    assert of(world, actions.DropRound) == [actions.DropRound(1, 1)]
    assert of(world, actions.SendSkip) == [actions.SendSkip(1, next_round=1)]
    world.settle()
    assert trained(world) == [(1, 0, (0, 1)), *((1, part, (0, 1)) for part in range(3))]
    assert world.averaged == [(0, 1)]


def test_parts_on_their_way_when_a_round_begins_again_are_not_used_and_cost_one_message() -> None:
    world = training(quorum=2, rounds=1)
    world.slow = {0: {2}, 1: {1, 2}}
    world.read_all()
    world.finish(actions.TrainRound)
    world.read_all(1)
    world.lose(1)
    assert len(of(world, actions.DropRound)) == 1
    world.do(events.Activations(1, 1, 1, part=2))
    assert len(of(world, actions.UseActivations)) == 3
    assert of(world, actions.SendSkip) == [actions.SendSkip(1, next_round=1)]
    world.slow = {}
    connection = world.connect(1)
    world.settle()
    assert of(world, actions.SendSkip)[1:] == [actions.SendSkip(connection, next_round=1)]
    assert trained(world)[1:] == [(1, part, (0, 1)) for part in range(3)]


def test_a_burst_of_parts_that_comes_too_early_is_answered_once() -> None:
    world = training(3, quorum=2)
    world.slow = {2: {0, 1, 2}}
    world.read_all()
    world.wait()  # until the round goes on without device-3
    for part in range(3):
        world.do(events.Activations(3, 1, 1, part=part))
    assert of(world, actions.SendSkip) == []
    world.slow = {}
    world.settle()
    assert of(world, actions.SendSkip) == [actions.SendSkip(3, next_round=2)]
    assert trained(world)[3:] == [(2, part, (0, 1, 2)) for part in range(3)]


# --- activations that are rejected ---


def test_a_device_that_is_rejected_in_a_later_part_costs_the_others_nothing() -> None:
    world = training(3, quorum=2, rounds=1)
    world.read_all()
    world.finish(actions.TrainRound)
    world.reject(2)
    assert [action.connection for action in of(world, actions.Close)] == [3]
    assert trained(world)[-1] == (1, 1, (0, 1))
    world.settle()
    assert trained(world) == [(1, 0, (0, 1, 2)), (1, 1, (0, 1, 2)), (1, 1, (0, 1)), (1, 2, (0, 1))]
    assert world.averaged == [(0, 1)]


def test_a_rejection_that_leaves_too_few_lets_the_round_begin_again() -> None:
    world = training(3, quorum=3, rounds=1)
    world.read_all()
    world.finish(actions.TrainRound)
    world.reject(2)
    assert len(of(world, actions.DropRound)) == 1
    world.connect(2, anew=True)
    world.settle()
    assert trained(world)[2:] == [(1, part, (0, 1, 2)) for part in range(3)]


def test_events_of_another_part_change_nothing() -> None:
    world = training()
    world.read_all()
    assert world.do(events.RoundTrained(1, 1, 1)) == []
    assert world.do(events.RoundRejected(1, 1, (0,), 2)) == []
    world.settle()
    assert world.averaged == [(0, 1)]


# --- hostile devices ---


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ((1,), "part 1 of round 1 came, part 0 was expected"),
        ((0, 2), "part 2 of round 1 came, part 1 was expected"),
        ((3,), "part 3 of round 1 came, which has 3"),
        ((0, 1, 2, 3), "part 3 of round 1 came, which has 3"),
    ],
)
def test_parts_that_have_no_place_end_the_connection(parts: tuple[int, ...], reason: str) -> None:
    world = training(3, quorum=3)
    for part in parts:
        world.do(events.Activations(1, 1, 1, part=part))
    assert of(world, actions.Close) == [actions.Close(1, reason, violation=True)]


def test_parts_that_come_again_are_used_once() -> None:
    world = training()
    for part in (0, 0, 1, 0, 1, 2, 2):
        world.do(events.Activations(1, 1, 1, part=part))
    assert [action.part for action in of(world, actions.UseActivations)] == [0, 1, 2]
    assert world.protocol.connections[1].useless == 1  # since the last one that was of use


def test_an_undivided_round_has_one_part() -> None:
    world = training(exact=1)
    world.do(events.Activations(1, 1, 1, part=1))
    assert of(world, actions.Close) == [actions.Close(1, "part 1 of round 1 came, which has 1", violation=True)]
