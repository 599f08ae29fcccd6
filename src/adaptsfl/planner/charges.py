"""A Lagrangian bound: seconds of thresholds, charged to the devices that need them.

A box of thresholds (see exact.py) is bounded by times at its lower corner with cuts at its upper corner. This bound is
weak where the server is the bottleneck: every device takes its deepest cut and thereby spares the server work, and no
device pays for the threshold that this cut needs. Here each pays a part. Let φ_i be functions that never fall, with

    Σ_i φ_i(t) ≤ t − low     for every t from `low` on.

Where T is the maximum of the times t_i that devices need with their cuts, T − low ≥ Σ_i φ_i(T) ≥ Σ_i φ_i(t_i). So what
T exceeds `low` by is at least the sum of what devices are charged for their own cuts, and the server's turn with all
charges is again a sum over devices, in which each takes the cut that is cheapest for it alone.

The charges are chosen as a flow. Each of the cuts that a device can take, from shallow to deep, spares the server some
work. It is charged for as much of that as there is room for in the seconds from `low` to its own time, cuts with the
shortest times first. What one threshold has no room for is charged to the next threshold. For a single threshold and
times that rise with depth this is the best bound of all: what remains is the optimum over that threshold.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from adaptsfl.checks import BoolArray, FloatArray, IntArray


@dataclass(frozen=True)
class Threshold:
    """One maximum over devices, T ≥ `low`, of which a second is worth `flops_per_s` of the server's work."""

    times: FloatArray  # (m, n): what each cut needs
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
    """Return what each cut costs a device in server work and charges: shape (m + 1, n), falling with depth.

    Args:
        flops: what cut j leaves to the server, falling with j; entry 0 is for "no cut". All multiples of `unit`.
        useful: the cuts (m, n) that a device may take beside `base`, its cut (n,) that needs no threshold to rise.
        deepest: cuts up to this one (n,) compete for the thresholds' seconds; deeper ones are charged no more than it.
        thresholds: what the cuts need, and what that is worth.
        unit: sums of its multiples are exact, and so is everything here.
    """
    cuts = np.arange(1, len(flops))[:, None]
    costs = np.append(flops[1:].max(), flops[1:])  # having no cut is no better than having any
    competing = useful & (cuts <= deepest)
    before = np.maximum.accumulate(np.vstack((base, np.where(competing, cuts, 0)[:-1])))
    unpaid = saved = np.where(competing, costs[before] - costs[cuts], 0.0)
    for threshold in thresholds:
        # No cut is charged for more seconds than the deeper ones need: charges rise with depth.
        needed = np.minimum.accumulate(np.where(useful, threshold.times, np.inf)[::-1])[::-1]
        unpaid = unpaid - _fitting_flow(unpaid, needed, threshold, unit)
    charges = np.cumsum(saved - unpaid, axis=0)
    return costs[:, None] + np.vstack((np.zeros(base.size), charges))


def _fitting_flow(demand: FloatArray, needed: FloatArray, threshold: Threshold, unit: float) -> FloatArray:
    """Return how much of each demand fits: up to any time, no more than the seconds from `low` to it are worth."""
    asking = np.flatnonzero(demand)
    asking = asking[np.argsort(needed.ravel()[asking], kind="stable")]
    total = np.cumsum(demand.ravel()[asking])
    room = np.maximum(needed.ravel()[asking] - threshold.low, 0.0) * threshold.flops_per_s
    room = np.floor(np.minimum(room, total[-1:]) / unit) * unit
    fitting = total + np.minimum(np.minimum.accumulate(room - total), 0.0)
    flow = np.zeros(demand.size)
    flow[asking] = np.diff(fitting, prepend=0.0)
    return flow.reshape(demand.shape)
