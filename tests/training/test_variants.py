"""SplitFed V1 and V2 and vanilla split learning against a few lines of plain torch."""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import cross_entropy

from adaptsfl.decisions import Decision
from adaptsfl.errors import InvalidInput
from adaptsfl.training import (
    Engine,
    OptimizerSettings,
    PooledEngine,
    Reference,
    Sequential,
)
from adaptsfl.training.wire_format import Dither, arriving
from training.cases import SIZES, largest_difference, make_batches, make_model

EXACT = 1e-12
SHAPE = (1, 8, 8)


def mean_state(nets):
    states = [net.state_dict() for net in nets]
    return {key: torch.stack([state[key].double() for state in states]).mean(0) for key in states[0]}


@pytest.mark.parametrize("norm", ["none", "batch"])
def test_vanilla_split_learning_is_sgd_on_one_batch_after_another(norm) -> None:
    model = make_model("vgg_digits", width=0.25, norm=norm)
    batches, net = make_batches(model, SHAPE), deepcopy(model.module)
    trainer = Sequential(model, 2, 4, OptimizerSettings("adam", 0.01), relayed=True)
    descent = torch.optim.Adam(net.parameters(), 0.01)
    for t in (1, 2, 3):
        losses = trainer.round(batches(t))
        for k, (x, y) in enumerate(batches(t)):
            descent.zero_grad()
            loss = cross_entropy(net(x), y)
            assert float(losses[k]) == pytest.approx(float(loss.detach()), rel=1e-5)
            loss.backward()
            descent.step()
    assert largest_difference(trainer.state(), net.state_dict()) < EXACT


@pytest.mark.parametrize("norm", ["none", "batch"])
def test_splitfed_v2(norm) -> None:
    """One server net follows every device's gradient in turn; client nets are averaged every second round."""
    model = make_model("vgg_digits", width=0.25, norm=norm)
    batches = make_batches(model, SHAPE)
    trainer = Sequential(model, 2, 4, OptimizerSettings("momentum", 0.05, at_averaging="keep"), interval=2, seed=5)
    clients, server = [deepcopy(model.client(2)) for _ in SIZES], deepcopy(model.server(2))
    descents = [torch.optim.SGD(net.parameters(), 0.05, momentum=0.9) for net in [*clients, server]]
    for t in range(1, 5):
        trainer.round(batches(t))
        assert sorted(trainer.order(t)) == [0, 1, 2, 3]
        for k in trainer.order(t):
            x, y = batches(t)[k]
            for descent in descents:
                descent.zero_grad()
            cross_entropy(server(clients[k](x)), y).backward()
            descents[k].step()
            descents[-1].step()
        if t % 2 == 0:
            mean = mean_state(clients)
            for client in clients:
                client.load_state_dict(mean)
    assert largest_difference(trainer.state(), model.merge_state(clients[0].state_dict(), server.state_dict())) < EXACT


@pytest.mark.parametrize("relayed", [True, False])
def test_devices_that_take_turns_round_what_they_send(relayed) -> None:
    model = make_model("vgg_digits", width=0.25)
    batches, settings = make_batches(model, SHAPE), OptimizerSettings("sgd", 0.05)
    rounded, exact = (
        Sequential(model, 2, 4, settings, interval=2, relayed=relayed, wire_dtype=dtype) for dtype in ("int4", None)
    )
    x, y = batches(1)[0]
    client, server = deepcopy(model.client(2)), deepcopy(model.server(2))
    sent = client(x)
    received = arriving(sent.detach(), "int4").requires_grad_()
    cross_entropy(server(received), y).backward()
    sent.backward(arriving(received.grad, "int4", Dither(0, 1)))
    for trainer in (rounded, exact):
        trainer.round(batches(1)[:1], present=[0])
    with torch.no_grad():
        for parameter in [*client.parameters(), *server.parameters()]:
            parameter.sub_(0.05 * parameter.grad)
    expected = model.merge_state(client.state_dict(), server.state_dict())
    assert largest_difference(rounded.state(), expected) < EXACT
    assert largest_difference(exact.state(), expected) > 1e-5


def test_the_order_changes_from_round_to_round() -> None:
    model = make_model("vgg_digits", width=0.25)
    trainer = Sequential(model, 2, 10, OptimizerSettings())
    assert len({tuple(trainer.order(t)) for t in range(1, 20)}) > 10


def test_splitfed_v1_is_federated_averaging() -> None:
    """Client and server nets of every device trained apart and all averaged at the end of an epoch of three rounds."""
    model = make_model("vgg_digits", width=0.25, norm="batch")
    batches = make_batches(model, SHAPE)
    engine = Engine(model, Decision((model.layers,) * 4, 3), OptimizerSettings("sgd", 0.05))
    pairs = [deepcopy((model.client(2), model.server(2))) for _ in SIZES]
    for t in (1, 2, 3):
        engine.round(batches(t))
        for (client, server), (x, y) in zip(pairs, batches(t), strict=True):
            descent = torch.optim.SGD([*client.parameters(), *server.parameters()], 0.05)
            activations = client(x)
            received = activations.detach().requires_grad_()
            cross_entropy(server(received), y).backward()
            activations.backward(received.grad)
            descent.step()
            descent.zero_grad()
    expected = model.merge_state(*(mean_state(nets) for nets in zip(*pairs, strict=True)))
    assert largest_difference(engine.state(), expected) < EXACT


def test_wrong_settings_say_what_to_do() -> None:
    model = make_model("vgg_digits", width=0.25)
    with pytest.raises(InvalidInput, match=r"cut\[0\]: is 9"):
        Sequential(model, 9, 4, OptimizerSettings())
    with pytest.raises(InvalidInput, match="devices: is 0"):
        Sequential(model, 2, 0, OptimizerSettings())
    with pytest.raises(InvalidInput, match="batches: has 4 entries"):
        Sequential(model, 2, 3, OptimizerSettings()).round(make_batches(model, SHAPE)(1))


def test_batch_norm_of_these_trainers_normalises_whole_mini_batches() -> None:
    parts = Decision((2,) * 4, 2, micro_batches=2)
    message = "micro_batches: is 2, but this trainer's batch-norm normalises whole mini-batches"
    for norm in ("group", "batch"):
        model = make_model("vgg_digits", width=0.25, norm=norm)
        pooled = PooledEngine(model, replace(parts, micro_batches=1), OptimizerSettings(), devices=4)
        turns = Sequential(model, 2, 4, OptimizerSettings(), interval=2)
        for trainer in (pooled, turns):
            if norm == "batch":
                with pytest.raises(InvalidInput, match=message):
                    trainer.change_plan(parts)
            else:
                trainer.change_plan(parts)
    with pytest.raises(InvalidInput, match=message):
        PooledEngine(model, parts, OptimizerSettings(), devices=4)


def test_a_model_with_nothing_to_train_is_refused() -> None:
    model = make_model("vgg_digits", width=0.25)
    model.module.requires_grad_(False)
    message = "model: has no parameter to train. Set requires_grad"
    for kind in (Engine, Reference):
        with pytest.raises(InvalidInput, match=message):
            kind(model, Decision((1, 2), 1), OptimizerSettings())
    with pytest.raises(InvalidInput, match=message):
        Sequential(model, 2, 4, OptimizerSettings())
