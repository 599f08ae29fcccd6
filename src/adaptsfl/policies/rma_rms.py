"""RMA+RMS: everything random."""

from adaptsfl import checks
from adaptsfl.decisions import Decision
from adaptsfl.policies.draw import LONGEST_DRAWN, random_cuts, random_interval
from adaptsfl.policies.policy import BasePolicy, Observation, decision


class RandomIntervalAndCuts(BasePolicy):
    """Interval and cuts are drawn anew after every averaging."""

    title = "RMA+RMS"

    def __init__(self, longest: int = LONGEST_DRAWN) -> None:
        self.longest = checks.whole_number("longest", longest)

    def decide(self, seen: Observation) -> Decision:
        """Draw an interval, then cuts."""
        interval = random_interval(seen, self.longest)
        return decision(random_cuts(seen), interval)
