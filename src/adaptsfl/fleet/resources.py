"""Fleets over time: constant, or redrawn from ranges every round; and the noise of their measurements."""

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from adaptsfl import checks
from adaptsfl.checks import FloatArray
from adaptsfl.fleet.fleet import FIXED, RATES, Fleet, Server

TERA, MEGA, MILLI = 1e12, 1e6, 1e-3


class Resources(Protocol):
    """The true resources of every round, from round 0 on."""

    def at(self, round_: int) -> Fleet:
        """Return the fleet as it is in that round."""
        ...


@dataclass(frozen=True)
class ConstantResources:
    """A fleet that never changes."""

    fleet: Fleet

    def at(self, round_: int) -> Fleet:
        """Return the fleet, whatever the round."""
        return self.fleet


NONE = (0.0, 0.0)  # no fixed seconds
PAPER_SERVER = Server(20 * TERA, 400 * MEGA, 400 * MEGA)


@dataclass(frozen=True)
class FleetRanges:
    """Ranges from which the resources of devices are drawn. Defaults: Table II.

    Rates and memory are drawn uniformly or log-uniformly, fixed seconds uniformly: they may be 0.
    """

    flops: tuple[float, float] = (1 * TERA, 2 * TERA)
    uplink_bps: tuple[float, float] = (75 * MEGA, 80 * MEGA)
    downlink_bps: tuple[float, float] = (370 * MEGA, 370 * MEGA)
    fed_uplink_bps: tuple[float, float] = (75 * MEGA, 80 * MEGA)
    fed_downlink_bps: tuple[float, float] = (370 * MEGA, 370 * MEGA)
    memory_bytes: tuple[float, float] | None = None
    server: Server = PAPER_SERVER
    logarithmic: bool = False
    forward_s: tuple[float, float] = NONE
    backward_s: tuple[float, float] = NONE
    uplink_s: tuple[float, float] = NONE
    downlink_s: tuple[float, float] = NONE
    fed_uplink_s: tuple[float, float] = NONE
    fed_downlink_s: tuple[float, float] = NONE

    def sample(self, devices: int, rng: np.random.Generator) -> Fleet:
        """Draw a fleet of that many devices."""
        checks.whole_number("devices", devices)
        rates: dict[str, Any] = {name: self.draw(name, devices, rng) for name in RATES}
        memory = None if self.memory_bytes is None else self.draw("memory_bytes", devices, rng)
        fixed: dict[str, Any] = {name: self.draw(name, devices, rng) for name in FIXED if getattr(self, name) != NONE}
        return Fleet(**rates, **fixed, server=self.server, memory_bytes=memory)

    def draw(self, resource: str, devices: int, rng: np.random.Generator) -> FloatArray:
        """Draw one resource of every device."""
        low, high = getattr(self, resource)
        if self.logarithmic and resource not in FIXED:
            # exp and log round: without the clip a draw could leave its range by one unit in the last place.
            return np.clip(np.exp(rng.uniform(np.log(low), np.log(high), devices)), low, high)
        return rng.uniform(low, high, devices)


FLEETS: dict[str, FleetRanges] = {
    "paper": FleetRanges(),
    # Phones, boards and laptops on anything from a bad mobile link to good Wi-Fi: two decades in every resource.
    "heterogeneous": FleetRanges(
        flops=(0.05 * TERA, 5 * TERA),
        uplink_bps=(2 * MEGA, 200 * MEGA),
        downlink_bps=(10 * MEGA, 1000 * MEGA),
        fed_uplink_bps=(2 * MEGA, 200 * MEGA),
        fed_downlink_bps=(10 * MEGA, 1000 * MEGA),
        logarithmic=True,
    ),
}

# The paper: computing capability and both uplink rates vary across every round.
REDRAWN_IN_THE_PAPER = ("flops", "uplink_bps", "fed_uplink_bps")


@dataclass(frozen=True)
class RedrawnResources:
    """A fleet drawn once, some of whose resources are redrawn each round."""

    ranges: FleetRanges
    devices: int
    seed: int
    redrawn: tuple[str, ...] = REDRAWN_IN_THE_PAPER
    fleet: Fleet = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "fleet", self.ranges.sample(self.devices, np.random.default_rng([self.seed, 0])))

    def at(self, round_: int) -> Fleet:
        """Return the fleet of that round: it depends on the seed and the round only."""
        rng = np.random.default_rng([self.seed, 1, round_])
        drawn = {name: self.ranges.draw(name, self.devices, rng) for name in (*RATES, *FIXED) if name in self.redrawn}
        return self.fleet.with_rates(drawn)


@dataclass(frozen=True)
class MeasurementNoise:
    """Noise of the planner's measurements: Gaussian errors with given coefficients of variation on all device rates.

    A factor 1 + cv·z is drawn again until it is at least `SMALLEST_FACTOR`, so that a measured rate stays positive.
    """

    compute_cv: float = 0.0
    uplink_cv: float = 0.0
    downlink_cv: float = 0.0
    seed: int = 0

    SMALLEST_FACTOR = 0.05

    def __post_init__(self) -> None:
        for name in ("compute_cv", "uplink_cv", "downlink_cv"):
            checks.number(name, getattr(self, name))

    def measure(self, fleet: Fleet, round_: int) -> Fleet:
        """Return `fleet` as measured in that round."""
        rng = np.random.default_rng([self.seed, 2, round_])
        deviations = (self.compute_cv, self.uplink_cv, self.downlink_cv, self.uplink_cv, self.downlink_cv)
        measured = {
            name: getattr(fleet, name) * self._factors(cv, fleet.size, rng)
            for name, cv in zip(RATES, deviations, strict=True)
        }
        return fleet.with_rates(measured)

    def _factors(self, cv: float, size: int, rng: np.random.Generator) -> FloatArray:
        factors = 1 + cv * rng.standard_normal(size)
        while (bad := factors < self.SMALLEST_FACTOR).any():
            factors[bad] = 1 + cv * rng.standard_normal(int(bad.sum()))
        return factors
