"""The fleet: devices, the edge server and their links, their changes over time, and measurements of them.

A `Fleet` is a snapshot: all resources as arrays with one entry per device. Three classes return a fleet for every round
(`Resources`): a constant one, one that redraws resources from ranges each round, and one that replays a trace. All
random draws are seeded by (seed, round), so that round 1000 can be computed without the 999 rounds before it.
"""

from adaptsfl.fleet.affine_time import AffineTime
from adaptsfl.fleet.fleet import FIXED, RATES, SERVER_FIXED, Device, Fleet, Server, memory_limits
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
    "FIXED",
    "FLEETS",
    "RATES",
    "SERVER_FIXED",
    "AffineTime",
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
