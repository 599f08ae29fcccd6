"""A Lagrangian bound that charges the seconds of thresholds to the devices that need them.

A box of thresholds (see exact.py) is bounded by times at its lower corner with cuts at its upper corner. This bound is
weak where the server is the bottleneck: every device takes its deepest cut and thereby spares the server work, and no
device pays for the threshold that this cut needs. Here each device pays a part. φ_i are functions that never fall, with

    Σ_i φ_i(t) ≤ t − low     for every t from `low` on.

If T is the maximum of the times t_i that devices need with their cuts, T − low ≥ Σ_i φ_i(T) ≥ Σ_i φ_i(t_i). So T − low
is at least the sum of the charges of all devices for their own cuts, and the server's turn plus all charges is again a
sum over devices, in which each device takes its own cheapest cut.

The charges are chosen as a flow. Each cut of a device, from shallow to deep, saves the server some work. The cut is
charged for as much of this work as fits into the seconds from `low` to its own time, cuts with the shortest times
first. The part that does not fit one threshold is charged to the next threshold. For a single threshold and times that
rise with depth this is the tightest bound: it equals the optimum over that threshold.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from adaptsfl.checks import BoolArray, FloatArray, IntArray


@dataclass(frozen=True)
class Threshold:
    """One maximum over devices, T ≥ `low`; one second of it is worth `flops_per_s` of the server's work."""

    times: FloatArray  # (m, n): the time that each cut needs
    low: float
    flops_per_s: float


def charged_flops(
    flops: FloatArray,
    useful: BoolArray,
    base: IntArray,
    deepest: IntArray,
    thresholds: Sequence[Threshold],
    unit: float,
) -> FloatArray:
    """Return the server work plus charges of each cut of each device: shape (m + 1, n), falling with depth.

    Args:
        flops: work that cut j leaves to the server, falling with j; entry 0 is for "no cut". All multiples of `unit`.
        useful: the cuts (m, n) that a device may take besides `base`.
        base: each device's cut (n,) that needs no higher threshold.
        deepest: cuts up to this one (n,) compete for the thresholds' seconds; deeper ones are not charged more.
        thresholds: the times of the cuts, and their worth in server work.
        unit: sums of its multiples are exact, and so are all sums here.
    """
    cuts = np.arange(1, len(flops))[:, None]
    costs = np.append(flops[1:].max(), flops[1:])  # no cut costs as much as the worst cut
    competing = useful & (cuts <= deepest)
    before = np.maximum.accumulate(np.vstack((base, np.where(competing, cuts, 0)[:-1])))
    unpaid = saved = np.where(competing, costs[before] - costs[cuts], 0.0)
    for threshold in thresholds:
        # A cut is not charged for more seconds than any deeper cut needs, so that charges rise with depth.
        needed = np.minimum.accumulate(np.where(useful, threshold.times, np.inf)[::-1])[::-1]
        unpaid = unpaid - _fitting_flow(unpaid, needed, threshold, unit)
    charges = np.cumsum(saved - unpaid, axis=0)
    return costs[:, None] + np.vstack((np.zeros(base.size), charges))


def _fitting_flow(demand: FloatArray, needed: FloatArray, threshold: Threshold, unit: float) -> FloatArray:
    """Return how much of each demand fits: the sum up to any time is at most the worth of the seconds since `low`."""
    asking = np.flatnonzero(demand)
    asking = asking[np.argsort(needed.ravel()[asking], kind="stable")]
    total = np.cumsum(demand.ravel()[asking])
    room = np.maximum(needed.ravel()[asking] - threshold.low, 0.0) * threshold.flops_per_s
    room = np.floor(np.minimum(room, total[-1:]) / unit) * unit
    fitting = total + np.minimum(np.minimum.accumulate(room - total), 0.0)
    flow = np.zeros(demand.size)
    flow[asking] = np.diff(fitting, prepend=0.0)
    return flow.reshape(demand.shape)
