"""The reference's copies of layers: each is a piece of the model with its own torch optimiser."""

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from adaptsfl.training.settings import OptimizerSettings, StateRule

# The state that torch's optimisers keep per parameter, under torch's names.
OPTIMIZER_STATE = ("momentum_buffer", "step", "exp_avg", "exp_avg_sq")


class Layer:
    """One copy of one layer and the optimiser of its parameters, which moves with the layer."""

    def __init__(self, piece: nn.Module, settings: OptimizerSettings) -> None:
        self.piece = deepcopy(piece).train()
        trained = {name: tensor for name, tensor in self.piece.named_parameters() if tensor.requires_grad}
        self._trained, self.parameters = list(trained), list(trained.values())
        group = {"params": self.parameters, "weight_decay": settings.weight_decay}
        self.optimizer: torch.optim.Optimizer
        if settings.name == "adam":
            self.optimizer = torch.optim.Adam([group], betas=settings.betas, eps=settings.eps)
        else:
            self.optimizer = torch.optim.SGD([group], momentum=settings.momentum if settings.name == "momentum" else 0)

    def update(self, gradients: Sequence[Tensor], rate: float) -> None:
        """Take one step, at the learning rate of the part to which the layer belongs now."""
        self.optimizer.param_groups[0]["lr"] = rate
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        self.optimizer.step()

    def tensors(self) -> list[Tensor]:
        """Return what is averaged under every state rule: parameters and buffers."""
        return [*self.parameters, *self.piece.buffers()]

    def state(self) -> dict[str, Tensor]:
        """Return all that training changes, by name; `load` accepts it, also on another machine."""
        state = {f"parameters.{name}": tensor.detach() for name, tensor in self.piece.named_parameters()}
        state |= {f"buffers.{name}": tensor for name, tensor in self.piece.named_buffers()}
        for k, name in enumerate(self._trained):
            state |= {f"{key}.{name}": torch.as_tensor(value) for key, value in self.state_of(k).items()}
        return state

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Load a `state` of the same layer."""
        for kind, tensors in (("parameters", self.piece.named_parameters()), ("buffers", self.piece.named_buffers())):
            for name, tensor in tensors:
                tensor.copy_(state[f"{kind}.{name}"])
        self.optimizer.state.clear()
        for name, parameter in zip(self._trained, self.parameters, strict=True):
            kept = {key: state[f"{key}.{name}"].clone() for key in OPTIMIZER_STATE if f"{key}.{name}" in state}
            if kept:
                self.optimizer.state[parameter] = kept

    def state_of(self, k: int) -> dict[str, Any]:
        """Return the optimiser's state of the k-th parameter; empty before its first step."""
        state: dict[str, Any] = self.optimizer.state[self.parameters[k]]
        return state


def run(layers: Sequence[Layer], x: Tensor) -> Tensor:
    """Run layers in order, φ(x; w)."""
    for layer in layers:
        x = layer.piece(x)
    return x


def parameters_of(layers: Sequence[Layer]) -> list[Tensor]:
    """Return the parameters of all layers, in order."""
    return [parameter for layer in layers for parameter in layer.parameters]


def gradients_of(outputs: Tensor, inputs: Sequence[Tensor], received: Tensor | None = None) -> Iterator[Tensor]:
    """Yield the gradient of every input, zero where `outputs` do not depend on it."""
    if inputs:
        yield from torch.autograd.grad(outputs, inputs, received, allow_unused=True, materialize_grads=True)


def summed(before: Sequence[Tensor], more: list[Tensor]) -> list[Tensor]:
    """Return the sums of gradients; `more` itself if there are none before."""
    return [a + b for a, b in zip(before, more, strict=True)] if before else more


def update(layers: Sequence[Layer], gradients: Iterator[Tensor], rate: float) -> None:
    """Update every layer by its part of `gradients`, which come in the order of the layers."""
    for layer in layers:
        layer.update(list(islice(gradients, len(layer.parameters))), rate)


def weighted_mean(tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Return Σ weight · tensor."""
    return torch.stack([tensor * weight for tensor, weight in zip(tensors, weights, strict=True)]).sum(0)


def common_value(tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Return the mean; for counters, which differ only if devices were absent, the maximum."""
    if tensors[0].is_complex():  # constants, which have no order
        return tensors[0].clone()
    return weighted_mean(tensors, weights) if tensors[0].is_floating_point() else torch.stack([*tensors]).amax(0)


@torch.no_grad()
def average(copies: Sequence[Layer], shares: Sequence[float], rule: StateRule) -> None:
    """Replace every copy of one layer by their mean (lines 27 and 28, which the fed server runs).

    The mean is over the copies with a nonzero share; an absent device has share 0, and also receives the mean.
    """
    present, weights = zip(*((copy, share) for copy, share in zip(copies, shares, strict=True) if share), strict=True)
    means = [common_value(tensors, weights) for tensors in zip(*(copy.tensors() for copy in present), strict=True)]
    for copy in copies:
        for tensor, mean in zip(copy.tensors(), means, strict=True):
            tensor.copy_(mean)
    if rule == "average":
        states = [
            _mean_state([copy.state_of(k) for copy in present], weights) for k in range(len(copies[0].parameters))
        ]
        for copy in copies:
            copy.optimizer.state.clear()
            for parameter, state in zip(copy.parameters, states, strict=True):
                copy.optimizer.state[parameter] = deepcopy(state)
    if rule == "reset":
        for copy in copies:
            copy.optimizer.state.clear()


def _mean_state(states: Sequence[dict[str, Any]], weights: Sequence[float]) -> dict[str, Any]:
    """Return the mean of the optimisers' states of one parameter; of Adam's step count, the maximum."""
    return {
        key: max(state[key] for state in states) if key == "step" else weighted_mean([s[key] for s in states], weights)
        for key in states[0]
    }
