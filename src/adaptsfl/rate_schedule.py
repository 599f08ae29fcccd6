"""The learning rate over a run: constant, a cosine, or steps, after an optional warm-up.

It is a pure function of the round, so that the engine, the reference, every rank and every device of a deployment
compute the same learning rate without communication.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from adaptsfl import checks
from adaptsfl.errors import InvalidInput, unknown

Kind = Literal["constant", "cosine", "steps"]
KEYS = {"cosine": ("rounds", "floor"), "steps": ("rounds", "factor"), "constant": ()}  # the keys that each kind reads


@dataclass(frozen=True)
class RateSchedule:
    """The multiplier of the learning rate in round 1, 2, ….

    Attributes:
        kind: `constant` is 1 throughout. `cosine` falls along half a cosine wave, from 1 in round 1 to `floor` in round
            `rounds`, and stays there. `steps` is multiplied by `factor` after each of `rounds`.
        rounds: cosine: the round that reaches the floor; steps: the last round before each step, in ascending order.
        floor: smallest multiplier of the cosine; 0 by default.
        factor: multiplier of each step; 0.1 by default.
        warmup_rounds: w first rounds with 1/(w+1), 2/(w+1), …; a cosine then falls from round w + 1 on.
    """

    kind: Kind = "constant"
    rounds: int | Sequence[int] | None = None
    floor: float | None = None
    factor: float | None = None
    warmup_rounds: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KEYS:
            raise unknown("schedule.kind", str(self.kind), get_args(Kind), f"Give one of {', '.join(get_args(Kind))}")
        checks.whole_number("schedule.warmup_rounds", self.warmup_rounds, at_least=0)
        for key in ("rounds", "floor", "factor"):
            if getattr(self, key) is not None and key not in KEYS[self.kind]:
                remedy = f"Remove it, or set kind = {' or '.join(repr(kind) for kind in KEYS if key in KEYS[kind])}"
                raise InvalidInput(f"schedule.{key}", f"is given, but kind is {self.kind!r}", remedy)
        if self.kind == "cosine":
            if self.rounds is None or isinstance(self.rounds, Sequence):
                raise InvalidInput("schedule.rounds", _given(self.rounds), "Give the round that reaches the floor")
            last = checks.whole_number("schedule.rounds", self.rounds, at_least=self.warmup_rounds + 2)
            object.__setattr__(self, "rounds", last)
            if checks.number("schedule.floor", self.floor or 0.0) > 1:
                raise InvalidInput("schedule.floor", f"is {self.floor:g}", "Give a share of the learning rate, 0 to 1")
        if self.kind == "steps":
            object.__setattr__(self, "rounds", self._checked_steps())
            factor = 0.1 if self.factor is None else checks.number("schedule.factor", self.factor, positive=True)
            if factor > 1:
                raise InvalidInput("schedule.factor", f"is {factor:g}", "Give a number above 0 and at most 1")

    def at(self, round_: int) -> float:
        """Return the multiplier of round 1, 2, …."""
        return min(1.0, round_ / (self.warmup_rounds + 1)) * self.decay(round_)

    def decay(self, round_: int) -> float:
        """Return the multiplier of round 1, 2, … without the warm-up: 1 while the warm-up lasts."""
        if self.kind == "cosine":
            assert isinstance(self.rounds, int)
            first, floor = self.warmup_rounds + 1, self.floor or 0.0
            passed = min(1.0, max(0.0, (round_ - first) / (self.rounds - first)))
            return floor + (1 - floor) * (1 + math.cos(math.pi * passed)) / 2
        if self.kind == "steps":
            assert isinstance(self.rounds, tuple)
            factor = 0.1 if self.factor is None else self.factor
            return float(factor ** sum(round_ > last for last in self.rounds))
        return 1.0

    def _checked_steps(self) -> tuple[int, ...]:
        if not isinstance(self.rounds, Sequence) or isinstance(self.rounds, str) or not self.rounds:
            raise InvalidInput("schedule.rounds", _given(self.rounds), "Give a list of rounds, one for every step")
        steps: list[int] = []
        for k, last in enumerate(self.rounds):
            least = steps[-1] + 1 if steps else self.warmup_rounds + 1  # in ascending order, after the warm-up
            steps.append(checks.whole_number(f"schedule.rounds[{k}]", last, at_least=least))
        return tuple(steps)


def _given(value: Any) -> str:
    return "is missing" if value is None else f"is {checks.short(value)}"
