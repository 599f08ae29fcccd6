"""MA+RMS: random cuts, and the best interval for them."""

from adaptsfl.decisions import Decision
from adaptsfl.policies.draw import random_cuts
from adaptsfl.policies.place import trusted_plan
from adaptsfl.policies.policy import BasePolicy, Observation, decision


class RandomCuts(BasePolicy):
    """The cuts are drawn anew after every averaging."""

    title = "MA+RMS"
    estimates = True

    def decide(self, seen: Observation) -> Decision:
        """Draw cuts and plan the interval: Theorem 2, or the closed form for powers."""
        cuts = random_cuts(seen)
        return decision(cuts, seen.limits.interval or trusted_plan(seen, cuts=cuts).interval)
