"""Numbers of parts and types of numbers to choose from: which of them deserve a search, and a bound for each.

Θ rises with the bits on the wire and with the rounds. So a type that needs no fewer bits than another one at any cut,
and has no smaller factor on the rounds, is never better and is left out. Where neither passes nor turns have fixed
seconds, more parts are never slower. With F, U, D, G and S of undivided mini-batches, without the latency l of links,
k parts have f = F/k and so on, so that

    X_k = max(F, U) + min(F, U)/k + l_up,    X_1 + k s + Y_1 = S + (F + U + D + G)/k + l,    Z = F + G

and all other terms fall with k too. Then only the largest k deserves a search.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from adaptsfl.checks import FloatArray, IntArray
from adaptsfl.planner.bound import (
    bounds_by_deepest,
    ideal_device,
    least_server_flops,
    slowest_devices,
    some_least_terms,
)
from adaptsfl.planner.interval import Rules
from adaptsfl.planner.problem import PlanProblem
from adaptsfl.planner.terms import Terms

FEW = 10_000  # devices
TIE = 1e-12  # times that differ by less are equal


@dataclass(frozen=True)
class Choice:
    """One number of parts and one type of numbers, the only one that `problem` has."""

    problem: PlanProblem
    terms: Terms

    @property
    def micro_batches(self) -> int:
        """How many parts a mini-batch has."""
        return self.terms.micro_batches

    @property
    def wire_dtype(self) -> str:
        """The type of numbers."""
        return self.problem.costs.wire_dtype

    @property
    def factor(self) -> float:
        """By how much the type of numbers multiplies the rounds."""
        return self.problem.rounds_factor


def every_choice(problem: PlanProblem) -> list[Choice]:
    """Return all choices, the fewest parts first, then types in the order in which they are given."""
    sent = [problem.sent_as(dtype) for dtype in problem.wire_dtypes]
    return [Choice(one, Terms(k)) for k in sorted(set(problem.micro_batches)) for one in sent]


def worthwhile(problem: PlanProblem, choices: Sequence[Choice]) -> list[Choice]:
    """Return those of all choices of which one is the best, whatever the interval and the cuts."""
    kept: list[Choice] = []  # of one k: those that no other one covers, the earlier of two equal ones
    for choice in choices:
        if choice.micro_batches == choices[0].micro_batches and not any(_covers(one, choice) for one in kept):
            kept = [*(one for one in kept if not _covers(choice, one)), choice]
    dtypes = {choice.wire_dtype for choice in kept}
    parts = set(problem.micro_batches) if fixed_in_parts(problem) else {max(problem.micro_batches)}
    return [choice for choice in choices if choice.wire_dtype in dtypes and choice.micro_batches in parts]


def _covers(one: Choice, other: Choice) -> bool:
    """Whether the first type of numbers is never slower than the second."""
    ours, theirs = one.problem.costs, other.problem.costs
    fewer_bits = (ours.activation_bits <= theirs.activation_bits) & (ours.gradient_bits <= theirs.gradient_bits)
    return bool(fewer_bits.all()) and one.factor <= other.factor


def fixed_in_parts(problem: PlanProblem) -> bool:
    """Whether passes or turns have fixed seconds, which every part pays for; those of links are paid once."""
    fleet = problem.fleet
    return bool(np.any(fleet.forward_s) or np.any(fleet.backward_s) or fleet.server.turn_s)


class Floor:
    """Bounds without a look at most devices: they close most choices and most cuts of a large fleet.

    Attributes:
        flops: the least work that devices leave to the server per data sample, for every L_c.
    """

    def __init__(self, problem: PlanProblem, rules: Rules, choices: int) -> None:
        self.flops = least_server_flops(problem)
        self._rules = rules
        # With one choice and few devices, to look at all of them takes no longer.
        self._useful = choices > 1 or problem.devices > FEW
        if self._useful:
            self._some, self._ideal = slowest_devices(problem), ideal_device(problem.fleet)

    def bounds_s(self, choice: Choice) -> FloatArray:
        """Return, for every L_c, a time that no plan with this choice beats, with the factor of the type."""
        if not self._useful:
            return np.zeros(choice.problem.layers)
        least = some_least_terms(choice.problem, choice.terms, self._some, self._ideal)
        return choice.factor * bounds_by_deepest(choice.problem, least, self.flops, self._rules, choice.terms)


def best_with(cuts: IntArray, choices: Sequence[Choice], rules: Rules) -> tuple[float, int, Choice]:
    """Return the time, the interval and the choice that are best for these cuts; the first of those that tie."""
    aggregation_s = choices[0].problem.aggregation_s(cuts)
    round_s = np.array([choice.problem.round_s(cuts, choice.micro_batches) for choice in choices])
    intervals, times = rules(int(cuts.max())).choose(round_s, np.full_like(round_s, aggregation_s))
    times = times * np.array([choice.factor for choice in choices])
    best = int(np.flatnonzero(times <= times.min() * (1 + TIE))[0])
    return float(times[best]), int(intervals[best]), choices[best]
