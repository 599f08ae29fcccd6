"""Modules that hold a part of a model's state under the names it has in the whole model."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, fx, nn

from adaptsfl.models.trace import Trace, resolve


class StateRoot(nn.Module):
    """Shares everything that one traced graph needs, under the names that the graph uses."""

    def __init__(self, module: nn.Module, trace: Trace) -> None:
        super().__init__()
        attach(self, module, targets(trace.graph.nodes), trace.constants)


def parameters_of(root: nn.Module, node: fx.Node) -> list[nn.Parameter]:
    """Return the parameters in `root` that `node` names itself."""
    if node.op == "call_module":
        return list(root.get_submodule(str(node.target)).parameters())
    value = resolve(root, str(node.target)) if node.op == "get_attr" else None
    return [value] if isinstance(value, nn.Parameter) else []


def targets(nodes: Iterable[fx.Node]) -> list[str]:
    """Return the dotted names of the modules and tensors that `nodes` look up."""
    return list(dict.fromkeys(str(node.target) for node in nodes if node.op in ("call_module", "get_attr")))


def attach(root: nn.Module, module: nn.Module, names: Iterable[str], constants: Mapping[str, Any]) -> None:
    """Give `root` the parts of `module` that `names` list, and the constants among them; nothing is copied.

    They are added in the order of `module`, so that the keys of a state_dict keep that order too.
    """
    parts = [*module.named_modules(remove_duplicate=False), *module.named_parameters(remove_duplicate=False)]
    rank = {name: k for k, (name, _) in enumerate([*parts, *module.named_buffers(remove_duplicate=False)])}
    persistent = module.state_dict(keep_vars=True).keys()
    for name in sorted(names, key=lambda name: rank.get(name, len(rank))):
        value = constants[name] if name in constants else resolve(module, name)
        holder, _, last = name.rpartition(".")
        inside = root
        for part in filter(None, holder.split(".")):
            if part not in inside._modules:
                inside.add_module(part, nn.Module())
            inside = inside.get_submodule(part)
        if hasattr(inside, last):
            assert getattr(inside, last) is value, f"{name!r} would hide another attribute"
            continue  # already attached, as part of a module
        if isinstance(value, nn.Module):
            inside.add_module(last, value)
        elif isinstance(value, nn.Parameter):
            inside.register_parameter(last, value)
        elif isinstance(value, Tensor):
            inside.register_buffer(last, value, persistent=name in persistent)
        else:
            setattr(inside, last, value)
