"""The paper's constants, measured: against plain autograd on the reference's copies, and by hand."""

import warnings
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from adaptsfl.decisions import Decision
from adaptsfl.errors import InvalidInput
from adaptsfl.models import SplitModel, split
from adaptsfl.training import Batch, Engine, OptimizerSettings, Reference, TrainingWarning
from adaptsfl.training.estimate import (
    ConstantsSample,
    MovingConstants,
    SmoothnessProbe,
    measure_constants,
)
from adaptsfl.training.settings import sample_cross_entropy, shares_of
from training.cases import make_batches, make_model

EXACT = 1e-10
SHAPE = (1, 8, 8)
SIZES = (4, 2, 6, 4)
WEIGHTS = (1.0, 5.0, 2.0, 3.0)
PLAN = Decision((1, 3, 2, 1), 4)
SGD = OptimizerSettings("sgd", 0.05)


def trained(
    model: SplitModel, rounds: int, plan: Decision = PLAN, present: Sequence[int] | None = None, **options: Any
) -> tuple[Engine, Reference]:
    """Return engine and reference after the same rounds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TrainingWarning)
        fast = Engine(model, plan, SGD, weights=WEIGHTS, chunk=3, **options)
        slow = Reference(model, plan, SGD, weights=WEIGHTS, **options)
    for t in range(rounds):
        batches = pick(make_batches(model, SHAPE, SIZES)(t), present)
        fast.round(batches, present)
        slow.round(batches, present)
    return fast, slow


def pick(batches: Sequence[Batch], devices: Sequence[int] | None) -> list[Batch]:
    return list(batches) if devices is None else [batches[k] for k in devices]


def by_autograd(
    slow: Reference, batches: Sequence[Batch], devices: Sequence[int], averaged: Sequence[int] | None = None
) -> list[Tensor]:
    """The gradient of every layer as one vector, by backward() through copies of the reference's own layers.

    With `averaged`, every device runs on the mean of the copies of those devices.
    """
    deepest = slow.schedule.plan.deepest
    own = [[deepcopy(layer.piece) for layer in device[:deepest]] for device in slow.forged()]
    if averaged is not None:
        shares = shares_of(slow.weights, averaged)
        for number in range(deepest):
            names = [name for name, _ in own[0][number].named_parameters()]
            copies = [dict(device[number].named_parameters()) for device in own]
            with torch.no_grad():
                means = {name: sum(shares[k] * copy[name] for k, copy in enumerate(copies)) for name in names}
                for copy in copies:
                    for name in names:
                        copy[name].copy_(means[name])
    common = [deepcopy(layer.piece) for layer in slow.server.common]
    hidden = []
    for k, (x, _) in zip(devices, batches, strict=True):
        hidden.append(nn.Sequential(*own[k])(x))
    outputs = torch.cat(hidden)
    for piece in common:
        outputs = piece(outputs)
    parts = outputs.split_with_sizes([len(x) for x, _ in batches])
    shares = shares_of(slow.weights, devices)
    sum(
        shares[k] * sample_cross_entropy(part, y).mean()
        for k, part, (_, y) in zip(devices, parts, batches, strict=True)
    ).backward()
    found = []
    for number in range(deepest):  # a copy's gradient is its share of the mean, already
        vectors = [flat(own[k][number]) for k in devices]
        found.append(sum(vectors[1:], vectors[0]))
    return found + [flat(piece) for piece in common]


def flat(piece: nn.Module) -> Tensor:
    gradients = [parameter.grad.flatten() for parameter in piece.parameters()]
    return torch.cat(gradients) if gradients else torch.zeros(0, dtype=torch.float64)


def same(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    return len(found) == len(expected) and all(
        torch.allclose(a, b, atol=EXACT, rtol=EXACT) for a, b in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize("devices", [None, (1, 3), (2,)])
@pytest.mark.parametrize("rounds", [0, 3, 4])
def test_gradients_are_autograds(rounds: int, devices: tuple[int, ...] | None) -> None:
    """At the copies and at their mean, of all devices and of some, before and after the copies drifted apart."""
    model = make_model("vgg_digits", width=0.25)
    fast, slow = trained(model, rounds)
    batches = pick(make_batches(model, SHAPE, SIZES)(99), devices)
    here = devices or range(4)
    assert same(fast.gradients(batches, devices=devices), by_autograd(slow, batches, here))
    with fast.averaged():
        found = fast.gradients(batches, devices=devices)
    assert same(found, by_autograd(slow, batches, here, range(4)))


def test_the_mean_is_that_of_the_devices_of_the_last_round() -> None:
    """Device 2 was absent, so its copy is not part of the mean, though its batch is part of the gradient."""
    model = make_model("vgg_digits", width=0.25)
    fast, slow = trained(model, 2, present=(0, 1, 3))
    batches = make_batches(model, SHAPE, SIZES)(99)
    with fast.averaged():
        found = fast.gradients(batches)
    assert same(found, by_autograd(slow, batches, range(4), (0, 1, 3)))
    assert not same(found, by_autograd(slow, batches, range(4), range(4)))


@pytest.mark.parametrize("norm", ["none", "batch"])
@pytest.mark.parametrize("interval", [1, 4])
@pytest.mark.parametrize("statistics", ["pooled", "device"])
def test_measuring_changes_nothing(norm: str, interval: int, statistics: str) -> None:
    """Weights and running statistics are bitwise what they were, and so is the next round, also where I = 1."""
    model = make_model("vgg_digits", width=0.25, norm=norm)
    plan = Decision(PLAN.cuts, interval)
    measured, left_alone = (trained(model, 3, plan, statistics=statistics)[0] for _ in range(2))
    batches = make_batches(model, SHAPE, (4, 4, 8, 4))(99)
    before = measured.snapshot()
    measure_constants(measured, batches)
    SmoothnessProbe(measured, batches).measure(measured)
    assert_equal(measured.snapshot().tensors, before.tensors)
    for t in range(3, 5):
        given = make_batches(model, SHAPE, SIZES)(t)
        assert torch.equal(measured.round(given), left_alone.round(given))
    assert_equal(measured.snapshot().tensors, left_alone.snapshot().tensors)


def assert_equal(found: Sequence[dict[str, Tensor]], expected: Sequence[dict[str, Tensor]]) -> None:
    for a, b in zip(found, expected, strict=True):
        assert a.keys() == b.keys()
        for name in a:
            assert torch.equal(a[name], b[name]), name


class Diagonal(nn.Module):
    """y_k = w_k x_k."""

    def __init__(self, values: Sequence[float]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(values, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x


def half_square(outputs: Tensor, _targets: Tensor) -> Tensor:
    return outputs.square().sum(1) / 2


def quadratic(values: Sequence[float], devices: int, interval: int = 10, rate: float = 0.1) -> Engine:
    """Return an engine for F(w) = mean over samples of Σ_k (w_k x_k)²/2: gradient w_k x_k², Hessian diag(x_k²)."""
    net = nn.Sequential(Diagonal(values), nn.Flatten())
    model = split(net, torch.ones(2, len(values), dtype=torch.float64), layers=list(net))
    return Engine(model, Decision((1,) * devices, interval), OptimizerSettings("sgd", rate), loss=half_square)


def points(rows: Sequence[Sequence[float]]) -> Batch:
    return torch.tensor(rows, dtype=torch.float64), torch.zeros(len(rows), dtype=torch.long)


def test_constants_by_hand() -> None:
    """w = (1, 1), both devices' data (2, 1) for measuring; before that device 0 trains on (1, 0), device 1 on nothing.

    After one round at rate 0.1: w_0 = (1 − 0.1·1, 1) = (0.9, 1), w_1 = (1, 1), w̄ = (0.95, 1). The drift lies along the
    first eigenvector of the Hessian diag(4, 1), so β = 4 exactly. Gradients are (4·0.9, 1) and (4, 1): squared norms
    12.96 + 1 and 16 + 1. Both halves are alike, so σ² = 0.
    """
    fast = quadratic([1.0, 1.0], 2)
    fast.round([points([[1.0, 0.0]]), points([[0.0, 0.0]])])
    sample = measure_constants(fast, [points([[2.0, 1.0], [2.0, 1.0]])] * 2)
    assert sample.smoothness == pytest.approx(4.0)
    assert sample.squared_norms[:, 0] == pytest.approx([13.96, 17.0])
    assert sample.variance == pytest.approx([0.0, 0.0])
    assert sample.devices == (0, 1)


def test_variance_by_hand() -> None:
    """Samples 1 and 3 at w = 1 have the gradients 1 and 9: σ² = (9 − 1)²/4 = 16; the other device's is 0; mean 8."""
    sample = measure_constants(quadratic([1.0], 2), [points([[1.0], [3.0]]), points([[2.0], [2.0]])])
    assert sample.variance[0] == pytest.approx(8.0)
    assert sample.squared_norms[:, 0] == pytest.approx([25.0, 16.0])
    assert sample.smoothness is None  # the copies are equal


def test_only_those_present_measure() -> None:
    sample = measure_constants(quadratic([1.0], 3), [points([[1.0], [3.0]])], (2,))
    assert sample.devices == (2,)
    assert sample.squared_norms.shape == (1, 2)


def test_smoothness_between_two_iterates() -> None:
    """One round on (0, 1) moves w along the second axis, where the held batch has the Hessian 9."""
    fast = quadratic([1.0, 1.0], 2, interval=1)
    held = [points([[1.0, 3.0], [1.0, 3.0]])] * 2
    probe = SmoothnessProbe(fast, held)
    assert probe.measure(fast) is None  # nothing has moved
    fast.round([points([[0.0, 1.0]])] * 2)
    assert probe.measure(fast) == pytest.approx(9.0)


def test_a_lone_sample_is_refused() -> None:
    fast = quadratic([1.0], 2)
    batches = [points([[1.0], [2.0]]), points([[1.0]])]
    with pytest.raises(InvalidInput, match=r"batches\[1\].*1 sample.*raise training.batch_size"):
        measure_constants(fast, batches)


def test_moving_constants() -> None:
    """Each new measurement counts half; a device that did not measure keeps its own; β waits for its first sample."""

    def sample(beta: float | None, devices: tuple[int, ...], norms: list[list[float]], noise: float) -> ConstantsSample:
        return ConstantsSample(beta, devices, np.array(norms), np.array([noise, noise]))

    empty = MovingConstants()
    assert empty.constants(initial_gap=1.0, target=1.0) is None
    one = empty.with_sample(sample(None, (0, 1), [[1.0, 8.0], [3.0, 2.0]], 4.0))
    assert one.constants(initial_gap=1.0, target=1.0) is None  # β is not known yet
    two = one.with_sample(sample(6.0, (1,), [[5.0, 4.0]], 2.0))
    found = two.constants(initial_gap=2.5, target=0.5)
    assert found is not None
    assert found.smoothness == 6.0
    assert found.gradient_moment.tolist() == [4.0, 8.0]  # the largest of (1, 8) and ((3 + 5)/2, (2 + 4)/2)
    assert found.gradient_variance.tolist() == [3.0, 3.0]
    assert (found.initial_gap, found.target) == (2.5, 0.5)
    three = two.with_sample(sample(2.0, (0,), [[1.0, 8.0]], 3.0)).with_sample(sample(None, (0,), [[1.0, 8.0]], 3.0))
    assert three.smoothness == 4.0
