"""The rounds of a block at the edge server: activations that have arrived, and the parts trained with them."""

import time
from collections.abc import Mapping

from torch import Tensor

from adaptsfl.deploy.parties.edge.accounts import TrainedPart
from adaptsfl.deploy.parties.edge.clock import ALL
from adaptsfl.deploy.parties.edge.comparison import compared
from adaptsfl.deploy.parties.edge.computing import ComputingThread
from adaptsfl.deploy.parties.edge.ledger import Ledger
from adaptsfl.deploy.parties.edge.model import RejectedActivations
from adaptsfl.deploy.parties.edge.roster import Roster
from adaptsfl.deploy.parties.edge.sessions import Arrival, Session
from adaptsfl.deploy.protocol.actions import TrainRound, UseActivations


class RoundTraining:
    """Trains rounds, part by part.

    Attributes:
        arrivals: activations that have arrived for the open round, by device and part.
    """

    def __init__(self, roster: Roster, computing: ComputingThread) -> None:
        self.roster, self.computing = roster, computing
        self.arrivals: dict[int, dict[int, Arrival]] = {}
        self._parts: list[TrainedPart] = []  # of the open round
        self._weights: dict[int, float] = {}  # of the devices with which the open round began

    def use(self, action: UseActivations, session: Session) -> None:
        """Keep the activations that a connection has brought, and hand them to the model."""
        assert session.arrival is not None
        self.arrivals.setdefault(action.device, {})[action.part] = session.arrival
        self.computing.receive(action.device, session.arrival.activations, action.part, session.close)

    def drop(self) -> None:
        """Drop the round: it begins again, or will not be trained."""
        self.arrivals, self._parts = {}, []

    def arrived(self, action: TrainRound) -> dict[int, Arrival]:
        """Return the activations that a part is trained with; with the first part, fix the weights of devices."""
        if not action.part:  # who misses a later part is missing in the mean
            shares = self.roster.shares(action.devices)
            self._parts, self._weights = [], dict(zip(action.devices, shares, strict=True))
        return {device: self.arrivals[device][action.part] for device in action.devices}

    async def train(self, block: Ledger, action: TrainRound, arrivals: Mapping[int, Arrival]) -> list[TrainedPart]:
        """Train a part, and keep its gradients to be sent; return all parts of the round so far.

        Raises `RejectedActivations` for activations that cannot be trained with, and forgets them.
        """
        began, weights = time.perf_counter(), [self._weights[device] for device in action.devices]
        labels = {device: arrival.labels for device, arrival in arrivals.items()}
        try:
            losses, gradients, compared_s = await self.computing.run(self._compute, block, action, labels, weights)
        except RejectedActivations as error:
            for device in error.devices:
                self.arrivals.pop(device, None)
            raise
        if block.over:
            return []
        dtype = block.sending.dtype(action.round)
        for device, gradient in zip(action.devices, gradients, strict=True):
            self.roster.by_number[device].keep(action.round, gradient, dtype, action.part)
        took = time.perf_counter() - began
        turn_s = ALL if action.everybody else took - compared_s
        loss = float((losses * losses.new_tensor(weights)).sum()) / sum(weights)
        self._parts.append(TrainedPart(arrivals, began + took, turn_s, loss, compared_s))
        if action.part + 1 == action.parts:
            self.arrivals = {}
        return self._parts

    def _compute(
        self, block: Ledger, action: TrainRound, labels: Mapping[int, Tensor], weights: list[float]
    ) -> tuple[Tensor, list[Tensor], float]:
        """Train; in the round that is there for it, first compare types of numbers. In the computing thread."""
        model, round_, devices, began = self.computing.edge_model, action.round, action.devices, time.perf_counter()
        comparing = bool(block.compared) and round_ == block.sending.exact_round
        if comparing:
            block.wires = compared(model, block.compared, round_, devices, labels, weights)
        compared_s = time.perf_counter() - began if comparing else 0.0
        losses, gradients = model.train(round_, devices, labels, weights, action.part, action.parts)
        return losses, gradients, compared_s
