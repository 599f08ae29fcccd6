"""The end of a block: all layers are delivered to the fed server, and averaged there.

If devices are lost or the fed server restarts meanwhile, the block still ends, with the devices that remain.
"""

from adaptsfl.deploy.protocol import actions as do
from adaptsfl.deploy.protocol import events as on
from adaptsfl.deploy.protocol.block import BlockState
from adaptsfl.deploy.protocol.membership import admit_waiting, reopen, send_away
from adaptsfl.deploy.protocol.state import State

FIRST_CHECK_S, LONGEST_CHECK_S = 0.5, 5.0  # pauses between checks whether the fed server still knows the block


def begin(state: State, block: BlockState, now: float) -> None:
    """Ask all connected devices to deliver their layers, and deliver the edge server's part meanwhile."""
    _wait_anew(state, block, now)
    _ask(state, block)
    _deliver_own(state, block, block.trained)


def _wait_anew(state: State, block: BlockState, now: float) -> None:
    """Wait for layers, with a new deadline."""
    block.phase, deliveries = "delivering", block.deliveries
    deliveries.deadline = now + state.rules.round_deadline_s
    deliveries.pause_s, deliveries.check_at = FIRST_CHECK_S, now + FIRST_CHECK_S


def _ask(state: State, block: BlockState) -> None:
    for device in state.here():
        connection, done = state.live(device), device.number in block.deliveries.by_devices
        if connection is not None and connection.planned == block.attempt and not done:
            state.emit(do.SendDeliver(connection.number, block.attempt))


def _deliver_own(state: State, block: BlockState, devices: set[int]) -> None:
    """Deliver these devices' layers above their cuts, one delivery per device at a time."""
    deliveries = block.deliveries
    for number in sorted(devices - deliveries.own - set(deliveries.sending)):
        deliveries.sending[number] = True
        state.emit(do.DeliverOwn(block.attempt, number, state.devices[number].cut))


def settle_delivering(state: State, block: BlockState, now: float) -> None:
    """Have layers averaged once all connected devices have delivered, or the deadline has passed and a quorum has."""
    deliveries = block.deliveries
    here = {device.number for device in state.holding()}
    # Devices of the last round count; if too few of them are left, all connected devices that hold layers do.
    counted = here & block.trained if len(here & block.trained) >= state.rules.quorum else here
    done = deliveries.by_devices & counted
    if len(done) >= state.rules.quorum and (done == counted or now >= deliveries.deadline):
        if block.reopening:
            return
        _deliver_own(state, block, done)
        if done <= deliveries.own:
            block.phase, deliveries.chosen, deliveries.asked = "averaging", tuple(sorted(done)), deliveries.forgotten
            state.emit(do.Average(block.attempt, deliveries.chosen))
        return
    state.emit(do.WaitFor("the devices' layers"))
    if now >= deliveries.check_at:  # the devices may be waiting for the fed server
        deliveries.pause_s = min(2 * deliveries.pause_s, LONGEST_CHECK_S)
        deliveries.check_at = now + deliveries.pause_s
        reopen(state, block)
    enough = len(done) >= state.rules.quorum
    state.wake_at = min(deliveries.check_at, deliveries.deadline) if enough else deliveries.check_at


def delivered(state: State, event: on.Delivered, now: float) -> None:
    """Record that a device has delivered its layers."""
    state.useless(event.connection)
    device, block = state.current(event.connection, event.attempt), state.block
    if device is None or block is None or not block.closing:
        return
    if device.number not in block.deliveries.by_devices:  # repeated reports must not postpone the check for ever
        block.deliveries.by_devices.add(device.number)
        block.deliveries.check_at = now + block.deliveries.pause_s  # the fed server knows the block


def reopened(state: State, event: on.Reopened, now: float) -> None:
    """Go on once the fed server knows the block; if it had forgotten the block, all devices deliver again."""
    block = state.block
    if block is None or block.attempt != event.attempt:
        return
    block.reopening = False
    if event.forgotten:
        block.deliveries.forgotten += 1
        block.deliveries.forget_all()
        if block.closing:
            _ask(state, block)
        if block.phase == "delivering":
            _wait_anew(state, block, now)
    admit_waiting(state)


def own_delivered(state: State, event: on.OwnDelivered, _now: float) -> None:
    """Record that the edge server has delivered a device's layers, unless the delivery has become obsolete."""
    block = state.block
    if block is not None and block.attempt == event.attempt and block.deliveries.sending.pop(event.device, False):
        block.deliveries.own.add(event.device)


def own_refused(state: State, event: on.OwnRefused, _now: float) -> None:
    """Go on without a device whose layers cannot be averaged; if it reconnects, it begins with the block's layers."""
    block, device = state.block, state.devices[event.device]
    if block is None or block.attempt != event.attempt:
        return
    if not block.deliveries.sending.pop(event.device, False):
        return  # the device has other layers by now
    block.deliveries.leave_out(event.device)
    device.attempt = 0
    state.close(device.connection, event.reason, violation=True)
    state.not_finite(event.device)


def block_forgotten(state: State, event: on.BlockForgotten, now: float) -> None:
    """Open the block again at a fed server that was restarted."""
    block = state.block
    if block is None or block.attempt != event.attempt:
        return
    if event.device is None:
        _wait_anew(state, block, now)
    else:
        block.deliveries.sending.pop(event.device, None)
    reopen(state, block)


def not_delivered(state: State, event: on.NotDelivered, now: float) -> None:
    """Disconnect devices that reported a delivery which the fed server does not have, and ask the others again."""
    block = state.block
    if block is None or block.attempt != event.attempt or block.phase != "averaging":
        return
    _wait_anew(state, block, now)
    if block.reopening or block.deliveries.forgotten != block.deliveries.asked:
        return  # the fed server may have lost the layers; then all devices are asked again
    for device in [state.devices[number] for number in event.devices]:
        block.deliveries.by_devices.discard(device.number)
        device.failed_to_deliver()
        reason = "it said that its layers are at the fed server, and none are"
        state.close(device.connection, reason, violation=True)
    _ask(state, block)


def averaged(state: State, event: on.Averaged, _now: float) -> None:
    """Count the devices that did not deliver; a device that does so repeatedly is shut out. Then end the block."""
    block = state.block
    if block is None or block.attempt != event.attempt or block.phase != "averaging":
        return
    for device in [state.devices[number] for number in block.present]:
        if device.number in block.deliveries.chosen:
            device.undelivered = 0
        elif device.connection is not None and device.attempt == block.attempt:
            device.failed_to_deliver()
            send_away(state, device)
    for device in state.devices:
        device.admission = ""
    block.phase, block.test_deadline = "testing", block.deliveries.deadline
