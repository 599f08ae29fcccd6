"""The reference against what it must be in special cases, each computed in a few lines of plain torch."""

from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from adaptsfl.decisions import Decision
from adaptsfl.errors import InvalidInput
from adaptsfl.training import OptimizerSettings, Reference, TrainingWarning
from training.cases import SIZES, largest_difference, make_batches, make_model

SHAPE = (1, 8, 8)
EXACT = 1e-12


def trained(trainer, batches, rounds: int, start: int = 1):
    for t in range(start, start + rounds):
        trainer.round(batches(t))
    return trainer


def mean_state(nets: list[nn.Module], weights: list[float]) -> dict[str, Tensor]:
    states = [net.state_dict() for net in nets]
    return {key: sum(w * state[key] for w, state in zip(weights, states, strict=True)) for key in states[0]}


@pytest.mark.parametrize("optimizer", ["sgd", "momentum"])
def test_averaging_every_round_is_centralized_training(optimizer) -> None:
    """With weights in proportion to the batches, the mean of the devices' losses is the mean over all samples."""
    model = make_model("vgg_digits", width=0.25, norm="group")
    batches = make_batches(model, SHAPE)
    settings = OptimizerSettings(optimizer, 0.1, weight_decay=0.01)
    found = trained(Reference(model, Decision((1, 4, 2, 6), 1), settings, weights=SIZES), batches, 6)
    net = deepcopy(model.module)
    momentum = 0.9 if optimizer == "momentum" else 0.0
    descent = torch.optim.SGD(net.parameters(), 0.1, momentum=momentum, weight_decay=0.01)
    for t in range(1, 7):
        x, y = (torch.cat(part) for part in zip(*batches(t), strict=True))
        descent.zero_grad()
        cross_entropy(net(x), y).backward()
        descent.step()
    assert largest_difference(found.state(), net.state_dict()) < EXACT


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_every_cut_at_the_end_is_federated_averaging(optimizer) -> None:
    """Batch-norm too: nothing is common, so every device has its own statistics and their mean at the end."""
    model = make_model("vgg_digits", width=0.25, norm="batch")
    batches = make_batches(model, SHAPE)
    settings = OptimizerSettings(optimizer, 0.01, at_averaging="reset")
    found = trained(Reference(model, Decision((6,) * 4, 3), settings), batches, 6)
    state = model.module.state_dict()
    for start in (1, 4):
        nets = [deepcopy(model.module) for _ in SIZES]
        for k, net in enumerate(nets):
            net.load_state_dict(state)
            kind = torch.optim.Adam if optimizer == "adam" else torch.optim.SGD
            descent = kind(net.parameters(), 0.01)
            for t in range(start, start + 3):
                x, y = batches(t)[k]
                descent.zero_grad()
                cross_entropy(net(x), y).backward()
                descent.step()
        state = mean_state(nets, [0.25] * 4)
    assert largest_difference(found.state(), state) < EXACT


def test_without_averaging_it_is_parallel_split_learning() -> None:
    """One server net and one client net per device, the server's following the mean gradient."""
    model = make_model("vgg_digits", width=0.25)
    batches = make_batches(model, SHAPE)
    found = trained(Reference(model, Decision((2,) * 4, None), OptimizerSettings("sgd", 0.1)), batches, 4)
    clients, server = [deepcopy(model.client(2)) for _ in SIZES], deepcopy(model.server(2))
    descent = [torch.optim.SGD(net.parameters(), 0.1) for net in [server, *clients]]
    for t in range(1, 5):
        for optimizer in descent:
            optimizer.zero_grad()
        for client, (x, y) in zip(clients, batches(t), strict=True):
            cross_entropy(server(client(x)), y).backward()
        for parameter in server.parameters():
            parameter.grad /= 4
        for optimizer in descent:
            optimizer.step()
    own = [nn.ModuleList(layer.piece for layer in forged).state_dict() for forged in found.forged()]
    for client, state in zip(clients, own, strict=True):
        expected = list(client.state_dict().values())
        assert all(torch.allclose(a, b, atol=EXACT, rtol=0) for a, b in zip(state.values(), expected, strict=True))
    assert (
        largest_difference(found.state(), model.merge_state(mean_state(clients, [0.25] * 4), server.state_dict()))
        < EXACT
    )


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_where_a_client_specific_layer_runs_does_not_change_the_weights(norm) -> None:
    model = make_model("vgg_digits", width=0.25, norm=norm)
    batches = make_batches(model, SHAPE)
    settings = OptimizerSettings("momentum", 0.1)
    cuts = [(4, 4, 4, 4), (1, 2, 3, 4), (4, 1, 1, 1)]
    states = [trained(Reference(model, Decision(c, 2), settings), batches, 5).state() for c in cuts]
    assert max(largest_difference(state, states[0]) for state in states) < EXACT


def test_the_user_s_model_is_not_touched() -> None:
    model = make_model("vgg_digits", width=0.25, norm="batch")
    before = deepcopy(model.module.state_dict())
    trained(Reference(model, Decision((1, 2, 3, 4), 2), OptimizerSettings()), make_batches(model, SHAPE), 2)
    assert largest_difference(model.module.state_dict(), before) == 0


@pytest.mark.parametrize("rule", ["average", "reset", "keep"])
@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_state_goes_with_the_layers(optimizer, rule) -> None:
    """Layer 3 becomes common with its state, layer 4 becomes client-specific with a copy of its own in every device."""
    model = make_model("vgg_digits", width=0.25)
    batches = make_batches(model, SHAPE)
    settings = OptimizerSettings(optimizer, 0.01, at_averaging=rule)
    trainer = trained(Reference(model, Decision((1, 3, 2, 3), 2), settings), batches, 4)
    key = "momentum_buffer" if optimizer == "momentum" else "exp_avg"

    def states(layers):
        return [deepcopy(layer.optimizer.state[layer.parameters[0]].get(key)) for layer in layers]

    third, fourth = states([own[2] for own in trainer.forged()]), states(trainer.server.common)[0]
    trainer.change_plan(Decision((2, 2, 1, 2), 2))
    (merged,) = states(trainer.server.common[:1])
    if rule == "reset":
        assert merged is None
    else:
        assert torch.allclose(merged, sum(third) / 4, atol=EXACT)
        assert (largest(third) < EXACT) == (rule == "average")
    trainer.change_plan(Decision((4, 2, 4, 1), 2))
    copies = states([own[3] for own in trainer.forged()])
    assert all(torch.equal(copy, fourth) for copy in copies)
    trained(trainer, batches, 2, start=5)


def largest(copies: list[Tensor]) -> float:
    return max(float((copy - copies[0]).detach().abs().max()) for copy in copies)


def test_layers_are_averaged_at_their_own_intervals() -> None:
    model = make_model("vgg_digits", width=0.25)
    plan = Decision((1, 2, 3, 3), 2, {3: 4})
    trainer, batches = Reference(model, plan, OptimizerSettings("sgd", 0.1)), make_batches(model, SHAPE)
    apart = []
    for t in range(1, 5):
        trainer.round(batches(t))
        layers = zip(*trainer.forged(), strict=True)
        apart.append([largest([layer.parameters[0] for layer in copies]) > 0 for copies in layers])
    assert apart == [[True] * 3, [False, False, True], [True] * 3, [False] * 3]


def test_the_parts_have_their_own_learning_rates() -> None:
    model = make_model("vgg_digits", width=0.25)
    batches = make_batches(model, SHAPE)

    def moved(client: float, common: float) -> dict[str, float]:
        settings = OptimizerSettings("sgd", client, common)
        state = trained(Reference(model, Decision((2, 1, 2, 1), 1), settings), batches, 1).state()
        return {key: float((state[key] - value).norm()) for key, value in model.module.state_dict().items()}

    slow, fast = moved(0.1, 0.1), moved(0.1, 0.2)
    for key in slow:
        assert fast[key] == pytest.approx(slow[key] * (1 if key in {*model.keys(1), *model.keys(2)} else 2))


def test_device_statistics_come_with_a_warning() -> None:
    model = make_model("vgg_digits", width=0.25, norm="batch")
    with pytest.warns(TrainingWarning, match="test accuracy does not rise"):
        Reference(model, Decision((1, 2), 1), OptimizerSettings(), statistics="device")


def test_wrong_settings_say_what_to_do() -> None:
    model = make_model("vgg_digits", width=0.25)
    with pytest.raises(InvalidInput, match=r"decision.cuts\[1\]: is 7. Give a whole number from 1 to 6"):
        Reference(model, Decision((1, 7), 1), OptimizerSettings())
    with pytest.raises(InvalidInput, match=r"statistics: is 'global'. Give one of 'pooled', 'device'"):
        Reference(model, Decision((1, 2), 1), OptimizerSettings(), statistics="global")
    with pytest.raises(InvalidInput, match=r"optimizer.name: is 'lion'"):
        OptimizerSettings("lion")
    with pytest.raises(InvalidInput, match=r"optimizer.momentum: is 1. Give a number ≥ 0 and below 1"):
        OptimizerSettings("momentum", momentum=1.0)
    trainer = Reference(model, Decision((1, 2), 1), OptimizerSettings())
    with pytest.raises(InvalidInput, match=r"batches: has 4 entries. Give 2, one per device"):
        trainer.round(make_batches(model, SHAPE)(1))
    with pytest.raises(InvalidInput, match=r"batches\[0\]: has 0 input\(s\) and 0 target"):
        trainer.round(make_batches(model, SHAPE, (0, 3))(1))
    with pytest.raises(InvalidInput, match=r"decision.cuts: has 3 entries. Give 2, one per device"):
        trainer.change_plan(Decision((1, 2, 3), 1))


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
@pytest.mark.parametrize("parts", [2, 4])
def test_a_mini_batch_in_parts_gives_the_losses_and_weights_of_a_whole_one(optimizer, parts) -> None:
    """Mixed cuts, batches of several sizes, weights, an absent device, a change of the plan in the middle."""
    model = make_model("vgg_digits", width=0.25, norm="group")
    batches = make_batches(model, SHAPE, sizes=(4, 8, 4, 12))
    settings = OptimizerSettings(optimizer, 0.01)
    found = []
    for k in (1, parts):
        trainer = Reference(model, Decision((1, 4, 2, 3), 2, micro_batches=k), settings, weights=[1, 2, 3, 4])
        losses = [trainer.round(batches(t)) for t in (1, 2)]
        trainer.change_plan(Decision((3, 1, 3, 2), 2, micro_batches=k))
        losses.append(trainer.round([batches(3)[0], *batches(3)[2:]], present=[0, 2, 3]))
        losses.append(trainer.round(batches(4)))
        found.append((torch.cat(losses), trainer.state()))
    assert float((found[0][0] - found[1][0]).abs().max()) < 1e-10
    assert largest_difference(found[1][1], found[0][1]) < 1e-10


def test_parts_are_equal_or_refused() -> None:
    model = make_model("vgg_digits", width=0.25)
    trainer = Reference(model, Decision((1, 2, 1, 2), 1, micro_batches=2), OptimizerSettings())
    with pytest.raises(InvalidInput, match="micro_batches: is 2, but a mini-batch has 3 samples"):
        trainer.round(make_batches(model, SHAPE)(1))
