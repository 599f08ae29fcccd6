"""Policies of a test's own, which remember what they were shown; a test reads it from `SHOWN`."""

import threading
from typing import Any

import numpy as np

from adaptsfl.policies import BasePolicy, Decision, Observation

SHOWN: list[list[Observation]] = []  # by policy that was made, in order
THINK: list[threading.Event] = []  # a policy that is slow on purpose waits for these, one per question


class ByUplink(BasePolicy):
    """The one that docs/policies.md shows: averages more often the further copies have drifted apart."""

    divergence = True

    def __init__(self, shallow: int = 1, deep: int = 3, interval: int = 4, apart: float = 0.0, rounds: int = 0) -> None:
        self.shallow, self.deep, self.interval, self.apart, self.rounds = shallow, deep, interval, apart, rounds
        self.seen: list[Observation] = []
        SHOWN.append(self.seen)

    def decide(self, seen: Observation) -> Decision:
        """Return shallow cuts for half of the devices; halve the interval where copies are further apart."""
        self.seen.append(seen)
        if seen.divergence.size and seen.divergence.mean() > self.apart:
            self.interval = max(1, self.interval // 2)
        cuts = np.where(np.arange(seen.devices) % 2, self.deep, self.shallow)
        return Decision(tuple(cuts.tolist()), self.interval, rounds=self.rounds or None)


class AsTrusted(BasePolicy):
    """Averages as seldom as what is believed about convergence is trusted: its blocks do not depend on any seconds."""

    estimates = True

    def decide(self, seen: Observation) -> Decision:
        """Return the longest interval that is trusted."""
        return Decision((3,) * seen.devices, seen.trust.longest_interval)


class Slow(BasePolicy):
    """Another cut in every decision; every question but the first waits until the test lets it be answered."""

    def __init__(self) -> None:
        self.seen: list[Observation] = []
        SHOWN.append(self.seen)

    def decide(self, seen: Observation) -> Decision:
        """Return interval 1."""
        number = len(self.seen)
        self.seen.append(seen)
        if number:
            THINK[number - 1].wait()
        return Decision((1 + number,) * seen.devices, 1)


def describe(seen: Observation) -> dict[str, Any]:
    """Return everything that a policy may look at, as plain numbers."""
    fleet, costs = seen.fleet, seen.costs
    rates = [getattr(fleet, name).tolist() for name in ("flops", "uplink_bps", "downlink_bps", "fed_uplink_bps")]
    return {
        "numbers": (seen.round, seen.block, seen.batch_size, seen.epoch_rounds, seen.trust.longest_interval),
        "fleet": (rates, fleet.server, fleet.names, seen.present),
        "costs": (costs.forward_flops.tolist(), costs.backward_flops.tolist(), costs.activation_bits.tolist()),
        "divergence": seen.divergence.tolist(),
        "drawn": seen.rng.bit_generator.state["state"],
        "rounds": seen.convergence.rounds(16, np.arange(1, seen.layers + 1)).tolist(),
        "losses": seen.losses.tolist(),
    }
