"""Turn the [fleet] of a recipe into resources."""

import dataclasses
from pathlib import Path

from adaptsfl import checks
from adaptsfl.config import FleetConfig, NoiseConfig
from adaptsfl.errors import InvalidInput
from adaptsfl.fleet.fleet import FIXED, RATES
from adaptsfl.fleet.resources import (
    FLEETS,
    MEGA,
    MILLI,
    REDRAWN_IN_THE_PAPER,
    TERA,
    FleetRanges,
    MeasurementNoise,
    RedrawnResources,
    Resources,
)
from adaptsfl.fleet.trace import read_trace

BESIDE_A_TRACE = {"trace", "trace_repeats", "noise", "seed"}

_CONFIG_KEYS = {
    "flops": ("device_tflops", TERA),
    "uplink_bps": ("uplink_mbps", MEGA),
    "downlink_bps": ("downlink_mbps", MEGA),
    "fed_uplink_bps": ("fed_uplink_mbps", MEGA),
    "fed_downlink_bps": ("fed_downlink_mbps", MEGA),
    "memory_bytes": ("memory_mb", MEGA),
    **{name: (name.removesuffix("_s") + "_ms", MILLI) for name in FIXED},
}


def resources_from(config: FleetConfig) -> Resources:
    """Return the resources that a recipe's [fleet] describes."""
    if config.trace is not None:
        for key in sorted(config.model_fields_set - BESIDE_A_TRACE):
            raise InvalidInput(key, "is given beside trace, which fixes the whole fleet", "Remove one of them")
        return read_trace(Path(config.trace), repeats=config.trace_repeats)
    if config.base not in FLEETS:
        raise InvalidInput("base", f"is {config.base!r}", f"Choose one of: {', '.join(FLEETS)}")
    ranges = _ranges_from(config, FLEETS[config.base])
    rate_of = {key: rate for rate, (key, _) in _CONFIG_KEYS.items() if rate in (*RATES, *FIXED)}
    for index, key in enumerate(config.redraw or ()):
        if key not in rate_of:
            raise InvalidInput(f"redraw[{index}]", f"is {key!r}", f"Choose from: {', '.join(rate_of)}")
    redrawn = REDRAWN_IN_THE_PAPER if config.redraw is None else tuple(rate_of[key] for key in config.redraw)
    return RedrawnResources(ranges, config.devices, config.seed, redrawn)


def noise_from(config: NoiseConfig, seed: int) -> MeasurementNoise:
    """Return the measurement noise that a recipe's [fleet.noise] describes."""
    return MeasurementNoise(config.compute_cv, config.uplink_cv, config.downlink_cv, seed)


def _ranges_from(config: FleetConfig, base: FleetRanges) -> FleetRanges:
    given: dict[str, tuple[float, float]] = {}
    for rate, (key, unit) in _CONFIG_KEYS.items():
        value = getattr(config, key)
        if value is not None:
            low, high = checks.bounds(key, value, positive=rate not in FIXED)
            given[rate] = (low * unit, high * unit)
    server = {
        "flops": (config.server_tflops, TERA),
        "to_fed_bps": (config.server_to_fed_mbps, MEGA),
        "from_fed_bps": (config.server_from_fed_mbps, MEGA),
        "turn_s": (config.server_turn_ms, MILLI),
        "to_fed_s": (config.server_to_fed_ms, MILLI),
        "from_fed_s": (config.server_from_fed_ms, MILLI),
        "averaging_s": (config.averaging_ms, MILLI),
        "averaging_bps": (config.averaging_mbps, MEGA),
    }
    changed = {name: value * unit for name, (value, unit) in server.items() if value is not None}
    logarithmic = base.logarithmic if config.distribution is None else config.distribution == "log-uniform"
    return dataclasses.replace(
        base, **given, server=dataclasses.replace(base.server, **changed), logarithmic=logarithmic
    )
