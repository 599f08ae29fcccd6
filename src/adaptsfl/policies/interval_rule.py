"""What rules for the interval have in common: cuts given or the fastest, and the recipe's limits."""

from collections.abc import Sequence

from adaptsfl.decisions import Decision
from adaptsfl.policies.place import check_options, fastest_cuts, given_cuts
from adaptsfl.policies.policy import BasePolicy, Observation, decision

LONGEST = 1000  # rounds between two averagings, however near to zero the learning rate is


class IntervalRule(BasePolicy):
    """A rule says how long the next interval is: subclasses need `interval`.

    Without `cut` or `cuts`, the cuts with the least seconds per round for that interval are taken, anew after every
    averaging.
    """

    def __init__(self, cut: int | None = None, cuts: Sequence[int] | None = None) -> None:
        check_options(cut, cuts)
        self.cut, self.cuts = cut, cuts

    def decide(self, seen: Observation) -> Decision:
        """Return one block of the interval that the rule gives, within the recipe's limits."""
        interval = within_limits(seen, self.interval(seen))
        return decision(self.cuts_for(seen, interval), interval)

    def interval(self, seen: Observation) -> int:
        """Return the interval that the rule gives."""
        raise NotImplementedError

    def cuts_for(self, seen: Observation, interval: int) -> tuple[int, ...]:
        """Return the cuts given, or the fastest for this interval."""
        chosen = given_cuts(seen, self.cut, self.cuts)
        return tuple(int(cut) for cut in fastest_cuts(seen, interval)) if chosen is None else chosen


def within_limits(seen: Observation, interval: int) -> int:
    """Return an interval as the recipe's [planner] allows it: a fixed one holds, and none is above max_interval."""
    if seen.limits.interval is not None:
        return seen.limits.interval
    return min(interval, seen.limits.max_interval or interval)
