"""Fixed: the interval and the cuts that one is told."""

from collections.abc import Sequence

from adaptsfl import checks
from adaptsfl.decisions import Decision
from adaptsfl.errors import InvalidInput
from adaptsfl.policies.place import check_options, given_cuts
from adaptsfl.policies.policy import BasePolicy, Observation, decision


class Fixed(BasePolicy):
    """The same plan throughout. What is not given as an option is taken from the recipe's [planner]."""

    title = "fixed"

    def __init__(self, interval: int | None = None, cut: int | None = None, cuts: Sequence[int] | None = None) -> None:
        check_options(cut, cuts)
        self.interval = None if interval is None else checks.whole_number("interval", interval)
        self.cut, self.cuts = cut, cuts

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
        return decision(chosen, interval)
