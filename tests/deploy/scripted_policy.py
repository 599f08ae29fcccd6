"""Policies that do as they are told, block by block: for runs that must be the same wherever they take place."""

from collections.abc import Sequence

from adaptsfl.policies import BasePolicy, Decision, Observation
from adaptsfl.policies.adaptsfl import AdaptSFL


class Scripted(BasePolicy):
    """Follows one plan after another, each a number: 3124 is interval 3 and cuts 1, 2, 4; the last one stays.

    Where the number is 0, AdaptSFL plans.
    """

    title = "Scripted"

    def __init__(self, plans: Sequence[int]) -> None:
        self.plans = [[int(digit) for digit in str(plan)] for plan in plans]
        self.asked = 0

    def decide(self, seen: Observation) -> Decision:
        """Return the next plan, for those who are there."""
        interval, *cuts = self.plans[min(seen.block, len(self.plans) - 1)]
        if not interval:
            return AdaptSFL().decide(seen)
        here = seen.present or range(seen.devices)
        return Decision(tuple(cuts[k] for k in here), interval)
