"""Make a model from what a recipe or a command line names: a zoo entry, or `package.module:factory`."""

import difflib
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from adaptsfl.errors import InvalidInput
from adaptsfl.models.trace import first_line
from adaptsfl.models.zoo import ZOO


@dataclass(frozen=True)
class BuiltModel:
    """A model, and one sample of input to trace and profile it with: None where nobody said what it takes."""

    module: nn.Module
    example_input: Tensor | None


def build(model: str | Callable[..., Any], *, device: str | None = None, **options: Any) -> BuiltModel:
    """Build a zoo model by name, or a model of the user's own by `package.module:factory` or by its factory.

    `options` go to the factory. A factory returns a module, or a module and an example input. With device "meta" the
    model takes no memory: enough to split and profile it.
    """
    with _importing_from_here(), torch.device(device) if device else nullcontext():
        if callable(model):
            return _call(getattr(model, "__name__", "factory"), model, options)
        if ":" in model:
            return _call(model, _find(model), options)
        if model not in ZOO:
            known = ", ".join(ZOO)
            raise _unknown("model", model, list(ZOO), f"Give one of {known}, or package.module:factory of your own")
        built = _call(model, ZOO[model].factory, options)
        return BuiltModel(built.module, ZOO[model].example(options))


def _call(name: str, factory: Callable[..., Any], options: dict[str, Any]) -> BuiltModel:
    try:
        inspect.signature(factory).bind(**options)
    except TypeError as error:
        known = ", ".join(inspect.signature(factory).parameters) or "no options"
        raise InvalidInput("model", f"{name} does not take these options: {error}", f"It takes {known}") from None
    try:
        made = factory(**options)
    except InvalidInput:
        raise
    except Exception as error:
        problem = f"{name} raised {type(error).__name__}: {first_line(error)}"
        raise InvalidInput("model", problem, "Make the factory work on its own first") from error
    module, example = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(module, nn.Module) or not isinstance(example, Tensor | None):
        problem = f"{name} returned a {type(made).__name__}"
        raise InvalidInput("model", problem, "Return a torch.nn.Module, or a module and an example input")
    return BuiltModel(module, example)


def _find(target: str) -> Callable[..., Any]:
    package, _, name = target.partition(":")
    try:
        found: Any = importlib.import_module(package)
    except Exception as error:
        problem = f"{target}: importing {package!r} raised {type(error).__name__}: {first_line(error)}"
        raise InvalidInput(
            "model", problem, "Give package.module:factory of a module that Python can import"
        ) from error
    if not callable(getattr(found, name, None)):
        callables = [key for key, value in vars(found).items() if callable(value) and not key.startswith("_")]
        raise _unknown(f"model {package}", name, callables, "Give a function of it that returns a torch.nn.Module")
    factory: Callable[..., Any] = getattr(found, name)
    return factory


def _unknown(field: str, name: str, known: list[str], remedy: str) -> InvalidInput:
    near = difflib.get_close_matches(name, known, n=1)
    question = f"Did you mean {near[0]!r}? " if near else ""
    return InvalidInput(field, f"{name!r} is unknown", question + remedy)


@contextmanager
def _importing_from_here() -> Iterator[None]:
    """Let Python import from the working directory, as `python -m` does and an installed command does not."""
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        yield
    finally:
        sys.path.remove(here)
