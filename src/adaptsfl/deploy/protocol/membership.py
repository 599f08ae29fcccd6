"""Membership: devices connect and disconnect, receive layers and a plan, or are shut out."""

from adaptsfl.checks import printable
from adaptsfl.deploy.protocol import actions as do
from adaptsfl.deploy.protocol import events as on
from adaptsfl.deploy.protocol.block import BlockState
from adaptsfl.deploy.protocol.state import Connection, DeviceState, Shutdown, State


def hello(state: State, event: on.Hello, _now: float) -> None:
    """Welcome a device. Before it is ready, no plan is sent to it, and no round waits for it."""
    device = state.devices[event.device]
    connection = Connection(event.connection, event.device, event.attempt)
    state.connections[event.connection] = connection
    if device.quarantined:  # shut out since the call began
        state.close(connection.number, f"{device.name} is shut out: {device.last_error}")
        return
    state.close(device.connection, f"{device.name} has connected anew")
    device.newest, device.connection, device.gave_up = event.connection, None, False
    if state.shutdown is not None:
        send_stop(state, connection)
    state.emit(do.SendWelcome(event.connection, event.device))


def ready(state: State, event: on.Ready, _now: float) -> None:
    """Count a device as connected and ready, and admit it to the block under way."""
    connection, block = state.connections.get(event.connection), state.block
    if connection is None or connection.closing:
        return
    device = state.devices[connection.device]
    if device.newest != connection.number:
        state.close(connection.number, f"{device.name} has connected anew")
        return
    if device.quarantined:  # shut out since its `Hello`
        state.close(connection.number, f"{device.name} is shut out: {device.last_error}")
        return
    device.samples, device.connection = event.samples, connection.number
    if connection.held != device.attempt:
        device.attempt = 0
    state.emit(do.Show((device.number,)))
    if state.shutdown is not None:
        send_stop(state, connection)
    elif block is None or device.attempt == block.attempt or (device.admission == "giving" and block.placed):
        admit(state, device)
    elif not block.averaged:  # else there are no layers to fetch before the next block
        device.admission = "reopening"  # it will fetch layers from the fed server
        reopen(state, block)


def reopen(state: State, block: BlockState) -> None:
    """Make sure that the fed server knows the block."""
    if not block.reopening:
        block.reopening = True
        state.emit(do.Reopen(block.attempt))


def admit(state: State, device: DeviceState) -> None:
    """Give a device layers of the block if it has none, and send it the plan, once per connection and block.

    While the edge server fetches its layers of the block, devices have the plan already and fetch theirs.
    """
    block, connection = state.block, state.live(device)
    if block is None or connection is None or connection.planned == block.attempt:
        return
    if device.attempt != block.attempt and device.admission != "giving":
        _give_layers(state, device, block)
    if device.admission == "giving" and block.placed:
        return  # the plan follows once the edge server holds the layers
    connection.planned = block.attempt
    estimation = block.estimation
    state.emit(
        do.SendPlan(
            connection.number,
            block.attempt,
            block.number,
            next_round=state.rounds + 1,
            last_round=block.last_round,
            cut=device.cut,
            evaluate=block.evaluation is not None and estimation is None,
            estimate=estimation.round if estimation is not None and not estimation.closed else 0,
        )
    )
    if block.evaluation is not None and estimation is not None and estimation.merged:
        state.emit(do.SendEvaluate(connection.number, block.attempt))
    if block.closing:
        state.emit(do.SendDeliver(connection.number, block.attempt))


def _give_layers(state: State, device: DeviceState, block: BlockState) -> None:
    """Restart a device with the block's layers; its earlier work in the block is discarded."""
    if block.round is not None:
        block.round.leave_out(device.number)
    block.trained.discard(device.number)
    block.deliveries.leave_out(device.number)
    device.cut, device.admission = block.cuts[device.number], "giving"
    device.answered = device.answered_parts = 0
    if block.placed:
        state.emit(do.GiveLayers(block.attempt, device.number, device.cut))


def give_waiting(state: State, block: BlockState) -> None:
    """Give layers to the devices that have waited until the edge server had placed its own."""
    for device in state.devices:
        if device.admission == "giving":
            state.emit(do.GiveLayers(block.attempt, device.number, device.cut))


def layers_given(state: State, event: on.LayersGiven) -> None:
    """Send the plan to a device whose layers the edge server now holds, unless it has the plan."""
    device, block = state.devices[event.device], state.block
    if block is not None and block.attempt == event.attempt and device.admission == "giving":
        device.attempt, device.admission = block.attempt, ""
        admit(state, device)


def admit_waiting(state: State) -> None:
    """Give layers to the devices that waited until the fed server knew the block."""
    for device in state.devices:
        if device.admission == "reopening":
            device.admission = ""
            admit(state, device)


def closing(state: State, event: on.Closing, _now: float) -> None:
    """Mark a connection as closing."""
    connection = state.connections.get(event.connection)
    if connection is not None:
        connection.closing = True


def disconnected(state: State, event: on.Disconnected, _now: float) -> None:
    """Remove a connection; its device keeps its layers of the block, unless it broke the protocol."""
    connection = state.connections.pop(event.connection, None)
    if connection is None:
        return
    device = state.devices[connection.device]
    if event.informed:
        device.informed = connection.stopped
    if device.newest == connection.number:
        device.newest = None
        if event.violated:
            device.attempt = 0
    if device.connection == connection.number:
        device.connection = None
        state.emit(do.Show((device.number,)))


def violated(state: State, event: on.Violated, _now: float) -> None:
    """Count a violation; too many shut a device out."""
    device = state.devices[event.device]
    device.violated(event.reason)
    state.emit(do.Say(f"{device.name}: {device.last_error}" + (" (shut out)" if device.quarantined else "")))
    send_away(state, device)


def send_away(state: State, device: DeviceState) -> None:
    """End the connection of a device that is shut out."""
    if device.quarantined:
        state.close(device.connection, f"{device.name} is shut out: {device.last_error}")
    state.emit(do.Show((device.number,)))


def gave_up(state: State, event: on.GaveUp, _now: float) -> None:
    """Disconnect a device that cannot go on."""
    connection = state.connections.get(event.connection)
    if connection is None:
        return
    device, block = state.devices[connection.device], state.block
    device.last_error, device.gave_up = printable(event.reason), True
    state.emit(do.Say(f"{device.name} gave up: {device.last_error}"))
    state.close(connection.number)
    if event.diverged and block is not None and device.attempt == block.attempt:
        state.not_finite(device.number)


# --- the end of a run ---


def send_stop(state: State, connection: Connection) -> None:
    """Tell a device that the run is over; it ends the connection."""
    assert state.shutdown is not None
    connection.stopped = True
    state.emit(do.SendStop(connection.number, state.shutdown.reason))


def run_over(state: State, event: on.RunOver, now: float) -> None:
    """Tell all devices that the run is over."""
    state.block = None
    until = now + event.shutdown_s
    state.shutdown = Shutdown(event.reason, frozenset(event.expected), until, until + event.preparing_s)
    for device in state.here():
        connection = state.live(device)
        if connection is not None:
            send_stop(state, connection)


def settle_shutdown(state: State, shutdown: Shutdown, now: float) -> None:
    """Wait until devices that are disconnected or still preparing are informed that the run is over."""
    if shutdown.over:
        return
    able = [d for d in state.devices if not (d.informed or d.gave_up or d.quarantined)]
    missing = [d for d in able if d.number in shutdown.expected or d.newest is not None]
    preparing = any(d.newest is not None for d in missing)
    deadline = shutdown.preparing_deadline if preparing else shutdown.deadline
    if not missing or now >= deadline:
        shutdown.over = True
        state.emit(do.EndShutdown())
        return
    state.wake_at = deadline
    if away := [d.name for d in missing if d.connection is None]:
        state.emit(do.WaitFor(f"{', '.join(away)} to hear that the run is over"))
