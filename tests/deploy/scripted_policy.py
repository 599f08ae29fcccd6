"""A policy that does as it is told, block by block: for runs that must be the same wherever they take place."""

from collections.abc import Sequence

from adaptsfl.policies import BasePolicy, Decision, Observation
from adaptsfl.training import TrainingPlan


class Scripted(BasePolicy):
    """Follows one plan after another, each a number: 3124 is interval 3 and cuts 1, 2, 4; the last one stays."""

    title = "Scripted"

    def __init__(self, plans: Sequence[int]) -> None:
        self.plans = [[int(digit) for digit in str(plan)] for plan in plans]
        self.asked = 0

    def decide(self, seen: Observation) -> Decision:
        """Return the next plan, for those who are there."""
        interval, *cuts = self.plans[min(seen.block, len(self.plans) - 1)]
        here = seen.present or range(seen.devices)
        return Decision(TrainingPlan(tuple(cuts[k] for k in here), interval))
