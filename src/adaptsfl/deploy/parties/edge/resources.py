"""Measured resources of the fleet: fixed seconds and rates, which the planner receives as a `Fleet`."""

import dataclasses
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from adaptsfl import latency
from adaptsfl.checks import FloatArray
from adaptsfl.costs import CutCosts
from adaptsfl.deploy.wire_pb2 import Ready
from adaptsfl.errors import BadMessage
from adaptsfl.fleet import RATES, AffineTime, Fleet, Server
from adaptsfl.training.settings import OptimizerSettings

FASTEST = 1e11  # bits per second that stand for a link too fast to be measured
AVERAGED_BPS = 2e9  # bits of layers that a fed server receives, checks and averages per second: the first guess
# Plausible limits of rates; far from values at which formulas give 0 or infinity.
SLOWEST_EVER, FASTEST_EVER = 1.0, 1e18
LONGEST_S = 1e6  # the longest computing time that a device may report
PROBED_BITS = 2**21  # about the size of the transfers with which a device measures its links when it joins
# Every rate with the name of the fixed seconds beside it; those of computing are split between both passes.
LINKS = {name: name.removesuffix("_bps") + "_s" for name in RATES if name.endswith("_bps")}
SERVER_RATES = {"flops": "turn_s", "to_fed_bps": "to_fed_s", "from_fed_bps": "from_fed_s"}
# The link to the edge server beside each to the fed server. A device mostly has one way out, so if one has changed by
# this factor, the other has too: it is used once per block, and by itself would be believed after three blocks only.
BESIDE, CHANGED = {"fed_uplink_bps": "uplink_bps", "fed_downlink_bps": "downlink_bps"}, 2.0
# Numbers sent per parameter when a layer is averaged: the parameter itself, and its optimiser state.
TRAVELLING = {"sgd": 1, "momentum": 2, "adam": 3}


def passes(flops: float, passes_s: float, fixed_s: float, beside_s: float = 0.0) -> AffineTime:
    """Return a first guess of how long passes take, of which one through all layers took `passes_s`.

    Args:
        flops: the speed if no seconds were fixed.
        fixed_s: how many of `passes_s` do not depend on the number of samples; at most half of them is believed.
        beside_s: further fixed seconds, which are not in `passes_s`.
    """
    fixed_s = min(fixed_s, passes_s / 2) if fixed_s > 0 else 0.0
    return AffineTime(min(flops * passes_s / (passes_s - fixed_s), FASTEST_EVER), fixed_s + beside_s)


class MeasuredFleet:
    """The rates of all devices and servers, and the fixed seconds of every pass and transfer.

    FLOPs say little about how long a layer takes on a real machine. So the work of a layer is measured by devices: its
    share in the time of all layers, averaged over devices, scaled so that the forward pass sums to the model's FLOPs.

    Attributes:
        devices: by number and rate: how long passes and transfers take.
        server: the same of the edge server, by rate; a turn is what it computes in a round.
        averaging: how long the fed server takes to open a block and to average the layers of all devices.
    """

    def __init__(self, nominal: CutCosts, names: Sequence[str], batch_size: int, settings: OptimizerSettings) -> None:
        self.names, self.batch_size = tuple(names), batch_size
        travelling = TRAVELLING[settings.name] if settings.at_averaging == "average" else 1
        self.nominal = dataclasses.replace(nominal, client_model_bits=nominal.client_model_bits * travelling)
        self.devices: dict[int, dict[str, AffineTime]] = {}
        self.server = {name: AffineTime(FASTEST) for name in SERVER_RATES}
        self.averaging = AffineTime(AVERAGED_BPS)
        self._beside: dict[tuple[int, str], float] = {}  # by device and link: the rate of the one beside it, last time
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
        passes_s, flops = float(forward.sum() + backward.sum()), min(float(flops), FASTEST_EVER)
        known = self.devices.setdefault(number, {"flops": passes(flops, passes_s, message.fixed_s)})
        one_way_s = {name: getattr(message.rates, fixed_name) for name, fixed_name in LINKS.items()}
        one_way_s = {name: seconds if 0 <= seconds <= LONGEST_S else 0.0 for name, seconds in one_way_s.items()}
        fixed_s = dict(one_way_s)
        # Layers are delivered and fetched by calls, which are answered. Besides, a message tells the edge server that
        # they are delivered, or the device what to fetch.
        call_s = one_way_s["fed_uplink_bps"] + one_way_s["fed_downlink_bps"]
        fixed_s["fed_uplink_bps"] = call_s + one_way_s["uplink_bps"]
        fixed_s["fed_downlink_bps"] = call_s + one_way_s["downlink_bps"]
        for name in LINKS:
            self._probed(known, name, getattr(message.rates, name.removesuffix("_bps")), fixed_s[name])

    def _probed(self, known: dict[str, AffineTime], name: str, rate: float, fixed_s: float) -> None:
        """Add the rate and the fixed seconds of a link that was probed; a rate of 0 is too fast to be measured."""
        measured = rate >= SLOWEST_EVER
        rate = min(rate, FASTEST) if measured else FASTEST
        link = known.setdefault(name, AffineTime(rate, fixed_s))
        if measured:  # both were measured apart: by the smallest message, and by a large one
            link.add(0, fixed_s)
            link.add(PROBED_BITS, fixed_s + PROBED_BITS / rate)

    def device(self, number: int, bits: float, **rates: float) -> None:
        """Add the bits per second of a device's links, by their names in `RATES`, as the receiver measured them.

        A receiver measures from the first byte to the last, so it learns nothing about fixed seconds.
        """
        self.first_rates(number, bits, **rates)
        for name, rate in rates.items():
            if SLOWEST_EVER <= rate < np.inf:
                link = self.devices[number][name]
                link.add(bits, link.fixed_s + bits / rate)

    def first_rates(self, number: int, bits: float, **rates: float) -> None:
        """Restart the estimates of links that were not probed: until a rate is known, all seconds seem to be fixed."""
        for name, rate in rates.items():
            link = self.devices[number][name]
            if link.rate >= FASTEST / 2 and SLOWEST_EVER <= rate < FASTEST / 2:
                fixed_s = max(0.0, link.predict_s(bits) - bits / rate)
                self.devices[number][name] = AffineTime(rate, min(fixed_s, LONGEST_S))

    def transferred(self, number: int, link: str, bits: float, seconds: float) -> None:
        """Add how long a whole transfer over a device's link took, latency included."""
        known = self.devices[number]
        if beside := BESIDE.get(link):
            before, now = self._beside.get((number, link)), known[beside].rate
            if before is not None and not 1 / CHANGED < now / before < CHANGED:
                known[link].expect_change()
            self._beside[number, link] = now
        known[link].add(bits, max(0.0, seconds))

    def transfer_s(self, number: int, link: str, bits: float) -> float:
        """Return how long a transfer over a device's link is expected to take."""
        return self.devices[number][link].predict_s(bits)

    def server_probed(self, to_fed_bps: float, from_fed_bps: float, to_fed_s: float, from_fed_s: float) -> None:
        """Add the rates and fixed seconds of the links between the two servers, as they were probed."""
        call_s = to_fed_s + from_fed_s  # every call of the fed server is answered
        for name, rate in (("to_fed_bps", to_fed_bps), ("from_fed_bps", from_fed_bps)):
            self.server.pop(name, None)
            self._probed(self.server, name, rate, call_s)
        self.averaging = AffineTime(AVERAGED_BPS, 2 * call_s)  # two: a block is opened, and its layers are averaged

    def computed(self, number: int, cut: int, forward_s: float, backward_s: float, parts: int = 1) -> None:
        """Add the time that a device's layers took for one of so many parts of a mini-batch."""
        costs = self.costs
        if forward_s > 0 and backward_s > 0:
            work = self.batch_size / parts * (costs.forward_flops[cut - 1] + costs.backward_flops[cut - 1])
            self.devices[number]["flops"].add(work, forward_s + backward_s)

    def server_took(self, cuts: Sequence[int], seconds: float, parts: int = 1) -> None:
        """Add the time that the server's turn took for one of so many parts of a round."""
        work = self.batch_size / parts * float(latency.server_flops(self.costs, np.array(cuts)))
        if seconds > 0:
            self.server["flops"].add(work, seconds)

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
        known = [self.devices[number] for number in numbers]
        rates = {name: np.array([device[name].rate for device in known]) for name in RATES}
        fixed = {seconds: np.array([device[name].fixed_s for device in known]) for name, seconds in LINKS.items()}
        a_pass = np.array([device["flops"].fixed_s for device in known]) / 2
        names = tuple(self.names[number] for number in numbers)
        return Fleet(**rates, **fixed, forward_s=a_pass, backward_s=a_pass, server=self.servers(), names=names)

    def servers(self) -> Server:
        """Return the edge server and its link with the fed server as the planner's `Server`."""
        rates = {name: self.server[name].rate for name in SERVER_RATES}
        fixed = {seconds: self.server[name].fixed_s for name, seconds in SERVER_RATES.items()}
        return Server(**rates, **fixed, averaging_s=self.averaging.fixed_s, averaging_bps=self.averaging.rate)
