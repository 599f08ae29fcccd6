"""The model zoo: networks to plan, profile and train with, each with an adjustable width."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from adaptsfl.models.zoo.gpt import gpt
from adaptsfl.models.zoo.resnet import resnet18
from adaptsfl.models.zoo.vgg import vgg11, vgg16, vgg_digits
from adaptsfl.models.zoo.vit import vit

__all__ = ["ZOO", "ZooModel", "gpt", "resnet18", "vgg11", "vgg16", "vgg_digits", "vit"]


@dataclass(frozen=True)
class ZooModel:
    """A network of the zoo: its factory, and a function from the factory's options to an example input (one sample)."""

    factory: Callable[..., nn.Module]
    example: Callable[[dict[str, Any]], Tensor]


def _images(channels: int, size: int) -> Callable[[dict[str, Any]], Tensor]:
    return lambda options: torch.zeros(1, channels, options.get("image_size", size), options.get("image_size", size))


def _tokens(context: int) -> Callable[[dict[str, Any]], Tensor]:
    return lambda options: torch.zeros(1, options.get("context", context), dtype=torch.long)


ZOO: dict[str, ZooModel] = {
    "vgg11": ZooModel(vgg11, _images(3, 32)),
    "vgg16": ZooModel(vgg16, _images(3, 32)),
    "resnet18": ZooModel(resnet18, _images(3, 32)),
    "vgg_digits": ZooModel(vgg_digits, _images(1, 8)),
    "vit": ZooModel(vit, _images(3, 32)),
    "gpt": ZooModel(gpt, _tokens(64)),
}
