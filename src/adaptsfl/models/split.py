"""Split an unmodified torch module into layers; one tensor passes from each layer to the next."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, Literal, Self, get_args

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from adaptsfl import checks
from adaptsfl.errors import InvalidInput, first_line
from adaptsfl.models.cuts import Flow, check_input, find_cuts, with_batch
from adaptsfl.models.keep import untouched
from adaptsfl.models.pieces import Piece, Segment, TracedLayer, compile_layer
from adaptsfl.models.record import label
from adaptsfl.models.trace import (
    EXPLICIT,
    Traces,
    check_one_input,
    mode,
    required_inputs,
    resolve,
    trace,
    trace_by_export,
    trace_layers,
)
from adaptsfl.models.verify import Differs, verify

Granularity = Literal["layer", "block"]
CHECKED_BATCH = 2


class SplitModel:
    """A model as L layers that can be cut after any of them; all parts share the parameters of `module`.

    Attributes:
        module: the original model.
        pieces: the layers in order; cut j puts pieces[:j] on the device.
        names: one name per layer.
    """

    def __init__(self, module: nn.Module, layers: Sequence[TracedLayer]) -> None:
        self.module = module
        self.names = tuple(layer.name for layer in layers)
        self._modes = {True: _exceptions(module, True), False: _exceptions(module, False)}
        self._layers = tuple(layers)
        self.pieces = tuple(self._piece([layer]) for layer in layers)

    @property
    def layers(self) -> int:
        """L, the number of layers and of cuts."""
        return len(self.pieces)

    def client(self, cut: int) -> Piece:
        """Return layers 1..cut as one module."""
        return self._piece(self._layers[: self._check(cut)])

    def server(self, cut: int) -> Piece:
        """Return layers cut+1..L as one module; at cut L it returns its input."""
        return self._piece(self._layers[self._check(cut) :])

    def __call__(self, x: Tensor) -> Tensor:
        """Run all layers; the result equals that of the original model."""
        for piece in self.pieces:
            x = piece(x)
        return x

    def train(self, mode: bool = True) -> Self:
        """Put the model and its layers into training mode, or evaluation mode if `mode` is False."""
        for part in (*self.pieces, self.module):
            part.train(mode)
        return self

    def eval(self) -> Self:
        """Put the model and its layers into evaluation mode."""
        return self.train(False)

    def keys(self, layer: int) -> tuple[str, ...]:
        """Return the original model's state_dict keys that layer `layer` (1..L) holds."""
        return tuple(self.pieces[self._check(layer) - 1].state_dict())

    def merge_state(self, *states: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Join the state_dicts of pieces into one that the original model's class loads.

        Keys that no layer uses keep the original's values; a key that the original does not have is refused.
        """
        merged = dict(self.module.state_dict())
        for state in states:
            for key, value in state.items():
                if key not in merged:
                    raise InvalidInput("state", f"has the key {key!r}", "Give state_dicts of this model's pieces")
                merged[key] = value
        return merged

    def _piece(self, layers: Sequence[TracedLayer]) -> Piece:
        return Piece(self.module, layers, self._modes)

    def _check(self, cut: int) -> int:
        return int(checks.cut_numbers("cut", [cut], self.layers)[0])

    def __repr__(self) -> str:
        return f"SplitModel({type(self.module).__name__}, L={self.layers}: {', '.join(self.names)})"


def split(
    module: nn.Module,
    example_input: Tensor,
    granularity: Granularity = "layer",
    layers: Sequence[nn.Module] | None = None,
) -> SplitModel:
    """Split `module` into layers (or coarser blocks) that share its parameters.

    `example_input` has the batch as its first dimension; the split model takes inputs with the same other dimensions.
    `layers` lists the layers in the order they run, for models that cannot be traced. At the end, `split` compares
    the split model with the original in both modes (not on the meta device, where there are no values).
    """
    if not isinstance(module, nn.Module):
        raise InvalidInput("model", f"is a {type(module).__name__}", "Give a torch.nn.Module")
    check_input(example_input)
    if granularity not in get_args(Granularity):
        raise InvalidInput("granularity", f"is {granularity!r}", "Give 'layer' or 'block'")
    if any(map(is_lazy, [*module.parameters(), *module.buffers()])):
        raise InvalidInput("model", "has parameters without a shape yet (lazy modules)", "Run the model once before")
    example = with_batch(example_input, CHECKED_BATCH)
    if layers is None:
        check_one_input(module)
    with untouched(module), torch.random.fork_rng():
        if layers is not None:
            checked = len(required_inputs(module)) <= 1
            if checked:
                check_example(module, example)
            return _make(module, trace_layers(module, layers), example, granularity, "layers" if checked else None)
        check_example(module, example)
        traces = trace(module, example)
        try:
            return _make(module, traces, example, granularity, "model")
        except Differs as error:
            if not traces.by_fx:
                raise
            try:  # the model may treat torch.fx's proxies differently from tensors
                return _make(module, trace_by_export(module, example), example, granularity, "model")
            except InvalidInput:
                raise error from None


def _make(
    module: nn.Module, traces: Traces, example: Tensor, granularity: Granularity, field: str | None
) -> SplitModel:
    model = SplitModel(module, _traced_layers(module, traces, example, granularity))
    if field is not None:
        verify(model.module, model.client(model.layers), model.names, example, field)
    return model


def _exceptions(module: nn.Module, training: bool) -> frozenset[str]:
    """Return the submodules that `module.train(training)` leaves in the other mode, such as frozen norms."""
    with mode(module, training):
        parts = module.named_modules(remove_duplicate=False)
        return frozenset(name for name, part in parts if part.training != training)


def check_example(module: nn.Module, example: Tensor) -> None:
    """Run the model once in evaluation mode; if that fails, raise an error that names the module."""
    buffers = {name: tensor.clone() for name, tensor in module.named_buffers()}
    with untouched(module), mode(module, False), torch.no_grad(), _located(module) as stack:
        try:
            output = torch.func.functional_call(module, buffers, (example,))
        except Exception as error:
            name = stack[-1] if stack else ""
            layer = f"layer {name!r} ({type(module.get_submodule(name)).__name__})" if name else "the model itself"
            shape = ", ".join(["batch", *map(str, example.shape[1:])])
            raise InvalidInput(
                "example_input",
                f"of shape ({shape}) and dtype {example.dtype} fails in {layer}: {first_line(error)}",
                "Give an input of the shape that the model takes, the batch first",
            ) from error
    if isinstance(output, Tensor) and output.is_complex():
        raise InvalidInput("model", f"returns complex numbers ({output.dtype})", "Return their real view or magnitude")


@contextmanager
def _located(module: nn.Module) -> Iterator[list[str]]:
    """Keep the names of the modules that are running, innermost last."""
    stack: list[str] = []
    names = {part: name for name, part in module.named_modules()}

    def enter(part: nn.Module, _inputs: Any) -> None:
        stack.append(names[part])

    def leave(_part: nn.Module, _inputs: Any, _output: Any) -> None:
        stack.pop()

    hooks = [part.register_forward_pre_hook(enter) for part in names]
    hooks += [part.register_forward_hook(leave) for part in names]
    try:
        yield stack
    finally:
        for hook in hooks:
            hook.remove()


def _traced_layers(module: nn.Module, traces: Traces, example: Tensor, granularity: Granularity) -> list[TracedLayer]:
    training = Flow(traces.training, module, example)
    evaluating = training if traces.same else Flow(traces.evaluating, module, example)
    starts = [_starts(flow, traces, granularity, module) for flow in (training, evaluating)]
    after = {cut.before: cut.position for cut in find_cuts(evaluating, starts[1])}
    cuts = [
        (cut.position, cut.position if traces.same else after[cut.before])
        for cut in find_cuts(training, starts[0])
        if traces.same or cut.before in after
    ]
    if not cuts:
        raise _no_cut(training, starts[0], module)
    constants = {**traces.training.constants, **traces.evaluating.constants}
    edges = [(0, 0), *cuts, (len(training.ordered), len(evaluating.ordered))]
    layers = []
    for (train_start, eval_start), (train_stop, eval_stop) in pairwise(edges):
        segment = Segment(training, train_start, train_stop)
        other = segment if traces.same else Segment(evaluating, eval_start, eval_stop)
        first = next(start for start in starts[0] if start >= train_start)
        name = _name(module, training, first, training.used(train_start, train_stop))
        layers.append(compile_layer(name, segment, other, constants))
    return layers


def _starts(flow: Flow, traces: Traces, granularity: Granularity, module: nn.Module) -> list[int]:
    """Return the positions where layers begin; for blocks, only those where a new block begins."""
    starts = flow.starts(traces.whole_modules)
    if granularity == "layer" or traces.whole_modules:
        return starts
    blocks = [_block(module, flow.owner(start)) for start in starts]
    return [start for k, start in enumerate(starts) if k == 0 or blocks[k] != blocks[k - 1]]


def _block(module: nn.Module, owner: str) -> str:
    """Return the outermost module on the way to `owner` that is an entry of an nn.Sequential or nn.ModuleList."""
    parts = owner.split(".")
    for depth in range(len(parts)):
        if isinstance(resolve(module, ".".join(parts[:depth])) if depth else module, nn.Sequential | nn.ModuleList):
            return ".".join(parts[: depth + 1])
    return owner


def _name(module: nn.Module, flow: Flow, start: int, used: frozenset[int]) -> str:
    """Return the name of the outermost module around the layer's first weight that has only the layer's weights."""
    name = flow.owner(start)
    while "." in name:
        parent = name.rpartition(".")[0]
        if not {id(tensor) for tensor in module.get_submodule(parent).parameters()} <= used:
            break
        name = parent
    return name


def _no_cut(flow: Flow, starts: Sequence[int], module: nn.Module) -> InvalidInput:
    """Return an error that explains why there is no legal cut."""
    if len(starts) < 2:
        return InvalidInput("model", f"has {len(starts)} layer(s) with weights, so there is no legal cut", EXPLICIT)
    names = {id(tensor): name for name, tensor in module.named_parameters()}
    shared = frozenset.intersection(*(flow.shared(start) for start in starts[1:]))
    tied = [names[key] for key in names if key in shared]
    if tied:
        problem = f"has no legal cut: {tied[0]!r} is used on both sides of every one (tied weights)"
        return InvalidInput("model", problem, "Untie them: device and server would train two copies of one weight")
    changing = next((flow.changes_received(start) for start in starts[1:] if flow.changes_received(start)), None)
    if changing:
        problem = f"has no legal cut: {changing!r} changes its input in place, so no cut can lie before it"
        return InvalidInput("model", problem, f"Let it make a new tensor (inplace=False). {EXPLICIT}")
    crossing = ", ".join(repr(label(node)) for node in flow.crossing(starts[1]))
    between = f"between {flow.owner(starts[0])!r} and {flow.owner(starts[1])!r}"
    problem = f"has no legal cut: one tensor, batch first, would have to cross, but {between} there cross {crossing}"
    return InvalidInput("model", problem, EXPLICIT)
