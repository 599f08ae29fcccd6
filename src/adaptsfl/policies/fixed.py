"""Policies with a constant interval: fixed plans, SFL, PSL, FedAvg, and centralized training."""

from collections.abc import Sequence
from typing import ClassVar

from adaptsfl import checks
from adaptsfl.decisions import Decision
from adaptsfl.errors import InvalidInput
from adaptsfl.policies.cuts import CutOptions, given_cuts
from adaptsfl.policies.policy import BLOCK_ROUNDS, BasePolicy, Observation, TrainerName, decision


class Fixed(CutOptions):
    """The same plan for the whole run. Options that are not given come from the recipe's [planner]."""

    title = "fixed"

    def __init__(
        self,
        interval: int | None = None,
        cut: int | None = None,
        cuts: Sequence[int] | None = None,
        micro_batches: int = 1,
    ) -> None:
        super().__init__(cut, cuts)
        self.interval = None if interval is None else checks.whole_number("interval", interval)
        self.micro_batches = checks.whole_number("micro_batches", micro_batches)

    def decide(self, seen: Observation) -> Decision:
        """Return the plan."""
        interval = self.interval or seen.limits.interval
        if interval is None:
            raise InvalidInput("policy.interval", "is missing", "Give it to the policy, or as interval in [planner]")
        cut, cuts = self.cut, self.cuts
        if cut is None and cuts is None:
            wanted = seen.limits.cuts
            if wanted is None:
                raise InvalidInput("policy.cut", "is missing", "Give cut or cuts to the policy, or cuts in [planner]")
            cut, cuts = (wanted, None) if isinstance(wanted, int) else (None, wanted)
        chosen = given_cuts(seen, cut, cuts)
        assert chosen is not None
        return decision(chosen, interval, self.micro_batches)


class SplitFederated(CutOptions):
    """Split federated learning with I = 1. Without `cut` or `cuts`, the fastest cuts of every round are taken.

    At I = 1 nothing drifts, so the fastest cuts are what the planner would choose.
    """

    title = "SFL (I = 1)"

    def decide(self, seen: Observation) -> Decision:
        """Return a block of one round."""
        return decision(self.cuts_for(seen, 1), 1)


class ParallelSplit(CutOptions):
    """Parallel split learning, whose client-specific layers are never averaged.

    Without `cut` or `cuts`, the cuts with the shortest round are chosen again every `rounds` rounds. They ignore
    convergence: by the bound, layers that are never averaged make no progress at any cut.
    """

    title = "PSL"

    def __init__(self, cut: int | None = None, cuts: Sequence[int] | None = None, rounds: int = BLOCK_ROUNDS) -> None:
        super().__init__(cut, cuts)
        self.rounds = checks.whole_number("rounds", rounds)

    def decide(self, seen: Observation) -> Decision:
        """Return `rounds` rounds without averaging."""
        return Decision(self.cuts_for(seen, None), None, rounds=self.rounds)


class FederatedAveraging(BasePolicy):
    """Every device trains the whole model, which is averaged every `interval` rounds.

    Without `interval` it is averaged as often as the recipe's [planner] says, else once per epoch.
    """

    title = "FedAvg"

    def __init__(self, interval: int | None = None) -> None:
        self.interval = None if interval is None else checks.whole_number("interval", interval)

    def decide(self, seen: Observation) -> Decision:
        """Return the plan with every cut at the last layer, which every device must be able to hold."""
        given_cuts(seen, seen.layers, None)
        interval = self.interval or seen.limits.interval or seen.epoch_rounds
        return Decision((seen.layers,) * seen.devices, interval)


class Centralized(BasePolicy):
    """Plain SGD on the pooled batch, the upper reference for accuracy.

    The server has all the data and trains alone; a block is `rounds` rounds. Its cuts are not used.
    """

    title = "centralized"
    trainer: ClassVar[TrainerName] = "centralized"

    def __init__(self, rounds: int = BLOCK_ROUNDS) -> None:
        self.rounds = checks.whole_number("rounds", rounds)

    def decide(self, seen: Observation) -> Decision:
        """Return `rounds` rounds."""
        return Decision((1,) * seen.devices, 1, rounds=self.rounds)
