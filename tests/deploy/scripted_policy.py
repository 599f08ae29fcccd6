"""Policies that do as they are told, block by block: for runs that must be the same wherever they take place."""

from collections.abc import Sequence

from adaptsfl.costs import WIRE_DTYPES
from adaptsfl.policies import BasePolicy, Decision, Observation
from adaptsfl.policies.adaptsfl import AdaptSFL


class Scripted(BasePolicy):
    """Follows one plan after another, each a number: 3124 is interval 3 and cuts 1, 2, 4; the last one stays.

    Where the number is 0, AdaptSFL plans. `sent` has the parts and the type of numbers of every plan, the last one
    stays: 43 is 4 parts in the type with index 3, int8. Without it, mini-batches are whole, in the type of the recipe.
    """

    title = "Scripted"

    def __init__(self, plans: Sequence[int], sent: Sequence[int] = ()) -> None:
        self.plans = [[int(digit) for digit in str(plan)] for plan in plans]
        self.sent = [(number // 10, WIRE_DTYPES[number % 10]) for number in sent]
        self.asked = 0

    def decide(self, seen: Observation) -> Decision:
        """Return the next plan, for those who are there."""
        interval, *cuts = self.plans[min(seen.block, len(self.plans) - 1)]
        if not interval:
            return AdaptSFL().decide(seen)
        here = seen.present or range(seen.devices)
        parts, wire_dtype = self.sent[min(seen.block, len(self.sent) - 1)] if self.sent else (1, None)
        chosen = tuple(cuts[k] for k in here)
        return Decision(chosen, interval, micro_batches=parts, wire_dtype=wire_dtype)
