"""Settings of a training run beside its plan: the optimiser, the loss, batch-norm's statistics, device weights."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from torch import Tensor
from torch.nn import functional

from adaptsfl import checks
from adaptsfl.errors import InvalidInput
from adaptsfl.models import Optimizer, SplitModel
from adaptsfl.rate_schedule import RateSchedule

Batch = tuple[Tensor, Tensor]  # inputs and targets of one device, the samples first
Batches = Callable[[int], Sequence[Batch]]  # from the round (1, 2, …) to one batch per device
Loss = Callable[[Tensor, Tensor], Tensor]  # from outputs and targets to one loss per sample

# The rule for the optimiser's state of a layer's copies when their weights are averaged.
StateRule = Literal["average", "reset", "keep"]
# Whose samples give a batch-norm of the common part its mean and variance.
Statistics = Literal["pooled", "device"]

LARGEST_FACTOR = 1e30  # the largest float32 is 3.4e38


class TrainingWarning(UserWarning):
    """Warns of settings that run but probably do not train as intended."""


@dataclass(frozen=True)
class OptimizerSettings:
    """Settings of the optimiser, which works as the one of the same name in torch.optim.

    Attributes:
        name: `sgd` (the paper), `momentum` or `adam`.
        learning_rate: γ, of the client-specific layers, and of all layers unless the next one is given.
        common_learning_rate: of the common layers.
        momentum: for `momentum` only.
        weight_decay: added to the gradient, times the weight.
        betas, eps: for `adam` only.
        at_averaging: what happens to the state (momentum, Adam's moments) of a layer's copies when their weights are
            averaged: it is averaged too, or reset to zero, or every copy keeps its own. When a change of the plan
            makes a layer common, it has one state from then on: the mean of its copies'.
        schedule: how both learning rates change from round to round.
    """

    name: Optimizer = "sgd"
    learning_rate: float = 0.05
    common_learning_rate: float | None = None
    momentum: float = 0.9
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    at_averaging: StateRule = "average"
    schedule: RateSchedule = field(default_factory=RateSchedule)

    def __post_init__(self) -> None:
        choice("optimizer.name", self.name, get_args(Optimizer))
        choice("optimizer.at_averaging", self.at_averaging, get_args(StateRule))
        checks.number("optimizer.learning_rate", self.learning_rate, positive=True)
        if self.common_learning_rate is not None:
            checks.number("optimizer.common_learning_rate", self.common_learning_rate, positive=True)
        checks.number("optimizer.weight_decay", self.weight_decay)
        checks.number("optimizer.eps", self.eps, positive=True)
        for name, value in (("momentum", self.momentum), ("betas[0]", self.betas[0]), ("betas[1]", self.betas[1])):
            if checks.number(f"optimizer.{name}", value) >= 1:
                raise InvalidInput(f"optimizer.{name}", f"is {value:g}", "Give a number ≥ 0 and below 1")
        for name in ("learning_rate", "common_learning_rate", "weight_decay"):
            if (getattr(self, name) or 0.0) > LARGEST_FACTOR:
                problem = f"is {getattr(self, name):g}"
                raise InvalidInput(
                    f"optimizer.{name}", problem, f"Give at most {LARGEST_FACTOR:g}; sensible is below 10"
                )

    def rate(self, round_: int, *, common: bool) -> float:
        """Return the learning rate of the common or of the client-specific layers in round 1, 2, …."""
        own = self.common_learning_rate if common else None
        return (self.learning_rate if own is None else own) * self.schedule.at(round_)

    @property
    def linear(self) -> bool:
        """Whether the mean of the devices' updates is the update by their mean gradient: not so for Adam."""
        return self.name != "adam"


def choice(field: str, value: str, allowed: Sequence[str]) -> None:
    """Refuse a value that is not in `allowed`."""
    if value not in allowed:
        names = ", ".join(repr(name) for name in allowed)
        raise InvalidInput(field, f"is {value!r}", f"Give one of {names}")


def check_trainable(model: SplitModel) -> None:
    """Refuse a model without trainable parameters."""
    if not any(parameter.requires_grad for piece in model.pieces for parameter in piece.parameters()):
        raise InvalidInput("model", "has no parameter to train", "Set requires_grad of those that should learn")


def device_weights(weights: Sequence[float] | None, devices: int) -> tuple[float, ...]:
    """Return every device's weight in means, summing to 1: equal, or in proportion to `weights`."""
    if weights is None:
        return (1.0 / devices,) * devices
    given = checks.vector("weights", weights, length=devices, of="one per device", positive=True)
    return tuple(float(weight) for weight in given / given.sum())


def present_devices(present: Sequence[int] | None, devices: int) -> tuple[int, ...]:
    """Return the devices that take part: all, or `present` after validation."""
    if present is None:
        return tuple(range(devices))
    named = tuple(int(k) for k in present)
    if not named:
        raise InvalidInput("present", "names no device", "Let at least one take part, or leave the round out")
    if list(named) != sorted(set(named)) or named[0] < 0 or named[-1] >= devices:
        problem = f"is {named}"
        raise InvalidInput("present", problem, f"Name devices from 0 to {devices - 1}, each once, in rising order")
    return named


def shares_of(weights: Sequence[float], present: Sequence[int]) -> tuple[float, ...]:
    """Return every device's share among the present ones, summing to 1; absent devices have share 0."""
    if len(present) == len(weights):
        return tuple(weights)
    total = math.fsum(weights[k] for k in present)
    here = set(present)
    return tuple(weight / total if k in here else 0.0 for k, weight in enumerate(weights))


def check_batches(batches: Sequence[Batch], devices: int) -> None:
    """Refuse anything but one batch of at least one sample per present device, with as many targets as inputs."""
    if len(batches) != devices:
        raise InvalidInput("batches", f"has {len(batches)} entries", f"Give {devices}, one per device that is present")
    for k, (x, y) in enumerate(batches):
        if len(x) == 0 or len(x) != len(y):
            problem = f"has {len(x)} input(s) and {len(y)} target(s)"
            raise InvalidInput(f"batches[{k}]", problem, "Give at least one sample, and a target for each")


def batch_parts(batch: Batch, parts: int) -> list[Batch]:
    """Return a mini-batch in equal parts."""
    x, y = batch
    if len(x) % parts:
        problem = f"is {parts}, but a mini-batch has {len(x)} samples"
        raise InvalidInput("decision.micro_batches", problem, "Give a number that divides it")
    return list(zip(x.chunk(parts), y.chunk(parts), strict=True))


def sample_cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy of every sample; over sequences, the mean over their tokens."""
    if outputs.dim() == 2:
        return functional.cross_entropy(outputs, targets, reduction="none")
    per_token = functional.cross_entropy(outputs.flatten(0, -2), targets.flatten(), reduction="none")
    return per_token.view(len(outputs), -1).mean(1)
