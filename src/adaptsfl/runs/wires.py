"""What a run believes each type of numbers costs in rounds: assumed or given at first, then measured now and then."""

from collections.abc import Mapping
from typing import Any

from adaptsfl.config import Recipe
from adaptsfl.costs import ASSUMED_FACTORS
from adaptsfl.policies import Policy
from adaptsfl.runs.record import Block

EXACT = "float32"


class WireCosts:
    """By type of numbers, the factor by which sending activations and gradients in it multiplies the rounds.

    Args:
        every: rounds between two measurements. The gap grows with the run, because factors change less and less: at
            round r the next measurement is `every` or r rounds later, whichever is more.

    Attributes:
        factors: None where the recipe or the policy leaves no choice.
    """

    def __init__(self, recipe: Recipe, policy: Policy, every: int) -> None:
        chosen = recipe.model.wire_dtype == "auto" and policy.precision
        given: Mapping[str, float] = recipe.planner.wires or ASSUMED_FACTORS
        self.factors: dict[str, float] | None = dict(given) if chosen else None
        self.every = every
        self._measured_after: int | None = None  # rounds done before the last measurement

    def due(self, rounds: int) -> tuple[str, ...]:
        """Return the types to compare in the next round; none most of the time."""
        if self.factors is None:
            return ()
        if self._measured_after is not None and rounds - self._measured_after < max(self.every, self._measured_after):
            return ()
        return tuple(dtype for dtype in self.factors if dtype != EXACT)

    def learn(self, block: Block) -> None:
        """Update the factors with a block's measurement: the first replaces what was assumed, later ones count half."""
        if self.factors is None or not block.wires:
            return
        before = self.factors if self._measured_after is not None else block.wires
        self.factors = {**self.factors, **{dtype: (before[dtype] + now) / 2 for dtype, now in block.wires.items()}}
        self._measured_after = block.first_round - 1

    def data(self) -> dict[str, Any]:
        """Return the factors for the record; nothing where there is no choice."""
        return {} if self.factors is None else {"wires": dict(self.factors)}
