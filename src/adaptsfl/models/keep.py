"""Restore a model after a run: undo every change that its forward made."""

import copy
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

CONTAINERS = (list, dict, set, deque, OrderedDict, defaultdict)


@contextmanager
def untouched(module: nn.Module) -> Iterator[None]:
    """Restore every attribute of every part of `module`, and the values of its buffers.

    Lists, dictionaries and sets among the attributes get their old entries back; this includes a module's own tables
    of parameters, buffers and children. Values of parameters are not saved: forward does not change them.
    """
    attributes = [(part, dict(vars(part))) for part in module.modules()]
    held = {id(value): value for _, values in attributes for value in values.values()}
    containers = [(value, copy.copy(value)) for value in held.values() if type(value) in CONTAINERS]
    loose = [value for value in held.values() if isinstance(value, Tensor)]
    tensors = {id(tensor): tensor for tensor in [*module.buffers(), *loose]}.values()
    values = [(tensor, tensor._version, tensor.detach().clone()) for tensor in tensors if not tensor.is_inference()]
    try:
        yield
    finally:
        for part, before in attributes:
            vars(part).clear()
            vars(part).update(before)
        for container, before in containers:
            container.clear()
            (container.extend if isinstance(container, list | deque) else container.update)(before)
        with torch.no_grad():
            for tensor, version, value in values:
                if tensor._version != version:
                    tensor.copy_(value)


def rebound(module: nn.Module, before: dict[str, Tensor]) -> str | None:
    """Return the name of a buffer of `module` that is no longer the same tensor as in `before`, or None."""
    now = dict(_buffers(module))
    return next((name for name, tensor in before.items() if now.get(name) is not tensor), None)


def buffers_of(module: nn.Module) -> dict[str, Tensor]:
    """Return the buffers of `module` by every name they have."""
    return dict(module.named_buffers(remove_duplicate=False))


def _buffers(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for prefix, part in module.named_modules(remove_duplicate=False):
        for name, value in part._buffers.items():
            yield f"{prefix}.{name}" if prefix else name, value
