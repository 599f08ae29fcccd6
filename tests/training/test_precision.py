"""What types of numbers cost in rounds: the formula, and the engine's measurement beside the reference's."""

import math
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from adaptsfl.costs import WIRE_DTYPES
from adaptsfl.decisions import Decision
from adaptsfl.training import Batch, Engine, OptimizerSettings, Reference
from adaptsfl.training.engine import compared_round
from adaptsfl.training.layers import Layer
from adaptsfl.training.passes import Work
from adaptsfl.training.precision import NO_PROGRESS, ServerGradients, affine_gradient, products, rounds_factor
from adaptsfl.training.ranks import ALONE
from adaptsfl.training.reference import ServerSide
from adaptsfl.training.settings import shares_of
from adaptsfl.training.wire_format import Dither, arriving
from training.cases import SIZES, largest_difference, make_batches, make_model

DIGITS = (1, 8, 8)
ROUNDED = WIRE_DTYPES[1:]
PLAN = Decision((1, 3, 2, 1), 3)


def gradients(*numbers: float) -> ServerGradients:
    return ServerGradients([torch.tensor(numbers)], {0: torch.tensor(numbers)})


@pytest.mark.parametrize("degrees", [0, 10, 45, 80])
@pytest.mark.parametrize("length", [0.1, 1, 7])
def test_the_factor_is_one_over_the_squared_cosine_whatever_the_length(degrees: float, length: float) -> None:
    angle = math.radians(degrees)
    turned = gradients(length * math.cos(angle), length * math.sin(angle))
    found = rounds_factor(products(gradients(1, 0), turned, [1.0]))
    assert found == pytest.approx(1 / math.cos(angle) ** 2, rel=1e-6)


@pytest.mark.parametrize("turned", [(0, 1), (-1, 0), (0, 0), (math.nan, 0)])
def test_no_progress_is_left(turned: tuple[float, float]) -> None:
    assert rounds_factor(products(gradients(1, 0), gradients(*turned), [1.0])) == NO_PROGRESS


def test_where_the_exact_gradient_is_zero_nothing_is_lost() -> None:
    assert rounds_factor(products(gradients(0, 0), gradients(0.1, 0), [1.0])) == 1
    assert rounds_factor(products(ServerGradients([], {}), ServerGradients([], {}), [])) == 1


def test_the_larger_factor_counts_and_devices_by_their_shares() -> None:
    exact = ServerGradients([torch.tensor([1.0, 0.0])], {0: torch.tensor([1.0, 0.0]), 1: torch.tensor([1.0, 0.0])})
    rounded = ServerGradients([torch.tensor([1.0, 0.1])], {0: torch.tensor([1.0, 1.0]), 1: torch.tensor([1.0, 0.0])})
    assert rounds_factor(products(exact, rounded, [0.25, 0.75])) == pytest.approx(1.25)
    assert rounds_factor(products(exact, rounded, [0.0, 1.0])) == pytest.approx(1.01)


@pytest.mark.parametrize("shape", [(5,), (5, 3), (5, 4, 3), (5, 3, 2, 2)])
def test_scale_and_shift_at_the_cut_have_the_gradient_that_autograd_finds(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x, channel = torch.randn(shape, dtype=torch.float64), {1: None, 2: 1, 3: 2, 4: 1}[len(shape)]
    broadcast = [1] * len(shape)
    if channel is not None:
        broadcast[channel] = shape[channel]
    scale, shift = torch.ones(broadcast).double().requires_grad_(), torch.zeros(broadcast).double().requires_grad_()
    loss = torch.sin(scale * x + shift).sum()
    loss.backward()
    assert scale.grad is not None
    assert shift.grad is not None
    expected = torch.cat([scale.grad.flatten(), shift.grad.flatten()])
    assert torch.allclose(affine_gradient(x, torch.cos(x)), expected)


# --- the engine's measurement ---


def by_reference(reference: Reference, batches: list[Batch], present: list[int], t: int) -> dict[str, float]:
    """Return the factors from the plain side of the edge server, one type after the other."""
    shares, exact = shares_of(reference.weights, present), None
    own, common = reference.forged(), reference.server.common
    factors = {}
    for wire in WIRE_DTYPES:
        server = ServerSide(copied(common), "pooled", reference.settings, reference.server.loss)
        server.non_common = [copied(layers) for layers in reference.server.non_common]
        sent = {}
        for device, (x, _) in zip(present, batches, strict=True):
            cut = len(own[device]) - len(reference.server.non_common[device])
            activations = x
            for layer in copied(own[device][:cut]):
                activations = layer.piece(activations)
            sent[device] = activations.detach()
            server.receive(device, arriving(sent[device], wire).clone())
        server.forward(present, [y for _, y in batches], [shares[device] for device in present])
        returned = server.backward()
        at_cut = {
            device: affine_gradient(sent[device], arriving(gradient, wire, Dither(device, t)))
            for device, gradient in zip(present, returned, strict=True)
        }
        count = sum(len(layer.parameters) for layer in common)
        found = ServerGradients(server.gradients[:count], at_cut)
        exact = exact or found
        factors[wire] = rounds_factor(products(exact, found, shares))
    return factors


def copied(layers: list[Layer]) -> list[Layer]:
    return [deepcopy(layer) for layer in layers]


@pytest.mark.parametrize("present", [[0, 1, 2, 3], [0, 2]])
@pytest.mark.parametrize("norm", ["group", "batch"])
def test_the_engine_finds_the_factors_that_the_edge_server_would(norm: str, present: list[int]) -> None:
    model, settings = make_model("vgg_digits", width=0.25, norm=norm), OptimizerSettings("sgd", 0.05)
    slow, fast = (kind(model, PLAN, settings, weights=SIZES) for kind in (Reference, Engine))
    batches = make_batches(model, DIGITS)
    for t in (1, 2):
        slow.round(batches(t))
        fast.round(batches(t))
    given = [batches(3)[device] for device in present]
    expected = by_reference(slow, given, present, 3)
    found = fast.wire_factors(given, WIRE_DTYPES, present)
    assert found == pytest.approx(expected, rel=1e-9)
    assert found["float32"] == 1
    assert 1 < found["int8"] < found["int4"] < 2


def test_a_comparison_changes_nothing_and_its_round_is_exact() -> None:
    model, settings = make_model("vgg_digits", width=0.25, norm="batch"), OptimizerSettings("momentum", 0.05)
    plan = replace(PLAN, wire_dtype="int4")
    comparing, exact = Engine(model, plan, settings), Engine(model, PLAN, settings)
    batches = make_batches(model, DIGITS)
    before = comparing.state()
    factors = comparing.wire_factors(batches(1), ROUNDED)
    assert largest_difference(comparing.state(), before) == 0
    losses, again = compared_round(comparing, batches(1), None, ROUNDED)
    assert again == factors
    assert torch.equal(losses, exact.round(batches(1)))
    assert largest_difference(comparing.state(), exact.state()) == 0
    comparing.round(batches(2))
    exact.round(batches(2))
    assert largest_difference(comparing.state(), exact.state()) > 0


def test_dropout_is_the_same_for_all_types_and_stays_as_it_was() -> None:
    model = make_model("vit", width=0.25, depth=2, patch=8, dropout=0.5)
    engine, batches = (
        Engine(model, Decision((2,) * 4, 3), OptimizerSettings("sgd", 0.05)),
        make_batches(model, (3, 32, 32)),
    )
    torch.manual_seed(1)
    found = engine.wire_factors(batches(1), WIRE_DTYPES)
    assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(1)))
    assert found["float32"] == 1
    assert found["int8"] < 1.1


def test_what_is_measured_is_near_what_all_gradients_lose() -> None:
    """The gradient of all layers, those of the devices included, which no edge server sees: the truth."""
    model, settings = make_model("vgg_digits", width=0.5, norm="group"), OptimizerSettings("sgd", 0.05)
    batches = make_batches(model, DIGITS, (16,) * 4)
    engine = Engine(model, Decision((2,) * 4, 3), settings)
    for t in range(1, 10):
        engine.round(batches(t))
    given = batches(10)
    measured = engine.wire_factors(given, ROUNDED)

    def whole(wire: str) -> Tensor:
        crossings = engine._crossings(wire, range(4), [0.25] * 4)
        sums = engine._weighted_gradients(Work(dict(enumerate(given)), [0.25] * 4, 2, ALONE, crossings))
        return torch.cat([tensor.flatten() for layer in sums for tensor in layer]).double()

    exact = whole("float32")
    for wire in ("int8", "int4"):
        rounded = whole(wire)
        lost = float(exact @ exact * (rounded @ rounded) / (exact @ rounded) ** 2) - 1
        assert 0.5 * lost < measured[wire] - 1 < 6 * lost, wire
