"""The steps of torch.optim's optimisers, over the tensors of many copies at once."""

from collections.abc import Mapping

import torch
from torch import Tensor

from adaptsfl.training.settings import OptimizerSettings

STATE_NAMES = {"sgd": (), "momentum": ("momentum",), "adam": ("mean", "square")}


@torch.no_grad()
def step(
    settings: OptimizerSettings,
    rate: float,
    count: int,
    parameters: list[Tensor],
    gradients: list[Tensor],
    state: Mapping[str, list[Tensor]],
) -> None:
    """Update `parameters` and their `state` in place; `count` is 1 in the first step after a reset of the state."""
    if not parameters:
        return
    if settings.weight_decay:
        gradients = list(torch._foreach_add(gradients, parameters, alpha=settings.weight_decay))
    if settings.name == "sgd":
        torch._foreach_add_(parameters, gradients, alpha=-rate)
    elif settings.name == "momentum":
        torch._foreach_mul_(state["momentum"], settings.momentum)
        torch._foreach_add_(state["momentum"], gradients)
        torch._foreach_add_(parameters, state["momentum"], alpha=-rate)
    else:
        first, second = settings.betas
        torch._foreach_lerp_(state["mean"], gradients, 1 - first)
        torch._foreach_mul_(state["square"], second)
        torch._foreach_addcmul_(state["square"], gradients, gradients, 1 - second)
        scale = torch._foreach_sqrt(state["square"])
        torch._foreach_div_(scale, (1 - second**count) ** 0.5)
        torch._foreach_add_(scale, settings.eps)
        torch._foreach_addcdiv_(parameters, state["mean"], scale, -rate / (1 - first**count))
