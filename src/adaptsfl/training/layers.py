"""Copies of layers as the reference holds them: a piece of the model with its own torch optimiser."""

from collections.abc import Iterator, Sequence
from copy import deepcopy
from itertools import islice

import torch
from torch import Tensor, nn

from adaptsfl.training.settings import OptimizerSettings, StateRule


class Layer:
    """One copy of one layer and the optimiser of its parameters, which goes wherever the layer goes."""

    def __init__(self, piece: nn.Module, settings: OptimizerSettings) -> None:
        self.piece = deepcopy(piece).train()
        self.parameters = [tensor for tensor in self.piece.parameters() if tensor.requires_grad]
        group = {"params": self.parameters, "weight_decay": settings.weight_decay}
        self.optimizer: torch.optim.Optimizer
        if settings.name == "adam":
            self.optimizer = torch.optim.Adam([group], betas=settings.betas, eps=settings.eps)
        else:
            self.optimizer = torch.optim.SGD([group], momentum=settings.momentum if settings.name == "momentum" else 0)

    def update(self, gradients: Sequence[Tensor], rate: float) -> None:
        """Step once, at the rate of the part to which the layer belongs now."""
        self.optimizer.param_groups[0]["lr"] = rate
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        self.optimizer.step()

    def averaged_tensors(self, with_state: bool) -> list[Tensor]:
        """Return the parameters, the float buffers and the optimiser's state, but for its step count, equal in all."""
        buffers = [buffer for buffer in self.piece.buffers() if buffer.is_floating_point()]
        states = [self.optimizer.state[parameter] for parameter in self.parameters] if with_state else []
        return [*self.parameters, *buffers, *(state[key] for state in states for key in state if key != "step")]


def run(layers: Sequence[Layer], x: Tensor) -> Tensor:
    """Run layers in order, φ(x; w)."""
    for layer in layers:
        x = layer.piece(x)
    return x


def parameters_of(layers: Sequence[Layer]) -> list[Tensor]:
    """Return the parameters of all layers, in order."""
    return [parameter for layer in layers for parameter in layer.parameters]


def gradients_of(outputs: Tensor, inputs: Sequence[Tensor], received: Tensor | None = None) -> Iterator[Tensor]:
    """Yield the gradient of every input, zero where it has no part in `outputs`."""
    if inputs:
        yield from torch.autograd.grad(outputs, inputs, received, allow_unused=True, materialize_grads=True)


def update(layers: Sequence[Layer], gradients: Iterator[Tensor], rate: float, weight: float = 1.0) -> None:
    """Let every layer take the gradients of its parameters from the front, over the weight they carry."""
    for layer in layers:
        layer.update([gradient / weight for gradient in islice(gradients, len(layer.parameters))], rate)


def weighted_mean(tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Return Σ weight · tensor."""
    return torch.stack([tensor * weight for tensor, weight in zip(tensors, weights, strict=True)]).sum(0)


@torch.no_grad()
def average(copies: Sequence[Layer], weights: Sequence[float], rule: StateRule) -> None:
    """Put the mean of one layer's copies into every one of them (line 27 and 28, what the fed server does)."""
    for tensors in zip(*(copy.averaged_tensors(rule == "average") for copy in copies), strict=True):
        mean = weighted_mean(tensors, weights)
        for tensor in tensors:
            tensor.copy_(mean)
    if rule == "reset":
        for copy in copies:
            copy.optimizer.state.clear()
