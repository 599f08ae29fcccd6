"""Post-local SGD: averaged after every round at first, and every I rounds later (Lin et al., 2020)."""

from collections.abc import Sequence

from adaptsfl import checks
from adaptsfl.errors import InvalidInput
from adaptsfl.policies.interval_rule import IntervalRule
from adaptsfl.policies.policy import Observation


class PostLocal(IntervalRule):
    """I = 1 up to round `switch_round`, then `interval`.

    The paper switches where the learning rate first falls: give the first of `[training.schedule]`'s steps.
    """

    title = "post-local SGD"

    def __init__(
        self,
        interval: int = 8,
        switch_round: int | None = None,
        cut: int | None = None,
        cuts: Sequence[int] | None = None,
    ) -> None:
        super().__init__(cut, cuts)
        self.later = checks.whole_number("interval", interval)
        if switch_round is None:
            remedy = "Give the last round that is averaged by itself, such as that before the learning rate falls"
            raise InvalidInput("switch_round", "is missing", remedy)
        self.switch_round = checks.whole_number("switch_round", switch_round, at_least=0)

    def interval(self, seen: Observation) -> int:
        """Return 1 before the switch, and the interval given after it."""
        return 1 if seen.round < self.switch_round else self.later
