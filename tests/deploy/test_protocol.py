"""The edge server's rules, event by event: races, faults and hostile orders in microseconds.

The same happens to real servers and devices in test_races.py, test_faults.py, test_bad_luck.py and test_hostile.py;
here every order can be had on purpose, and hypothesis looks for those that nobody thought of.
"""

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from adaptsfl.deploy.protocol import actions, events
from adaptsfl.deploy.protocol.state import Rules
from adaptsfl.deploy.security.limits import MOST_USELESS, MOST_VIOLATIONS, STRIKES
from adaptsfl.deploy.sending import Sending
from deploy.protocol_world import Device, World


def training(devices: int = 2, quorum: int = 1, rounds: int = 2, *, cuts: Any = None, **options: Any) -> World:
    """A world in which all devices have sent nothing yet of the first round, but have their plans to read."""
    world = World(devices, quorum)
    for number in range(devices):
        world.connect(number)
    world.open_block(rounds, cuts, **options)
    while world.finish(actions.GiveLayers):
        pass
    return world


def of(world: World, kind: type[actions.Action]) -> list[Any]:
    return [action for action in world.log if isinstance(action, kind)]


def presents(world: World) -> list[tuple[int, ...]]:
    return [action.devices for action in of(world, actions.TrainRound)]


# --- a block as it should be ---


def test_a_block_of_two_rounds() -> None:
    world = training()
    world.settle()
    assert presents(world) == [(0, 1), (0, 1)]
    assert world.averaged == [(0, 1)]
    assert world.ended == [1]
    assert [device.learned for device in world.devices] == [2, 2]


def test_plans_say_where_everybody_is() -> None:
    world = training(cuts=(3, 1), evaluate=True)
    assert [(plan.cut, plan.next_round, plan.last_round, plan.evaluate) for plan in of(world, actions.SendPlan)] == [
        (3, 1, 2, True),
        (1, 1, 2, True),
    ]


# --- evaluation ---


def test_rounds_do_not_wait_for_test_samples_and_all_of_these_count() -> None:
    world = training(evaluate=True)
    world.read_all()
    assert of(world, actions.EvaluateBatch) == []
    assert [world.test(0), world.test(0), world.test(1)] == [True, False, True]  # one of each device is on its way
    world.finish(actions.TrainRound)
    assert len(of(world, actions.SendGradients)) == 2
    assert of(world, actions.EndEvaluation) == []
    world.settle()
    assert of(world, actions.EndEvaluation) == [actions.EndEvaluation(0, 0.5, 0.1)]
    assert sorted((batch.device, batch.number) for batch in of(world, actions.EvaluateBatch)) == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
    ]
    assert world.ended == [1]


def test_an_evaluation_ends_in_the_middle_of_a_block_once_all_samples_have_come() -> None:
    world = training(evaluate=True, rounds=3)
    world.read_all()
    for _ in range(2):
        for number in (0, 1):
            assert of(world, actions.EndEvaluation) == []
            world.test(number)
            world.finish(actions.EvaluateBatch)
            world.read_all()
    assert of(world, actions.EndEvaluation) == [actions.EndEvaluation(0, 0.5, 0.1)]
    assert presents(world) == [(0, 1)]
    world.do(events.BatchEvaluated(1, 0, 0, (0, 100.0, 10)))  # nobody counts it
    world.settle()
    assert len(of(world, actions.EndEvaluation)) == 1


def test_an_evaluation_does_not_end_before_a_block_does_while_a_device_is_away() -> None:
    world = training(3, evaluate=True)
    world.read_all()
    world.lose(2)
    world.pending.remove(next(action for action in world.pending if isinstance(action, actions.TrainRound)))
    while world.test(0) or world.test(1) or world.finish(actions.EvaluateBatch):
        world.read_all()
    assert world.devices[0].tested == world.devices[1].tested == {0, 1}
    assert of(world, actions.EndEvaluation) == []
    world.connect(2)
    world.read_all(2)
    while world.test(2) or world.finish(actions.EvaluateBatch):
        world.read_all()
    assert len(of(world, actions.EndEvaluation)) == 1


def averaged(devices: int = 2, **options: Any) -> World:
    """A world in which the layers are averaged, and no test samples have been evaluated."""
    world = training(devices, rounds=1, evaluate=True, **options)
    world.read_all()
    for kind in (actions.TrainRound, actions.DeliverOwn, actions.Average):
        while world.finish(kind):
            world.read_all()
    assert world.averaged
    return world


def test_a_block_waits_for_test_samples_once_its_layers_are_averaged() -> None:
    world = averaged()
    assert world.ended == []
    assert world.log[-1] == actions.WaitFor("the devices' test samples")
    world.settle(0)
    assert world.ended == []
    world.settle(1)
    assert world.ended == [1]
    assert [type(action) for action in world.log[-2:]] == [actions.EndEvaluation, actions.EndBlock]


def test_who_never_finishes_its_evaluation_holds_a_block_until_the_deadline_and_only_once() -> None:
    world = averaged()
    world.settle(0)
    world.wait()
    assert (world.now, world.ended) == (10.0, [1])  # the deadline of deliveries
    assert of(world, actions.EndEvaluation) == [actions.EndEvaluation(0, 0.5, 0.1)]
    for _ in range(2):
        world.devices[1].inbox.clear()
        world.devices[1].evaluates = False
        world.open_block(1, evaluate=True)
        while world.finish() or world.read(0) or world.read(1) or world.test(0):
            world.devices[1].evaluates = False
    assert world.ended == [1, 2, 3]
    assert world.now == 10.0
    world.open_block(1, evaluate=True)
    world.settle()
    assert not world.protocol.devices[1].untested
    assert world.now == 10.0


def test_samples_are_not_waited_for_beyond_the_deadline_of_deliveries() -> None:
    world = training(3, quorum=2, rounds=1, evaluate=True)
    world.read_all()
    world.finish(actions.TrainRound)
    world.read_all(0, 1)
    for _ in range(20):
        while world.finish():
            pass
        if not world.averaged:
            world.wait()
    assert world.now == 10.0
    assert world.ended == [1]


def test_who_comes_back_sends_the_test_samples_that_are_missing() -> None:
    world = training(evaluate=True, rounds=1)
    world.read_all()
    world.test(1)
    world.finish(actions.EvaluateBatch)
    world.read_all()
    world.test(1)
    world.take(actions.EvaluateBatch)  # of the second mini-batch, whose connection is lost
    world.connect(1)
    world.settle()
    assert [batch.number for batch in of(world, actions.EvaluateBatch) if batch.device == 1] == [0, 1, 1]
    assert of(world, actions.EndEvaluation) == [actions.EndEvaluation(0, 0.5, 0.1)]
    assert world.ended == [1]


def test_who_comes_back_after_the_averaging_goes_on_with_test_samples() -> None:
    world = averaged()
    world.connect(1)
    world.settle()
    assert len(of(world, actions.SendDeliver)) == 2
    assert of(world, actions.EndEvaluation) == [actions.EndEvaluation(0, 0.5, 0.1)]
    assert (world.now, world.ended) == (0.0, [1])


def test_who_is_restarted_after_the_averaging_waits_for_the_next_block() -> None:
    world = averaged()
    world.connect(1, anew=True)
    assert of(world, actions.Reopen) == []
    world.settle()
    assert (world.now, world.ended) == (0.0, [1])
    world.open_block(1)
    world.settle()
    assert presents(world) == [(0, 1)] * 2


def test_test_samples_before_the_statistics_lead_to_nothing() -> None:
    world = training()
    world.settle()
    world.open_block(evaluate=True, estimate=True)
    while world.finish(actions.GiveLayers):
        pass
    world.do(events.Activations(1, 2, 0, "evaluation", 2))
    assert of(world, actions.EvaluateBatch) == []
    world.settle()
    assert len(of(world, actions.EvaluateBatch)) == 4
    assert len(of(world, actions.EndEvaluation)) == 1


def test_only_statistics_that_are_wanted_are_estimated_without_test_samples() -> None:
    world = training()
    world.settle()
    world.open_block(0, evaluate=True, estimate=True, result_wanted=False)
    world.settle()
    assert of(world, actions.SendEvaluate) == of(world, actions.EndEvaluation) == []
    assert world.ended == [1, 2]


def test_the_last_evaluation_waits_for_all_samples_and_not_beyond_the_deadline() -> None:
    world = training(rounds=0, evaluate=True)
    world.settle(0)
    assert not world.ended
    world.settle(1)
    assert world.ended == [1]
    world = training(rounds=0, evaluate=True)
    world.settle(0)
    world.wait()
    assert world.now == 10.0
    assert world.ended == [1]
    assert of(world, actions.EndEvaluation)


# --- layers at the begin of a block ---


def opened(devices: int = 2, quorum: int = 1, rounds: int = 2, **options: Any) -> World:
    """A world in which devices have their plans, and the edge server is still fetching its own layers."""
    world = World(devices, quorum)
    for number in range(devices):
        world.connect(number)
    world.open_block(rounds, placed=False, **options)
    return world


def test_devices_have_their_plans_while_the_edge_server_fetches_its_layers() -> None:
    world = opened()
    assert [type(action) for action in world.log[-3:]] == [actions.PlaceLayers, actions.SendPlan, actions.SendPlan]
    world.read_all()
    assert of(world, actions.GiveLayers) == of(world, actions.UseActivations) == []
    world.settle()
    assert presents(world) == [(0, 1)] * 2
    assert len(of(world, actions.SendPlan)) == 2
    assert world.ended == [1]


@pytest.mark.parametrize("estimate", [False, True])
def test_activations_that_come_before_the_edge_servers_layers_are_kept_and_used_once(estimate: bool) -> None:
    world = opened()
    if estimate:
        world.settle()
        world.open_block(placed=False, evaluate=True, estimate=True)
    world.read_all()
    assert [world.protocol.keeps(connection) for connection in (1, 2)] == [True, True]
    world.finish(actions.PlaceLayers)
    assert [world.protocol.keeps(connection) for connection in (1, 2)] == [True, True]
    world.finish(actions.GiveLayers, device=0)
    assert [world.protocol.keeps(connection) for connection in (1, 2)] == [False, True]
    world.settle()
    assert presents(world)[-2:] == [(0, 1)] * 2


def test_a_round_has_its_whole_deadline_once_the_edge_server_has_its_layers() -> None:
    world = opened(3, quorum=2)
    world.read_all(0, 1)
    world.now = 25.0
    world.do(events.DeadlinePassed())
    while world.finish(actions.PlaceLayers) or world.finish(actions.GiveLayers):
        pass
    assert presents(world) == []
    assert world.protocol.wake_at == 35.0
    world.wait()
    assert presents(world) == [(0, 1)]


def test_what_a_lost_device_sent_before_the_layers_came_is_sent_again() -> None:
    world = opened(quorum=2)
    world.read_all()
    world.lose(1)
    world.finish(actions.PlaceLayers)
    while world.finish(actions.GiveLayers):
        pass
    assert [action.device for action in of(world, actions.UseActivations)] == [0]
    world.connect(1)
    world.settle()
    assert presents(world) == [(0, 1)] * 2


@pytest.mark.parametrize("anew", [False, True])
def test_who_comes_back_before_the_layers_do_has_its_plan_at_once_if_the_fed_server_knows_the_block(anew: bool) -> None:
    world = opened(quorum=2)
    world.read_all()
    connection = world.connect(1, anew=anew)
    assert len(of(world, actions.SendPlan)) == 2
    world.finish(actions.Reopen)
    assert [plan.connection for plan in of(world, actions.SendPlan)] == [1, 2, connection]
    world.settle()
    assert presents(world) == [(0, 1)] * 2
    assert world.ended == [1]


def test_layers_that_come_after_their_block_change_nothing() -> None:
    world = opened(1)
    late = world.take(actions.PlaceLayers)
    world.do(events.NotFinite(0, 1))
    assert world.diverged
    assert world.do(events.LayersPlaced(late.attempt)) == []


# --- races ---


def test_activations_that_come_while_their_round_is_trained_are_too_late_and_the_device_goes_on() -> None:
    world = training()
    world.read_all(0)
    world.wait()
    assert presents(world) == [(0,)]
    world.read_all(1)
    assert of(world, actions.SendSkip) == [actions.SendSkip(2, next_round=2)]  # and it sends that, which is too early
    world.finish(actions.TrainRound)
    assert of(world, actions.SendSkip) == [actions.SendSkip(2, next_round=2)] * 2
    world.settle()
    assert presents(world) == [(0,), (0, 1)]
    assert world.averaged == [(0, 1)]


def test_activations_whose_device_is_lost_before_they_are_used_count() -> None:
    world = training(quorum=2)
    world.read_all(1)
    world.lose(1)
    world.read_all(0)
    assert presents(world) == [(0, 1)]


def test_an_answer_that_was_lost_on_the_way_is_sent_again_and_nothing_is_trained_again() -> None:
    world = training()
    world.read_all()
    world.finish(actions.TrainRound)
    world.lose(1)
    connection = world.connect(1)
    world.read(1)  # the welcome
    world.read(1)  # the plan: it sends the same activations again
    assert of(world, actions.SendGradients)[-1] == actions.SendGradients(connection, 1, 1)
    world.settle()
    assert presents(world) == [(0, 1), (0, 1)]


def test_activations_that_are_sent_again_before_they_are_answered_count_once() -> None:
    world = training()
    world.read_all(1)
    world.lose(1)
    world.connect(1)
    world.read_all(1)
    assert len(of(world, actions.UseActivations)) == 1
    world.settle()
    assert presents(world) == [(0, 1), (0, 1)]


def test_a_device_that_comes_back_is_sent_nothing_before_its_plan() -> None:
    world = training(quorum=2)
    world.read_all(1)
    world.lose(1)
    connection = world.connect(1, ready=False, anew=True)
    world.read_all(0)
    world.finish(actions.TrainRound)
    to_it = [action for action in world.log if getattr(action, "connection", 0) == connection]
    assert [type(action) for action in to_it] == [actions.SendWelcome]


def test_what_a_lost_device_had_sent_gives_way_to_what_it_sends_with_new_layers() -> None:
    world = training(quorum=2)
    world.read_all(1)
    world.connect(1, anew=True)
    world.finish(actions.Reopen)
    world.read_all(0)
    assert presents(world) == []  # what it had sent belongs to layers that are lost
    world.settle()
    assert presents(world) == [(0, 1), (0, 1)]


def test_a_device_that_loses_its_layers_while_its_round_is_trained_is_not_answered() -> None:
    world = training()
    world.read_all()
    world.connect(1, anew=True)
    world.finish(actions.Reopen)
    world.finish(actions.TrainRound)
    assert [action.device for action in of(world, actions.SendGradients)] == [0]
    assert world.protocol.block is not None
    assert world.protocol.block.trained == {0}
    world.settle()
    assert presents(world)[1] == (0, 1)


def test_layers_that_were_meant_for_a_block_that_is_over_are_no_admission_to_the_next() -> None:
    world = training(rounds=1)
    world.settle(0)
    world.connect(1, anew=True)
    world.finish(actions.Reopen)
    late = world.take(actions.GiveLayers)
    world.settle(0)
    assert world.ended == [1]
    world.open_block()
    world.do(events.LayersGiven(late.attempt, late.device))
    assert world.protocol.devices[late.device].attempt == 0


def test_a_second_connection_ends_the_first_and_the_older_one_is_refused() -> None:
    world = training()
    world.connect(1)
    assert of(world, actions.Close) == [actions.Close(2, "device-2 has connected anew")]
    older = world.connect(0, ready=False)
    world.connect(0, ready=False)
    world.do(events.Ready(older, 100))
    assert of(world, actions.Close)[-1] == actions.Close(older, "device-1 has connected anew")


# --- deadlines and quorums ---


def test_a_round_goes_on_without_those_who_are_late_and_nobody_waits_for_them_again() -> None:
    world = training(3, quorum=2)
    world.read_all(0, 1)
    world.wait(9.9)
    assert presents(world) == []
    world.wait()
    assert presents(world) == [(0, 1)]
    assert actions.Say("round 1 goes on without device-3") in world.log
    world.settle(0, 1)
    assert presents(world) == [(0, 1), (0, 1)]
    assert world.now == 10.0


def test_a_late_device_is_waited_for_once_it_sends_again() -> None:
    world = training(3, quorum=2, rounds=3)
    world.read_all(0, 1)
    world.wait()
    world.read_all(2)  # too late for the first round, and told so
    assert not world.protocol.devices[2].late
    world.finish(actions.TrainRound)
    world.read_all(0, 1)
    assert presents(world) == [(0, 1)]
    world.read_all(2)
    assert presents(world) == [(0, 1), (0, 1, 2)]


def test_without_a_quorum_a_round_waits_however_long_it_takes() -> None:
    world = training(3, quorum=3)
    world.lose(2)
    world.read_all()
    for _ in range(5):
        world.now += 1000.0
        world.do(events.DeadlinePassed())
    assert presents(world) == []
    assert actions.WaitFor("devices: 2 of 3 that are needed") in world.log
    world.connect(2)
    world.settle()
    assert presents(world) == [(0, 1, 2)] * 2


def test_enough_after_the_deadline_is_enough_at_once() -> None:
    world = training(3, quorum=2)
    world.read_all(0)
    world.now = 11.0
    world.do(events.DeadlinePassed())
    assert presents(world) == []
    world.read_all(1)
    assert presents(world) == [(0, 1)]


def test_whoever_is_being_given_layers_is_waited_for() -> None:
    world = World(2, quorum=1)
    world.connect(0)
    world.connect(1)
    world.open_block()
    world.finish(actions.GiveLayers, device=0)
    world.read_all(0)
    assert presents(world) == []
    assert len(of(world, actions.GiveLayers)) == 2
    world.settle()
    assert presents(world) == [(0, 1)] * 2


def test_a_run_starts_with_all_who_can_or_after_a_while_with_enough() -> None:
    world = World(3, quorum=2)
    world.connect(0)
    world.connect(1)
    assert not world.protocol.may_start(0.0, 60.0)
    assert world.protocol.may_start(60.0, 60.0)
    connection = world.connect(2, ready=False)
    world.do(events.GaveUp(connection, "no data"))
    assert world.protocol.may_start(0.0, 60.0)
    world.lose(1)
    assert not world.protocol.may_start(100.0, 60.0)


def test_who_was_told_to_go_on_after_the_last_round_is_asked_for_it_when_it_is_repeated() -> None:
    world = training(4, quorum=3, rounds=1)
    world.read_all(0, 1, 3)
    world.wait()
    assert presents(world) == [(0, 1, 3)]
    world.read_all(2)  # too late: there is no round after this one
    world.reject(3)
    world.settle(0, 1, 2)
    assert presents(world) == [(0, 1, 3), (0, 1, 2)]
    assert world.ended == [1]


def test_who_connects_twice_while_the_fed_server_is_asked_gets_no_layers_before_its_answer() -> None:
    world = training()
    for _ in range(2):
        world.connect(1, anew=True)
    assert len(of(world, actions.GiveLayers)) == 2  # when the block began
    assert len(of(world, actions.Reopen)) == 1
    world.settle()
    assert world.ended == [1]


# --- the end of a block ---


def delivering(devices: int = 3, quorum: int = 3, cuts: Any = None) -> World:
    """A world in which the last round was trained, and everybody was asked to deliver."""
    world = training(devices, quorum, rounds=1, cuts=cuts)
    world.read_all()
    world.finish(actions.TrainRound)
    return world


def test_own_layers_of_a_device_that_lost_its_layers_meanwhile_are_delivered_again() -> None:
    for before in (False, True):
        world = delivering()
        if before:
            world.read_all(2)
        world.connect(2, anew=True)
        world.finish(actions.Reopen)
        world.finish(actions.GiveLayers)
        world.read_all()
        assert world.averaged == []
        world.settle()
        assert [action.device for action in of(world, actions.DeliverOwn)] == [0, 1, 2, 2]
        assert world.averaged == [(0, 1, 2)]


def test_nobody_is_accused_when_the_fed_server_forgets_layers_that_were_delivered() -> None:
    world = delivering()
    world.read_all()
    while world.finish(actions.DeliverOwn):
        pass
    average = world.take(actions.Average)
    world.forget()
    world.fed.know(1)
    world.do(events.Reopened(1, forgotten=True))  # as when a device comes meanwhile
    world.do(events.NotDelivered(average.attempt, average.devices))
    assert of(world, actions.Close) == []
    world.settle()
    assert world.averaged == [(0, 1, 2)]
    assert [device.undelivered for device in world.protocol.devices] == [0, 0, 0]


def test_a_fed_server_that_was_restarted_is_told_of_the_block_and_everybody_delivers_again() -> None:
    world = delivering()
    world.read_all()
    world.forget()
    world.settle()
    assert len(of(world, actions.SendDeliver)) == 6
    assert world.averaged == [(0, 1, 2)]


def test_a_fed_server_that_keeps_everybody_waiting_is_asked_whether_it_knows_the_block() -> None:
    world = delivering()
    while world.finish(actions.DeliverOwn):
        pass
    world.forget()
    world.read_all()  # nobody gets rid of its layers, and nobody says so
    world.wait()
    assert world.now == 0.5
    world.settle()
    assert world.averaged == [(0, 1, 2)]


def test_who_says_again_and_again_that_it_has_delivered_does_not_put_off_asking_the_fed_server() -> None:
    world = delivering()
    while world.finish(actions.DeliverOwn):
        pass
    world.deliver(world.devices[2])
    world.forget()
    world.read_all(0, 1)
    for _ in range(4):
        world.wait(0.4)
        world.do(events.Delivered(3, 1))
    assert of(world, actions.Reopen)


def test_devices_have_the_whole_time_to_deliver_again_what_the_fed_server_forgot() -> None:
    world = delivering(quorum=2)
    while world.finish(actions.DeliverOwn):
        pass
    world.read_all(0)
    world.now = 9.9
    world.forget()
    world.do(events.DeadlinePassed())
    world.finish(actions.Reopen)
    world.read_all(0, 1)
    world.wait(0.2)
    assert of(world, actions.Average) == []
    world.settle()
    assert world.averaged == [(0, 1, 2)]


def test_nobody_is_accused_while_the_fed_server_is_being_told_of_the_block() -> None:
    world = delivering()
    world.read_all()
    while world.finish(actions.DeliverOwn):
        pass
    average = world.take(actions.Average)
    world.forget()
    world.do(events.Hello(4, 2, 0))
    world.do(events.Ready(4, 100))
    (reopening,) = of(world, actions.Reopen)
    world.fed.know(reopening.attempt)  # the answer is on its way
    world.do(events.NotDelivered(average.attempt, average.devices))
    assert [closed.reason for closed in of(world, actions.Close)] == ["device-3 has connected anew"]
    assert [device.undelivered for device in world.protocol.devices] == [0, 0, 0]


def test_a_delivery_that_never_comes_is_not_waited_for_beyond_the_deadline() -> None:
    world = delivering(quorum=2)
    world.settle(0, 1)
    while not world.averaged:
        world.wait()
        world.settle(0, 1)
    assert world.now == 10.0
    assert world.averaged == [(0, 1)]
    assert world.protocol.devices[2].undelivered == 1


def test_whoever_holds_up_the_others_again_and_again_is_shut_out() -> None:
    world = World(3, quorum=2)
    for number in range(3):
        world.connect(number)
    for _ in range(STRIKES):
        world.open_block(rounds=1)
        while world.finish(actions.GiveLayers):
            pass
        world.read_all()
        world.finish(actions.TrainRound)
        world.read(2)  # its gradients; it never reads that it is to deliver
        while world.protocol.block is not None:
            world.settle(0, 1)
            world.wait()
        world.devices[2].inbox.clear()
    assert world.protocol.devices[2].quarantined
    assert of(world, actions.Close)[-1].reason.startswith("device-3 is shut out: its layers did not get to the fed")


def test_whoever_claims_deliveries_that_never_came_is_sent_away_and_the_others_are_averaged() -> None:
    world = delivering(quorum=2)
    world.do(events.Delivered(3, 1))
    world.settle(0, 1)
    assert of(world, actions.Close) == [
        actions.Close(3, "it said that its layers are at the fed server, and none are", violation=True)
    ]
    assert world.averaged == [(0, 1)]
    assert (world.protocol.devices[2].undelivered, world.protocol.devices[2].violations) == (1, 1)


def test_a_device_whose_own_layers_cannot_be_averaged_is_dropped() -> None:
    world = delivering(quorum=2)
    world.read_all()
    world.pending.remove(actions.DeliverOwn(1, 2, 1))
    world.do(events.OwnRefused(1, 2, "layer 3 came with numbers that cannot be"))
    world.settle(0, 1)
    assert of(world, actions.Close) == [actions.Close(3, "layer 3 came with numbers that cannot be", violation=True)]
    assert world.averaged == [(0, 1)]


def test_if_too_few_of_the_last_round_are_left_whoever_is_here_delivers() -> None:
    world = training(3, quorum=2, rounds=1)
    world.read_all(0, 1)
    world.wait()
    world.finish(actions.TrainRound)
    world.read_all(0, 1)
    world.lose(1)
    world.settle(0, 2)
    assert world.averaged == [(0, 2)]


def test_without_a_quorum_nothing_is_averaged_however_long_it_takes() -> None:
    world = delivering(quorum=3)
    world.lose(2)
    for _ in range(20):
        world.settle(0, 1)
        world.wait()
    assert world.now > 10.0
    assert of(world, actions.Average) == []
    world.connect(2)
    world.settle()
    assert world.averaged == [(0, 1, 2)]


def test_the_answer_about_a_block_that_is_over_changes_nothing() -> None:
    world = training(rounds=1)
    world.settle()
    world.open_block()
    before = world.protocol.block
    for late in (
        events.Averaged(1, 1),
        events.NotDelivered(1, (0,)),
        events.Reopened(1, forgotten=True),
        events.BlockForgotten(1),
        events.OwnDelivered(1, 0),
        events.OwnRefused(1, 0, "late"),
        events.RoundTrained(1, 1),
        events.RoundRejected(1, 1, (0,)),
        events.MomentsMerged(1, merged=True),
        events.MomentsRejected(1, (0,)),
        events.NotFinite(0, 1),
    ):
        world.log.clear()
        world.do(late)
        assert not world.log, late
    assert world.protocol.block is before


# --- statistics of batch-norm ---


def test_devices_evaluate_with_merged_statistics_and_train_on() -> None:
    world = training(evaluate=True, estimate=True)
    assert [plan.estimate for plan in of(world, actions.SendPlan)] == [0, 0]  # the model before round 1
    world = training(evaluate=True, estimate=True)
    world.protocol.block.estimation.round = 5  # type: ignore[union-attr]
    for device in world.devices:
        world.do(events.Activations(device.connection, 1, 5, "estimation"))
    world.finish(actions.EstimateMoments)
    assert [action.connection for action in of(world, actions.SendEvaluate)] == [1, 2]


@pytest.mark.parametrize("forgotten", [False, True])
def test_an_estimation_that_fails_costs_one_evaluation(forgotten: bool) -> None:
    world = training(3, 2)
    world.settle()
    world.open_block(2, evaluate=True, estimate=True)
    if forgotten:
        while world.finish(actions.GiveLayers):
            pass
        world.read_all()
        world.forget()
    else:
        world.pending.clear()
        world.wait()  # nobody has sent anything
    world.settle()
    assert of(world, actions.EndEvaluation) == []
    assert actions.Say("batch-norm's statistics could not be re-estimated: no evaluation this time") in world.log
    if forgotten:
        world.drain()
        assert world.ended == [1, 2]


def test_without_a_quorum_no_statistics_are_estimated_and_training_waits() -> None:
    world = training(3, 2)
    world.settle()
    world.open_block(2, evaluate=True, estimate=True)
    while world.finish(actions.GiveLayers):
        pass
    world.lose(1)
    world.lose(2)
    world.settle(0)
    world.wait()
    assert world.now == 10.0
    assert of(world, actions.EstimateMoments) == []
    assert world.protocol.block is not None
    assert world.protocol.block.phase == "training"


def test_a_device_whose_moments_are_not_at_the_fed_server_is_sent_away() -> None:
    world = training(3, 2)
    world.settle()
    world.open_block(2, evaluate=True, estimate=True)
    while world.finish(actions.GiveLayers):
        pass
    world.read_all()
    work = world.take(actions.EstimateMoments)
    world.do(events.MomentsMerged(work.attempt, merged=False, missing=(1,)))
    assert of(world, actions.Close)[-1].reason == "it said that its moments are at the fed server, and none are"
    world.settle(0, 2)
    assert world.ended == [1, 2]


@pytest.mark.parametrize("answered", [False, True])
def test_nobody_is_accused_when_the_fed_server_forgets_moments(answered: bool) -> None:
    world = training(4, 2)
    world.settle()
    world.open_block(2, evaluate=True, estimate=True)
    while world.finish(actions.GiveLayers):
        pass
    world.read_all(0, 1, 2)
    world.forget()
    world.connect(3, anew=True)  # so the fed server is told of the block
    if answered:
        world.finish(actions.Reopen)
    work = world.take(actions.EstimateMoments)
    world.do(events.MomentsMerged(work.attempt, merged=False, missing=(0, 1, 2)))
    assert [closed.violation for closed in of(world, actions.Close)] == [False]
    assert [device.undelivered for device in world.protocol.devices] == [0, 0, 0, 0]
    world.settle()
    assert world.ended == [1, 2]


def test_nobody_is_accused_when_the_fed_server_forgets_moments_before_the_edge_server_has_its_layers() -> None:
    """The edge server tells it of the block again in order to fetch them; devices' moments may have come before."""
    world = training(3, 2)
    world.settle()
    world.open_block(2, placed=False, evaluate=True, estimate=True)
    world.read_all()
    world.forget()
    world.finish(actions.PlaceLayers)
    while world.finish(actions.GiveLayers):
        pass
    work = world.take(actions.EstimateMoments)
    world.do(events.MomentsMerged(work.attempt, merged=False, missing=work.devices))
    assert of(world, actions.Close) == []
    assert [device.undelivered for device in world.protocol.devices] == [0, 0, 0]
    world.settle()
    assert world.ended == [1, 2]


def test_activations_that_spoil_an_estimation_are_left_out_of_it() -> None:
    world = training(3, 2)
    world.settle()
    world.open_block(2, evaluate=True, estimate=True)
    while world.finish(actions.GiveLayers):
        pass
    world.read_all()
    work = world.take(actions.EstimateMoments)
    assert work.devices == (0, 1, 2)
    world.do(events.MomentsRejected(work.attempt, (2,)))
    assert of(world, actions.EstimateMoments)[-1].devices == (0, 1)
    world.settle(0, 1)
    assert len(of(world, actions.EndEvaluation)) == 1


# --- NaN and infinity ---


def test_a_device_whose_activations_lead_to_nan_is_left_out_and_the_others_are_trained() -> None:
    world = training(3, quorum=2)
    world.read_all()
    world.reject(2)
    assert presents(world) == [(0, 1, 2), (0, 1)]
    assert of(world, actions.Close) == [
        actions.Close(3, "activations came that lead to NaN or infinity", violation=True)
    ]
    world.settle(0, 1)
    assert world.ended == [1]


def test_a_round_that_is_repeated_is_repeated_without_those_who_lost_their_layers_meanwhile() -> None:
    world = training(4, quorum=1)
    world.read_all()
    world.connect(1, anew=True)
    world.finish(actions.Reopen)
    world.reject(3)
    world.finish(actions.GiveLayers)
    world.read_all(1)
    assert presents(world) == [(0, 1, 2, 3), (0, 1, 2)]


@pytest.mark.parametrize(("devices", "bad"), [(1, 1), (3, 2), (4, 3)])
def test_nan_on_most_devices_ends_the_run_and_is_nobodys_fault(devices: int, bad: int) -> None:
    world = training(devices)
    for device in range(bad):
        assert not world.diverged
        world.do(events.NotFinite(device, 1))
    assert world.diverged.startswith(
        f"round 1: activations, losses or layers of {bad} of {devices} devices contain NaN"
    )
    assert "Lower training.learning_rate" in world.diverged
    assert world.protocol.block is None
    world.do(events.RunOver("training has failed", tuple(range(devices)), 30.0, 90.0))
    assert len(of(world, actions.SendStop)) == devices


def test_nan_of_one_of_two_devices_does_not_end_the_run() -> None:
    world = training(2)
    world.do(events.NotFinite(0, 1))
    world.do(events.NotFinite(0, 1))
    assert not world.diverged


def test_a_device_that_gives_up_because_it_diverged_counts_and_is_not_waited_for() -> None:
    world = training(3)
    world.read_all(0, 1)
    world.do(events.GaveUp(3, "layers contain NaN", diverged=True))
    assert presents(world) == [(0, 1)]
    assert world.protocol.block is not None
    assert world.protocol.block.not_finite == {2}
    assert world.protocol.devices[2].violations == 0


# --- hostile devices ---


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (events.Activations(1, 1, 0), "activations of round 0 came in rounds 1 to 2"),
        (events.Activations(1, 1, 3), "activations of round 3 came in rounds 1 to 2"),
        (events.Activations(1, 1, 2), "activations of round 2 came, before round 1 was trained"),
        (events.Activations(1, 1, 0, "estimation"), "activations of round 0 came for an estimation that nobody asked"),
        (events.Activations(1, 1, 2, "evaluation", 2), "test samples 2 came of 2 that were announced"),
    ],
)
def test_what_has_no_place_ends_the_connection(event: events.Event, reason: str) -> None:
    world = training(evaluate=True)
    world.do(event)
    (closed,) = of(world, actions.Close)
    assert (closed.connection, closed.violation) == (1, True)
    assert closed.reason.startswith(reason)
    assert world.protocol.devices[0].attempt == 0


def test_three_violations_in_a_row_shut_a_device_out_and_a_trained_round_forgives_two() -> None:
    world = training(quorum=2, rounds=100)
    bad = world.protocol.devices[1]
    for count in range(MOST_VIOLATIONS):
        assert not bad.quarantined
        world.do(events.Violated(1, "nonsense"))
        if bad.strikes == STRIKES - 1 and count < MOST_VIOLATIONS - 1:
            world.read_all()
            world.finish(actions.TrainRound)
            assert bad.strikes == 0
    assert bad.quarantined  # by the number of all of them
    assert of(world, actions.Close)[-1] == actions.Close(2, "device-2 is shut out: nonsense")
    assert actions.Say("device-2: nonsense (shut out)") in world.log


def test_who_is_shut_out_has_no_use_of_connections_that_it_opened_before() -> None:
    world = World(2)
    greeted = world.connect(1, ready=False)
    for _ in range(STRIKES):
        world.do(events.Violated(1, "nonsense"))
    world.do(events.Ready(greeted, 100))
    world.do(events.Hello(77, 1))
    assert of(world, actions.Close) == [
        actions.Close(greeted, "device-2 is shut out: nonsense"),
        actions.Close(77, "device-2 is shut out: nonsense"),
    ]
    assert world.protocol.here() == []


def test_nothing_counts_that_comes_over_a_connection_that_is_being_ended() -> None:
    world = training()
    world.do(events.Closing(1))
    world.log.clear()
    world.do(events.Activations(1, 1, 1))
    world.do(events.Delivered(1, 1))
    assert world.log == []
    assert not world.protocol.expects(1, 1)


def test_endless_messages_that_lead_to_nothing_end_the_connection() -> None:
    world = training()
    for _ in range(MOST_USELESS):
        world.do(events.StaleActivations(1))
    assert of(world, actions.Close) == []
    world.do(events.StaleActivations(1))
    assert of(world, actions.Close) == [
        actions.Close(1, f"{MOST_USELESS} messages came that lead to nothing", violation=True)
    ]


def test_nothing_that_an_unknown_or_older_connection_says_counts() -> None:
    world = training()
    world.connect(0)
    for connection in (1, 77):
        for event in (
            events.Ready(connection, 5),
            events.Activations(connection, 1, 1),
            events.StaleActivations(connection),
            events.Delivered(connection, 1),
            events.GaveUp(connection, "so there", diverged=True),
            events.Closing(connection),
            events.Disconnected(connection, violated=True),
        ):
            assert world.do(event) == [], event
    assert world.protocol.devices[0].samples == 100


# --- the end of a run ---


def test_everybody_hears_that_the_run_is_over_also_who_is_away_or_not_ready() -> None:
    world = World(3)
    world.connect(0)
    world.connect(1)
    world.lose(1)
    world.connect(2, ready=False)
    world.do(events.RunOver("the run is over", (0, 1), shutdown_s=30.0, preparing_s=90.0))
    world.read_all(0)
    assert world.devices[0].told == "the run is over"
    assert of(world, actions.EndShutdown) == []
    world.connect(1, ready=False)
    world.read_all(1)
    assert world.devices[1].told == "the run is over"
    world.read_all(2)
    assert of(world, actions.EndShutdown) == [actions.EndShutdown()]


@pytest.mark.parametrize(("connected", "until"), [(False, 30.0), (True, 120.0)])
def test_a_shutdown_ends(connected: bool, until: float) -> None:
    world = World(2)
    if connected:
        world.connect(1, ready=False)
    world.do(events.RunOver("the run is over", (1,), shutdown_s=30.0, preparing_s=90.0))
    world.wait()
    assert of(world, actions.EndShutdown) == [actions.EndShutdown()]
    assert world.now == until
    world.do(events.DeadlinePassed())
    assert len(of(world, actions.EndShutdown)) == 1


# --- orders that nobody thought of ---

HOSTILE = 3
DEVICE, HONEST = st.integers(0, HOSTILE), st.integers(0, HOSTILE - 1)


class AnyOrder(RuleBasedStateMachine):
    """Four devices, of whom the last may do anything, a fed server that forgets, and time that passes.

    `World` checks every action; and whatever has happened, once everybody behaves the block ends.
    """

    def __init__(self) -> None:
        super().__init__()
        self.world = World(HOSTILE + 1, quorum=2)
        self.world.liars = {HOSTILE}
        self.blocks = 0

    @property
    def running(self) -> bool:
        return self.world.protocol.block is not None

    @initialize(
        quorum=st.integers(1, 3),
        connected=st.integers(0, HOSTILE + 1),
        steps=st.integers(0, 40),
        parts=st.integers(1, 3),
    )
    def begin(self, quorum: int, connected: int, steps: int, parts: int) -> None:
        """Begin in the middle of a block, more often than not."""
        self.world.protocol.rules = Rules(quorum, round_deadline_s=10.0)
        for number in range(connected):
            self.world.connect(number)
        if connected >= quorum:
            self.open(rounds=1, evaluate=False, estimate=False, placed=True, cuts=(1,) * (HOSTILE + 1), parts=parts)
        self.go_on(steps)

    @rule(steps=st.integers(1, 20))
    def go_on(self, steps: int) -> None:
        """Everybody does some of what is to be done, in turns."""
        for step in range(steps):
            if not self.world.finish():
                self.world.read(step % (HOSTILE + 1))

    @precondition(lambda self: not self.running and self.world.protocol.enough())
    @rule(
        rounds=st.integers(1, 3),
        evaluate=st.booleans(),
        estimate=st.booleans(),
        placed=st.booleans(),
        cuts=st.tuples(*[st.just(1)] * 4),
        parts=st.integers(1, 3),
        exact=st.booleans(),
    )
    def open(
        self,
        rounds: int,
        evaluate: bool,
        estimate: bool,
        placed: bool,
        cuts: tuple[int, ...],
        parts: int,
        exact: bool = False,
    ) -> None:
        self.blocks += 1
        sending = Sending(parts, exact_round=self.world.rounds + 1 if exact else 0)
        self.world.open_block(rounds, cuts, placed=placed, evaluate=evaluate, estimate=estimate, sending=sending)

    @rule(number=DEVICE, anew=st.booleans(), ready=st.booleans())
    def connect(self, number: int, anew: bool, ready: bool) -> None:
        self.world.connect(number, anew=anew, ready=ready)

    @rule(number=DEVICE, messages=st.integers(1, 3))
    def read(self, number: int, messages: int) -> None:
        for _ in range(messages):
            self.world.read(number)

    @rule(number=DEVICE)
    def test(self, number: int) -> None:
        self.world.test(number)

    @rule(number=DEVICE)
    def lose(self, number: int) -> None:
        self.world.lose(number)

    @precondition(lambda self: self.world.pending)
    @rule(turn=st.integers(0, 100))
    def finish(self, turn: int) -> None:
        """What computes ends in its order, what calls the fed server in any."""
        world = self.world
        computing = [
            a for a in world.pending if isinstance(a, actions.PlaceLayers | actions.GiveLayers | actions.TrainRound)
        ]
        calling = [a for a in world.pending if a not in computing]
        action = ([*computing[:1], *calling])[turn % (len(calling) + bool(computing))]
        world.finish(type(action), device=getattr(action, "device", None))

    @precondition(lambda self: any(isinstance(a, actions.TrainRound) for a in self.world.pending))
    @rule()
    def reject(self) -> None:
        first = next(a for a in self.world.pending if isinstance(a, actions.TrainRound | actions.GiveLayers))
        if isinstance(first, actions.TrainRound) and HOSTILE in first.devices:
            self.world.reject(HOSTILE)

    def advance(self, phase: str) -> None:
        """Everybody works until a round is being trained, or until layers are being delivered."""
        for step in range(200):
            block = self.world.protocol.block
            if block is None or (block.phase == phase and (block.round is None or block.round.training)):
                return
            if not self.world.finish():
                self.world.read(step % (HOSTILE + 1))

    @precondition(lambda self: self.running)
    @rule(
        phase=st.sampled_from(["training", "delivering"]),
        numbers=st.sets(HONEST, min_size=1),
        delivered=st.booleans(),
        steps=st.integers(0, 10),
    )
    def restart(self, phase: str, numbers: set[int], delivered: bool, steps: int) -> None:
        """Devices are restarted, perhaps after they have delivered; they get layers before other work ends."""
        self.advance(phase)
        for number in sorted(numbers):
            if delivered:
                self.world.read_all(number)
            self.world.connect(number, anew=True)
            self.world.finish(actions.Reopen)
            if not any(isinstance(action, actions.TrainRound) for action in self.world.pending):
                self.world.finish(actions.GiveLayers, device=number)
        self.go_on(steps)

    @rule(number=HONEST, before=st.integers(0, 3), after=st.integers(0, 3))
    def reconnect(self, number: int, before: int, after: int) -> None:
        """A device's connection breaks, and it comes back at once with its layers."""
        self.read(number, before)
        self.world.connect(number)
        self.read(number, after)

    @precondition(lambda self: self.running)
    @rule(silent=DEVICE)
    def outwait(self, silent: int) -> None:
        """One device is silent, and the others work until the deadline has passed."""
        others, until = [number for number in range(HOSTILE + 1) if number != silent], self.world.now + 10.0
        for _ in range(20):
            self.world.settle(*others)
            if self.running and self.world.now < until:
                self.world.wait()

    @rule()
    def forget(self) -> None:
        self.world.forget()

    @rule(seconds=st.sampled_from([0.1, 1.0, 100.0]))
    def wait(self, seconds: float) -> None:
        self.world.wait(seconds)

    @rule(
        attempt=st.integers(0, 2),
        number=st.integers(0, 4),
        kind=st.sampled_from(["round", "evaluation", "estimation", "delivered", "stale", "closing", "gave up"]),
        part=st.integers(0, 3),
    )
    def lie(self, attempt: int, number: int, kind: str, part: int) -> None:
        """The hostile device says something, whether or not it has a place."""
        device = self.world.devices[HOSTILE]
        attempt, connection = attempt or device.held, device.connection
        if kind == "delivered":
            self.world.do(events.Delivered(connection, attempt))
        elif kind == "stale":
            self.world.do(events.StaleActivations(connection))
        elif kind == "closing":
            self.world.do(events.Closing(connection))
        elif kind == "gave up":
            self.world.do(events.GaveUp(connection, "I will not", diverged=True))
        else:
            if kind == "round":
                device.pending = number
            self.world.do(events.Activations(connection, attempt, number, kind, 3, part))  # type: ignore[arg-type]

    @invariant()
    def nobody_honest_is_accused(self) -> None:
        assert not any(device.violations for device in self.world.protocol.devices[:HOSTILE])

    def teardown(self) -> None:
        self.world.devices[HOSTILE] = Device(HOSTILE)  # it behaves from now on, if it is let
        for connection, number in list(self.world.open.items()):
            if number == HOSTILE or self.world.devices[number].connection != connection:
                self.world._gone(connection)
        self.world.drain()
        assert len(self.world.ended) == self.blocks or self.world.diverged


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=300, stateful_step_count=40, deadline=None)
