"""The paper's constants, measured while training: scalars per layer, from gradients on one mini-batch each.

`measure_constants` returns β, G_j² and σ_j², which need every device's separate gradient; the engine does not change.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from adaptsfl.checks import FloatArray
from adaptsfl.convergence import Constants
from adaptsfl.errors import InvalidInput
from adaptsfl.training.engine import Engine
from adaptsfl.training.settings import Batch, present_devices

# The cost of `measure_constants` in rounds: two gradients per device on half batches, which run less efficiently.
CONSTANTS_COST = 4
# Copies closer than this give no estimate of the smoothness.
SMALLEST_DISTANCE = 1e-10


@dataclass(frozen=True)
class ConstantsSample:
    """The paper's constants at one moment.

    Attributes:
        smoothness: β, the mean over devices of ‖∇F_i(w_i) − ∇F_i(w̄)‖ / ‖w_i − w̄‖; None where the copies are equal.
        devices: the devices that measured.
        squared_norms: ‖∇_j F_i‖², shape (devices, layers).
        variance: σ_j² of a mini-batch gradient, the mean over devices of ‖g_j^a − g_j^b‖²/4 for its halves a and b.
    """

    smoothness: float | None
    devices: tuple[int, ...]
    squared_norms: FloatArray
    variance: FloatArray


def measure_constants(
    engine: Engine, batches: Sequence[Batch], present: Sequence[int] | None = None
) -> ConstantsSample:
    """Measure β, G_j² and σ_j² on one mini-batch per present device; costs about four rounds.

    On several ranks, each measures with its own devices, and all get the same result by an all-reduce of scalars.
    """
    halves = [_half(batches, k) for k in range(2)]
    devices = present_devices(present, len(engine.weights))
    local = engine.sharding.here(devices)
    distances = _distances(engine)
    norms, variances = np.zeros((2, len(devices), len(engine.layers)))
    ratios = np.zeros(len(devices))
    wholes = {}
    for k, device in enumerate(local):
        at_copy = [engine.gradients([half[k]], devices=[device], alone=True) for half in halves]
        whole, apart, place = _middle(*at_copy), _minus(*at_copy), devices.index(device)
        norms[place], variances[place] = _products(whole, whole), _products(apart, apart) / 4
        wholes[device] = whole
    with engine.averaged():
        for k, device in enumerate(local):
            if distances[device] >= SMALLEST_DISTANCE:
                at_mean = [engine.gradients([half[k]], devices=[device], alone=True) for half in halves]
                change = _minus(wholes[device], _middle(*at_mean))
                ratios[devices.index(device)] = _length(change) / distances[device]
    every = np.array(
        engine.sharding.ranks.sum_numbers(np.concatenate([norms.ravel(), variances.ravel(), ratios]).tolist())
    )
    norms, variances = every[: -len(devices)].reshape(2, len(devices), -1)
    known = [
        ratio for ratio, k in zip(every[-len(devices) :], devices, strict=True) if distances[k] >= SMALLEST_DISTANCE
    ]
    smoothness = float(sum(known) / len(known)) if known else None
    return ConstantsSample(smoothness, devices, norms, np.mean(variances, axis=0))


def measured_round(
    engine: Engine, batches: Sequence[Batch], present: Sequence[int] | None = None
) -> tuple[Tensor, ConstantsSample]:
    """Measure the constants on the mini-batches of one round, then train it; return its losses and the constants."""
    sample = measure_constants(engine, batches, present)
    if sample.smoothness is not None:
        return engine.round(batches, present), sample
    probe = SmoothnessProbe(engine, batches, present)
    losses = engine.round(batches, present)
    return losses, replace(sample, smoothness=probe.measure(engine))


class SmoothnessProbe:
    """Measures β where copies never differ (I = 1): from two global iterates, on the same mini-batch per device."""

    def __init__(self, engine: Engine, batches: Sequence[Batch], present: Sequence[int] | None = None) -> None:
        self.batches, self.present = batches, present
        with engine.averaged():
            self.weights, self.gradients = _weights(engine), engine.gradients(batches, devices=present)

    def measure(self, engine: Engine) -> float | None:
        """Return ‖∇f(w') − ∇f(w)‖ / ‖w' − w‖ between now and the probe's construction; None if no weight changed."""
        with engine.averaged():
            distance = _length(_minus(_weights(engine), self.weights))
            if distance < SMALLEST_DISTANCE:
                return None
            now = engine.gradients(self.batches, devices=self.present)
        return _length(_minus(now, self.gradients)) / distance


@dataclass(frozen=True)
class MovingConstants:
    """β, G_j², σ_j² smoothed over measurements: each new one has weight 1/2.

    Attributes:
        squared_norms: by device, moving averages of ‖∇_j F_i‖²; G_j² is the largest over devices.
    """

    smoothness: float | None = None
    squared_norms: Mapping[int, FloatArray] = field(default_factory=dict)
    variance: FloatArray | None = None

    def with_sample(self, sample: ConstantsSample) -> "MovingConstants":
        """Return the averages with one more measurement."""
        norms = dict(self.squared_norms)
        for device, row in zip(sample.devices, sample.squared_norms, strict=True):
            norms[device] = (norms[device] + row) / 2 if device in norms else row
        smoothness = self.smoothness
        if sample.smoothness is not None:
            smoothness = sample.smoothness if smoothness is None else (smoothness + sample.smoothness) / 2
        variance = sample.variance if self.variance is None else (self.variance + sample.variance) / 2
        return MovingConstants(smoothness, norms, variance)

    def constants(self, *, initial_gap: float, target: float) -> Constants | None:
        """Return the paper's constants; None until all of them were measured."""
        if self.smoothness is None or self.variance is None or not self.squared_norms:
            return None
        moment = np.max(list(self.squared_norms.values()), axis=0)
        return Constants(self.smoothness, moment, self.variance, initial_gap, target)


def _half(batches: Sequence[Batch], number: int) -> list[Batch]:
    """Return every other sample of every mini-batch, from `number` on."""
    for k, (x, _) in enumerate(batches):
        if len(x) < 2:
            remedy = "Estimates compare two halves of a mini-batch: raise training.batch_size"
            raise InvalidInput(f"batches[{k}]", f"has {len(x)} sample", remedy)
    return [(x[number::2], y[number::2]) for x, y in batches]


def _products(a: Sequence[Tensor], b: Sequence[Tensor]) -> FloatArray:
    """Return ⟨a_j, b_j⟩ for every layer j, summed in double precision."""
    return np.array([float(torch.dot(x.double(), y.double())) for x, y in zip(a, b, strict=True)])


def _length(vector: Sequence[Tensor]) -> float:
    """Return ‖a‖ over all layers."""
    return float(np.sqrt(_products(vector, vector).sum()))


def _minus(a: Sequence[Tensor], b: Sequence[Tensor]) -> list[Tensor]:
    return [x - y for x, y in zip(a, b, strict=True)]


def _middle(a: Sequence[Tensor], b: Sequence[Tensor]) -> list[Tensor]:
    return [0.5 * x + 0.5 * y for x, y in zip(a, b, strict=True)]


def _distances(engine: Engine) -> list[float]:
    """Return ‖w_i − w̄‖ of every device, over the client-specific layers."""
    squares = torch.zeros(len(engine.weights), dtype=torch.float64)
    layers, local = engine.layers[: engine.schedule.plan.deepest], engine.sharding.local
    copies = [{name: layer.parameters[name] for name in layer.trained} for layer in layers]
    with engine.averaged():
        for layer, held in zip(layers, copies, strict=True):
            for name, rows in held.items():
                if len(rows) > 1:
                    apart = (rows - layer.parameters[name]).double().square().flatten(1).sum(1).cpu()
                    squares[list(local)] += apart[: len(local)]
    return [math.sqrt(square) for square in engine.sharding.ranks.sum_numbers(squares.tolist())]


def _weights(engine: Engine) -> list[Tensor]:
    """Return a copy of every layer's first row as one vector."""
    nothing = torch.zeros(0, device=engine.device)
    return [
        torch.cat([layer.parameters[name][0].flatten() for name in layer.trained]) if layer.trained else nothing
        for layer in engine.layers
    ]
