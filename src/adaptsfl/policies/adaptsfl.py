"""AdaptSFL: plans interval and cuts together, from current measurements and estimates."""

from adaptsfl import planner
from adaptsfl.decisions import Decision
from adaptsfl.errors import InvalidInput
from adaptsfl.planner import Plan
from adaptsfl.policies.policy import BasePolicy, Observation, planned
from adaptsfl.policies.trust import trusted_plan, worth_probing


class AdaptSFL(BasePolicy):
    """The paper's policy: plan, train for I rounds, plan again. `mode` and `target` are as in the recipe's [adapt].

    Paper: every block has the plan of its moment. Here: the last plan is kept unless the new one is faster by
    `Trust.kept_gain`. Because: the convergence model is an estimate, and changing the interval or L_c
    costs rounds that no model counts.
    """

    title = "AdaptSFL"
    estimates = True
    precision = True

    def __init__(self, mode: str | None = None, target: float | None = None) -> None:
        if mode not in (None, "calibrated", "paper"):
            raise InvalidInput("mode", f"is {mode!r}", "Give 'calibrated' or 'paper'")
        given = {"mode": mode, "target": target}
        self.adapt = {name: value for name, value in given.items() if value is not None}
        self._last: tuple[Plan, tuple[int, ...]] | None = None  # with the devices that were present

    def decide(self, seen: Observation) -> Decision:
        """Return the best trusted plan for the current problem, or a probing block that measures the drift."""
        plan = trusted_plan(seen, **seen.choices)
        if worth_probing(seen, plan):
            return planned(planner.plan(seen.problem(**seen.choices, interval=seen.trust.probe)))
        if not self._keeps(seen, plan):
            self._last = plan, seen.present
        assert self._last is not None
        return planned(self._last[0])

    def _keeps(self, seen: Observation, plan: Plan) -> bool:
        """Whether the last plan is kept: it has the same devices, and the new one gains less than `kept_gain`."""
        if self._last is None or not seen.trust.kept_gain:
            return False
        last, present = self._last
        if present != seen.present or len(last.cuts) != seen.devices:
            return False
        last_s = seen.problem(**seen.choices).time_of(last)
        return plan.predicted_time_s > (1 - seen.trust.kept_gain) * last_s
