"""Centralized: plain SGD on the pooled batch, the upper reference for accuracy."""

from typing import ClassVar

from adaptsfl import checks
from adaptsfl.decisions import Decision
from adaptsfl.policies.policy import BLOCK_ROUNDS, BasePolicy, Observation, TrainerName


class Centralized(BasePolicy):
    """The server has all the data and trains alone; a block is `rounds` rounds. Its cuts mean nothing."""

    title = "centralized"
    trainer: ClassVar[TrainerName] = "centralized"

    def __init__(self, rounds: int = BLOCK_ROUNDS) -> None:
        self.rounds = checks.whole_number("rounds", rounds)

    def decide(self, seen: Observation) -> Decision:
        """Return `rounds` rounds."""
        return Decision((1,) * seen.devices, 1, rounds=self.rounds)
