"""A snapshot of a fleet: its devices, the edge server and their links."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from adaptsfl import checks
from adaptsfl.checks import FloatArray

RATES = ("flops", "uplink_bps", "downlink_bps", "fed_uplink_bps", "fed_downlink_bps")
# Seconds of every forward pass, backward pass or transfer, however small it is: 0 in the paper.
FIXED = ("forward_s", "backward_s", "uplink_s", "downlink_s", "fed_uplink_s", "fed_downlink_s")
SERVER_FIXED = ("turn_s", "to_fed_s", "from_fed_s", "averaging_s")
ZEROS: Any = None  # as one of `FIXED`: 0 for every device


@dataclass(frozen=True)
class Device:
    """One device: f_i, r_i^U, r_i^D, r_{i,f}^U, r_{i,f}^D, the memory for training, and fixed seconds (`FIXED`)."""

    name: str
    flops: float
    uplink_bps: float
    downlink_bps: float
    fed_uplink_bps: float
    fed_downlink_bps: float
    memory_bytes: float | None = None
    forward_s: float = 0.0
    backward_s: float = 0.0
    uplink_s: float = 0.0
    downlink_s: float = 0.0
    fed_uplink_s: float = 0.0
    fed_downlink_s: float = 0.0


@dataclass(frozen=True)
class Server:
    """The edge server and its links with the fed server: f_s, r_{s,f} and r_{f,s}; and the fed server's averaging.

    Attributes:
        turn_s, to_fed_s, from_fed_s: fixed seconds of every turn, and of every transfer to and from the fed server.
        averaging_s: fixed seconds of every averaging.
        averaging_bps: the bits of devices' layers that the fed server averages per second; None takes no time.
    """

    flops: float
    to_fed_bps: float
    from_fed_bps: float
    turn_s: float = 0.0
    to_fed_s: float = 0.0
    from_fed_s: float = 0.0
    averaging_s: float = 0.0
    averaging_bps: float | None = None

    def __post_init__(self) -> None:
        for name in ("flops", "to_fed_bps", "from_fed_bps"):
            object.__setattr__(self, name, checks.number(name, getattr(self, name), positive=True))
        for name in SERVER_FIXED:
            object.__setattr__(self, name, checks.number(name, getattr(self, name)))
        if self.averaging_bps is not None:
            checks.number("averaging_bps", self.averaging_bps, positive=True)


@dataclass(frozen=True)
class Fleet:
    """All devices and the edge server at one moment; entry i of every array belongs to device i.

    The last six arrays are fixed seconds (`FIXED`): what every forward pass, backward pass and transfer takes besides
    its work or bits over the rate.
    """

    flops: FloatArray
    uplink_bps: FloatArray
    downlink_bps: FloatArray
    fed_uplink_bps: FloatArray
    fed_downlink_bps: FloatArray
    server: Server
    memory_bytes: FloatArray | None = None  # infinite for a device without a limit
    names: tuple[str, ...] = ()
    forward_s: FloatArray = ZEROS
    backward_s: FloatArray = ZEROS
    uplink_s: FloatArray = ZEROS
    downlink_s: FloatArray = ZEROS
    fed_uplink_s: FloatArray = ZEROS
    fed_downlink_s: FloatArray = ZEROS

    def __post_init__(self) -> None:
        size: int | None = None
        for name in RATES:
            values = checks.vector(name, getattr(self, name), length=size, of="one per device", positive=True)
            size = values.size
            object.__setattr__(self, name, values)
        for name in FIXED:
            given = getattr(self, name)
            seconds = np.zeros(self.size) if given is ZEROS else given
            object.__setattr__(self, name, checks.vector(name, seconds, length=self.size, of="one per device"))
        if self.memory_bytes is not None:
            object.__setattr__(self, "memory_bytes", _memory("memory_bytes", self.memory_bytes, self.size))
        object.__setattr__(self, "names", checks.names("names", self.names, self.size, "one per device"))

    @property
    def size(self) -> int:
        """N, the number of devices."""
        return self.flops.size

    def name(self, index: int) -> str:
        """Return the name of the device at `index`; unnamed devices are numbered from 1."""
        return self.names[index] if self.names else f"device {index + 1}"

    def device(self, index: int) -> Device:
        """Return one device by its index."""
        numbers = {name: float(getattr(self, name)[index]) for name in (*RATES, *FIXED)}
        limit = float("inf") if self.memory_bytes is None else float(self.memory_bytes[index])
        return Device(self.name(index), **numbers, memory_bytes=None if np.isinf(limit) else limit)

    @property
    def has_fixed_costs(self) -> bool:
        """Whether anything takes fixed seconds."""
        of_devices = any(np.any(getattr(self, name)) for name in FIXED)
        return of_devices or any(getattr(self.server, name) for name in SERVER_FIXED)

    def __iter__(self) -> Iterator[Device]:
        return (self.device(index) for index in range(self.size))

    @classmethod
    def of(cls, devices: Sequence[Device], server: Server) -> "Fleet":
        """Build a fleet from single devices."""
        limits = [device.memory_bytes for device in devices]
        return cls(
            **{name: np.array([getattr(device, name) for device in devices]) for name in (*RATES, *FIXED)},
            server=server,
            memory_bytes=None if all(limit is None for limit in limits) else memory_limits(limits),
            names=tuple(device.name for device in devices),
        )

    def subset(self, indices: Sequence[int]) -> "Fleet":
        """Return the fleet of some of its devices, in the given order; each keeps its name."""
        if list(indices) == list(range(self.size)):
            return self
        chosen = [checks.whole_number("indices", index, at_least=0, at_most=self.size - 1) for index in indices]
        return Fleet(
            **{name: getattr(self, name)[chosen] for name in (*RATES, *FIXED)},
            server=self.server,
            memory_bytes=None if self.memory_bytes is None else self.memory_bytes[chosen],
            names=tuple(self.name(index) for index in chosen),
        )

    def with_rates(self, rates: Mapping[str, FloatArray]) -> "Fleet":
        """Return the fleet with some of its `RATES` or `FIXED` seconds replaced."""
        changes: dict[str, Any] = dict(rates)
        return dataclasses.replace(self, **changes)

    def scaled(self, factor: float, *resources: str) -> "Fleet":
        """Return the fleet with the named numbers, of devices or (as `server.flops`) of the server, times `factor`."""
        ours = {name: getattr(self, name) * factor for name in resources if "." not in name}
        theirs = [name.partition(".")[2] for name in resources if "." in name]
        server = dataclasses.replace(self.server, **{name: getattr(self.server, name) * factor for name in theirs})
        return dataclasses.replace(self, server=server).with_rates(ours)


def memory_limits(limits: Sequence[float | None]) -> FloatArray:
    """Return memory limits as an array; None (no limit) becomes infinity."""
    return np.array([np.inf if limit is None else limit for limit in limits], dtype=np.float64)


def _memory(name: str, values: FloatArray, size: int) -> FloatArray:
    """Check limits like any other vector, but allow infinity (no limit)."""
    limits = np.array(values, dtype=np.float64)
    checks.vector(name, np.where(limits == np.inf, 1.0, limits), length=size, of="one per device", positive=True)
    limits.setflags(write=False)
    return limits
