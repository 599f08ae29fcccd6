"""SplitFed: everything, or the clients' part, averaged once per epoch."""

from typing import ClassVar

from adaptsfl.policies.one_cut import OneCut
from adaptsfl.policies.policy import Decision, Observation, Trainer
from adaptsfl.training import TrainingPlan, federated_averaging


class SplitFedV1(OneCut):
    """Every device has its own copy of every layer; the server's copies are averaged with the clients'.

    So it learns what FedAvg learns, and only takes another time: the layers after the cut run on the edge server.
    """

    title = "SplitFed V1"

    def decide(self, seen: Observation) -> Decision:
        """Return one epoch."""
        plan = federated_averaging(seen.devices, seen.layers, seen.epoch_rounds)
        return Decision(plan, placed=self.cuts(seen))


class SplitFedV2(OneCut):
    """One server model, updated by one device after another; the clients' layers are averaged."""

    title = "SplitFed V2"
    trainer: ClassVar[Trainer] = "turns"

    def decide(self, seen: Observation) -> Decision:
        """Return one epoch."""
        return Decision(TrainingPlan(self.cuts(seen), seen.epoch_rounds))
