"""What the edge server knows of its fleet, all of it measured: moving averages of times, as the planner's `Fleet`."""

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

FASTEST = 1e11  # bits per second, of a link that is too fast to be measured
# Rates and seconds that a device can say without being laughed at; far from where formulas meet 0 or infinity.
SLOWEST_EVER, FASTEST_EVER = 1.0, 1e18
LONGEST_S = 1e6  # that a device may say to have computed
WHOLE_BITS = 2**21  # of a transfer that counts as one measurement; in shorter ones much of the time is not the link's
SERVER_RATES = ("flops", "to_fed_bps", "from_fed_bps")
# How often a layer's parameters travel when it is averaged: themselves, and what the optimiser keeps of each.
TRAVELLING = {"sgd": 1, "momentum": 2, "adam": 3}


class Moving:
    """A rate, averaged as times are: the mean of 1/rate over about the last `MEMORY_ROUNDS` measurements."""

    def __init__(self, rate: float) -> None:
        self._slowness, self._weight = 1 / rate, 0.0

    def add(self, rate: float, weight: float = 1.0) -> None:
        """Take in a measurement, of little weight if it was a short one; the first takes the place of a guess."""
        if not (0 < rate < np.inf and weight > 0):
            return
        rate = min(max(rate, SLOWEST_EVER), FASTEST_EVER)
        self._weight = min(self._weight + weight, MEMORY_ROUNDS)
        self._slowness += (1 / rate - self._slowness) * min(1.0, weight / self._weight)

    @property
    def rate(self) -> float:
        """What is known."""
        return 1 / self._slowness


class MeasuredFleet:
    """Everybody's rates.

    FLOPs say little about how long a layer takes on a real machine. So the work of a layer is here what devices
    measured: its share in the time of all layers, on average over devices, in units that make up the model's FLOPs.
    """

    def __init__(self, nominal: CutCosts, names: Sequence[str], batch_size: int, settings: OptimizerSettings) -> None:
        self.names, self.batch_size = tuple(names), batch_size
        travelling = TRAVELLING[settings.name] if settings.at_averaging == "average" else 1
        self.nominal = dataclasses.replace(nominal, client_model_bits=nominal.client_model_bits * travelling)
        self.devices: dict[int, dict[str, Moving]] = {}
        self.server = {name: Moving(FASTEST) for name in SERVER_RATES}
        self._shares: dict[int, tuple[FloatArray, FloatArray]] = {}  # by device: of every layer, forward and backward

    def ready(self, number: int, message: Ready) -> None:
        """Take in what a device measured when it joined."""
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
        """Take in bits per second of a device's links, by their names in `RATES`, measured with so many bits."""
        for name, rate in rates.items():
            if rate >= SLOWEST_EVER:
                self.devices[number][name].add(min(rate, FASTEST), min(1.0, bits / WHOLE_BITS))

    def server_link(self, bits: float, **rates: float) -> None:
        """Take in bits per second between the two servers, by their names in `SERVER_RATES`."""
        for name, rate in rates.items():
            self.server[name].add(rate, min(1.0, bits / WHOLE_BITS))

    def computed(self, number: int, cut: int, forward_s: float, backward_s: float) -> None:
        """Take in how long a device's layers took."""
        costs = self.costs
        if forward_s > 0 and backward_s > 0:
            work = self.batch_size * (costs.forward_flops[cut - 1] + costs.backward_flops[cut - 1])
            self.devices[number]["flops"].add(work / max(1e-9, forward_s + backward_s))

    def server_took(self, cuts: Sequence[int], seconds: float) -> None:
        """Take in how long the server's turn of one round took."""
        work = self.batch_size * float(latency.server_flops(self.costs, np.array(cuts)))
        if work > 0 and seconds > 0:
            self.server["flops"].add(work / seconds)

    @cached_property
    def costs(self) -> CutCosts:
        """What every cut costs, with work as devices measured it; worked out anew when one has joined."""
        if not self._shares:
            return self.nominal
        total = self.nominal.forward_flops[-1]
        forward, backward = (np.mean([shares[k] for shares in self._shares.values()], axis=0) for k in range(2))
        return dataclasses.replace(
            self.nominal, forward_flops=total * np.cumsum(forward), backward_flops=total * np.cumsum(backward)
        )

    def fleet(self, numbers: Sequence[int]) -> Fleet:
        """Return some of the devices as the planner sees them."""
        rates = {name: np.array([self.devices[number][name].rate for number in numbers]) for name in RATES}
        return Fleet(**rates, server=self.servers(), names=tuple(self.names[number] for number in numbers))

    def servers(self) -> Server:
        """Return the edge server and its link with the fed server as the planner sees them."""
        return Server(**{name: moving.rate for name, moving in self.server.items()})
