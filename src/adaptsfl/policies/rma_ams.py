"""RMA+AMS: a random interval, and cuts by the devices' resources, ignoring convergence.

Paper: CoopFL's resource-aware splitting. Here: every device takes the deepest cut that keeps its own part of a round
under a common threshold, and the threshold is the best one. Because: CoopFL's own text is not public; this follows its
stated inputs and goal.
"""

import numpy as np

from adaptsfl import latency
from adaptsfl.checks import IntArray
from adaptsfl.decisions import Decision
from adaptsfl.policies.cuts import check_every_device_has_a_cut
from adaptsfl.policies.policy import Observation, decision
from adaptsfl.policies.random_plans import DrawnInterval


class ResourceAware(DrawnInterval):
    """The interval is drawn anew after every averaging, and the cuts follow the resources."""

    title = "RMA+AMS"

    def decide(self, seen: Observation) -> Decision:
        """Draw an interval and balance the devices."""
        return decision(balanced_cuts(seen), self.drawn_interval(seen))


def balanced_cuts(seen: Observation) -> IntArray:
    """Return the deepest cuts with d_i(j) ≤ T for the T among all d_i(j) that minimises T + T_s.

    d_i(j) is the time of device i itself in a round with cut j: T_i^F + T_{a,i}^U + T_{g,i}^D + T_i^B.
    """
    check_every_device_has_a_cut(seen)
    column = np.arange(1, seen.layers + 1)[:, None]
    moment = (seen.costs, seen.fleet, column, seen.batch_size)
    own = np.where(seen.allowed, latency.to_server_s(*moment) + latency.from_server_s(*moment), np.inf)
    left = latency.remaining_flops(seen.costs) * seen.batch_size / seen.fleet.server.flops  # seconds of the server
    deepest = np.zeros(seen.devices, dtype=np.int64)  # 0: none of the device's cuts is under the threshold yet
    waiting, server_s = seen.devices, 0.0
    best_s, best = np.inf, np.inf
    for layer, device in zip(*np.unravel_index(np.argsort(own, axis=None), own.shape), strict=True):
        threshold, before = own[layer, device], deepest[device]
        if np.isinf(threshold):
            break
        if layer + 1 > before:
            waiting -= before == 0
            server_s += left[layer] - (left[before - 1] if before else 0.0)
            deepest[device] = layer + 1
        if waiting == 0 and threshold + server_s <= best_s:
            best_s, best = threshold + server_s, threshold
    return seen.layers - np.argmax((own <= best)[::-1], axis=0)
