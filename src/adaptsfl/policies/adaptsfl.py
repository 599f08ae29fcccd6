"""AdaptSFL: interval and cuts planned together, from what is measured and estimated now."""

from adaptsfl import planner
from adaptsfl.policies.policy import BasePolicy, Decision, Observation, decision


class AdaptSFL(BasePolicy):
    """The paper's own: plan, train for I rounds, plan again."""

    title = "AdaptSFL"
    estimates = True

    def decide(self, seen: Observation) -> Decision:
        """Return the optimum of this moment's problem."""
        plan = planner.plan(seen.problem())
        return decision(plan.cuts, plan.interval)
