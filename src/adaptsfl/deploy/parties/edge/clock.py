"""The time of a block, split into phases that add up to wall-clock time.

A round takes as long as its slowest device, whose activations arrive last: its download and backward pass after the
previous gradients, its forward pass and upload, then the server's part. So the times of one device count, not the
largest of each phase, which may belong to different devices.
"""

import math
from collections import defaultdict

from adaptsfl.latency import PHASES

ALL = math.inf  # as the seconds of a phase: all time that has passed


class BlockClock:
    """The time of one block, split among its phases as it passes.

    Attributes:
        seconds: by phase.
        other_s: time outside all phases: planning, evaluation, waiting for absent devices, message latency.
        rounds_s: of every round but the first, which includes fetching layers: from one answer to the next.
    """

    def __init__(self, began: float) -> None:
        self._at = self._answered = self._began = began
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.other_s = 0.0
        self.rounds_s: list[float] = []
        self._waited: defaultdict[tuple[str, str], float] = defaultdict(float)  # by party and phase

    def passed(self, now: float, who: str = "", **phases: float) -> dict[str, float]:
        """Split the time since the last call among phases, in order, until it is used up; return the share of each.

        So a time that a device reports wrongly never exceeds the time that has passed.
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
        """Record that a round's gradients were sent; return how long the round took."""
        took, self._answered = now - self._answered, now
        if not first:
            self.rounds_s.append(took)
        return took

    def begin_rounds(self, now: float) -> None:
        """Record that the first round begins: devices have the plan."""
        self._answered = now

    @property
    def answered_at(self) -> float:
        """When the gradients of the last round were sent; before the first round, when devices got the plan."""
        return self._answered

    @property
    def bottleneck(self) -> tuple[str, str]:
        """The party that was waited for longest, and in which phase."""
        return max(self._waited, key=lambda pair: self._waited[pair])

    @property
    def wall_s(self) -> float:
        """The block's wall-clock time so far."""
        return self._at - self._began

    def data(self) -> dict[str, object]:
        """Return the measured times for the record, beside the phases."""
        averaging_s = sum(seconds for phase, seconds in self.seconds.items() if phase.startswith("b"))
        return {
            "wall_s": self.wall_s,
            "rounds_s": [round(seconds, 6) for seconds in self.rounds_s],
            "averaging_s": averaging_s,
            "other_s": self.other_s,
        }
