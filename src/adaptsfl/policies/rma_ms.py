"""RMA+MS: a random interval, and the cuts planned for it."""

from adaptsfl import checks, planner
from adaptsfl.decisions import Decision
from adaptsfl.errors import InfeasiblePlan
from adaptsfl.policies.draw import LONGEST_DRAWN, random_interval
from adaptsfl.policies.place import fastest_cuts
from adaptsfl.policies.policy import BasePolicy, Observation, decision


class RandomInterval(BasePolicy):
    """The interval is drawn anew after every averaging."""

    title = "RMA+MS"
    estimates = True

    def __init__(self, longest: int = LONGEST_DRAWN) -> None:
        self.longest = checks.whole_number("longest", longest)

    def decide(self, seen: Observation) -> Decision:
        """Draw an interval and plan the cuts.

        Paper: cuts are planned for the interval that was drawn. Here: where no cuts make progress with it, the fastest
        ones are taken. Because: a long interval's drift can exceed what the bound allows, or a table may not have the
        interval, and the benchmark then still has to train; without drift in the model the planner minimises the
        seconds of a round and its share of an averaging, which is all that is left of its objective.
        """
        interval = random_interval(seen, self.longest)
        try:
            cuts = planner.plan(seen.problem(interval=interval)).cuts
        except InfeasiblePlan:
            cuts = fastest_cuts(seen, interval)
        return decision(cuts, interval)
