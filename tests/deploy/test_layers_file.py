"""Layers as files: what another party sends is what the model's layers look like, or it is refused."""

import json
import random
import struct
from collections.abc import Callable

import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from adaptsfl.deploy.layers_file import LARGEST, LayerStates, Template, by_layer, named, to_bytes
from adaptsfl.errors import BadMessage
from adaptsfl.models import split
from adaptsfl.training import OptimizerSettings
from adaptsfl.training.layers import run

MASK = 2


class Masked(nn.Module):
    """A layer with buffers that a careless check would trip over: infinities, truth values, whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("mask", torch.tensor([0.0, 0.0, float("-inf"), 0.0, 0.0, -3e38]))
        self.register_buffer("used", torch.tensor([True, True, False, True, True, False]))
        self.register_buffer("places", torch.arange(6))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)[:, self.places]
        return torch.where(self.used, y + self.mask.clamp(-1.0), y)


def template(optimizer: str) -> Template:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), Masked(), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))
    return Template(split(model, torch.randn(8, 4)), OptimizerSettings(name=optimizer))


def trained(made: Template) -> LayerStates:
    """All layers after a step of training, with what the optimiser keeps."""
    layers = [made.layer(number) for number in range(1, made.model.layers + 1)]
    loss = run(layers, torch.randn(8, 4)).square().mean()
    for layer in layers:
        layer.update(torch.autograd.grad(loss, layer.parameters, retain_graph=True) if layer.parameters else [], 0.1)
    return {number: layer.state() for number, layer in enumerate(layers, start=1)}


def same(one: LayerStates, other: LayerStates) -> bool:
    first, second = named(one), named(other)
    return first.keys() == second.keys() and all(
        a.dtype == second[name].dtype and torch.equal(a, second[name]) for name, a in first.items()
    )


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
def test_layers_and_their_optimisers_arrive_as_they_were_sent(optimizer: str) -> None:
    made = template(optimizer)
    sent = trained(made)
    data, layers = to_bytes(sent), range(1, made.model.layers + 1)
    assert len(data) <= made.largest_bytes(layers)
    arrived = made.from_bytes(data, layers)
    assert same(arrived, sent)
    kept = {name.split(".")[1] for name in named(arrived)}
    extra = {"sgd": set(), "momentum": {"momentum_buffer"}, "adam": {"step", "exp_avg", "exp_avg_sq"}}[optimizer]
    assert kept == {"parameters", "buffers"} | extra
    # And a layer goes on from them as the one that was sent would have.
    for number, state in arrived.items():
        assert same({number: made.layer(number, state).state()}, {number: sent[number]})


def test_layers_that_were_not_trained_have_nothing_of_an_optimiser() -> None:
    made = template("adam")
    fresh = {1: made.layer(1).state()}
    assert same(made.from_bytes(to_bytes(fresh), [1]), fresh)


def test_some_of_the_layers() -> None:
    made = template("momentum")
    sent = {number: state for number, state in trained(made).items() if number in (2, 3)}
    assert same(made.from_bytes(to_bytes(sent), range(2, 4)), sent)


def changed(change: Callable[[dict[str, Tensor]], object], optimizer: str = "adam") -> tuple[Template, bytes]:
    made = template(optimizer)
    tensors = named(trained(made))
    change(tensors)
    return made, save({name: tensor.clone() for name, tensor in tensors.items()})


def layer_of(kind: str) -> str:
    """The full name of some tensor of a kind."""
    return next(name for name in named(trained(template("adam"))) if kind in name)


def with_value(kind: str, value: float) -> Callable[[dict[str, Tensor]], object]:
    def change(tensors: dict[str, Tensor]) -> None:
        name = layer_of(kind)
        tensors[name] = tensors[name].clone()
        tensors[name].view(-1)[0] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(layer_of("parameters")), "came without parameters"),
        (lambda t: t.pop(layer_of("buffers")), "came without buffers"),
        (lambda t: t.pop(layer_of("exp_avg_sq")), "came without exp_avg_sq"),
        (lambda t: t.pop(layer_of("step")), "came without step"),
        (lambda t: t.update({"1.parameters.more": torch.zeros(1)}), "came with 'parameters.more'"),
        (lambda t: t.update({"1.momentum_buffer.weight": torch.zeros(6, 4)}), "came with 'momentum_buffer"),
        (lambda t: t.update({"99.parameters.x": torch.zeros(1)}), r"layers \[1, 2, .*99\] came"),
        (lambda t: t.update({"0.nothing": torch.zeros(1)}), r"layers \[0, 1, "),
        (lambda t: t.update({"\x1b[2J.x": torch.zeros(1)}), "cannot be read"),
        (lambda t: t.update({layer_of("parameters"): torch.zeros(1)}), r"of torch.float32, \(1,\)"),
        (lambda t: t.update({layer_of("exp_avg."): torch.zeros(1)}), r"of torch.float32, \(1,\)"),
        (lambda t: t.update({k: v.double() for k, v in t.items() if "parameters" in k}), "of torch.float64"),
        (lambda t: t.update({k: v.half() for k, v in t.items() if "exp_avg" in k}), "of torch.float16"),
        (lambda t: t.update({k: v.double() for k, v in t.items() if "step" in k}), "of torch.float64"),
        (lambda t: t.update({k: v.float() for k, v in t.items() if "used" in k}), "of torch.float32"),
        (with_value("parameters", float("nan")), "that cannot be"),
        (with_value("parameters", float("inf")), "that cannot be"),
        (with_value("parameters", -2 * LARGEST), "that cannot be"),
        (with_value("running_mean", float("inf")), "that cannot be"),
        (with_value("running_mean", float("nan")), "that cannot be"),
        (with_value("running_var", -1e-3), "that cannot be"),
        (with_value("mask", float("-inf")), "that cannot be"),
        (with_value("exp_avg_sq", -1e-12), "that cannot be"),
        (with_value("step", -1.0), "that cannot be"),
        (with_value("step", float("nan")), "that cannot be"),
    ],
)
def test_what_does_not_look_like_the_models_layers_is_refused(
    change: Callable[[dict[str, Tensor]], object], message: str
) -> None:
    made, data = changed(change)
    with pytest.raises(BadMessage, match=message) as caught:
        made.from_bytes(data, range(1, made.model.layers + 1))
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_one_bad_number_is_found_wherever_it_is(value: float, dtype: torch.dtype) -> None:
    """Torch looks for the least and the most in several ways, by the place and the size of a tensor."""
    model = nn.Sequential(nn.Linear(13, 11), nn.Linear(11, 2)).to(dtype)
    made = Template(split(model, torch.randn(8, 13, dtype=dtype)), OptimizerSettings())
    state = made.layer(1).state()
    made.check({1: state})
    for name, tensor in state.items():
        for place in range(tensor.numel()):
            bad = tensor.clone()
            bad.view(-1)[place] = value
            with pytest.raises(BadMessage, match="that cannot be"):
                made.check({1: state | {name: bad}})


def test_fewer_layers_than_were_asked_for_are_refused() -> None:
    made = template("sgd")
    with pytest.raises(BadMessage, match=r"layers \[1\] came, \[1, 2\] were expected"):
        made.from_bytes(to_bytes({1: made.layer(1).state()}), range(1, 3))


def header(about: object, size: int | None = None) -> bytes:
    text = json.dumps(about).encode()
    return struct.pack("<Q", len(text) if size is None else size) + text


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0" * 7,
        b"\0" * 100,
        struct.pack("<Q", 2**63) + b"{}",
        header({}, 2**40),
        header({"1.x": {"dtype": "F32", "shape": [2**62], "data_offsets": [0, 2**62]}}),
        header({"1.x": {"dtype": "F32", "shape": [2**62, 2**62], "data_offsets": [0, 4]}}) + b"\0" * 4,
        header({"1.x": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}) + b"\0" * 4,
        header({"1.x": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}}) + b"\0" * 4,
        header({"1.x": {"dtype": "\x1b[2J", "shape": [1], "data_offsets": [0, 4]}}) + b"\0" * 4,
        header({"1.x": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}) + b"\0" * 4,
        header({"1.x": {"dtype": "F8_E4M3", "shape": [4], "data_offsets": [0, 4]}}) + b"\0" * 4,
        header({"1.x": {"dtype": "F4", "shape": [8], "data_offsets": [0, 4]}}) + b"\0" * 4,
        header({"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}) + b"\0" * 4,
        header({"9" * 5000 + ".x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}) + b"\0" * 4,
        header([[]]),
        b"[" * 10_000,
        struct.pack("<Q", 20_000) + b"[" * 20_000,
        header({"1.x": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}),
    ],
    ids=range(19),
)
def test_garbage_is_refused_in_words_that_can_be_shown(data: bytes) -> None:
    made = template("sgd")
    with pytest.raises(BadMessage) as caught:
        made.from_bytes(data, [1])
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 400


def test_no_change_of_some_bytes_gets_further_than_a_refusal() -> None:
    made, rng = template("momentum"), random.Random(0)
    layers = range(1, made.model.layers + 1)
    good, refused = to_bytes(trained(made)), 0
    for _ in range(500):
        data = bytearray(good)
        end = len(data) if rng.random() < 0.3 else 2000  # the header is what can be broken in many ways
        for _ in range(rng.randint(1, 5)):
            data[rng.randrange(end)] = rng.randrange(256)
        if rng.random() < 0.2:
            del data[rng.randrange(len(data)) :]
        try:
            arrived = made.from_bytes(data, layers)
        except BadMessage:
            refused += 1
        else:
            assert all(not t.is_floating_point() or not t.isnan().any() for t in named(arrived).values())
    assert refused > 300


def test_names_say_whose_a_tensor_is() -> None:
    states: LayerStates = {1: {"parameters.a.b": torch.zeros(2)}, 12: {"buffers.c": torch.ones(1, dtype=torch.bool)}}
    assert same(by_layer(load(to_bytes(states))), states)
