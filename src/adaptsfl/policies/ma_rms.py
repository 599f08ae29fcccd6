"""MA+RMS: random cuts, and the best interval for them."""

from adaptsfl import planner
from adaptsfl.policies.draw import random_cuts
from adaptsfl.policies.policy import BasePolicy, Decision, Observation, decision


class RandomCuts(BasePolicy):
    """The cuts are drawn anew after every averaging."""

    title = "MA+RMS"
    estimates = True

    def decide(self, seen: Observation) -> Decision:
        """Draw cuts and plan the interval: Theorem 2."""
        cuts = random_cuts(seen)
        interval = seen.limits.interval
        return decision(cuts, interval or planner.plan(seen.problem(cuts=cuts)).interval)
