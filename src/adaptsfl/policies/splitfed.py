"""SplitFed: everything, or the clients' part, averaged once per epoch."""

from typing import ClassVar

from adaptsfl.decisions import Decision
from adaptsfl.policies.one_cut import OneCut
from adaptsfl.policies.policy import Observation, TrainerName


class SplitFedV1(OneCut):
    """Every device has its own copy of every layer; the server's copies are averaged with the clients'.

    So it learns what FedAvg learns, and only takes another time: the layers after the cut run on the edge server.
    """

    title = "SplitFed V1"

    def decide(self, seen: Observation) -> Decision:
        """Return one epoch."""
        return Decision((seen.layers,) * seen.devices, seen.epoch_rounds, placed=self.cuts(seen))


class SplitFedV2(OneCut):
    """One server model, updated by one device after another; the clients' layers are averaged."""

    title = "SplitFed V2"
    trainer: ClassVar[TrainerName] = "turns"

    def decide(self, seen: Observation) -> Decision:
        """Return one epoch."""
        return Decision(self.cuts(seen), seen.epoch_rounds)
