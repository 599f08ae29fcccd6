"""The state machine: one function handles each event, then the protocol checks whether its phase is complete."""

import math
from collections.abc import Callable
from typing import Any

from adaptsfl.deploy.protocol import delivery, evaluation, events, membership, rounds
from adaptsfl.deploy.protocol.actions import Action
from adaptsfl.deploy.protocol.block import BlockState
from adaptsfl.deploy.protocol.state import State

TRANSITIONS: dict[type[events.Event], Callable[[State, Any, float], None]] = {
    events.Hello: membership.hello,
    events.Ready: membership.ready,
    events.Closing: membership.closing,
    events.Disconnected: membership.disconnected,
    events.Violated: membership.violated,
    events.GaveUp: membership.gave_up,
    events.RunOver: membership.run_over,
    events.BlockOpened: rounds.block_opened,
    events.LayersPlaced: rounds.layers_placed,
    events.LayersGiven: rounds.layers_given,
    events.Activations: rounds.activations,
    events.StaleActivations: rounds.stale_activations,
    events.NotFinite: rounds.not_finite,
    events.RoundTrained: rounds.round_trained,
    events.RoundRejected: rounds.round_rejected,
    events.BatchEvaluated: evaluation.batch_evaluated,
    events.MomentsRejected: rounds.moments_rejected,
    events.MomentsMerged: rounds.moments_merged,
    events.Delivered: delivery.delivered,
    events.Reopened: delivery.reopened,
    events.OwnDelivered: delivery.own_delivered,
    events.OwnRefused: delivery.own_refused,
    events.BlockForgotten: delivery.block_forgotten,
    events.NotDelivered: delivery.not_delivered,
    events.Averaged: delivery.averaged,
}
SETTLE: dict[str, Callable[[State, BlockState, float], None]] = {
    "estimating": rounds.settle_estimating,
    "training": rounds.settle_round,
    "testing": evaluation.settle_testing,
    "delivering": delivery.settle_delivering,
}


class EdgeProtocol(State):
    """The protocol of one run.

    Args:
        names: the names of all devices, in the fleet's order.

    It has no clock of its own: `now` is any clock that never goes back. If no event comes until `wake_at`, the caller
    hands in `DeadlinePassed`.
    """

    def handle(self, event: events.Event, now: float) -> list[Action]:
        """Handle an event; return the actions to carry out, in this order."""
        self.only_arrived = False
        if not isinstance(event, events.DeadlinePassed):
            TRANSITIONS[type(event)](self, event, now)
        self.wake_at = math.inf
        while self.block is not None and (settle := SETTLE.get(self.block.phase)) is not None:
            phase = self.block.phase
            settle(self, self.block, now)
            if self.block is None or self.block.phase == phase:
                break
        if self.shutdown is not None:
            membership.settle_shutdown(self, self.shutdown, now)
        actions, self.actions = self.actions, []
        return actions

    def expects(self, connection: int, attempt: int) -> bool:
        """Whether activations that a connection announces are of the block under way."""
        return self.current(connection, attempt) is not None or self.awaiting_layers(connection, attempt) is not None

    def keeps(self, number: int) -> bool:
        """Whether activations of a connection wait until the edge server holds the layers that they are for."""
        connection, block = self.connections.get(number), self.block
        kept = None if connection is None else connection.kept
        return kept is not None and block is not None and kept.attempt == block.attempt

    def may_start(self, now: float, deadline: float) -> bool:
        """Whether a run may begin: with all devices that can take part, or after the deadline with a quorum."""
        able = sum(not (device.gave_up or device.quarantined) for device in self.devices)
        return self.enough() and (len(self.here()) >= able or now >= deadline)
