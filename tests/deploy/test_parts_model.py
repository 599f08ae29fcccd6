"""The edge server's part of the model, trained part by part: sums of gradients, rejections, rounds that begin again."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from adaptsfl.config import ModelConfig
from adaptsfl.deploy.layers_file import Template
from adaptsfl.deploy.parties.edge.model import EdgeModel, RejectedActivations
from adaptsfl.loading import split_model
from adaptsfl.training import OptimizerSettings

CUTS, WEIGHTS, BATCH, CLASSES = (2, 1, 3), (0.5, 0.3, 0.2), 8, 10
PRESENT = (0, 1, 2)


class Round:
    """A model in the middle of a block, and the mini-batches of one round.

    Attributes:
        sent, labels: by device.
    """

    def __init__(self, norm: str = "group", factor: float = 1.0) -> None:
        options = {"width": 0.25, "norm": norm}
        torch.manual_seed(0)
        model, example = split_model(ModelConfig(name="vgg_digits", options=options), to_train=True)
        template = Template(model, OptimizerSettings())
        self.edge = EdgeModel(model, template, "pooled", len(CUTS), 1)
        self.edge.place(max(CUTS), {number: template.layer(number).state() for number in range(2, model.layers + 1)})
        self.sent: dict[int, Tensor] = {}
        self.labels: dict[int, Tensor] = {}
        for device, cut in enumerate(CUTS):
            self.edge.admit(device, cut)
            x = torch.randn(BATCH, *example.shape[1:])
            for piece in model.pieces[:cut]:
                x = piece(x)
            self.sent[device] = factor * x.detach()
            self.labels[device] = torch.randint(0, CLASSES, (BATCH,))

    def receive(self, parts: int, devices: Sequence[int] = PRESENT) -> None:
        for device in devices:
            for part, x in enumerate(self.sent[device].chunk(parts)):
                self.edge.receive(device, x.clone(), part)

    def train(self, part: int, parts: int, devices: Sequence[int] = PRESENT) -> list[Tensor]:
        labels = {device: self.labels[device].chunk(parts)[part] for device in devices}
        weights = [WEIGHTS[device] for device in devices]
        return self.edge.train(1, devices, labels, weights, part, parts)[1]

    def state(self) -> list[Tensor]:
        layers = [*self.edge.server.common, *(layer for own in self.edge.server.non_common for layer in own)]
        return [tensor.clone() for layer in layers for tensor in layer.piece.state_dict().values()]


def assert_close(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("parts", [2, 4, 8])
def test_parts_lead_to_the_same_layers_and_gradients_as_the_whole(parts: int) -> None:
    whole, divided = Round(), Round()
    whole.receive(1)
    expected = whole.train(0, 1)
    divided.receive(parts)
    found = [divided.train(part, parts) for part in range(parts)]
    assert_close(divided.state(), whole.state())
    for device, gradient in enumerate(expected):
        assert_close([torch.cat([part[device] for part in found])], [gradient])


def test_layers_change_after_the_last_part_only() -> None:
    given = Round()
    before = given.state()
    given.receive(2)
    given.train(0, 2)
    assert_close(given.state(), before)
    given.train(1, 2)
    assert any(not torch.equal(one, other) for one, other in zip(given.state(), before, strict=True))


def test_own_layers_of_a_device_that_missed_a_part_stay_as_they_were() -> None:
    given = Round()
    own = [tensor.clone() for layer in given.edge.server.non_common[1] for tensor in layer.piece.state_dict().values()]
    given.receive(2)
    given.train(0, 2)
    given.train(1, 2, (0, 2))
    after = [tensor for layer in given.edge.server.non_common[1] for tensor in layer.piece.state_dict().values()]
    assert_close(after, own)


def test_a_rejected_part_changes_nothing_and_the_gradients_of_earlier_ones_stay() -> None:
    given, expected = Round(), Round()
    for one in (given, expected):
        one.receive(2)
        one.train(0, 2)
    given.edge.receive(2, torch.full_like(given.sent[2].chunk(2)[1], 1e30), 1)
    with pytest.raises(RejectedActivations) as rejected:
        given.train(1, 2)
    assert rejected.value.devices == (2,)
    for one in (given, expected):
        one.train(1, 2, (0, 1))
    assert_close(given.state(), expected.state())


def test_a_round_that_begins_again_leaves_nothing_of_its_first_attempt() -> None:
    given, expected = Round(), Round()
    given.receive(4)
    given.train(0, 4)
    given.train(1, 4, (0, 1))
    given.edge.drop_round()
    for one in (given, expected):
        one.receive(4, (0, 2))
        for part in range(4):
            one.train(part, 4, (0, 2))
    assert_close(given.state(), expected.state())


def test_parts_may_be_normalised_by_themselves() -> None:
    """As ghost batches: all parts arrive before the first is trained, and running statistics change as they do."""
    given = Round("batch")
    given.receive(2)
    for part in range(2):
        assert all(bool(torch.isfinite(gradient).all()) for gradient in given.train(part, 2))
