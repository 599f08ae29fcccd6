import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptsfl.planner.charges import Threshold, charged_flops


def drawn(seed: int, thresholds: int):
    """A few devices, each with a few useful cuts, and thresholds that matter as much as the server's work."""
    rng = np.random.default_rng(seed)
    cuts, devices = int(rng.integers(1, 5)), int(rng.integers(1, 5))
    flops = np.append(0.0, np.sort(rng.integers(0, 50, cuts))[::-1]).astype(float)
    base = rng.integers(0, cuts + 1, devices)
    useful = (rng.random((cuts, devices)) < 0.7) & (np.arange(1, cuts + 1)[:, None] > base)
    deepest = rng.integers(0, cuts + 1, devices)
    low, worth = rng.integers(0, 10, thresholds), rng.uniform(0.1, 20, thresholds)
    times = rng.integers(0, 20, (thresholds, cuts, devices)).astype(float)
    several = [Threshold(*one) for one in zip(times, low.astype(float), worth, strict=True)]
    return flops, useful, base, deepest, several


def choices(useful, base):
    """Every choice of one available cut per device."""
    return itertools.product(
        *([*([b] if b else []), *(np.flatnonzero(fits) + 1)] for b, fits in zip(base, useful.T, strict=True))
    )


@given(st.integers(0, 2**32 - 1), st.integers(1, 3))
def test_no_choice_of_cuts_is_cheaper_than_its_charges(seed, thresholds):
    """Whatever cuts devices take: server work plus thresholds is no less than the sum of what they are charged."""
    flops, useful, base, deepest, several = drawn(seed, thresholds)
    charged = charged_flops(flops, useful, base, deepest, several, unit=2.0**-20)
    for cuts in choices(useful, base):
        paid, cost = 0.0, 0.0
        for threshold in several:
            taken = [threshold.times[c - 1, i] for i, c in enumerate(cuts) if c != base[i]]
            cost += threshold.flops_per_s * max([0.0, *(time - threshold.low for time in taken)])
        for device, cut in enumerate(cuts):
            cost += flops[cut]
            paid += charged[cut, device]
        assert paid <= cost * (1 + 1e-12)


@given(st.integers(0, 2**32 - 1), st.integers(0, 3))
def test_charged_costs_fall_with_depth(seed, thresholds):
    """So that the deepest available cut is the cheapest, as the staircases need it."""
    flops, useful, base, deepest, several = drawn(seed, thresholds)
    charged = charged_flops(flops, useful, base, deepest, several, unit=2.0**-20)
    for device, (own, fits) in enumerate(zip(base, useful.T, strict=True)):
        order = [own, *(np.flatnonzero(fits) + 1)]
        assert (np.diff(charged[order, device]) <= 0).all()


@given(st.integers(0, 2**32 - 1))
def test_one_threshold_is_bounded_by_its_best_value(seed):
    """With one threshold, and times that rise with depth, the charges add up to the optimum itself."""
    flops, useful, base, _, (threshold,) = drawn(seed, thresholds=1)
    times = np.maximum.accumulate(threshold.times)
    rising = Threshold(times, threshold.low, threshold.flops_per_s)
    base = np.maximum(base, 1)
    useful = useful & (np.arange(1, len(flops))[:, None] > base)
    charged = charged_flops(flops, useful, base, np.full(base.size, len(flops)), [rising], unit=2.0**-40)
    best = min(
        sum(flops[cut] for cut in cuts)
        + rising.flops_per_s
        * max([0.0, *(times[cut - 1, i] - rising.low for i, cut in enumerate(cuts) if cut != base[i])])
        for cuts in choices(useful, base)
    )
    assert charged.min(axis=0, where=available(useful, base), initial=np.inf).sum() == pytest.approx(best, abs=1e-6)


def available(useful, base):
    mask = np.vstack((np.zeros(base.size, dtype=bool), useful))
    mask[base, np.arange(base.size)] = True
    return mask


def test_charges_worked_by_hand():
    """Three devices that can spare the server 6 FLOPs each at 1, 2 and 4 s; a second is worth 4 FLOPs.

    The first has room for 4, the second for 4 more, the third for all of its 6. They pay 14 together, which is the
    optimum: a threshold of 2 s (8 FLOPs) leaves 6 to the server; 0, 1 and 4 s come to 18, 16 and 16.
    """
    threshold = Threshold(np.array([[0.0, 0.0, 0.0], [1.0, 2.0, 4.0]]), low=0.0, flops_per_s=4.0)
    useful = np.array([[False] * 3, [True] * 3])
    one = np.ones(3, dtype=np.int64)
    charged = charged_flops(np.array([0.0, 6.0, 0.0]), useful, one, 2 * one, [threshold], unit=1.0)
    np.testing.assert_array_equal(charged, [[6.0] * 3, [6.0] * 3, [4.0, 4.0, 6.0]])
