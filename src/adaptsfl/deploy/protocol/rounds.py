"""Rounds: trained with all connected devices, or after the deadline with the devices that have sent activations.

Mini-batches may come in parts, of which each is trained as soon as it is there; layers change after the last one.
Before the first round of a block that evaluates, batch-norm's statistics are estimated.
"""

from collections.abc import Sequence

from adaptsfl.deploy.protocol import actions as do
from adaptsfl.deploy.protocol import delivery, evaluation, membership
from adaptsfl.deploy.protocol import events as on
from adaptsfl.deploy.protocol.block import BlockState, Estimation, Evaluation, Round
from adaptsfl.deploy.protocol.membership import admit, give_waiting
from adaptsfl.deploy.protocol.state import DeviceState, State


def block_opened(state: State, event: on.BlockOpened, _now: float) -> None:
    """Send plans to all connected devices, and have the edge server's own layers placed meanwhile."""
    state.rounds = event.first_round - 1
    estimation = Estimation(state.rounds) if event.evaluate and event.estimate else None
    state.block = BlockState(
        attempt=event.attempt,
        number=event.number,
        first_round=event.first_round,
        rounds=event.rounds,
        cuts=event.cuts,
        planned=event.planned,
        phase="placing",
        sending=event.sending,
        result_wanted=event.result_wanted,
        round=Round(event.first_round, parts=event.sending.parts(event.first_round)) if event.rounds else None,
        evaluation=Evaluation(state.rounds) if event.evaluate else None,
        estimation=estimation,
    )
    state.emit(do.PlaceLayers(event.attempt))
    for device in state.devices:
        device.attempt, device.admission = 0, ""
    for device in state.here():
        admit(state, device)


def layers_placed(state: State, event: on.LayersPlaced, now: float) -> None:
    """Begin with the estimation of statistics or with the first round, and give devices their layers."""
    block = state.block
    if block is None or block.attempt != event.attempt or block.placed:
        return
    block.deliveries.forgotten += event.forgotten
    if block.estimation is None:
        _begin_training(state, block, now)
    else:
        block.phase, block.estimation_deadline = "estimating", now + state.rules.round_deadline_s
    give_waiting(state, block)


def layers_given(state: State, event: on.LayersGiven, now: float) -> None:
    """Admit a device whose layers the edge server now holds, and handle the activations that were kept until then."""
    membership.layers_given(state, event)
    connection = state.live(state.devices[event.device])
    if connection is not None and connection.kept is not None:
        kept, connection.kept = connection.kept, None
        activations(state, kept, now)


def _begin_training(state: State, block: BlockState, now: float) -> None:
    """Go on with the first round, or with the last evaluation in a block without rounds."""
    deadline = now + state.rules.round_deadline_s
    if block.round is not None:
        block.phase, block.round.deadline = "training", deadline
    else:
        block.phase, block.test_deadline = "testing", deadline


# --- activations ---


def activations(state: State, event: on.Activations, _now: float) -> None:
    """Dispatch activations by their purpose; keep those that arrive before the edge server holds the layers."""
    if (connection := state.awaiting_layers(event.connection, event.attempt)) is not None:
        connection.kept = event
        return
    device, block = state.current(event.connection, event.attempt), state.block
    if device is None or block is None:
        return  # the block was closed meanwhile, or the device has reconnected and sends them again
    if event.purpose == "evaluation":
        evaluation.test_batch(state, block, device, event)
    elif event.purpose == "estimation":
        _for_estimation(state, block, device, event)
    elif not block.first_round <= event.number <= block.last_round:
        rounds = f"rounds {block.first_round} to {block.last_round}"
        state.close(event.connection, f"activations of round {event.number} came in {rounds}", violation=True)
    elif event.part >= (parts := block.sending.parts(event.number)):
        reason = f"part {event.part} of round {event.number} came, which has {parts}"
        state.close(event.connection, reason, violation=True)
    else:
        device.late = False
        _of_round(state, block, device, event)


def _of_round(state: State, block: BlockState, device: DeviceState, event: on.Activations) -> None:
    current, number = block.round, device.number
    if device.answered == event.number and event.part < device.answered_parts:
        state.useless(event.connection)  # the part was trained, and the gradients were lost on the way
        state.emit(do.SendGradients(event.connection, number, event.number, event.part))
    elif event.part and state.connections[event.connection].unwanted == event.number:
        state.useless(event.connection)  # sent before the device could read that its first parts came in vain
    elif current is None or event.number != current.number:
        _too_early_or_late(state, current, event)
    elif event.part < current.sent.get(number, 0):
        state.useless(event.connection)  # sent again over a new connection, before it was answered
    elif not current.takes(number, event.part):
        _too_early_or_late(state, current, event)
    elif event.part > current.sent.get(number, 0):
        _out_of_order(state, current, event, current.sent.get(number, 0))
    else:
        current.arrives(number)
        state.only_arrived = True
        state.useful(event.connection)
        state.connections[event.connection].unwanted = 0
        state.emit(do.UseActivations(event.connection, number, event.part))


def _out_of_order(state: State, current: Round, event: on.Activations, expected: int) -> None:
    """Have a device send all parts of a round that has begun again; else it has left out a part."""
    if not current.began_again:
        reason = f"part {event.part} of round {event.number} came, part {expected} was expected"
        state.close(event.connection, reason, violation=True)
        return
    state.useless(event.connection)
    state.connections[event.connection].unwanted = event.number
    _skip(state, event.connection, event.number)


def _too_early_or_late(state: State, current: Round | None, event: on.Activations) -> None:
    """Tell a device which round to send instead; if it is early, do so once the current round is trained."""
    under_way, connection = current is not None and current.under_way, state.connections[event.connection]
    following = state.rounds + (2 if under_way else 1)
    if event.number > max(following, connection.skipped_to):
        reason = f"activations of round {event.number} came, before round {following} was trained"
        state.close(event.connection, reason, violation=True)
        return
    state.useless(event.connection)
    connection.unwanted = event.number  # its other parts are on their way
    if current is not None and under_way and (event.number == following or current.parts > 1):
        current.early.add(event.connection)  # a skip now would only make it send the same again
    else:
        _skip(state, event.connection, following)


def _skip(state: State, number: int, next_round: int) -> None:
    connection = state.connections.get(number)
    if connection is not None and not connection.closing:
        connection.skipped_to = max(connection.skipped_to, next_round)
        state.emit(do.SendSkip(number, next_round))


def _for_estimation(state: State, block: BlockState, device: DeviceState, event: on.Activations) -> None:
    """Keep activations for the estimation of batch-norm's statistics, unless they arrive too late."""
    estimation = block.estimation
    if estimation is None or event.number != estimation.round:
        reason = f"activations of round {event.number} came for an estimation that nobody asked for"
        state.close(event.connection, reason, violation=True)
        return
    device.late = False
    if estimation.closed:
        state.useless(event.connection)
        return
    estimation.arrived.add(device.number)
    state.useful(event.connection)
    state.emit(do.KeepForEstimation(event.connection, device.number))


def stale_activations(state: State, event: on.StaleActivations, _now: float) -> None:
    """Record that a device is slow, but still sends."""
    connection = state.connections.get(event.connection)
    if connection is not None:
        state.devices[connection.device].late = False
        state.useless(event.connection)


def not_finite(state: State, event: on.NotFinite, _now: float) -> None:
    """Record that data of a device contain NaN or infinity."""
    if state.block is not None and state.block.attempt == event.attempt:
        state.not_finite(event.device)


def _reject(state: State, devices: tuple[int, ...]) -> None:
    """End the connections of devices whose activations led to NaN or infinity."""
    for device in devices:
        state.close(state.devices[device].connection, "activations came that lead to NaN or infinity", violation=True)
        state.not_finite(device)


# --- rounds ---


def settle_round(state: State, block: BlockState, now: float) -> None:
    """Train a part of the round once all connected devices have sent it, or the deadline has passed and a quorum has.

    Its first part decides with whom: a device that misses a part is left out until the next round. If fewer than a
    quorum is left, the round begins again: nothing has been updated anywhere.
    """
    current = block.round
    if current is None or current.training or _waits_on(state, current, now):
        return
    missing = [d for d in state.holding() if d.number not in current.arrived]
    if current.members is not None:
        missing = [d for d in missing if d.number in current.members]
        if len(current.arrived) + len(missing) < state.rules.quorum:
            block.round = _begun_again(state, block, current, now)
            settle_round(state, block, now)
            return
    waiting = [d for d in missing if not d.late]
    # A round waits for devices that are given layers; they cannot join it later.
    arriving = current.members is None and any(d.admission == "giving" for d in state.here())
    enough = len(current.arrived) >= state.rules.quorum
    if enough and (now >= current.deadline or not (waiting or arriving)):
        _train(state, block, current, waiting)
        return
    current.awaited |= {d.number for d in waiting}
    current.watched = waiting[0].number if waiting else None
    if enough:
        state.wake_at = current.deadline
    elif not missing and not arriving:
        state.emit(do.WaitFor(f"devices: {len(current.arrived)} of {state.rules.quorum} that are needed"))


def _train(state: State, block: BlockState, current: Round, waiting: Sequence[DeviceState]) -> None:
    """Train a part with the devices that have sent it; the round does not wait for these others any more."""
    if waiting:
        state.emit(do.Say(f"round {current.number} goes on without {', '.join(d.name for d in waiting)}"))
    for device in waiting:
        device.late = True
    everybody = not waiting and current.awaited <= current.arrived
    current.training = True
    devices = tuple(sorted(current.arrived))
    state.emit(do.TrainRound(block.attempt, current.number, devices, everybody, current.part, current.parts))


def _begun_again(state: State, block: BlockState, before: Round, now: float) -> Round:
    """Begin a round again: have all devices send all parts of it, and drop what was trained."""
    number = before.number
    state.emit(do.DropRound(block.attempt, number))
    state.emit(do.Say(f"round {number} begins again: too few of its devices are left"))
    for device in state.devices:
        connection = state.live(device)
        if device.answered == number:
            device.answered = device.answered_parts = 0
        if connection is None or connection.planned != block.attempt:
            continue  # it sends again once it has its plan
        if device.number in before.sent:
            connection.unwanted = number
        if device.number in before.sent or connection.number in before.early or connection.skipped_to > number:
            _skip(state, connection.number, number)
    return Round(number, now + state.rules.round_deadline_s, before.parts, began_again=True)


def _waits_on(state: State, current: Round, now: float) -> bool:
    """Whether a round waits on, which is seen without a look at every device: else N arrivals would take N² looks."""
    if not state.only_arrived or current.watched is None or current.watched in current.arrived:
        return False
    if now >= current.deadline:
        return False
    if len(current.arrived) >= state.rules.quorum:
        state.wake_at = current.deadline
    return True


def _being_trained(state: State, event: on.RoundTrained | on.RoundRejected) -> tuple[BlockState, Round] | None:
    block = state.block
    if block is None or block.attempt != event.attempt or block.round is None or not block.round.training:
        return None
    current = block.round
    return (block, current) if (current.number, current.part) == (event.round, event.part) else None


def round_trained(state: State, event: on.RoundTrained, now: float) -> None:
    """Send gradients to the devices of a part, and go on with the next part or round."""
    found = _being_trained(state, event)
    if found is None:
        return
    block, current = found
    trained = _send_gradients(state, block, current)
    if event.part + 1 < current.parts:
        current.next_part(now + state.rules.round_deadline_s / current.parts)
        return
    state.rounds = event.round
    block.present, block.trained = tuple(sorted(current.arrived)), trained
    for device in [state.devices[number] for number in block.present]:
        device.last_round, device.rounds, device.strikes = event.round, device.rounds + 1, 0
    if event.round < block.last_round:
        following = event.round + 1
        block.round = Round(following, now + state.rules.round_deadline_s, block.sending.parts(following))
        for early in sorted(current.early):
            _skip(state, early, following)
    else:
        block.round = None
        delivery.begin(state, block, now)


def _send_gradients(state: State, block: BlockState, current: Round) -> set[int]:
    """Send gradients to the devices with whom a part was trained; return those that still hold its layers."""
    trained = set()
    for device in [state.devices[number] for number in sorted(current.arrived)]:
        if device.attempt != block.attempt or device.number in current.lost:
            continue  # it has lost the layers that the gradients are for
        trained.add(device.number)
        device.answered, device.answered_parts, connection = current.number, current.part + 1, state.live(device)
        if connection is not None and connection.planned == block.attempt:  # else it sends again once it has its plan
            state.emit(do.SendGradients(connection.number, device.number, current.number, current.part))
    return trained


def round_rejected(state: State, event: on.RoundRejected, now: float) -> None:
    """Collect once more, without devices whose activations led to NaN or infinity."""
    found = _being_trained(state, event)
    if found is None:
        return
    _, current = found
    current.reject(event.devices)
    if not current.part:  # else nobody can join the round
        # A device that was told to go on with a later round would not send this one, and the round would wait for it.
        ahead = {c.number for c in state.connections.values() if c.skipped_to > current.number}
        for connection in sorted(current.early | ahead):
            _skip(state, connection, current.number)
        current.early = set()
    current.deadline = now + state.rules.round_deadline_s
    _reject(state, event.devices)


# --- batch-norm's statistics ---


def settle_estimating(state: State, block: BlockState, now: float) -> None:
    """Estimate batch-norm's statistics once all connected devices have sent, or the deadline has passed."""
    estimation = block.estimation
    assert estimation is not None
    waiting = [d for d in state.holding() if d.number not in estimation.arrived and not d.late]
    arriving = any(d.admission == "giving" for d in state.here())
    enough = len(estimation.arrived) >= state.rules.quorum
    if now < block.estimation_deadline and (waiting or arriving or not enough):
        state.wake_at = block.estimation_deadline
        return
    for device in waiting:
        device.late = True
    block.phase = "merging"
    if enough:
        state.emit(do.EstimateMoments(block.attempt, tuple(sorted(estimation.arrived))))
    else:
        moments_merged(state, on.MomentsMerged(block.attempt, merged=False), now)


def moments_rejected(state: State, event: on.MomentsRejected, now: float) -> None:
    """Collect once more, without devices whose activations led to NaN or infinity."""
    block = state.block
    if block is None or block.attempt != event.attempt or block.phase != "merging" or block.estimation is None:
        return
    block.estimation.arrived -= set(event.devices)
    block.phase, block.estimation_deadline = "estimating", now + state.rules.round_deadline_s
    _reject(state, event.devices)


def moments_merged(state: State, event: on.MomentsMerged, now: float) -> None:
    """Tell devices to evaluate with the merged statistics; without these, to go on with the first round at once."""
    block = state.block
    if block is None or block.attempt != event.attempt or block.phase != "merging" or block.estimation is None:
        return
    # If the block was opened again, the fed server may have lost them: the estimation is the first phase of a block.
    liars = () if block.reopening or block.deliveries.forgotten else event.missing
    for device in [state.devices[number] for number in liars]:
        device.failed_to_deliver()
        reason = "it said that its moments are at the fed server, and none are"
        state.close(device.connection, reason, violation=True)
    block.estimation.closed, block.estimation.merged = True, event.merged
    if not event.merged:
        state.emit(do.Say("batch-norm's statistics could not be re-estimated: no evaluation this time"))
    if not event.merged or not block.result_wanted:
        block.evaluation = None
    for device in state.here():
        connection = state.live(device)
        if connection is not None and connection.planned == block.attempt:
            if block.evaluation is not None:
                state.emit(do.SendEvaluate(connection.number, block.attempt))
            else:
                _skip(state, connection.number, block.first_round)
    _begin_training(state, block, now)
