"""Intervals and cuts by chance, within what the recipe and the devices' memory allow."""

import numpy as np

from adaptsfl import checks
from adaptsfl.checks import IntArray
from adaptsfl.policies.place import check_every_device_has_a_cut
from adaptsfl.policies.policy import Observation

LONGEST_DRAWN = 25  # as in the paper


def random_interval(seen: Observation, longest: int) -> int:
    """Draw I uniformly on 1..longest, or on 1..max_interval where that is less; a fixed interval holds."""
    if seen.limits.interval is not None:
        return seen.limits.interval
    if seen.limits.max_interval is not None:
        longest = min(longest, checks.whole_number("planner.max_interval", seen.limits.max_interval))
    return int(seen.rng.integers(1, longest, endpoint=True))


def random_cuts(seen: Observation) -> IntArray:
    """Draw every device's cut uniformly from those allowed to it."""
    check_every_device_has_a_cut(seen)
    # The largest of independent draws is any of them with equal chance.
    return np.argmax(np.where(seen.allowed, seen.rng.random(seen.allowed.shape), -1.0), axis=0) + 1
