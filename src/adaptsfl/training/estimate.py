"""What is known about convergence, measured while training: scalars per layer, from gradients on one mini-batch each.

Two measurements, both of which leave the engine as it was:

- `measure_drift`: what the paper bounds by 4β²γ²I²ΣG², measured instead. It needs means over devices only, so it runs
  as fast as training, and costs about two rounds.
- `measure_constants`: the paper's β, G_j², σ_j², which need every device's gradient by itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from adaptsfl.checks import FloatArray
from adaptsfl.errors import InvalidInput
from adaptsfl.training.engine import Engine
from adaptsfl.training.settings import Batch
from adaptsfl.training.stack import mean

# Rounds of training that one `measure_drift` takes: a gradient at the copies and one at their mean.
DRIFT_COST = 2
# Copies closer than this say nothing about smoothness.
SMALLEST_DISTANCE = 1e-10


@dataclass(frozen=True)
class DriftSample:
    """The copies' common gradient ḡ = (1/N) Σ_i ∇F_i(w_i) beside ∇f(w̄), the one at their mean; arrays per layer.

    Products are between two halves of every mini-batch, so that the noise of sampling adds nothing to them on average.

    Attributes:
        age: rounds since the copies were equal, t.
        deepest: L_c.
        squared_norm: ‖∇_j f(w̄)‖².
        lost: ⟨∇_j f(w̄), ∇_j f(w̄) − ḡ_j⟩. To first order a round gains γ Σ_j ⟨∇_j f(w̄), ḡ_j⟩: this much less.
        drift: Δ_j = ‖∇_j f(w̄) − ḡ_j‖².
        spread: (1/N) Σ_i ‖∇_j F_i(w̄) − ∇_j f(w̄)‖², what drives copies apart: other data, other samples.
    """

    age: int
    deepest: int
    squared_norm: FloatArray
    lost: FloatArray
    drift: FloatArray
    spread: FloatArray

    @property
    def lost_share(self) -> float | None:
        """The part of a round's progress that the drift takes; None where the gradient is lost in noise."""
        total = float(self.squared_norm.sum())
        return float(self.lost.sum()) / total if total > 0 else None


def measure_drift(engine: Engine, batches: Sequence[Batch]) -> DriftSample:
    """Measure how far the copies' drift has bent the common gradient, on one mini-batch per device."""
    devices = range(len(batches))
    halves = [_part(batches, 2, k) for k in range(2)]
    at_copies = [engine.gradients(half) for half in halves]
    # At the mean also by two groups of devices, whose difference tells how far the devices' gradients spread.
    groups = [devices] if len(batches) == 1 else [devices[0::2], devices[1::2]]
    shares = [sum(engine.weights[list(group)].tolist()) for group in groups]
    by_group = [
        [engine.gradients([half[k] for k in group], devices=group, averaged=True) for group in groups]
        for half in halves
    ]
    at_mean = [_weighted(gradients, shares) for gradients in by_group]
    bent = [_minus(mean_, copies) for mean_, copies in zip(at_mean, at_copies, strict=True)]
    spread = np.zeros(len(engine.layers))
    if len(groups) == 2:
        first, second = (_weighted([half[k] for half in by_group], [0.5, 0.5]) for k in range(2))
        apart = _minus(first, second)
        # The difference of two means over N/2 devices each has 4/N times the variance of one device's gradient.
        spread = _products(apart, apart) * len(batches) / 4
    return DriftSample(
        age=max(engine.schedule.ages, default=0),
        deepest=engine.schedule.plan.deepest,
        squared_norm=_products(*at_mean),
        lost=(_products(at_mean[0], bent[1]) + _products(at_mean[1], bent[0])) / 2,
        drift=_products(*bent),
        spread=spread,
    )


@dataclass(frozen=True)
class ConstantsSample:
    """The paper's constants at one moment.

    Attributes:
        smoothness: β, the mean over devices of ‖∇F_i(w_i) − ∇F_i(w̄)‖ / ‖w_i − w̄‖; None where the copies are equal.
        squared_norms: ‖∇_j F_i‖², shape (devices, layers).
        variance: σ_j² of a mini-batch gradient, the mean over devices of ‖g_j^a − g_j^b‖²/4 for its halves a and b.
        loss: f(w̄) on the mini-batches.
    """

    smoothness: float | None
    squared_norms: FloatArray
    variance: FloatArray


def measure_constants(engine: Engine, batches: Sequence[Batch]) -> ConstantsSample:
    """Measure β, G_j² and σ_j² on one mini-batch per device; costs about four rounds."""
    halves = [_part(batches, 2, k) for k in range(2)]
    norms, variances, ratios = [], [], []
    for k, distance in enumerate(_distances(engine)):
        at_copy = [engine.gradients([half[k]], devices=[k]) for half in halves]
        whole = _weighted(at_copy, [0.5, 0.5])
        apart = _minus(*at_copy)
        norms.append(_products(whole, whole))
        variances.append(_products(apart, apart) / 4)
        if distance >= SMALLEST_DISTANCE:
            at_mean = [engine.gradients([half[k]], devices=[k], averaged=True) for half in halves]
            change = _minus(whole, _weighted(at_mean, [0.5, 0.5]))
            ratios.append(float(np.sqrt(_products(change, change).sum())) / distance)
    smoothness = sum(ratios) / len(ratios) if ratios else None
    return ConstantsSample(smoothness, np.array(norms), np.mean(variances, axis=0))


class SmoothnessProbe:
    """β where copies never differ (I = 1): two consecutive global iterates on one held mini-batch."""

    def __init__(self, engine: Engine, batches: Sequence[Batch]) -> None:
        self.batches = batches
        self.weights = _global_weights(engine)
        self.gradients = engine.gradients(batches, averaged=True)

    def measure(self, engine: Engine) -> float | None:
        """Return ‖∇f(w') − ∇f(w)‖ / ‖w' − w‖ between now and when the probe was made; None if nothing moved."""
        moved = _minus(_global_weights(engine), self.weights)
        distance = float(np.sqrt(_products(moved, moved).sum()))
        if distance < SMALLEST_DISTANCE:
            return None
        change = _minus(engine.gradients(self.batches, averaged=True), self.gradients)
        return float(np.sqrt(_products(change, change).sum())) / distance


def _part(batches: Sequence[Batch], parts: int, number: int) -> list[Batch]:
    """Return every `parts`-th sample of every mini-batch, from `number` on."""
    for k, (x, _) in enumerate(batches):
        if len(x) < parts:
            raise InvalidInput(f"batches[{k}]", f"has {len(x)} sample(s)", "Estimates need mini-batches of at least 2")
    return [(x[number::parts], y[number::parts]) for x, y in batches]


def _products(a: Sequence[Tensor], b: Sequence[Tensor]) -> FloatArray:
    """Return ⟨a_j, b_j⟩ for every layer j, summed in double precision."""
    return np.array([float(torch.dot(x.double(), y.double())) for x, y in zip(a, b, strict=True)])


def _minus(a: Sequence[Tensor], b: Sequence[Tensor]) -> list[Tensor]:
    return [x - y for x, y in zip(a, b, strict=True)]


def _weighted(vectors: Sequence[Sequence[Tensor]], weights: Sequence[float]) -> list[Tensor]:
    """Return Σ weight · vector, layer by layer."""
    total = [weights[0] * x for x in vectors[0]]
    for vector, weight in zip(vectors[1:], weights[1:], strict=True):
        total = [x + weight * y for x, y in zip(total, vector, strict=True)]
    return total


def _distances(engine: Engine) -> list[float]:
    """Return ‖w_i − w̄‖ of every device, over the client-specific layers."""
    squares = torch.zeros(len(engine.weights), dtype=torch.float64)
    for layer in engine.layers[: engine.schedule.plan.deepest]:
        for name in layer.trained:
            rows = layer.parameters[name]
            if len(rows) > 1:
                squares += (rows - mean(rows, engine.weights)).double().square().flatten(1).sum(1).cpu()
    return [float(square) for square in squares.sqrt()]


def _global_weights(engine: Engine) -> list[Tensor]:
    return [
        torch.cat([mean(layer.parameters[name], engine.weights)[0].flatten() for name in layer.trained])
        if layer.trained
        else engine.weights[:0]
        for layer in engine.layers
    ]
