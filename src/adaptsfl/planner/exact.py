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
import time
from dataclasses import replace

import numpy as np

from adaptsfl.checks import BoolArray, FloatArray
from adaptsfl.planner.bound import best_uniform, bounds_by_deepest, cut_times, least_terms
from adaptsfl.planner.grid import Box, Corners, Grid, ServerLoad, deepest_cuts, fitting
from adaptsfl.planner.interval import IntervalRule, interval_rule
from adaptsfl.planner.problem import Plan, PlanProblem, explained

TOLERANCE = 1e-11  # a box that could save less than this share of the best time is closed
SHAVED_FROM = 200_000  # number of times in a box above which `shave` costs less than the grids it saves
CHARGED_AFTER = 24  # boxes after which charges cost less than the boxes they save; easy problems need fewer
WORTHWHILE = 0.9  # shrink again only while some range falls below this share of its size


def solve(problem: PlanProblem, *, time_limit_s: float = float("inf")) -> Plan:
    """Return the optimal plan; if stopped by `time_limit_s`, the best plan found, with status `limit` and a bound."""
    started = time.perf_counter()
    problem.check_feasible()
    search = _Search(problem)
    open_bound_s = search.run(started + time_limit_s)
    return explained(
        problem,
        search.interval,
        search.cuts,
        lower_bound_s=min(open_bound_s, search.goal_s),
        proven=open_bound_s >= search.goal_s,
        solver="exact",
        solve_s=time.perf_counter() - started,
        nodes=search.nodes,
    )


class _Search:
    """The state of the search: the best plan so far, and the data to look for a better one."""

    def __init__(self, problem: PlanProblem) -> None:
        self.problem = problem
        self.server = ServerLoad(problem)
        self.times = cut_times(problem)  # (4, L, N)
        self.least = least_terms(problem, self.times)
        self.times[0][~problem.allowed] = np.inf
        self.rules: dict[int, IntervalRule] = {}
        self.nodes = 0
        start = best_uniform(problem)
        self.best_s, self.interval, self.cuts = start.time_s, start.interval, start.cuts

    @property
    def goal_s(self) -> float:
        """The search looks only for plans that are faster than this."""
        return self.best_s * (1 - TOLERANCE)

    def rule(self, deepest: int) -> IntervalRule:
        """Return the rule for this L_c, created on first use."""
        if deepest not in self.rules:
            self.rules[deepest] = interval_rule(self.problem, deepest)
        return self.rules[deepest]

    def run(self, deadline: float) -> float:
        """Search until done or until `deadline`; return the smallest bound of the open boxes, infinite if none."""
        order = itertools.count()  # among equal bounds, the oldest box comes first
        bounds = bounds_by_deepest(self.problem, self.least)
        deepest = (int(m) + 1 for m in np.flatnonzero(np.isfinite(bounds)))
        boxes = [(bounds[m - 1], next(order), self.root(m)) for m in deepest]
        heapq.heapify(boxes)
        while boxes and boxes[0][0] < self.goal_s:
            if time.perf_counter() > deadline:
                return float(boxes[0][0])
            for bound_s, child in self.expand(heapq.heappop(boxes)[-1]):
                heapq.heappush(boxes, (bound_s, next(order), child))
        return np.inf

    def root(self, deepest: int) -> Box:
        """Return the box of all plans whose deepest cut is `deepest`."""
        everyone = np.arange(self.problem.devices)
        return Box(deepest, self.least[:, deepest - 1], np.full(4, np.inf), everyone)

    def offer(self, deepest: int, thresholds: FloatArray) -> None:
        """Keep the plan that these thresholds determine, if it is the best so far."""
        cuts = deepest_cuts(fitting(self.times[:, :deepest], thresholds))
        rule = self.rule(int(cuts.max()))
        interval, time_s = rule.choose(self.problem.round_s(cuts), self.problem.aggregation_s(cuts))
        if time_s < self.best_s:
            self.best_s, self.interval, self.cuts = float(time_s), int(interval), cuts

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
        times = self.times[:, : box.deepest]
        times = times if box.active.size == self.problem.devices else times[:, :, box.active]
        low, high = box.low.copy(), box.high
        while True:
            before = high - low
            fits = fitting(times, high)
            # Each maximum is at least the largest of the devices' minimal times.
            low = np.maximum(low, np.where(fits, times, np.inf).min(axis=1).max(axis=1, initial=0.0))
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
        for term in range(4):
            half = high.copy()
            half[term] = (low[term] + high[term]) / 2
            if low[term] < half[term] and self.caps(box, fitting(times, half), low, rule) is None:
                low[term] = half[term]
                raised = True
        return raised

    def caps(self, box: Box, fits: BoolArray, low: FloatArray, rule: IntervalRule) -> FloatArray | None:
        """Upper limits on T3 … T6 for plans that beat the best so far; None if there can be no such plan.

        `fits` are the cuts within the upper corner. The bound uses times at the lower corner and cuts at the upper.
        """
        cuts = deepest_cuts(fits)
        if not cuts.all():
            return None
        turn_s = self.server.turn_s(box.settled_flops + float(self.server.flops[cuts].sum()))
        exchanged_s = self.server.exchanged_s(box.settled_bits + float(self.server.bits[cuts].sum()), box.deepest)
        round_s = float(low[0] + turn_s + low[1])
        exchange_s = np.maximum(low[2:], exchanged_s)
        aggregation_s = float(exchange_s.sum()) + self.server.averaging_s(box.deepest)
        slack_s = rule.round_cap_s(self.goal_s, aggregation_s) - round_s
        if slack_s <= 0:
            return None
        spare_s = rule.aggregation_cap_s(self.goal_s, round_s) - aggregation_s
        return np.concatenate((low[:2] + slack_s, exchange_s + spare_s))

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
