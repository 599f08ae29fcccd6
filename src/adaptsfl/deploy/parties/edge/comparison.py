"""What types of numbers cost in rounds, measured on the activations of one round; nothing is changed by it."""

from collections.abc import Mapping, Sequence
from copy import deepcopy

import torch
from torch import Tensor

from adaptsfl.deploy.parties.edge.model import EdgeModel
from adaptsfl.training.layers import Layer, parameters_of
from adaptsfl.training.precision import ServerGradients, affine_gradient, products, repeated, rounds_factor
from adaptsfl.training.reference import ServerSide
from adaptsfl.training.wire_format import Dither, arriving


def compared(
    model: EdgeModel,
    dtypes: Sequence[str],
    round_: int,
    present: Sequence[int],
    labels: Mapping[int, Tensor],
    weights: Sequence[float],
) -> dict[str, float]:
    """Return by type the factor on the rounds, for a round whose undivided mini-batches have arrived exactly.

    Args:
        weights: of the present devices in the mean over all; they sum to 1.
    """
    received = {device: model.server.received(device) for device in present}
    targets = [labels[device] for device in present]
    shares = dict(zip(present, weights, strict=True))
    by_number = [shares.get(device, 0.0) for device in range(len(model.server.non_common))]
    server = _apart(model.server)

    def gradients(dtype: str) -> ServerGradients:
        with repeated(torch.device("cpu")):
            return _gradients(server, dtype, round_, received, targets, weights)

    exact = gradients("float32")
    return {dtype: rounds_factor(products(exact, gradients(dtype), by_number)) for dtype in dtypes}


def _apart(server: ServerSide) -> ServerSide:
    """Return the same layers, but copies of those whose buffers, such as running statistics, change as they run."""

    def kept(layers: Sequence[Layer]) -> list[Layer]:
        return [Layer(deepcopy(one.piece), server.settings) if [*one.piece.buffers()] else one for one in layers]

    apart = ServerSide(kept(server.common), server.statistics, server.settings, server.loss)
    apart.non_common = [kept(layers) for layers in server.non_common]
    return apart


def _gradients(
    server: ServerSide,
    dtype: str,
    round_: int,
    received: Mapping[int, Tensor],
    targets: Sequence[Tensor],
    weights: Sequence[float],
) -> ServerGradients:
    """Return the gradients of a round whose activations and gradients are sent in a type of numbers."""
    present = list(received)
    for device, activations in received.items():
        server.receive(device, arriving(activations, dtype).detach())
    server.forward(present, targets, weights)
    sent = server.backward()
    at_cut = {
        device: affine_gradient(received[device], arriving(gradient, dtype, Dither(device, round_)))
        for device, gradient in zip(present, sent, strict=True)
    }
    found = ServerGradients(server.gradients[: len(parameters_of(server.common))], at_cut)
    server.drop()
    return found
