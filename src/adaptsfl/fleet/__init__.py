"""Who takes part: devices, the edge server and their links, as they are, as they change, as they are measured.

A `Fleet` is one moment, all resources as arrays with one entry per device. Three things give a fleet for every round
(`Resources`): one that never changes, one whose ranges are redrawn each round, and one replayed from a trace. All are
seeded by (seed, round), so that round 1000 can be asked for without the 999 before it.
"""

from adaptsfl.fleet.fleet import RATES, Device, Fleet, Server, memory_limits
from adaptsfl.fleet.recipe import noise_from, resources_from
from adaptsfl.fleet.resources import (
    FLEETS,
    ConstantResources,
    FleetRanges,
    MeasurementNoise,
    RedrawnResources,
    Resources,
)
from adaptsfl.fleet.trace import TraceResources, read_trace, write_trace

__all__ = [
    "FLEETS",
    "RATES",
    "ConstantResources",
    "Device",
    "Fleet",
    "FleetRanges",
    "MeasurementNoise",
    "RedrawnResources",
    "Resources",
    "Server",
    "TraceResources",
    "memory_limits",
    "noise_from",
    "read_trace",
    "resources_from",
    "write_trace",
]
