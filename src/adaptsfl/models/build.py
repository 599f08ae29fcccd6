"""Build the model that a recipe or a command line names: a zoo entry, or `package.module:factory`."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from adaptsfl import factories
from adaptsfl.errors import InvalidInput, unknown
from adaptsfl.models.zoo import ZOO


@dataclass(frozen=True)
class BuiltModel:
    """A model and an example input to trace and profile it with; the input is None if the factory returns none."""

    module: nn.Module
    example_input: Tensor | None


def build(model: str | Callable[..., Any], /, *, device: str | None = None, **options: Any) -> BuiltModel:
    """Build a zoo model by name, or a model of the user's own by `package.module:factory` or by its factory.

    `options` go to the factory. A factory returns a module, or a module and an example input. With device "meta" the
    model uses no memory, and can still be split and profiled.
    """
    with factories.importing_from_here(), torch.device(device) if device else nullcontext():
        if callable(model):
            return _call(getattr(model, "__name__", "factory"), model, options)
        if ":" in model:
            return _call(model, factories.find("model", model, "a torch.nn.Module"), options)
        if model not in ZOO:
            known = ", ".join(ZOO)
            raise unknown("model", model, list(ZOO), f"Give one of {known}, or package.module:factory of your own")
        built = _call(model, ZOO[model].factory, options)
        return BuiltModel(built.module, ZOO[model].example(options))


def _call(name: str, factory: Callable[..., Any], options: dict[str, Any]) -> BuiltModel:
    made = factories.call("model", name, factory, options)
    module, example = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(module, nn.Module) or not isinstance(example, Tensor | None):
        problem = f"{name} returned a {type(made).__name__}"
        raise InvalidInput("model", problem, "Return a torch.nn.Module, or a module and an example input")
    return BuiltModel(module, example)
