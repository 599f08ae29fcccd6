"""The paper's random benchmarks: RMA+MS, MA+RMS, RMA+RMS. They draw again after every averaging."""

import numpy as np

from adaptsfl import checks, planner
from adaptsfl.checks import IntArray
from adaptsfl.decisions import Decision
from adaptsfl.errors import InfeasiblePlan
from adaptsfl.policies.cuts import check_every_device_has_a_cut, fastest_cuts
from adaptsfl.policies.policy import BasePolicy, Observation, decision
from adaptsfl.policies.trust import trusted_plan

LONGEST_DRAWN = 25  # as in the paper


class DrawnInterval(BasePolicy):
    """A policy whose interval is drawn uniformly on 1..longest."""

    def __init__(self, longest: int = LONGEST_DRAWN) -> None:
        self.longest = checks.whole_number("longest", longest)

    def drawn_interval(self, seen: Observation) -> int:
        """Draw I, at most max_interval if the recipe has one; a fixed interval is kept."""
        if seen.limits.interval is not None:
            return seen.limits.interval
        longest = self.longest
        if seen.limits.max_interval is not None:
            longest = min(longest, checks.whole_number("planner.max_interval", seen.limits.max_interval))
        return int(seen.rng.integers(1, longest, endpoint=True))


def random_cuts(seen: Observation) -> IntArray:
    """Draw every device's cut uniformly from those allowed to it."""
    check_every_device_has_a_cut(seen)
    # The largest of independent draws is any of them with equal chance.
    return np.argmax(np.where(seen.allowed, seen.rng.random(seen.allowed.shape), -1.0), axis=0) + 1


class RandomInterval(DrawnInterval):
    """RMA+MS: a random interval, and the cuts planned for it."""

    title = "RMA+MS"
    estimates = True

    def decide(self, seen: Observation) -> Decision:
        """Draw an interval and plan the cuts.

        Paper: cuts are planned for the interval that was drawn. Here: where no cuts make progress with it, the fastest
        ones are taken. Because: a long interval's drift can exceed what the bound allows, or a table may not have the
        interval, and the benchmark then still has to train; without drift in the model the planner minimises the
        seconds of a round and its share of an averaging, which is all that is left of its objective.
        """
        interval = self.drawn_interval(seen)
        try:
            cuts = planner.plan(seen.problem(interval=interval)).cuts
        except InfeasiblePlan:
            cuts = fastest_cuts(seen, interval)
        return decision(cuts, interval)


class RandomCuts(BasePolicy):
    """MA+RMS: random cuts, and the best interval for them."""

    title = "MA+RMS"
    estimates = True

    def decide(self, seen: Observation) -> Decision:
        """Draw cuts and plan the interval: Theorem 2, or the closed form for powers."""
        cuts = random_cuts(seen)
        return decision(cuts, seen.limits.interval or trusted_plan(seen, cuts=cuts).interval)


class RandomIntervalAndCuts(DrawnInterval):
    """RMA+RMS: both random."""

    title = "RMA+RMS"

    def decide(self, seen: Observation) -> Decision:
        """Draw an interval, then cuts."""
        interval = self.drawn_interval(seen)
        return decision(random_cuts(seen), interval)
