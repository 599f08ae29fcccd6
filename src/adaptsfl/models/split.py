"""Split an unmodified torch module into layers with one tensor between each two."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, Literal, Self, get_args

import torch
from torch import Tensor, nn

from adaptsfl import checks
from adaptsfl.errors import InvalidInput, first_line
from adaptsfl.models.cuts import Flow, find_cuts, label, with_batch
from adaptsfl.models.pieces import Piece, Segment, Step, make_step
from adaptsfl.models.trace import (
    EXPLICIT,
    Traces,
    check_one_input,
    mode,
    required_inputs,
    resolve,
    trace,
    trace_layers,
)

Granularity = Literal["layer", "block"]
CHECKED_BATCH = 2
ROUNDING_FLOOR = 1e-5  # of the largest gradient's norm
GRADIENT_TOLERANCE = 1e-2  # relative to the gradient's norm: rounding, also in half precision


class SplitModel:
    """A model as L layers that can be cut after any of them; all parts share the parameters of `module`.

    Attributes:
        module: the original model.
        pieces: the layers in order; cut j puts pieces[:j] on the device.
        names: one name per layer.
    """

    def __init__(self, module: nn.Module, steps: Sequence[Step]) -> None:
        self.module = module
        self.names = tuple(step.name for step in steps)
        self.pieces = tuple(Piece(module, [step]) for step in steps)
        self._steps = tuple(steps)

    @property
    def layers(self) -> int:
        """L, the number of layers and of cuts."""
        return len(self.pieces)

    def client(self, cut: int) -> Piece:
        """Return layers 1..cut as one module."""
        return Piece(self.module, self._steps[: self._check(cut)])

    def server(self, cut: int) -> Piece:
        """Return layers cut+1..L as one module; at cut L it returns its input."""
        return Piece(self.module, self._steps[self._check(cut) :])

    def __call__(self, x: Tensor) -> Tensor:
        """Run all layers: what the original model returns."""
        for piece in self.pieces:
            x = piece(x)
        return x

    def train(self, mode: bool = True) -> Self:
        """Put the model and its layers into training mode, or evaluation mode if `mode` is False."""
        for part in (self.module, *self.pieces):
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

    `example_input` has the batch as its first dimension; its other sizes are those the split model will take.
    `layers` names the layers in the order they run, for models that cannot be traced. Before it is returned, the split
    model is run against the original in both modes (not on the meta device, where there are no values).
    """
    if not isinstance(module, nn.Module):
        raise InvalidInput("model", f"is a {type(module).__name__}", "Give a torch.nn.Module")
    if not isinstance(example_input, Tensor) or example_input.dim() == 0 or not len(example_input):
        given = "of no samples" if isinstance(example_input, Tensor) else f"a {type(example_input).__name__}"
        raise InvalidInput("example_input", f"is {given}", "Give one tensor with the batch first")
    if granularity not in get_args(Granularity):
        raise InvalidInput("granularity", f"is {granularity!r}", "Give 'layer' or 'block'")
    example = with_batch(example_input, CHECKED_BATCH)
    if layers is None:
        check_one_input(module)
    callable_alone = layers is None or len(required_inputs(module)) <= 1
    if callable_alone:
        check_example(module, example)
    traces = trace(module, example) if layers is None else trace_layers(module, layers)
    model = SplitModel(module, _steps(module, traces, example, granularity))
    if callable_alone:
        _verify(model, example, "layers" if layers is not None else "model")
    return model


def check_example(module: nn.Module, example: Tensor) -> None:
    """Run the model once in evaluation mode; where that fails, say in which of its modules."""
    with mode(module, False), torch.no_grad(), _located(module) as stack:
        try:
            module(example)
        except Exception as error:
            name = stack[-1] if stack else ""
            layer = f"layer {name!r} ({type(module.get_submodule(name)).__name__})" if name else "the model itself"
            shape = ", ".join(["batch", *map(str, example.shape[1:])])
            raise InvalidInput(
                "example_input",
                f"of shape ({shape}) and dtype {example.dtype} fails in {layer}: {first_line(error)}",
                "Give an input of the shape that the model takes, the batch first",
            ) from error


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


def _steps(module: nn.Module, traces: Traces, example: Tensor, granularity: Granularity) -> list[Step]:
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
    steps = []
    for (train_start, eval_start), (train_stop, eval_stop) in pairwise(edges):
        segment = Segment(training, train_start, train_stop)
        other = segment if traces.same else Segment(evaluating, eval_start, eval_stop)
        first = next(start for start in starts[0] if start >= train_start)
        name = _name(module, training, first, training.used(train_start, train_stop))
        steps.append(make_step(name, segment, other, constants))
    return steps


def _starts(flow: Flow, traces: Traces, granularity: Granularity, module: nn.Module) -> list[int]:
    """Return where layers begin; for blocks, only where another block begins."""
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
    """Return the name of the outermost module around the layer's first weight that has no weights but the layer's."""
    name = flow.owner(start)
    while "." in name:
        parent = name.rpartition(".")[0]
        if not {id(tensor) for tensor in module.get_submodule(parent).parameters()} <= used:
            break
        name = parent
    return name


def _no_cut(flow: Flow, starts: Sequence[int], module: nn.Module) -> InvalidInput:
    """Say why nothing can be cut."""
    if len(starts) < 2:
        return InvalidInput("model", f"has {len(starts)} layer(s) with weights, so there is no legal cut", EXPLICIT)
    names = {id(tensor): name for name, tensor in module.named_parameters()}
    shared = frozenset.intersection(*(flow.shared(start) for start in starts[1:]))
    tied = [names[key] for key in names if key in shared]
    if tied:
        problem = f"has no legal cut: {tied[0]!r} is used on both sides of every one (tied weights)"
        return InvalidInput("model", problem, "Untie them: device and server would train two copies of one weight")
    crossing = ", ".join(repr(label(node)) for node in flow.crossing(starts[1]))
    between = f"between {flow.owner(starts[0])!r} and {flow.owner(starts[1])!r}"
    problem = f"has no legal cut: one tensor, batch first, would have to cross, but {between} there cross {crossing}"
    return InvalidInput("model", problem, EXPLICIT)


def _verify(model: SplitModel, example: Tensor, field: str) -> None:
    """Run the split model against the original in both modes, on copies of the buffers.

    Outputs must agree bit for bit. Gradients may round differently, because some models run other kernels when they
    are exported, but a gradient that is lost or added on the way is found.
    """
    if example.device.type == "meta":
        return
    whole = model.client(model.layers)
    parameters = [tensor for tensor in model.module.parameters() if tensor.requires_grad]
    for training in (True, False):
        with mode(model.module, training), mode(whole, training):
            expected, expected_gradients = _run(model.module, example, parameters)
            found, found_gradients = _run(whole, example, parameters)
        same = torch.equal(torch.nan_to_num(expected), torch.nan_to_num(found))
        if not same or not _near(expected_gradients, found_gradients):
            what = "gradients" if same else "outputs"
            when = "training" if training else "evaluation"
            problem = f"run one after the other do not have the model's {what} in {when} mode"
            raise InvalidInput(field, f"the layers {', '.join(model.names)}, {problem}", EXPLICIT)


def _run(module: nn.Module, example: Tensor, parameters: Sequence[Tensor]) -> tuple[Tensor, list[Tensor | None]]:
    buffers = {name: tensor.clone() for name, tensor in module.named_buffers()}
    with torch.random.fork_rng(), torch.enable_grad():
        torch.manual_seed(0)
        output = _tensors(torch.func.functional_call(module, buffers, (example,)))[0]
        if not output.requires_grad or not parameters:
            return output, []
        weights = torch.linspace(-1, 1, output.numel(), dtype=output.dtype, device=output.device).view_as(output)
        return output.detach(), list(torch.autograd.grad((output * weights).sum(), parameters, allow_unused=True))


def _near(expected: Sequence[Tensor | None], found: Sequence[Tensor | None]) -> bool:
    """Whether gradients agree within rounding; one that is zero but for rounding is measured against the others."""
    if [tensor is None for tensor in expected] != [tensor is None for tensor in found]:
        return False
    pairs = [(a, b) for a, b in zip(expected, found, strict=True) if a is not None and b is not None]
    norms = [float(torch.nan_to_num(a).norm()) for a, _ in pairs]
    floor = ROUNDING_FLOOR * max(norms, default=0.0)
    apart = [float(torch.nan_to_num(a - b).norm()) for a, b in pairs]
    return all(d <= GRADIENT_TOLERANCE * norm + floor for d, norm in zip(apart, norms, strict=True))


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, tuple | list) else ()
    return [tensor for part in parts for tensor in _tensors(part)]
