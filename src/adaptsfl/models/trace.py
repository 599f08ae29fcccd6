"""Trace a module into the graph of its operations, once in training mode and once in evaluation mode.

Both modes are traced because a trace fixes the mode: `torch.fx` follows one side of `if self.training`, and
`torch.export` writes the mode into every dropout and batch-norm. Names in the graphs are those of the original model.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from adaptsfl.errors import InvalidInput, first_line
from adaptsfl.models.export import export_graph
from adaptsfl.models.keep import buffers_of, rebound, untouched

EXPLICIT = "Pass the layers yourself: split(model, example_input, layers=[model.stem, *model.blocks, model.head])"
INNER = "inner"


@dataclass(frozen=True)
class Trace:
    """One mode of a model: its graph, and the values it needs that are no named attribute of the model."""

    graph: fx.Graph
    constants: dict[str, Tensor | nn.Module] = field(default_factory=dict)


@dataclass(frozen=True)
class Traces:
    """The traces of a model in training mode and in evaluation mode.

    `whole_modules` means that every node is a layer the caller named, `by_fx` that torch.fx traced the model.
    """

    training: Trace
    evaluating: Trace
    whole_modules: bool = False
    by_fx: bool = False

    @property
    def same(self) -> bool:
        """Whether both modes run the same operations (modules such as dropout check the mode themselves)."""
        return self.training is self.evaluating


class _OneInput(nn.Module):
    """Calls a model with one argument, so that tracing sees the defaults of the others as plain values."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Any:
        return self.inner(x)


class _Tracer(fx.Tracer):
    """torch.fx's tracer, which remembers the module in which tracing failed."""

    proxy_buffer_attributes = True  # else an in-place buffer update runs while tracing and is missing in the graph
    stopped_in: str | None = None

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name != INNER and super().is_leaf_module(m, module_qualified_name)

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        try:
            return super().call_module(m, forward, args, kwargs)
        except Exception:
            if self.stopped_in is None:
                self.stopped_in = self.path_of_module(m)
            raise


def trace(module: nn.Module, example: Tensor) -> Traces:
    """Trace `module`: an nn.Sequential by its children, others by torch.fx, and by torch.export where that fails."""
    if is_sequence(module):
        return _chain(list(_children(module)))
    try:
        return replace(_both_modes(module, lambda: _trace_fx(module)), by_fx=True)
    except _Untraceable as by_fx:
        try:
            return _both_modes(module, lambda: _trace_export(module, example))
        except _Untraceable as by_export:
            raise InvalidInput(
                "model", f"{type(module).__name__} cannot be traced: {by_fx}; {by_export}", EXPLICIT
            ) from by_export


def trace_by_export(module: nn.Module, example: Tensor) -> Traces:
    """Trace `module` by torch.export alone: slower than torch.fx, but it traces with tensors instead of proxies."""
    try:
        return _both_modes(module, lambda: _trace_export(module, example))
    except _Untraceable as error:
        raise InvalidInput("model", f"{type(module).__name__} cannot be traced: {error}", EXPLICIT) from error


def trace_layers(module: nn.Module, layers: Sequence[nn.Module]) -> Traces:
    """Return the chain of `layers`, which must hold every parameter of `module`."""
    names = {id(child): name for name, child in module.named_modules()}
    constants: dict[str, Tensor | nn.Module] = {}
    chain: list[str] = []
    for k, layer in enumerate(layers):
        if not isinstance(layer, nn.Module):
            raise InvalidInput(f"layers[{k}]", f"is a {type(layer).__name__}", "Give the model's own modules")
        name = names.get(id(layer))
        if name is None:
            if layer.state_dict():
                problem = f"is a {type(layer).__name__} with state, but not a module of the model"
                raise InvalidInput(f"layers[{k}]", problem, "Give the model's own modules, and modules without state")
            name = f"layer_{k}"
            constants[name] = layer
        chain.append(name)
    held = {id(tensor) for layer in layers for tensor in layer.parameters()}
    missing = [name for name, tensor in module.named_parameters() if id(tensor) not in held]
    if missing:
        raise InvalidInput("layers", f"leave out {_few(missing)}", "Give the modules that hold every parameter")
    return _chain(chain, constants)


def is_sequence(module: nn.Module) -> bool:
    """Whether `module` runs its children one after the other: an nn.Sequential that keeps its own forward."""
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def required_inputs(module: nn.Module) -> list[str]:
    """Return the names of the required arguments of the model's forward."""
    try:
        parameters = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):  # compiled modules may have no signature
        return []
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [p.name for p in parameters if p.default is p.empty and p.kind in kinds]


def check_one_input(module: nn.Module) -> None:
    """Raise if the model needs more than one input."""
    inputs = required_inputs(module)
    if len(inputs) > 1:
        problem = f"{type(module).__name__}.forward needs {len(inputs)} inputs ({', '.join(inputs)})"
        raise InvalidInput("model", problem, f"Wrap the model so that it takes one tensor. {EXPLICIT}")


@contextmanager
def mode(module: nn.Module, training: bool) -> Iterator[None]:
    """Put `module` into one mode, then every part of it back into the mode it was in."""
    before = [(part, part.training) for part in module.modules()]
    module.train(training)
    try:
        yield
    finally:
        for part, was in before:
            part.training = was


class _Untraceable(Exception):
    """A tracer failed; the message says where."""


def _both_modes(module: nn.Module, make: Callable[[], Trace]) -> Traces:
    with untouched(module), mode(module, True):
        training = make()
    with untouched(module), mode(module, False):
        evaluating = make()
    same = str(training.graph) == str(evaluating.graph) and not (training.constants or evaluating.constants)
    return Traces(training, training if same else evaluating)


def _trace_fx(module: nn.Module) -> Trace:
    root, tracer = _OneInput(module), _Tracer()
    buffers = buffers_of(module)
    try:
        graph = tracer.trace(root)
    except Exception as error:
        nodes = list(tracer.graph.nodes) if hasattr(tracer, "graph") else []
        where = tracer.stopped_in.removeprefix(INNER).removeprefix(".") if tracer.stopped_in else ""
        inside = f"in {where!r}" if where else "in its forward"
        after = f" after node {nodes[-1].name.removeprefix(INNER + '_')!r}" if nodes else ""
        raise _Untraceable(f"torch.fx stopped {inside}{after} ({first_line(error)})") from error
    if any(node.target is torch._C._set_grad_enabled for node in graph.nodes):
        raise _Untraceable("torch.fx cannot keep torch.no_grad() inside forward")
    replaced = rebound(module, buffers)
    if replaced is not None:
        raise _Untraceable(f"torch.fx cannot keep the new tensor that forward puts into the buffer {replaced!r}")
    trace = _with_original_names(graph, root, module)
    if trace.constants:
        raise _Untraceable("torch.fx would freeze a tensor that forward creates")  # such as a random one
    return trace


def _trace_export(module: nn.Module, example: Tensor) -> Trace:
    try:
        exported = export_graph(_OneInput(module), example)
    except Exception as error:
        raise _Untraceable(f"torch.export stopped ({first_line(error)})") from error
    return _with_original_names(exported.graph, exported, module)


def _with_original_names(graph: fx.Graph, root: nn.Module, module: nn.Module) -> Trace:
    """Drop the wrapper's prefix from every target, and collect values that the original model lacks as constants."""
    constants: dict[str, Tensor | nn.Module] = {}
    for node in graph.nodes:
        if node.op not in ("get_attr", "call_module"):
            continue
        value = resolve(root, str(node.target))
        name = str(node.target).removeprefix(f"{INNER}.")
        if _holds(module, name, value):
            node.target = name
        elif isinstance(value, nn.Parameter):
            raise _Untraceable(f"the parameter {name!r} is not one of the model's own")
        else:
            phase = "train" if module.training else "eval"  # constants of both modes may share a name, not the value
            node.target = f"constant_{phase}_{name.replace('.', '_')}"
            constants[node.target] = value
    return Trace(graph, constants)


def _holds(module: nn.Module, name: str, value: Any) -> bool:
    try:
        return resolve(module, name) is value
    except AttributeError:
        return False


def _chain(names: Sequence[str], constants: dict[str, Tensor | nn.Module] | None = None) -> Traces:
    graph = fx.Graph()
    value = graph.placeholder("x")
    for name in names:
        value = graph.call_module(name, (value,))
    graph.output(value)
    one = Trace(graph, constants or {})
    return Traces(one, one, whole_modules=constants is not None)


def _children(module: nn.Module, prefix: str = "") -> Iterator[str]:
    for name, child in module._modules.items():  # named_children() would skip a child that appears twice
        if child is None:
            continue
        if is_sequence(child):
            yield from _children(child, f"{prefix}{name}.")
        else:
            yield prefix + name


def resolve(root: nn.Module, target: str) -> Any:
    """Return the attribute of `root` with the dotted name `target`."""
    value: Any = root
    for part in target.split("."):
        value = getattr(value, part)
    return value


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
