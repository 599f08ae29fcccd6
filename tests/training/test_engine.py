"""The engine has the reference's weights, buffers and losses after any number of rounds."""

import warnings
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from adaptsfl.costs import WIRE_DTYPES
from adaptsfl.decisions import Decision
from adaptsfl.errors import InvalidInput
from adaptsfl.models import SplitModel, build, split
from adaptsfl.training import Engine, OptimizerSettings, Reference, TrainingWarning
from adaptsfl.training.engine import one_after_another
from training.cases import SIZES, OddNorms, largest_difference, make_batches, make_model, make_odd_norms

EXACT = 1e-10
DIGITS, SMALL_IMAGES, IMAGES = (1, 8, 8), (3, 16, 16), (3, 32, 32)

PLANS = [Decision((1, 3, 2, 1), 3), Decision((4, 2, 1, 2), 4, {4: 6}), Decision((2, 1, 1, 2), 1)]
LENGTHS = (6, 8, 6)


def compare(model: SplitModel, shape: tuple[int, ...], settings: OptimizerSettings, **options: Any) -> None:
    """Train both for 20 rounds, with a deeper and a shallower plan on the way, and compare as they go."""
    plans, lengths = options.pop("plans", PLANS), options.pop("lengths", LENGTHS)
    chunk, sizes = options.pop("chunk", 3), options.pop("sizes", SIZES)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TrainingWarning)
        slow = Reference(model, plans[0], settings, **options)
        fast = Engine(model, plans[0], settings, chunk=chunk, **options)
    batches, t = make_batches(model, shape, sizes), 0
    for plan, rounds in zip(plans, lengths, strict=True):
        if t:
            slow.change_plan(plan)
            fast.change_plan(plan)
        for _ in range(rounds):
            t += 1
            expected, found = slow.round(batches(t)), fast.round(batches(t))
            assert torch.allclose(found, expected, atol=EXACT, rtol=EXACT)
        assert largest_difference(fast.state(), slow.state()) < EXACT


@pytest.mark.parametrize("statistics", ["pooled", "device"])
@pytest.mark.parametrize("norm", ["none", "batch", "group"])
def test_vgg_trains_as_the_reference_does(norm: str, statistics: str) -> None:
    model = make_model("vgg_digits", width=0.25, norm=norm)
    compare(model, DIGITS, OptimizerSettings("momentum", 0.05), statistics=statistics)


@pytest.mark.parametrize(
    ("norm", "statistics"), [("none", "pooled"), ("group", "pooled"), ("batch", "pooled"), ("batch", "device")]
)
def test_resnet_trains_as_the_reference_does(norm: str, statistics: str) -> None:
    torch.manual_seed(0)
    module = build("resnet18", width=0.125, norm=norm).module.double()
    model = split(module, torch.zeros(1, *SMALL_IMAGES, dtype=torch.float64))
    compare(model, SMALL_IMAGES, OptimizerSettings("sgd", 0.02), statistics=statistics)


def test_transformer() -> None:
    model = make_model("vit", width=0.25, depth=2, patch=8, dropout=0.0)
    compare(model, IMAGES, OptimizerSettings("adam", 1e-3))


@pytest.mark.parametrize("rule", ["average", "reset", "keep"])
@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
@pytest.mark.parametrize("weights", [None, SIZES], ids=["equal", "weighted"])
def test_optimizers(optimizer: str, rule: str, weights: Any) -> None:
    model = make_model("vgg_digits", width=0.25)
    rate = 1e-3 if optimizer == "adam" else 0.05
    settings = OptimizerSettings(optimizer, rate, 2 * rate, weight_decay=0.01, at_averaging=rule)
    compare(model, DIGITS, settings, weights=weights)


@pytest.mark.parametrize("wire_dtype", WIRE_DTYPES)
@pytest.mark.parametrize(("optimizer", "weights"), [("sgd", None), ("momentum", SIZES), ("adam", SIZES)])
def test_activations_and_gradients_are_rounded_at_every_devices_own_cut(
    optimizer: str, weights: Any, wire_dtype: str
) -> None:
    model = make_model("vgg_digits", width=0.25, norm="group")
    settings = OptimizerSettings(optimizer, 1e-3 if optimizer == "adam" else 0.05)
    plans = [replace(plan, wire_dtype=wire_dtype) for plan in PLANS]
    compare(model, DIGITS, settings, weights=weights, plans=plans)


@pytest.mark.parametrize("wire_dtype", WIRE_DTYPES)
@pytest.mark.parametrize("parts", [1, 2, 4, 8])
def test_whole_mini_batches_of_the_engine_learn_what_parts_of_the_reference_learn(parts: int, wire_dtype: str) -> None:
    """Without batch-norm, in every type of numbers: what is sent of a sample does not depend on its part."""
    model = make_model("vgg_digits", width=0.25, norm="group")
    plans = [replace(plan, wire_dtype=wire_dtype, micro_batches=parts) for plan in PLANS]
    settings = OptimizerSettings("momentum", 0.05)
    compare(model, DIGITS, settings, weights=SIZES, plans=plans, lengths=(3, 4, 2), sizes=(8, 16, 8, 24))
    assert Engine(model, plans[0], settings).schedule.plan.micro_batches == 1


@pytest.mark.parametrize("statistics", ["pooled", "device"])
def test_rounding_and_batch_norm(statistics: str) -> None:
    model = make_model("vgg_digits", width=0.25, norm="batch")
    plans = [replace(plan, wire_dtype="int8") for plan in PLANS]
    compare(model, DIGITS, OptimizerSettings("sgd", 0.05), statistics=statistics, plans=plans)


def test_where_devices_are_cut_matters_only_if_activations_are_rounded() -> None:
    model = make_model("vgg_digits", width=0.25, norm="group")

    def trained(cuts: tuple[int, ...], wire_dtype: str | None) -> dict[str, Tensor]:
        plan = Decision(cuts, 3, wire_dtype=wire_dtype).levelled(4)
        engine, batches = Engine(model, plan, OptimizerSettings("sgd", 0.05)), make_batches(model, DIGITS)
        for t in range(1, 4):
            engine.round(batches(t))
        return engine.state()

    assert largest_difference(trained((1, 3, 2, 1), None), trained((3, 3, 3, 3), None)) == 0
    assert largest_difference(trained((1, 3, 2, 1), "int8"), trained((3, 3, 3, 3), "int8")) > 1e-6
    assert 1e-6 < largest_difference(trained((1, 3, 2, 1), "int8"), trained((1, 3, 2, 1), None)) < 0.01


@pytest.mark.parametrize("statistics", ["pooled", "device"])
def test_weights_and_batch_norm(statistics: str) -> None:
    model = make_model("vgg_digits", width=0.25, norm="batch")
    compare(model, DIGITS, OptimizerSettings("momentum", 0.05), statistics=statistics, weights=(1, 5, 2, 3))


@pytest.mark.parametrize("chunk", [1, 2, 4, None])
def test_the_chunk_does_not_matter(chunk: int | None) -> None:
    model = make_model("vgg_digits", width=0.25)
    compare(model, DIGITS, OptimizerSettings("sgd", 0.05), chunk=chunk)


@pytest.mark.parametrize(
    "plan",
    [Decision((6,) * 4, 3), Decision((2,) * 4, None), Decision((1, 6, 2, 3), 1)],
    ids=["FedAvg", "PSL", "I = 1"],
)
@pytest.mark.parametrize("norm", ["none", "batch"])
def test_special_cases_equal_the_reference(plan: Decision, norm: str) -> None:
    model = make_model("vgg_digits", width=0.25, norm=norm)
    compare(model, DIGITS, OptimizerSettings("sgd", 0.05), plans=[plan], lengths=[9])


@pytest.mark.parametrize("statistics", ["pooled", "device"])
def test_batch_norm_of_every_kind(statistics: str) -> None:
    model = make_odd_norms()
    plans = [Decision((1, 1, 1, 1), 2), Decision((2, 1, 2, 1), 2), Decision((1, 1, 1, 1), 1)]
    compare(model, DIGITS, OptimizerSettings("sgd", 0.05), statistics=statistics, plans=plans)


def test_language_model() -> None:
    model = make_model("gpt", width=0.25, depth=1, context=8, vocabulary=20, dropout=0.0, tied=False)

    def batches(t: int) -> list[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(t)
        tokens = [torch.randint(0, 20, (size, 9), generator=generator) for size in SIZES]
        return [(part[:, :-1], part[:, 1:]) for part in tokens]

    plan = Decision((1, 2, 3, 2), 2)
    slow, fast = (kind(model, plan, OptimizerSettings("adam", 1e-3)) for kind in (Reference, Engine))
    for t in range(1, 6):
        assert torch.allclose(slow.round(batches(t)), fast.round(batches(t)), atol=EXACT)
    assert largest_difference(fast.state(), slow.state()) < EXACT


def test_single_precision_differs_by_rounding_only() -> None:
    """The stated tolerance: after 20 rounds weights of size 1 differ by less than 1e-4."""
    model = make_model("vgg_digits", torch.float32, width=0.25, norm="group")
    batches, plan = make_batches(model, DIGITS), Decision((1, 4, 2, 3), 4)
    slow, fast = (kind(model, plan, OptimizerSettings("momentum", 0.05)) for kind in (Reference, Engine))
    for t in range(1, 21):
        slow.round(batches(t))
        fast.round(batches(t))
    assert largest_difference(fast.state(), slow.state()) < 1e-4


@pytest.mark.parametrize("optimizer", ["sgd", "momentum"])
def test_averaging_every_round_is_centralized_training(optimizer: str) -> None:
    """And needs one copy of the weights only."""
    model = make_model("vgg_digits", width=0.25, norm="group")
    batches = make_batches(model, DIGITS)
    engine = Engine(model, Decision((1, 4, 2, 6), 1), OptimizerSettings(optimizer, 0.1), weights=SIZES, chunk=2)
    net = deepcopy(model.module)
    descent = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9 if optimizer == "momentum" else 0.0)
    for t in range(1, 7):
        engine.round(batches(t))
        x, y = (torch.cat(part) for part in zip(*batches(t), strict=True))
        descent.zero_grad()
        cross_entropy(net(x), y).backward()
        descent.step()
    assert largest_difference(engine.state(), net.state_dict()) < EXACT
    assert all(len(rows) == 1 for layer in engine.layers for rows in layer.parameters.values())


def test_one_device_is_centralized_training_with_batch_norm_too() -> None:
    model = make_model("vgg_digits", width=0.25, norm="batch")
    batches = make_batches(model, DIGITS, (8,))
    engine, net = Engine(model, Decision((3,), 1), OptimizerSettings("sgd", 0.1)), deepcopy(model.module)
    descent = torch.optim.SGD(net.parameters(), 0.1)
    for t in range(1, 5):
        engine.round(batches(t))
        ((x, y),) = batches(t)
        descent.zero_grad()
        cross_entropy(net(x), y).backward()
        descent.step()
    assert largest_difference(engine.state(), net.state_dict()) < EXACT


@pytest.mark.parametrize(
    ("norm", "statistics", "expected"),
    [("none", "pooled", [2, 2]), ("batch", "pooled", [4]), ("batch", "device", [2, 2])],
)
def test_devices_come_in_chunks_unless_samples_depend_on_each_other(
    norm: str, statistics: str, expected: list[int]
) -> None:
    model, seen = make_model("vgg_digits", width=0.25, norm=norm), []

    def chunk_forward(devices: Sequence[Sequence[nn.Module]], inputs: Sequence[Tensor]) -> Tensor:
        seen.append(len(devices))
        return one_after_another(devices, inputs)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TrainingWarning)
        plan, settings = Decision((1, 2, 2, 1), 2), OptimizerSettings()
        engine = Engine(model, plan, settings, chunk=3, statistics=statistics, chunk_forward=chunk_forward)
    engine.round(make_batches(model, DIGITS)(1))
    assert seen == expected


def test_frozen_parameters_stay() -> None:
    model = make_model("vgg_digits", width=0.25)
    for key in ("conv1_1.0.weight", "fc1.0.bias"):
        model.module.get_parameter(key).requires_grad_(False)
    before = deepcopy(model.module.state_dict())
    engine, slow = (
        kind(model, Decision((1, 2, 2, 1), 2), OptimizerSettings("momentum", weight_decay=0.1))
        for kind in (Engine, Reference)
    )
    batches = make_batches(model, DIGITS)
    for t in range(1, 4):
        engine.round(batches(t))
        slow.round(batches(t))
    state = engine.state()
    same = [key for key in before if torch.equal(before[key], state[key])]
    assert same == ["conv1_1.0.weight", "fc1.0.bias"]
    assert largest_difference(state, slow.state()) < EXACT


def test_the_user_s_model_is_not_touched_and_takes_the_result() -> None:
    model = make_model("vgg_digits", width=0.25, norm="batch")
    before = deepcopy(model.module.state_dict())
    engine = Engine(model, Decision((1, 2, 3, 4), 2), OptimizerSettings())
    engine.round(make_batches(model, DIGITS)(1))
    state = engine.state()
    engine.round(make_batches(model, DIGITS)(2))
    assert largest_difference(model.module.state_dict(), before) == 0
    assert largest_difference(engine.state(), state) > 0
    model.module.load_state_dict(state)


class TwoBiases(nn.Module):
    """Autograd returns one tensor as the gradients of both biases."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 8), nn.Linear(8, 10, bias=False)
        self.one, self.other = (nn.Parameter(torch.zeros(10)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x.flatten(1)).tanh()) + (self.one + self.other)


@pytest.mark.parametrize("cut", [1, 3])
@pytest.mark.parametrize("chunk", [1, 4])
def test_gradients_that_are_one_tensor_are_not_added_up_twice(chunk: int, cut: int) -> None:
    torch.manual_seed(0)
    model = split(TwoBiases().double(), torch.zeros(1, *DIGITS, dtype=torch.float64))
    plans = [Decision((min(cut, model.layers),) * 4, 2)]
    compare(model, DIGITS, OptimizerSettings("sgd", 0.05), plans=plans, lengths=[4], chunk=chunk)


class ByShape(OddNorms):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.dim() == 4 else x  # torch.fx cannot decide, torch.export can


def test_device_statistics_need_batch_norm_modules() -> None:
    model = split(ByShape().double(), torch.zeros(2, 1, 8, 8, dtype=torch.float64))
    for kind in (Engine, Reference):
        with pytest.raises(InvalidInput, match="statistics: is 'device', but tracing turned"):
            kind(model, Decision((1,) * 4, 2), OptimizerSettings(), statistics="device")
    compare(model, DIGITS, OptimizerSettings("sgd", 0.05), plans=[Decision((1, 2, 1, 2), 2)], lengths=[4])


class Untracked(nn.Module):
    """Exported, its batch-norm leaves neither a module nor running statistics: only the operation itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(64, 8), nn.Linear(8, 6), nn.Linear(6, 10)
        self.norm = nn.BatchNorm1d(6, track_running_stats=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.second(self.first(x.flatten(1)).relu())).relu()) if x.dim() == 4 else x


def test_batch_norm_without_a_trace_is_noticed() -> None:
    torch.manual_seed(0)
    model = split(Untracked().double(), torch.zeros(2, 1, 8, 8, dtype=torch.float64))
    with pytest.raises(InvalidInput, match="statistics: is 'device', but tracing turned"):
        Engine(model, Decision((1,) * 4, 2), OptimizerSettings(), statistics="device")
    plans = [Decision((1,) * 4, 2), Decision((2, 1, 2, 1), 1)]
    compare(model, DIGITS, OptimizerSettings("sgd", 0.05), plans=plans, lengths=[4, 3], chunk=2)


def test_wrong_settings_say_what_to_do() -> None:
    model = make_model("vgg_digits", width=0.25)
    with pytest.raises(InvalidInput, match="chunk: is 0"):
        Engine(model, Decision((1, 2), 1), OptimizerSettings(), chunk=0)
    with pytest.raises(InvalidInput, match="weights: has 3 entries, expected 2"):
        Engine(model, Decision((1, 2), 1), OptimizerSettings(), weights=[1, 2, 3])
    engine = Engine(model, Decision((1, 2), 4), OptimizerSettings())
    engine.round(make_batches(model, DIGITS, (2, 3))(1))
    with pytest.raises(InvalidInput, match=r"Change it 3 round\(s\) later"):
        engine.change_plan(Decision((1, 1), 2))


@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize("interval", [1, 2])
def test_everything_is_on_the_chosen_device(norm: str, interval: int) -> None:
    """The meta device refuses tensors of another device, and needs no hardware."""
    model = make_model("vgg_digits", torch.float32, width=0.25, norm=norm)
    settings = OptimizerSettings("adam", weight_decay=0.1)
    engine = Engine(model, Decision((1, 4, 2, 3), interval), settings, weights=SIZES, device="meta")
    batches = make_batches(model, DIGITS)
    for t in (1, 2):
        assert engine.round(batches(t)).device.type == "meta"
    engine.change_plan(Decision((1, 2, 2, 1), 1))
    engine.round(batches(3))
    assert all(tensor.device.type == "meta" for tensor in engine.state().values())
