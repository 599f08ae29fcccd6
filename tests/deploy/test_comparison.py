"""What types of numbers cost in rounds: measured by the edge server in a round that is exact, and changes nothing."""

import asyncio
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from adaptsfl.config import ModelConfig
from adaptsfl.deploy.layers_file import Template
from adaptsfl.deploy.parties.edge.comparison import compared
from adaptsfl.deploy.parties.edge.model import EdgeModel
from adaptsfl.loading import split_model
from adaptsfl.runs.backend import Learned
from adaptsfl.runs.loop import BlockLoop
from adaptsfl.training import OptimizerSettings
from adaptsfl.training.precision import ServerGradients, affine_gradient, products, rounds_factor
from adaptsfl.training.wire_format import Dither, arriving
from deploy.deployed import PATIENCE_S
from deploy.in_process import RECIPE, Deployment, deployed

DTYPES = ("float32", "bfloat16", "float16", "int8", "int4")
CUTS, WEIGHTS, ROUND, CLASSES = (2, 1, 3), (0.5, 0.3, 0.2), 7, 10
PRESENT = (0, 1, 2)


def edge_model(norm: str) -> tuple[EdgeModel, dict[int, Tensor], dict[int, Tensor]]:
    """Return a model with a cut of its own for every device, and activations and labels that have arrived."""
    model, example = split_model(ModelConfig(name="vgg_digits", options={"width": 0.25, "norm": norm}), to_train=True)
    template = Template(model, OptimizerSettings())
    torch.manual_seed(0)
    edge = EdgeModel(model, template, "pooled", len(CUTS), 1)
    edge.place(max(CUTS), {number: template.layer(number).state() for number in range(2, model.layers + 1)})
    sent, labels = {}, {}
    for device, cut in enumerate(CUTS):
        edge.admit(device, cut)
        x = torch.randn(8, *example.shape[1:])
        for piece in model.pieces[:cut]:
            x = piece(x)
        sent[device], labels[device] = x.detach(), torch.randint(0, CLASSES, (8,))
        edge.receive(device, sent[device].clone())
    return edge, sent, labels


def by_hand(edge: EdgeModel, sent: dict[int, Tensor], labels: dict[int, Tensor], dtype: str) -> ServerGradients:
    """The gradients of the model as one expression, without batch-norm."""
    parameters = [parameter for layer in edge.server.common for parameter in layer.piece.parameters()]
    inputs = {device: arriving(x, dtype).detach().requires_grad_() for device, x in sent.items()}
    losses = []
    for device, x in inputs.items():
        output = x
        for layer in [*edge.server.non_common[device], *edge.server.common]:
            output = layer.piece(output)
        losses.append(torch.nn.functional.cross_entropy(output, labels[device]))
    mean = sum(weight * loss for weight, loss in zip(WEIGHTS, losses, strict=True))
    common = torch.autograd.grad(mean, parameters, retain_graph=True)
    arrived = {}
    for device, x in inputs.items():
        (gradient,) = torch.autograd.grad(losses[device], x, retain_graph=True)
        arrived[device] = affine_gradient(sent[device], arriving(gradient, dtype, Dither(device, ROUND)))
    return ServerGradients(common, arrived)


def test_factors_are_those_of_the_gradients() -> None:
    edge, sent, labels = edge_model("group")
    found = compared(edge, DTYPES, ROUND, PRESENT, labels, WEIGHTS)
    exact = by_hand(edge, sent, labels, "float32")
    for dtype in DTYPES:
        expected = rounds_factor(products(exact, by_hand(edge, sent, labels, dtype), WEIGHTS))
        assert found[dtype] == pytest.approx(expected, rel=1e-4), dtype
    assert found["float32"] == pytest.approx(1.0, abs=1e-6)
    assert 1 < found["int8"] < found["int4"]


@pytest.mark.parametrize("norm", ["group", "batch"])
def test_a_comparison_changes_nothing(norm: str) -> None:
    edge, _, labels = edge_model(norm)
    alone, _, _ = edge_model(norm)
    random = torch.get_rng_state()
    compared(edge, DTYPES, ROUND, PRESENT, labels, WEIGHTS)
    assert torch.equal(torch.get_rng_state(), random)
    for model in (edge, alone):
        model.train(ROUND, PRESENT, labels, WEIGHTS)
    for layer, same in zip(edge.server.common, alone.server.common, strict=True):
        for name, tensor in layer.piece.state_dict().items():
            torch.testing.assert_close(tensor, same.piece.state_dict()[name], rtol=0, atol=0)


def run(folder: Path, monkeypatch: pytest.MonkeyPatch, sent: int, dtypes: tuple[str, ...]) -> tuple[list[Any], Any]:
    """Run three blocks of which the second compares types; return what was learned, and the model."""
    learned: list[Learned] = []
    order, learn = BlockLoop._order, BlockLoop._learn

    def ordered(loop: BlockLoop, standing: Any) -> Any:
        made = order(loop, standing)
        return replace(made, compared=dtypes) if loop.blocks == 1 else made

    def noted(loop: BlockLoop, found: Learned, given: Any) -> None:
        learned.append(found)
        learn(loop, found, given)

    monkeypatch.setattr(BlockLoop, "_order", ordered)
    monkeypatch.setattr(BlockLoop, "_learn", noted)

    async def scenario() -> Any:
        plans = f"plans = [3122, 3122, 3122], sent = [{sent}]"
        recipe = RECIPE.replace("plans = [31234, 22222, 53142]", plans)
        async with deployed(folder, None, "fleet.devices=3", "run.rounds=9", recipe=recipe) as here:
            sizes = counted(here)
            devices = [asyncio.create_task(here.device(f"device-{k}", probe_links=False).run()) for k in (1, 2, 3)]
            await asyncio.wait_for(here.finish(devices), PATIENCE_S)
            return deepcopy(here.model()), sizes

    return learned, asyncio.run(scenario())


def counted(here: Deployment) -> dict[int, list[tuple[int, str]]]:
    """Return by round how many samples came in which type, of the first device."""
    found: dict[int, list[tuple[int, str]]] = {}
    check = here.edge.shapes.check

    def noted(header: Any, cut: int, sending: Any) -> None:
        check(header, cut, sending)
        if cut == 1 and not (header.evaluation or header.estimation):
            found.setdefault(header.round, []).append((header.tensor.shape[0], header.tensor.dtype))

    object.__setattr__(here.edge.shapes, "check", noted)
    return found


def test_the_first_round_of_a_comparing_block_is_whole_and_exact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learned, (_, sizes) = run(tmp_path, monkeypatch, 43, ("int8", "int4"))
    assert sizes == {number: [(8, "float32")] if number == 4 else [(2, "int8")] * 4 for number in range(1, 10)}
    assert [sorted(found.wires) for found in learned] == [[], ["int4", "int8"], []]
    assert 1 < learned[1].wires["int8"] < learned[1].wires["int4"] < 2
    assert all(len(found.losses) == 3 for found in learned)
