"""DAMA+RMS: shallow layers are averaged more often than deep ones, by how far the copies are apart; random cuts.

Paper: AIFed's depth-aware aggregation. Here: its authors' earlier rule, the shallow half every I₀ rounds and the deep
half every 3·I₀. Because: AIFed's own text is not public.
"""

import numpy as np

from adaptsfl import checks
from adaptsfl.decisions import Decision
from adaptsfl.errors import InvalidInput
from adaptsfl.policies.interval_rules import within_limits
from adaptsfl.policies.policy import BasePolicy, Observation
from adaptsfl.policies.random_plans import LONGEST_DRAWN, random_cuts

DEEP = 3  # the interval of the deep half is DEEP · I₀


class DepthAware(BasePolicy):
    """I₀ changes by one round per block: down if the divergence is above its moving average, up if below.

    A block is 3·I₀ rounds, so that every layer is averaged at its end. `first` is the I₀ of the first block, `longest`
    the largest, `decay` the weight of the past in the moving average of the divergence.
    """

    title = "DAMA+RMS"
    divergence = True

    def __init__(self, first: int = 5, longest: int = LONGEST_DRAWN, decay: float = 0.8) -> None:
        self.longest = checks.whole_number("longest", longest)
        self.interval = checks.whole_number("first", first, at_most=longest)
        if checks.number("decay", decay) >= 1:
            raise InvalidInput("decay", f"is {decay:g}", "Give a number below 1")
        self.decay = decay
        self.average: float | None = None

    def decide(self, seen: Observation) -> Decision:
        """Update I₀ and draw cuts."""
        self._look_at(seen)
        base = within_limits(seen, self.interval)
        cuts = tuple(int(cut) for cut in random_cuts(seen))
        deepest = max(cuts)
        shallow = (deepest + 1) // 2
        deep = dict.fromkeys(range(shallow + 1, deepest + 1), DEEP * base)
        return Decision(cuts, base, deep, rounds=DEEP * base)

    def _look_at(self, seen: Observation) -> None:
        if not seen.divergence.size:
            return
        divergence = float(np.mean(seen.divergence))
        if self.average is None:
            self.average = divergence
            return
        step = int(np.sign(self.average - divergence))
        self.interval = min(max(self.interval + step, 1), self.longest)
        self.average = self.decay * self.average + (1 - self.decay) * divergence
