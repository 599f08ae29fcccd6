"""Measured resources of the fleet: moving averages of times, which the planner receives as a `Fleet`."""

import dataclasses
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from adaptsfl import latency
from adaptsfl.checks import FloatArray
from adaptsfl.costs import CutCosts
from adaptsfl.deploy.wire_pb2 import Ready
from adaptsfl.errors import BadMessage
from adaptsfl.fleet import RATES, Fleet, Server
from adaptsfl.runs.beliefs import MEMORY_ROUNDS
from adaptsfl.training.settings import OptimizerSettings

FASTEST = 1e11  # bits per second that stand for a link too fast to be measured
# Plausible limits of rates; far from values at which formulas give 0 or infinity.
SLOWEST_EVER, FASTEST_EVER = 1.0, 1e18
LONGEST_S = 1e6  # the longest computing time that a device may report
WHOLE_BITS = 2**21  # a transfer of this size counts as one full measurement; in shorter ones overhead dominates
SERVER_RATES = ("flops", "to_fed_bps", "from_fed_bps")
# Numbers sent per parameter when a layer is averaged: the parameter itself, and its optimiser state.
TRAVELLING = {"sgd": 1, "momentum": 2, "adam": 3}


class Moving:
    """A moving average of a rate: the mean of 1/rate over about the last `MEMORY_ROUNDS` measurements."""

    def __init__(self, rate: float) -> None:
        self._slowness, self._weight = 1 / rate, 0.0

    def add(self, rate: float, weight: float = 1.0) -> None:
        """Add a measurement, with a small weight if it was short; the first one replaces the initial guess."""
        if not (0 < rate < np.inf and weight > 0):
            return
        rate = min(max(rate, SLOWEST_EVER), FASTEST_EVER)
        self._weight = min(self._weight + weight, MEMORY_ROUNDS)
        self._slowness += (1 / rate - self._slowness) * min(1.0, weight / self._weight)

    @property
    def rate(self) -> float:
        """The present average."""
        return 1 / self._slowness


class MeasuredFleet:
    """The rates of all devices and servers.

    FLOPs say little about how long a layer takes on a real machine. So the work of a layer is measured by devices: its
    share in the time of all layers, averaged over devices, scaled so that the forward pass sums to the model's FLOPs.
    """

    def __init__(self, nominal: CutCosts, names: Sequence[str], batch_size: int, settings: OptimizerSettings) -> None:
        self.names, self.batch_size = tuple(names), batch_size
        travelling = TRAVELLING[settings.name] if settings.at_averaging == "average" else 1
        self.nominal = dataclasses.replace(nominal, client_model_bits=nominal.client_model_bits * travelling)
        self.devices: dict[int, dict[str, Moving]] = {}
        self.server = {name: Moving(FASTEST) for name in SERVER_RATES}
        self._shares: dict[int, tuple[FloatArray, FloatArray]] = {}  # by device: per layer, forward and backward

    def ready(self, number: int, message: Ready) -> None:
        """Add the measurements that a device made when it joined."""
        times = [np.array(values, dtype=np.float64) for values in (message.forward_s, message.backward_s)]
        for seconds in times:
            if seconds.shape != (self.nominal.layers,) or not ((seconds >= 0) & (seconds <= LONGEST_S)).all():
                raise BadMessage("a device measured its layers in another number, or in seconds that cannot be")
        forward, backward = (np.maximum(seconds, 1e-9) for seconds in times)
        self._shares[number] = forward / forward.sum(), backward / forward.sum()
        self.__dict__.pop("costs", None)
        flops = self.batch_size * self.nominal.forward_flops[-1] / forward.sum()
        known = self.devices.setdefault(number, {name: Moving(FASTEST) for name in RATES})
        known["flops"].add(float(flops))
        rates = message.rates
        self.device(
            number,
            WHOLE_BITS,
            uplink_bps=rates.uplink,
            downlink_bps=rates.downlink,
            fed_uplink_bps=rates.fed_uplink,
            fed_downlink_bps=rates.fed_downlink,
        )

    def device(self, number: int, bits: float, **rates: float) -> None:
        """Add the bits per second of a device's links, by their names in `RATES`, measured with so many bits."""
        for name, rate in rates.items():
            if rate >= SLOWEST_EVER:
                self.devices[number][name].add(min(rate, FASTEST), min(1.0, bits / WHOLE_BITS))

    def server_link(self, bits: float, **rates: float) -> None:
        """Add the bits per second between the two servers, by their names in `SERVER_RATES`."""
        for name, rate in rates.items():
            self.server[name].add(rate, min(1.0, bits / WHOLE_BITS))

    def computed(self, number: int, cut: int, forward_s: float, backward_s: float) -> None:
        """Add the time that a device's layers took."""
        costs = self.costs
        if forward_s > 0 and backward_s > 0:
            work = self.batch_size * (costs.forward_flops[cut - 1] + costs.backward_flops[cut - 1])
            self.devices[number]["flops"].add(work / max(1e-9, forward_s + backward_s))

    def server_took(self, cuts: Sequence[int], seconds: float) -> None:
        """Add the time that the server's part of one round took."""
        work = self.batch_size * float(latency.server_flops(self.costs, np.array(cuts)))
        if work > 0 and seconds > 0:
            self.server["flops"].add(work / seconds)

    @cached_property
    def costs(self) -> CutCosts:
        """The costs of every cut, with the work that devices measured; computed again when a device joins."""
        if not self._shares:
            return self.nominal
        total = self.nominal.forward_flops[-1]
        forward, backward = (np.mean([shares[k] for shares in self._shares.values()], axis=0) for k in range(2))
        return dataclasses.replace(
            self.nominal, forward_flops=total * np.cumsum(forward), backward_flops=total * np.cumsum(backward)
        )

    def fleet(self, numbers: Sequence[int]) -> Fleet:
        """Return these devices as the planner's `Fleet`."""
        rates = {name: np.array([self.devices[number][name].rate for number in numbers]) for name in RATES}
        return Fleet(**rates, server=self.servers(), names=tuple(self.names[number] for number in numbers))

    def servers(self) -> Server:
        """Return the edge server and its link with the fed server as the planner's `Server`."""
        return Server(**{name: moving.rate for name, moving in self.server.items()})
