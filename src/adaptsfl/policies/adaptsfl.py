"""AdaptSFL: plans interval and cuts together, from current measurements and estimates."""

import numpy as np

from adaptsfl import planner
from adaptsfl.decisions import Decision
from adaptsfl.errors import InvalidInput
from adaptsfl.planner import Plan
from adaptsfl.policies.policy import BasePolicy, Observation, decision
from adaptsfl.policies.trust import trusted_plan, worth_probing


class AdaptSFL(BasePolicy):
    """The paper's policy: plan, train for I rounds, plan again. `mode` and `target` are as in the recipe's [adapt].

    Paper: every block has the plan of its moment. Here: the last plan is kept unless the new one is faster by
    `Trust.kept_gain`. Because: the convergence model is an estimate, and changing the interval or L_c
    costs rounds that no model counts.
    """

    title = "AdaptSFL"
    estimates = True

    def __init__(self, mode: str | None = None, target: float | None = None) -> None:
        if mode not in (None, "calibrated", "paper"):
            raise InvalidInput("mode", f"is {mode!r}", "Give 'calibrated' or 'paper'")
        given = {"mode": mode, "target": target}
        self.adapt = {name: value for name, value in given.items() if value is not None}
        # Interval, cuts, micro-batches, present devices.
        self._last: tuple[int, tuple[int, ...], int, tuple[int, ...]] | None = None

    def decide(self, seen: Observation) -> Decision:
        """Return the best trusted plan for the current problem, or a probing block that measures the drift."""
        plan = trusted_plan(seen, micro_batches=seen.parts)
        if worth_probing(seen, plan):
            probe = planner.plan(seen.problem(interval=seen.trust.probe, micro_batches=seen.parts))
            return decision(probe.cuts, probe.interval, probe.micro_batches)
        if (kept := self._kept(seen, plan)) is not None:
            return kept
        self._last = plan.interval, tuple(plan.cuts.tolist()), plan.micro_batches, seen.present
        return decision(plan.cuts, plan.interval, plan.micro_batches)

    def _kept(self, seen: Observation, plan: Plan) -> Decision | None:
        """Return the last plan if it has the same devices and the new one gains less than `kept_gain`; else None."""
        if self._last is None or not seen.trust.kept_gain:
            return None
        interval, cuts, parts, present = self._last
        if present != seen.present or len(cuts) != seen.devices:
            return None
        last_s = float(seen.problem().time_to_target_s(interval, np.array(cuts), parts))
        return decision(cuts, interval, parts) if plan.predicted_time_s > (1 - seen.trust.kept_gain) * last_s else None
