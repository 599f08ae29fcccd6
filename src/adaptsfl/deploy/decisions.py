"""Which cuts and which interval come next: a policy of ours or of the user's, asked with what was measured."""

from collections.abc import Sequence

import numpy as np

from adaptsfl import latency
from adaptsfl.convergence import ConvergenceModel, model_from
from adaptsfl.deploy.resources import MeasuredFleet
from adaptsfl.deploy.terms import Terms
from adaptsfl.errors import InvalidInput
from adaptsfl.fleet import Fleet
from adaptsfl.loading import inside
from adaptsfl.policies import Decision, Observation
from adaptsfl.policies.registry import make_policy
from adaptsfl.simulation.beliefs import beliefs_from
from adaptsfl.simulation.run import POLICY_STREAM, decided


class Decisions:
    """A policy and all that it is told.

    Attributes:
        name: of the policy, as the recipe has it.
    """

    def __init__(self, terms: Terms, layers: int, measured: MeasuredFleet) -> None:
        self.terms, self.measured = terms, measured
        recipe, run = terms.recipe, terms.run
        if len(run.policies) != 1:
            raise InvalidInput("run.policies", f"names {len(run.policies)}", "A deployment follows one: give one")
        self.name = run.policies[0]
        self.policy = make_policy(self.name, **run.options.get(self.name, {}))
        if self.policy.trainer != "engine":
            problem = f"{self.name} trains devices in turns, or without them"
            raise InvalidInput("run.policies", problem, "Give one that trains all devices at once, such as adaptsfl")
        adapt = recipe.adapt.model_copy(update=dict(self.policy.adapt))
        self.beliefs = beliefs_from(recipe, adapt, layers)
        allowed = [cut for cut in recipe.planner.allowed_cuts or range(1, layers + 1) if cut >= terms.floor]
        self.limits = recipe.planner.model_copy(update={"allowed_cuts": allowed})
        self._last: Decision | None = None
        self._intervals_left = 0
        self._decided_for: tuple[int, ...] = ()

    def next(self, rounds: int, blocks: int, numbers: tuple[int, ...], epoch_rounds: int) -> tuple[Decision, Fleet]:
        """Return how to train next, and the fleet for which that was decided.

        The last decision holds for as many intervals as it says, if the same devices are there.
        """
        fleet = self.measured.fleet(numbers)
        if self._last is not None and self._intervals_left > 0 and numbers == self._decided_for:
            self._intervals_left -= 1
            return self._last, fleet
        costs = self.measured.costs
        seen = Observation(
            round=rounds,
            block=blocks,
            fleet=fleet,
            costs=costs,
            batch_size=self.terms.batch_size,
            convergence=self._convergence(len(numbers)),
            epoch_rounds=epoch_rounds,
            rng=np.random.default_rng([self.terms.seed, POLICY_STREAM, blocks]),
            limits=self.limits,
            present=() if len(numbers) == self.terms.devices else numbers,
            trusted_interval=self.beliefs.trusted_interval,
        )
        decision = decided(self.policy, seen)
        decision.check(len(numbers), costs.layers)
        self._check(decision)
        assert decision.plan.interval is not None
        self._last, self._decided_for = decision, numbers
        self._intervals_left = decision.length // decision.plan.interval - 1
        return decision, fleet

    def predicted(self, fleet: Fleet, cuts: Sequence[int]) -> dict[str, float]:
        """Return the seconds of every phase of one round, and of one averaging, as the latency model has them."""
        times = latency.phase_times(self.measured.costs, fleet, np.array(cuts), self.terms.batch_size)
        return {time.phase: time.seconds for time in times}

    def _check(self, decision: Decision) -> None:
        plan = decision.plan
        if plan.interval is None or plan.layer_intervals or decision.placed is not None:
            problem = f"{self.policy.title} averages some layers at other times than others, or never"
            raise InvalidInput("run.policies", problem, "A deployment averages all client-specific layers together")
        if min(plan.cuts) < self.terms.floor:
            problem = f"is {self.terms.floor}, but {self.policy.title} cuts at {min(plan.cuts)}"
            raise InvalidInput("deploy.cut_floor", problem, "Lower it, or give cuts from it on")

    def _convergence(self, devices: int) -> ConvergenceModel:
        """Return what is believed about convergence: what the recipe gives, or what calibration begins with."""
        given = self.terms.recipe.convergence
        if given is None:
            return self.beliefs.model(devices)
        with inside("convergence"):
            return model_from(given, self.terms.recipe.training.learning_rate, devices, self.measured.costs.layers)
