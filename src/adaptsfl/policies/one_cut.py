"""What the classical ways of splitting have in common: one cut for all devices, kept for the whole run."""

import numpy as np

from adaptsfl import checks, latency
from adaptsfl.checks import FloatArray
from adaptsfl.policies.place import every_cut, given_cuts, one_cut
from adaptsfl.policies.policy import BasePolicy, Observation


class OneCut(BasePolicy):
    """Without `cut`, the fastest cut at the start of the run is taken and kept."""

    def __init__(self, cut: int | None = None) -> None:
        self.cut = None if cut is None else checks.whole_number("cut", cut)

    def cuts(self, seen: Observation) -> tuple[int, ...]:
        """Return the cut, once per device; a device that cannot hold it is an error."""
        if self.cut is None:
            self.cut = one_cut(seen, self.seconds(seen))
        chosen = given_cuts(seen, self.cut, None)
        assert chosen is not None
        return chosen

    def seconds(self, seen: Observation) -> FloatArray:
        """Return the seconds of a round and of its share of an averaging once per epoch, for every cut."""
        cuts = every_cut(seen)
        round_s = latency.round_s(seen.costs, seen.fleet, cuts, seen.batch_size)
        return np.asarray(round_s + latency.aggregation_s(seen.costs, seen.fleet, cuts) / seen.epoch_rounds)
