"""What types of numbers cost in rounds, measured on the activations of one round; nothing is changed by it."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from adaptsfl.deploy.parties.edge.model import EdgeModel
from adaptsfl.training.layers import parameters_of
from adaptsfl.training.precision import ServerGradients, products, rounds_factor
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
    with _unchanged(model, present):
        random = torch.get_rng_state()

        def gradients(dtype: str) -> ServerGradients:
            torch.set_rng_state(random)  # the same dropout for all types
            return _gradients(model, dtype, round_, received, targets, weights)

        exact = gradients("float32")
        return {dtype: rounds_factor(products(exact, gradients(dtype), by_number)) for dtype in dtypes}


def _gradients(
    model: EdgeModel,
    dtype: str,
    round_: int,
    received: Mapping[int, Tensor],
    targets: Sequence[Tensor],
    weights: Sequence[float],
) -> ServerGradients:
    """Return the gradients of a round whose activations and gradients are sent in a type of numbers."""
    present, real = list(received), model.server
    server = ServerSide(real.common, real.statistics, real.settings, real.loss)
    server.non_common = real.non_common
    for device, activations in received.items():
        server.receive(device, arriving(activations, dtype).detach())
    server.forward(present, targets, weights)
    sent = server.backward()
    arrived = {
        device: arriving(gradient, dtype, Dither(device, round_))
        for device, gradient in zip(present, sent, strict=True)
    }
    return ServerGradients(server.gradients[: len(parameters_of(real.common))], arrived)


@contextmanager
def _unchanged(model: EdgeModel, present: Sequence[int]) -> Iterator[None]:
    """Restore all buffers, such as running statistics, and the state of torch's random numbers."""
    layers = [*model.server.common, *(layer for device in present for layer in model.server.non_common[device])]
    buffers = [buffer for layer in layers for buffer in layer.piece.buffers()]
    kept, random = [buffer.clone() for buffer in buffers], torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(random)
        with torch.no_grad():
            for buffer, value in zip(buffers, kept, strict=True):
                buffer.copy_(value)
