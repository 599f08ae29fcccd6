"""Where the time of a block went: phases that add up to what a clock on the wall shows.

Everybody waits for somebody. Of a round that is the device whose activations came last: its download and backward pass
after the answer before, its forward pass and upload, then the server's turn. So one device's times count, not the
largest of each phase, which nobody may have had together.
"""

import math
from collections import defaultdict

from adaptsfl.latency import PHASES

ALL = math.inf  # of the time that has passed


class BlockClock:
    """The time of one block, split among its phases as it passes.

    Attributes:
        seconds: by phase.
        other_s: what no phase explains: planning, evaluation, waiting for those who stay away, messages on their way.
        rounds_s: of every round but the first, which begins with fetching layers: from one answer to the next.
    """

    def __init__(self, began: float) -> None:
        self._at = self._answered = self._began = began
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.other_s = 0.0
        self.rounds_s: list[float] = []
        self._waited: defaultdict[tuple[str, str], float] = defaultdict(float)  # for whom, and in which phase

    def passed(self, now: float, who: str = "", **phases: float) -> dict[str, float]:
        """Give the time since the last call to phases, in order, as far as it reaches; return what each got.

        What a device says about itself can thus be wrong, but never more than what has passed.
        """
        left, self._at = max(0.0, now - self._at), max(now, self._at)
        given = {}
        for phase, seconds in phases.items():
            given[phase] = min(seconds, left) if seconds > 0 else 0.0
            self.seconds[phase] += given[phase]
            self._waited[who, phase] += given[phase]
            left -= given[phase]
        self.other_s += left
        return given

    def answered(self, now: float, *, first: bool) -> float:
        """Note that a round's gradients are on their way; return how long the round took."""
        took, self._answered = now - self._answered, now
        if not first:
            self.rounds_s.append(took)
        return took

    def begin_rounds(self, now: float) -> None:
        """Note that devices know the plan: the first round begins."""
        self._answered = now

    @property
    def bottleneck(self) -> tuple[str, str]:
        """For whom everybody waited longest, and in which phase."""
        return max(self._waited, key=lambda pair: self._waited[pair])

    @property
    def wall_s(self) -> float:
        """All of it so far."""
        return self._at - self._began

    def data(self) -> dict[str, object]:
        """Return what a record keeps beside the phases."""
        averaging_s = sum(seconds for phase, seconds in self.seconds.items() if phase.startswith("b"))
        return {
            "wall_s": self.wall_s,
            "rounds_s": [round(seconds, 6) for seconds in self.rounds_s],
            "averaging_s": averaging_s,
            "other_s": self.other_s,
        }
