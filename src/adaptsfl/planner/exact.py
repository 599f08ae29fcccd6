"""The joint optimum of interval and cuts, with its certificate: the default solver.

docs/planner.md has the full argument. In short, fix the deepest cut m and let a plan's four maxima over devices be

    T3 = max T_i^F + T_{a,i}^U,   T4 = max T_{g,i}^D + T_i^B,   T5 = max T_{c,i}^U,   T6 = max T_{c,i}^D.

Within given thresholds on the four, every device should take its deepest cut, since the server's work and the bits it
exchanges only fall with depth. So an optimal plan is determined by m and its own four maxima, and the search is over
boxes of thresholds: times at the lower corner with cuts at the upper corner bound everything in between from below.
Branch and bound, best box first: a box is shrunk as far as the best plan so far allows (this file), then cut into a
grid of cells that are bounded together (grid.py). A search that takes longer also charges thresholds to the devices
that need them, which raises these bounds (charges.py).
"""

import heapq
import itertools
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from adaptsfl.checks import BoolArray, FloatArray, IntArray
from adaptsfl.planner.bound import best_uniform, bounds_by_deepest, cut_times, least_terms
from adaptsfl.planner.choices import Choice, Floor, best_with, every_choice, worthwhile
from adaptsfl.planner.grid import Box, Corners, Grid, ServerLoad, deepest_cuts, fitting, least_within
from adaptsfl.planner.interval import IntervalRule, Rules
from adaptsfl.planner.problem import Plan, PlanProblem, explained

TOLERANCE = 1e-11  # a box that could save less than this share of the best time is closed
SHAVED_FROM = 200_000  # number of times in a box above which `shave` costs less than the grids it saves
CHARGED_AFTER = 24  # boxes after which charges cost less than the boxes they save; easy problems need fewer
FIRST_TURN = 8  # boxes of a search before the searches for other k and types of numbers have their turn
KEPT = 10_000_000  # size of a search's table above which it is computed anew in every turn, to save memory
WORTHWHILE = 0.9  # shrink again only while some range falls below this share of its size


def solve(problem: PlanProblem, *, time_limit_s: float = float("inf")) -> Plan:
    """Return the optimal plan; if stopped by `time_limit_s`, the best plan found, with status `limit` and a bound."""
    started = time.perf_counter()
    problem.check_feasible()
    best = Incumbent()
    open_bound_s, nodes = run_all(problem, best, started + time_limit_s)
    return explained(
        problem,
        best.interval,
        best.cuts,
        micro_batches=best.micro_batches,
        wire_dtype=best.wire_dtype,
        lower_bound_s=min(open_bound_s, best.goal_s),
        proven=open_bound_s >= best.goal_s,
        solver="exact",
        solve_s=time.perf_counter() - started,
        nodes=nodes,
    )


@dataclass
class Incumbent:
    """The best plan so far, which the searches for all k and all types of numbers on the wire share."""

    time_s: float = np.inf
    interval: int = 1
    cuts: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    micro_batches: int = 1
    wire_dtype: str = "float32"

    @property
    def goal_s(self) -> float:
        """The search looks only for plans that are faster than this."""
        return self.time_s * (1 - TOLERANCE)

    def keep(self, time_s: float, interval: int, cuts: IntArray, choice: Choice) -> None:
        """Keep a plan if it is the best so far; `time_s` includes the factor of the type of numbers."""
        if time_s < self.time_s or not self.cuts.size:
            self.time_s, self.interval, self.cuts = time_s, interval, cuts
            self.micro_batches, self.wire_dtype = choice.micro_batches, choice.wire_dtype


def run_all(problem: PlanProblem, best: Incumbent, deadline: float) -> tuple[float, int]:
    """Search for every k and type of numbers; return the smallest bound of the open boxes, and the boxes bounded.

    The searches take turns, those with the lowest bounds first, and each turn is twice as long as the one before: the
    lowest bound says little about where the best plan is. A plan that is the best so far is tried with every other k
    and type too, so that most searches end at their bounds.
    """
    every, rules = every_choice(problem), Rules(problem)
    choices = worthwhile(problem, every)
    floor = Floor(problem, rules, len(choices))
    searches = [_Search(choice, best, rules, floor) for choice in choices]
    first = min(searches, key=lambda search: search.bound_s).choice
    start = best_uniform(first.problem, first.micro_batches)
    best.keep(start.time_s * first.factor, start.interval, start.cuts, first)
    _try(best, choices, rules)
    boxes = FIRST_TURN if len(choices) > 1 else sys.maxsize
    while any(search.is_open for search in searches) and (boxes == FIRST_TURN or time.perf_counter() <= deadline):
        for search in sorted(searches, key=lambda search: search.bound_s):
            before_s = best.time_s
            search.advance(boxes, deadline)
            if best.time_s < before_s:
                _try(best, choices, rules)
        boxes *= 2
    _try(best, every, rules)
    return min(search.bound_s for search in searches), sum(search.nodes for search in searches)


def _try(best: Incumbent, choices: Sequence[Choice], rules: Rules) -> None:
    """Try the cuts of the best plan with every k and type of numbers; of those that tie, keep the first."""
    if len(choices) > 1:
        best.time_s, best.interval, choice = best_with(best.cuts, choices, rules)
        best.micro_batches, best.wire_dtype = choice.micro_batches, choice.wire_dtype


class _Search:
    """The search for one k and one type of numbers: the best plan so far, and the data to look for a better one."""

    def __init__(self, choice: Choice, best: Incumbent, rule: Rules, floor: Floor) -> None:
        self.choice, self.problem, self.terms = choice, choice.problem, choice.terms
        self.best, self.rule, self.floor = best, rule, floor
        self.floor_s = floor.bounds_s(choice)
        self.server = ServerLoad(self.problem, self.terms.micro_batches)
        self.nodes, self.most = 0, 0
        self.times: FloatArray | None = None
        self.boxes: list[tuple[float, int, Box]] | None = None  # a heap; None before the first turn
        self._order = itertools.count()  # among equal bounds, the oldest box comes first

    @property
    def bound_s(self) -> float:
        """No plan that is left to search is faster, with the factor of the type; infinite if none is left."""
        if self.boxes is None:
            return float(self.floor_s.min())
        return self.boxes[0][0] * self.choice.factor if self.boxes else np.inf

    @property
    def is_open(self) -> bool:
        """Whether there can be a plan that is better than the best so far."""
        return self.bound_s < self.best.goal_s

    @property
    def goal_s(self) -> float:
        """The search looks only for plans that are faster than this, before the factor of the type of numbers."""
        return self.best.goal_s / self.choice.factor

    def advance(self, boxes: int, deadline: float) -> None:
        """Search until done, until so many boxes are bounded, or until `deadline`."""
        if not self.is_open:
            return
        if self.boxes is None:
            self.begin()
        last = self.nodes + boxes
        while self.boxes and self.is_open and self.nodes < last and time.perf_counter() <= deadline:
            for bound_s, child in self.expand(heapq.heappop(self.boxes)[-1]):
                heapq.heappush(self.boxes, (bound_s, next(self._order), child))
        if not self.is_open or (self.times is not None and self.times.size > KEPT):
            self.times = None

    def begin(self) -> None:
        """Put the roots on the heap: one for every deepest cut, up to the last one whose bound is open."""
        self.most = int(np.flatnonzero(self.floor_s < self.best.goal_s)[-1]) + 1
        times = cut_times(self.problem, self.terms, self.most)
        self.least = least_terms(self.problem, times)
        bounds_s = bounds_by_deepest(self.problem, self.least, self.floor.flops, self.rule, self.terms)
        deepest = (int(m) + 1 for m in np.flatnonzero(np.isfinite(bounds_s)))
        self.boxes = [(float(bounds_s[m - 1]), next(self._order), self.root(m)) for m in deepest]
        heapq.heapify(self.boxes)
        times[0][~self.problem.allowed[: self.most]] = np.inf
        self.times = times

    @property
    def table(self) -> FloatArray:
        """The time of every cut up to `most` of every device for every maximum: shape (terms, most, N)."""
        if self.times is None:
            self.times = cut_times(self.problem, self.terms, self.most)
            self.times[0][~self.problem.allowed[: self.most]] = np.inf
        return self.times

    def root(self, deepest: int) -> Box:
        """Return the box of all plans whose deepest cut is `deepest`."""
        everyone = np.arange(self.problem.devices)
        return Box(deepest, self.least[:, deepest - 1], np.full(self.terms.count, np.inf), everyone)

    def offer(self, deepest: int, thresholds: FloatArray) -> None:
        """Keep the plan that these thresholds determine, if it is the best so far."""
        cuts = deepest_cuts(fitting(self.table[:, :deepest], thresholds))
        rule = self.rule(int(cuts.max()))
        round_s = self.problem.round_s(cuts, self.terms.micro_batches)
        interval, time_s = rule.choose(round_s, self.problem.aggregation_s(cuts))
        self.best.keep(float(time_s) * self.choice.factor, int(interval), cuts, self.choice)

    def expand(self, box: Box) -> list[tuple[float, Box]]:
        """Shrink the box, bound a grid of cells inside it, and return the boxes that remain to be searched."""
        self.nodes += 1
        rule = self.rule(box.deepest)
        shrunk = self.shrink(box, rule)
        if shrunk is None:
            return []
        box, corners = shrunk
        if not box.active.size:
            self.offer(box.deepest, box.high)
            return []
        grid = Grid(box, corners, rule, self.server, self.goal_s, charged=self.nodes > CHARGED_AFTER)
        if not grid.alive.any():
            return []
        self.offer(box.deepest, grid.most_promising())
        for thresholds in grid.answered(self.goal_s):
            self.offer(box.deepest, thresholds)
        return grid.children(self.goal_s)

    def shrink(self, box: Box, rule: IntervalRule) -> tuple[Box, Corners] | None:
        """Return the box with its corners moved inwards as far as the best time so far allows; None if it is empty."""
        times = self.table[:, : box.deepest]
        times = times if box.active.size == self.problem.devices else times[:, :, box.active]
        low, high = box.low.copy(), box.high
        while True:
            before = high - low
            fits = fitting(times, high)
            if np.isfinite(high).any():  # a root's lower corner is what this would give
                # Each maximum is at least the largest of the devices' minimal times.
                low = np.maximum(low, least_within(times, fits))
            caps = self.caps(box, fits, low, rule)
            if caps is None:
                return None
            high = np.minimum(high, caps)
            if np.any(high - low < WORTHWHILE * before):
                continue
            if times.size < SHAVED_FROM or not self.shave(box, times, low, high, rule):
                return self.settle(replace(box, low=low, high=high), times)

    def shave(self, box: Box, times: FloatArray, low: FloatArray, high: FloatArray, rule: IntervalRule) -> bool:
        """Raise `low` to the middle of each range whose lower half has no better plan; return whether any rose."""
        raised = False
        for term in range(self.terms.count):
            half = high.copy()
            half[term] = (low[term] + high[term]) / 2
            if low[term] < half[term] and self.caps(box, fitting(times, half), low, rule) is None:
                low[term] = half[term]
                raised = True
        return raised

    def caps(self, box: Box, fits: BoolArray, low: FloatArray, rule: IntervalRule) -> FloatArray | None:
        """Upper limits on all maxima for plans that beat the best so far; None if there can be no such plan.

        `fits` are the cuts within the upper corner. The bound uses times at the lower corner and cuts at the upper.
        """
        cuts = deepest_cuts(fits)
        if not cuts.all():
            return None
        turn_s = self.server.turn_s(box.settled_flops + float(self.server.flops[cuts].sum()))
        exchanged_s = self.server.exchanged_s(box.settled_bits + float(self.server.bits[cuts].sum()), box.deepest)
        round_s = max(box.round_s[0], float(self.terms.round_s(low[:-2], turn_s)))
        exchange_s = np.maximum(low[-2:], exchanged_s)
        aggregation_s = float(exchange_s.sum()) + self.server.averaging_s(box.deepest)
        cap_s = min(rule.round_cap_s(self.goal_s, aggregation_s), box.round_s[1])
        if cap_s <= round_s:
            return None
        spare_s = rule.aggregation_cap_s(self.goal_s, round_s) - aggregation_s
        return np.concatenate((self.terms.caps_s(low[:-2], float(turn_s), cap_s), exchange_s + spare_s))

    def settle(self, box: Box, times: FloatArray) -> tuple[Box, Corners] | None:
        """Remove from the box the devices whose deepest cut is the same at both corners."""
        fits = fitting(times, box.high)
        high_cuts, low_cuts = deepest_cuts(fits), deepest_cuts(fitting(times, box.low))
        if not high_cuts.all():
            return None
        undecided = low_cuts != high_cuts
        settled = high_cuts[~undecided]
        smaller = replace(
            box,
            active=box.active[undecided],
            settled_flops=box.settled_flops + float(self.server.flops[settled].sum()),
            settled_bits=box.settled_bits + float(self.server.bits[settled].sum()),
        )
        return smaller, Corners(times[:, :, undecided], fits[:, undecided], low_cuts[undecided])
