"""Evaluation of the model with which a block began: devices send test samples while they wait for gradients.

Rounds do not wait for test samples. Once the layers are averaged the block does, until the deadline at most.
"""

from adaptsfl.deploy.protocol import actions as do
from adaptsfl.deploy.protocol import events as on
from adaptsfl.deploy.protocol.block import BlockState, Evaluation
from adaptsfl.deploy.protocol.state import DeviceState, State


def test_batch(state: State, block: BlockState, device: DeviceState, event: on.Activations) -> None:
    """Have a mini-batch of a device's test samples evaluated, unless the evaluation is over or has not begun."""
    estimation = block.estimation
    if block.evaluation is None or (estimation is not None and not estimation.merged):
        state.useless(event.connection)
        return
    if event.number >= event.batches:
        reason = f"test samples {event.number} came of {event.batches} that were announced"
        state.close(event.connection, reason, violation=True)
        return
    block.evaluation.announced(device.number, event.batches)
    state.emit(do.EvaluateBatch(event.connection, block.attempt, device.number, event.number))


def batch_evaluated(state: State, event: on.BatchEvaluated, _now: float) -> None:
    """Count a mini-batch of test samples, and let the device send another one."""
    block = state.block
    if block is None or block.attempt != event.attempt or block.evaluation is None:
        return
    block.evaluation.add(event.device, event.number, event.row)
    device = state.devices[event.device]
    device.untested = device.untested and not block.evaluation.complete(event.device)
    connection = state.live(device)
    if connection is not None and connection.planned == block.attempt:
        state.emit(do.SendEvaluated(connection.number, block.attempt, event.number))
    if block.rounds and _everybody(state, block, block.evaluation):
        end_evaluation(state, block)


def _everybody(state: State, block: BlockState, evaluation: Evaluation) -> bool:
    """Whether all test samples were evaluated: of connected devices, and of those that may reconnect."""
    taking_part = [d for d in state.devices if d.attempt == block.attempt or d.admission]
    return all(evaluation.complete(device.number) for device in taking_part)


def end_evaluation(state: State, block: BlockState) -> None:
    """Report the result of the evaluation."""
    evaluation, block.evaluation = block.evaluation, None
    result = None if evaluation is None else evaluation.result()
    if evaluation is not None and result is not None:
        state.emit(do.EndEvaluation(evaluation.round, *result))


def settle_testing(state: State, block: BlockState, now: float) -> None:
    """End the block once connected devices have sent all test samples, or the deadline has passed."""
    evaluation = block.evaluation
    if evaluation is not None:
        missing = _missing(state, block, evaluation)
        arriving = not block.rounds and (any(d.admission == "giving" for d in state.here()) or not state.enough())
        awaited = [device for device in missing if not (block.rounds and device.untested)]
        if now < block.test_deadline and (arriving or awaited):
            state.wake_at = block.test_deadline
            state.emit(do.WaitFor("the devices' test samples"))
            return
        for device in missing:
            device.untested = True
    end_evaluation(state, block)
    state.block = None
    state.emit(do.EndBlock(block.attempt))


def _missing(state: State, block: BlockState, evaluation: Evaluation) -> list[DeviceState]:
    """Return connected devices whose test samples are missing; after an averaging, only those that were part of it."""
    devices = [device for device in state.holding() if not evaluation.complete(device.number)]
    return [device for device in devices if not block.rounds or device.number in block.deliveries.chosen]
