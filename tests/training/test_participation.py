"""Rounds in which some devices are absent: who is trained, who is averaged, and who receives the average."""

import warnings
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from adaptsfl.decisions import Decision
from adaptsfl.errors import InvalidInput, TrainingDiverged
from adaptsfl.models import SplitModel, split
from adaptsfl.training import (
    Batch,
    Engine,
    OptimizerSettings,
    Reference,
    Sequential,
    TrainingWarning,
    train,
)
from training.cases import largest_difference, make_batches, make_model

EXACT = 1e-10
SHAPE = (1, 8, 8)
WEIGHTS = (1.0, 5.0, 2.0, 3.0)
# Device 3 is never there at first; one device alone; all; a plan begins and ends while somebody is away.
PRESENT = [(1, 2), (1, 2), (0,), (0, 1, 2, 3), (3,), (1, 3), (0, 1, 2), (2, 3), (0, 2), (1,), (0, 1, 2, 3), (0, 3)]
PLANS = {0: Decision((1, 3, 2, 1), 3), 3: Decision((4, 2, 1, 2), 4, {3: 6}), 7: Decision((2, 1, 1, 2), 1)}


def pick(batches: Sequence[Batch], present: Sequence[int]) -> list[Batch]:
    return [batches[k] for k in present]


def compare(model: SplitModel, settings: OptimizerSettings, **options: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TrainingWarning)
        slow = Reference(model, PLANS[0], settings, weights=WEIGHTS, **options)
        fast = Engine(model, PLANS[0], settings, weights=WEIGHTS, chunk=2, **options)
    batches = make_batches(model, SHAPE)
    for t, present in enumerate(PRESENT):
        if t in PLANS and t:
            slow.change_plan(PLANS[t])
            fast.change_plan(PLANS[t])
        expected, found = (trainer.round(pick(batches(t), present), present) for trainer in (slow, fast))
        assert len(found) == len(present)
        assert torch.allclose(found, expected, atol=EXACT, rtol=EXACT)
        assert largest_difference(fast.state(), slow.state()) < EXACT
        for layer, copies in zip(fast.layers, zip(*slow.forged(), strict=True), strict=False):  # absent ones too
            for k, copy in enumerate(copies):
                for name, tensor in [*copy.piece.named_parameters(), *copy.piece.named_buffers()]:
                    rows = layer.parameters[name] if name in layer.parameters else layer.buffers[name]
                    assert torch.allclose(rows[k if len(rows) > 1 else 0], tensor, atol=EXACT, rtol=EXACT), (t, k, name)


@pytest.mark.parametrize("rule", ["average", "reset", "keep"])
@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
def test_the_engine_is_the_reference(optimizer: str, rule: Any) -> None:
    model = make_model("vgg_digits", width=0.25)
    rate = 1e-3 if optimizer == "adam" else 0.05
    compare(model, OptimizerSettings(optimizer, rate, 2 * rate, weight_decay=0.01, at_averaging=rule))


@pytest.mark.parametrize("statistics", ["pooled", "device"])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_batch_norm(statistics: str, momentum: float | None) -> None:
    """With momentum None the running statistics depend on how many batches a copy has seen, which now differs."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 3, 3),
        nn.BatchNorm2d(3, momentum=momentum),
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4, momentum=momentum),
        nn.Sequential(nn.ReLU(), nn.Flatten()),
        nn.Linear(64, 6),
        nn.BatchNorm1d(6, momentum=momentum),
        nn.Linear(6, 10),
    )
    model = split(net.double(), torch.zeros(2, *SHAPE, dtype=torch.float64))
    compare(model, OptimizerSettings("momentum", 0.05), statistics=statistics)


@pytest.mark.parametrize("kind", [Engine, Reference])
def test_federated_averaging_in_plain_torch(kind: Any) -> None:
    """Two rounds between averages. The mean is of those present in the second, and all begin again from it."""
    model = make_model("vgg_digits", width=0.25, norm="group")
    batches = make_batches(model, SHAPE)
    trainer = kind(model, Decision((model.layers,) * 4, 2), OptimizerSettings("sgd", 0.05), weights=WEIGHTS)
    nets = [deepcopy(model.module) for _ in WEIGHTS]
    for t, present in enumerate([(0, 1, 3), (1, 2), (0, 1, 2, 3), (0, 3)], start=1):
        losses = trainer.round(pick(batches(t), present), present)
        for k, loss in zip(present, losses, strict=True):
            x, y = batches(t)[k]
            expected = cross_entropy(nets[k](x), y)
            assert float(loss) == pytest.approx(float(expected.detach()))
            gradients = torch.autograd.grad(expected, list(nets[k].parameters()))
            with torch.no_grad():
                for parameter, gradient in zip(nets[k].parameters(), gradients, strict=True):
                    parameter.sub_(0.05 * gradient)
        total = sum(WEIGHTS[k] for k in present)
        states = [nets[k].state_dict() for k in present]
        mean = {
            key: sum(WEIGHTS[k] / total * state[key] for k, state in zip(present, states, strict=True))
            for key in states[0]
        }
        assert largest_difference(trainer.state(), mean) < EXACT
        if t % 2 == 0:
            for net in nets:
                net.load_state_dict(mean)


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_whoever_is_absent_stays_as_it_is(optimizer: str) -> None:
    model = make_model("vgg_digits", width=0.25, norm="batch")
    batches = make_batches(model, SHAPE)
    engine = Engine(model, Decision((2, 1, 2, 2), 3), OptimizerSettings(optimizer, 0.01))
    engine.round(batches(1))
    before = engine.snapshot()
    engine.round(pick(batches(2), (0, 2)), (0, 2))
    after = engine.snapshot()
    for old, new in zip(before.tensors[:2], after.tensors[:2], strict=True):
        for name in old:
            same = [torch.equal(old[name][k], new[name][k]) for k in range(4)]
            assert same == [False, True, False, True], name
    assert after.steps[0] == (2, 1, 2, 1)
    assert after.present == (0, 2)
    engine.round(pick(batches(3), (0, 1)), (0, 1))
    assert all(len(rows) == 1 for layer in engine.layers for rows in layer.tensors().values())  # equal again, for all
    assert engine.layers[0].steps == [3]


def test_averaging_every_round_is_one_step_on_the_samples_of_those_present() -> None:
    """The engine's short way: no copies, and the weights of those present sum to 1."""
    model = make_model("vgg_digits", width=0.25, norm="group")
    batches, net = make_batches(model, SHAPE), deepcopy(model.module)
    engine = Engine(model, Decision((1, 4, 2, 6), 1), OptimizerSettings("momentum", 0.1), weights=WEIGHTS)
    descent = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    for t, present in enumerate(PRESENT[:5]):
        engine.round(pick(batches(t), present), present)
        total = sum(WEIGHTS[k] for k in present)
        descent.zero_grad()
        sum(
            WEIGHTS[k] / total * cross_entropy(net(x), y) for k, (x, y) in enumerate(batches(t)) if k in present
        ).backward()
        descent.step()
    assert largest_difference(engine.state(), net.state_dict()) < EXACT
    assert all(len(rows) == 1 for layer in engine.layers for rows in layer.parameters.values())


def test_naming_all_devices_equals_naming_none() -> None:
    """Bit for bit, in single precision."""
    model = make_model("vgg_digits", torch.float32, width=0.25)
    batches = make_batches(model, SHAPE)
    one, other = (Engine(model, PLANS[0], OptimizerSettings("adam"), weights=WEIGHTS) for _ in range(2))
    for t in range(1, 5):
        one.round(batches(t))
        other.round(batches(t), range(4))
    assert largest_difference(one.state(), other.state()) == 0


@pytest.mark.parametrize("relayed", [False, True])
def test_devices_take_turns_without_those_absent(relayed: bool) -> None:
    model = make_model("vgg_digits", width=0.25)
    batches = make_batches(model, SHAPE)
    trainer = Sequential(model, 2, 4, OptimizerSettings("sgd", 0.05), interval=2, seed=5, relayed=relayed)
    clients, server = [deepcopy(model.client(2)) for _ in WEIGHTS], deepcopy(model.server(2))
    for t, present in enumerate([(0, 1, 3), (1, 2), (0, 2)], start=1):
        losses = trainer.round(pick(batches(t), present), present)
        for k in [k for k in trainer.order(t) if k in present]:
            x, y = batches(t)[k]
            client = clients[0 if relayed else k]
            loss = cross_entropy(server(client(x)), y)
            assert float(losses[present.index(k)]) == pytest.approx(float(loss.detach()), rel=1e-6)
            parameters = [*client.parameters(), *server.parameters()]
            with torch.no_grad():
                for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
                    parameter.sub_(0.05 * gradient)
        if t == 2 and not relayed:
            mean = {key: (clients[1].state_dict()[key] + value) / 2 for key, value in clients[2].state_dict().items()}
            for client in clients:
                client.load_state_dict(mean)
    found = clients[0].state_dict()
    if not relayed:
        found = {key: (value + clients[2].state_dict()[key]) / 2 for key, value in found.items()}
    assert largest_difference(trainer.state(), model.merge_state(found, server.state_dict())) < 1e-12


@pytest.mark.parametrize(
    ("present", "message"),
    [
        ((), r"present: names no device. Let at least one take part"),
        ((0, 4), r"present: is \(0, 4\). Name devices from 0 to 3, each once, in rising order"),
        ((-1, 2), r"present: is \(-1, 2\). Name"),
        ((2, 1), r"present: is \(2, 1\). Name"),
        ((1, 1), r"present: is \(1, 1\). Name"),
        ((1, 2, 3), r"batches: has 2 entries. Give 3, one per device that is present"),
    ],
)
def test_a_wrong_presence_says_what_to_do(present: tuple[int, ...], message: str) -> None:
    model = make_model("vgg_digits", width=0.25)
    batches = make_batches(model, SHAPE)(1)[:2]
    trainers = [kind(model, PLANS[0], OptimizerSettings()) for kind in (Engine, Reference)]
    for trainer in [*trainers, Sequential(model, 2, 4, OptimizerSettings())]:
        with pytest.raises(InvalidInput, match=message):
            trainer.round(batches, present)


def test_the_loop_takes_the_batches_of_those_present() -> None:
    model = make_model("vgg_digits", width=0.25)
    batches = make_batches(model, SHAPE)
    engine, other = (Engine(model, PLANS[0], OptimizerSettings(), weights=WEIGHTS) for _ in range(2))
    records = list(train(engine, batches, 3, present=lambda t: PRESENT[t]))
    for t in (1, 2, 3):
        losses = other.round(pick(batches(t), PRESENT[t]), PRESENT[t])
        assert records[t - 1].losses == tuple(losses.tolist())
        assert records[t - 1].present == PRESENT[t]
    assert largest_difference(engine.state(), other.state()) == 0
    with pytest.raises(InvalidInput, match=r"present: is \(0, 9\)"):
        list(train(engine, batches, 1, present=lambda t: (0, 9)))


def test_the_device_that_diverges_is_named_by_its_number() -> None:
    class Scripted:
        def round(self, batches: Any, present: Any = None) -> Tensor:
            return torch.tensor([1.0, float("inf")])

        def state(self) -> dict[str, Tensor]:
            return {}

    with pytest.raises(TrainingDiverged, match="round 1: the loss of device 5 is inf"):
        list(train(Scripted(), lambda t: [None] * 6, 3, present=lambda t: (2, 5)))
