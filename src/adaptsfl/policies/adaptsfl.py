"""AdaptSFL: interval and cuts planned together, from what is measured and estimated now."""

from adaptsfl.decisions import Decision
from adaptsfl.errors import InvalidInput
from adaptsfl.policies.place import measurable_plan
from adaptsfl.policies.policy import BasePolicy, Observation, decision


class AdaptSFL(BasePolicy):
    """The paper's own: plan, train for I rounds, plan again. `mode` and `target` are as in the recipe's [adapt]."""

    title = "AdaptSFL"
    estimates = True

    def __init__(self, mode: str | None = None, target: float | None = None) -> None:
        if mode not in (None, "calibrated", "paper"):
            raise InvalidInput("mode", f"is {mode!r}", "Give 'calibrated' or 'paper'")
        given = {"mode": mode, "target": target}
        self.adapt = {name: value for name, value in given.items() if value is not None}

    def decide(self, seen: Observation) -> Decision:
        """Return the optimum of this moment's problem; where drift is to be measured, with an interval that lets it."""
        plan = measurable_plan(seen)
        return decision(plan.cuts, plan.interval)
