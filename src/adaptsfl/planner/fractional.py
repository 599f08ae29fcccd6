"""Algorithm 2: the best cuts for a fixed interval, by Dinkelbach's method over a sequence of MILPs.

Paper: the stop test pairs the new λ with the old μ, λ⁽⁰⁾ may be anything with Υ ≥ 0, and the tolerance is absolute.
Here: λ is always the time of the best plan known, starting from an admissible one, and the loop ends when the MILP
finds no improvement above a relative tolerance. Because: then every λ is attained by a plan, λ only falls, and
the result does not depend on the unit of time.
"""

import time
from dataclasses import dataclass

import numpy as np

from adaptsfl.checks import IntArray
from adaptsfl.planner.milp import CutProgram
from adaptsfl.planner.problem import PlanProblem

RELATIVE_TOLERANCE = 1e-9


@dataclass(frozen=True)
class BestCuts:
    """The cuts found, how many MILPs were needed, and whether all of them were solved to optimality."""

    cuts: IntArray
    programs: int
    finished: bool


def best_cuts(problem: PlanProblem, interval: int, start: IntArray, deadline: float = float("inf")) -> BestCuts:
    """Return the best cuts for `interval`, starting from the admissible cuts `start`.

    `deadline` is a `time.perf_counter()` value after which the best cuts so far are returned.
    """
    cuts, programs = start, 0
    price = float(problem.time_to_target_s(interval, cuts))  # λ⁽⁰⁾ = Q/P of an admissible plan
    program = CutProgram(problem, interval)
    while True:
        remaining_s = deadline - time.perf_counter()
        if remaining_s <= 0:
            return BestCuts(cuts, programs, finished=False)
        answer = program.solve(price, cuts, remaining_s)  # line 3
        programs += 1
        found = price if answer.cuts is None else float(problem.time_to_target_s(interval, answer.cuts))
        if answer.cuts is None or not np.isfinite(found) or found >= price * (1 - RELATIVE_TOLERANCE):  # line 7
            return BestCuts(cuts, programs, answer.finished)
        cuts, price = answer.cuts, found  # line 5
