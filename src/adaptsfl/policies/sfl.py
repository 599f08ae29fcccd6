"""SFL: averaged after every round."""

from collections.abc import Sequence

from adaptsfl.decisions import Decision
from adaptsfl.policies.place import check_options, fastest_cuts, given_cuts
from adaptsfl.policies.policy import BasePolicy, Observation, decision


class SplitFederated(BasePolicy):
    """Split federated learning with I = 1. Without `cut` or `cuts`, the fastest cuts of every round are taken.

    At I = 1 nothing drifts, so the fastest cuts are what the planner would choose.
    """

    title = "SFL (I = 1)"

    def __init__(self, cut: int | None = None, cuts: Sequence[int] | None = None) -> None:
        check_options(cut, cuts)
        self.cut, self.cuts = cut, cuts

    def decide(self, seen: Observation) -> Decision:
        """Return a block of one round."""
        cuts = given_cuts(seen, self.cut, self.cuts)
        return decision(fastest_cuts(seen, 1) if cuts is None else cuts, 1)
