"""FedAvg: every device trains the whole model."""

from adaptsfl import checks
from adaptsfl.decisions import Decision
from adaptsfl.policies.place import given_cuts
from adaptsfl.policies.policy import BasePolicy, Observation


class FederatedAveraging(BasePolicy):
    """Averages every `interval` rounds; without it as often as the recipe's [planner] says, else once per epoch."""

    title = "FedAvg"

    def __init__(self, interval: int | None = None) -> None:
        self.interval = None if interval is None else checks.whole_number("interval", interval)

    def decide(self, seen: Observation) -> Decision:
        """Return the plan with every cut at the last layer, which every device must be able to hold."""
        given_cuts(seen, seen.layers, None)
        interval = self.interval or seen.limits.interval or seen.epoch_rounds
        return Decision((seen.layers,) * seen.devices, interval)
