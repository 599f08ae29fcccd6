"""Rounds: trained with all connected devices, or after the deadline with the devices that have sent activations.

Before the first round of a block that evaluates, batch-norm's statistics are estimated.
"""

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
        result_wanted=event.result_wanted,
        round=Round(event.first_round) if event.rounds else None,
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
    elif block.first_round <= event.number <= block.last_round:
        device.late = False
        _of_round(state, block, device, event)
    else:
        rounds = f"rounds {block.first_round} to {block.last_round}"
        state.close(event.connection, f"activations of round {event.number} came in {rounds}", violation=True)


def _of_round(state: State, block: BlockState, device: DeviceState, event: on.Activations) -> None:
    current = block.round
    if device.answered == event.number:  # the round was trained, and the gradients were lost on the way
        state.useless(event.connection)
        state.emit(do.SendGradients(event.connection, device.number, event.number))
    elif current is not None and event.number == current.number and device.number in current.arrived:
        state.useless(event.connection)  # sent again over a new connection, before it was answered
    elif current is not None and event.number == current.number and not current.training:
        current.arrived.add(device.number)
        state.only_arrived = True
        state.useful(event.connection)
        state.emit(do.UseActivations(event.connection, device.number))
    else:
        _too_early_or_late(state, current, event)


def _too_early_or_late(state: State, current: Round | None, event: on.Activations) -> None:
    """Tell a device which round to send instead; if it is early, do so once the current round is trained."""
    training = current is not None and current.training
    following = state.rounds + (2 if training else 1)
    if event.number > max(following, state.connections[event.connection].skipped_to):
        reason = f"activations of round {event.number} came, before round {following} was trained"
        state.close(event.connection, reason, violation=True)
        return
    state.useless(event.connection)
    if current is not None and training and event.number == following:
        current.early.add(event.connection)  # a skip now would only make it send the same again
    else:
        _skip(state, event.connection, following)


def _skip(state: State, number: int, next_round: int) -> None:
    connection = state.connections.get(number)
    if connection is not None and not connection.closing:
        connection.skipped_to = next_round
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
    """Train the round once all connected devices have sent, or the deadline has passed and a quorum has."""
    current = block.round
    if current is None or current.training or _waits_on(state, current, now):
        return
    missing = [d for d in state.holding() if d.number not in current.arrived]
    waiting = [d for d in missing if not d.late]
    arriving = any(d.admission == "giving" for d in state.here())  # the round waits for them
    enough = len(current.arrived) >= state.rules.quorum
    if enough and (now >= current.deadline or not (waiting or arriving)):
        if waiting:
            state.emit(do.Say(f"round {current.number} goes on without {', '.join(d.name for d in waiting)}"))
        for device in waiting:
            device.late = True
        everybody = not waiting and current.awaited <= current.arrived
        current.training = True
        state.emit(do.TrainRound(block.attempt, current.number, tuple(sorted(current.arrived)), everybody))
        return
    current.awaited |= {d.number for d in waiting}
    current.watched = waiting[0].number if waiting else None
    if enough:
        state.wake_at = current.deadline
    elif not missing and not arriving:
        state.emit(do.WaitFor(f"devices: {len(current.arrived)} of {state.rules.quorum} that are needed"))


def _waits_on(state: State, current: Round, now: float) -> bool:
    """Whether a round waits on, which is seen without a look at every device: else N arrivals would take N² looks."""
    if not state.only_arrived or current.watched is None or current.watched in current.arrived:
        return False
    if now >= current.deadline:
        return False
    if len(current.arrived) >= state.rules.quorum:
        state.wake_at = current.deadline
    return True


def _being_trained(state: State, attempt: int, number: int) -> tuple[BlockState, Round] | None:
    block = state.block
    if block is None or block.attempt != attempt or block.round is None or not block.round.training:
        return None
    return (block, block.round) if block.round.number == number else None


def round_trained(state: State, event: on.RoundTrained, now: float) -> None:
    """Send gradients to the devices of a round, and go on with the next one."""
    found = _being_trained(state, event.attempt, event.round)
    if found is None:
        return
    block, current = found
    state.rounds = event.round
    block.present, block.trained = tuple(sorted(current.arrived)), set()
    for device in [state.devices[number] for number in block.present]:
        device.last_round, device.rounds, device.strikes = event.round, device.rounds + 1, 0
        if device.attempt != block.attempt or device.number in current.lost:
            continue  # it has lost the layers that the gradients are for
        block.trained.add(device.number)
        device.answered, connection = event.round, state.live(device)
        if connection is not None and connection.planned == block.attempt:  # else it sends again once it has its plan
            state.emit(do.SendGradients(connection.number, device.number, event.round))
    if event.round < block.last_round:
        block.round = Round(event.round + 1, now + state.rules.round_deadline_s)
        for early in sorted(current.early):
            _skip(state, early, event.round + 1)
    else:
        block.round = None
        delivery.begin(state, block, now)


def round_rejected(state: State, event: on.RoundRejected, now: float) -> None:
    """Collect once more, without devices whose activations led to NaN or infinity."""
    found = _being_trained(state, event.attempt, event.round)
    if found is None:
        return
    _, current = found
    current.arrived -= {*event.devices, *current.lost}
    # A device that was told to go on with a later round would not send this one, and the round would wait for it.
    ahead = {c.number for c in state.connections.values() if c.skipped_to > current.number}
    for connection in sorted(current.early | ahead):
        _skip(state, connection, current.number)
    current.training, current.lost, current.awaited, current.early = False, set(), set(), set()
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
