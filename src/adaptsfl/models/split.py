"""Split an unmodified torch module into layers with one tensor between each two."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, Self, get_args

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from adaptsfl import checks
from adaptsfl.errors import InvalidInput, first_line
from adaptsfl.models.cuts import Flow, check_input, find_cuts, label, with_batch
from adaptsfl.models.pieces import Piece, Segment, Step, make_step
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
    untouched,
)

Granularity = Literal["layer", "block"]
IN_PLACE = f"Change buffers in place, as in self.mean.copy_(new). {EXPLICIT}"
CHECKED_BATCHES = (2, 5, 1)  # several: a trace may hold for one size only, and a model may remember the run before
SHIFT = 0.1  # buffers start at other values than fresh ones, which are often zero
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
        self._modes = {True: _exceptions(module, True), False: _exceptions(module, False)}
        self._steps = tuple(steps)
        self.pieces = tuple(self._piece([step]) for step in steps)

    @property
    def layers(self) -> int:
        """L, the number of layers and of cuts."""
        return len(self.pieces)

    def client(self, cut: int) -> Piece:
        """Return layers 1..cut as one module."""
        return self._piece(self._steps[: self._check(cut)])

    def server(self, cut: int) -> Piece:
        """Return layers cut+1..L as one module; at cut L it returns its input."""
        return self._piece(self._steps[self._check(cut) :])

    def __call__(self, x: Tensor) -> Tensor:
        """Run all layers: what the original model returns."""
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

    def _piece(self, steps: Sequence[Step]) -> Piece:
        return Piece(self.module, steps, self._modes)

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
    check_input(example_input)
    if granularity not in get_args(Granularity):
        raise InvalidInput("granularity", f"is {granularity!r}", "Give 'layer' or 'block'")
    if any(map(is_lazy, [*module.parameters(), *module.buffers()])):
        raise InvalidInput("model", "has parameters without a shape yet (lazy modules)", "Run the model once before")
    example = with_batch(example_input, CHECKED_BATCHES[0])
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
        except _Differs as error:
            if not traces.by_fx:
                raise
            try:  # the model may treat what torch.fx traces with in another way than tensors
                return _make(module, trace_by_export(module, example), example, granularity, "model")
            except InvalidInput:
                raise error from None


def _make(
    module: nn.Module, traces: Traces, example: Tensor, granularity: Granularity, field: str | None
) -> SplitModel:
    model = SplitModel(module, _steps(module, traces, example, granularity))
    if field is not None:
        _verify(model, example, field)
    return model


def _exceptions(module: nn.Module, training: bool) -> frozenset[str]:
    """Return the parts that `module.train(training)` leaves in the other mode, as a model with frozen norms does."""
    with mode(module, training):
        parts = module.named_modules(remove_duplicate=False)
        return frozenset(name for name, part in parts if part.training != training)


def check_example(module: nn.Module, example: Tensor) -> None:
    """Run the model once in evaluation mode; where that fails, say in which of its modules."""
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
    changing = next((flow.changes_received(start) for start in starts[1:] if flow.changes_received(start)), None)
    if changing:
        problem = f"has no legal cut: {changing!r} changes its input in place, so no cut can lie before it"
        return InvalidInput("model", problem, f"Let it make a new tensor (inplace=False). {EXPLICIT}")
    crossing = ", ".join(repr(label(node)) for node in flow.crossing(starts[1]))
    between = f"between {flow.owner(starts[0])!r} and {flow.owner(starts[1])!r}"
    problem = f"has no legal cut: one tensor, batch first, would have to cross, but {between} there cross {crossing}"
    return InvalidInput("model", problem, EXPLICIT)


class _Differs(InvalidInput):
    """The layers do not do what the model does."""


@dataclass(frozen=True)
class _Result:
    """One run: what came out, the gradients of the parameters, and the buffers it left."""

    output: Tensor
    gradients: list[Tensor | None]
    buffers: dict[str, Tensor]


def _verify(model: SplitModel, example: Tensor, field: str) -> None:
    """Run all layers against the original in both modes, on copies of the buffers.

    Several batches run one after the other, of different sizes and random samples. Outputs and buffers must agree bit
    for bit. Gradients may round differently, because some models run other kernels when they are exported, but a
    gradient that is lost or added on the way is found.
    """
    if example.device.type == "meta":
        return
    module, whole, names = model.module, model.client(model.layers), ", ".join(model.names)
    parameters = [tensor for tensor in module.parameters() if tensor.requires_grad]
    for training in (True, False):
        when = "training" if training else "evaluation"
        inputs, buffers, expected = _expected(module, example, parameters, training)
        held = {name for name, _ in whole.named_buffers(remove_duplicate=False)}
        start = {name: tensor for name, tensor in buffers.items() if name in held}
        try:
            with untouched(module), mode(whole, training):
                found = _runs(whole, inputs, start, parameters)
        except Exception as error:
            problem = f"run one after the other fail in {when} mode: {first_line(error)}"
            raise _Differs(field, f"the layers {names}, {problem}", EXPLICIT) from error
        for x, a, b in zip(inputs, expected, found, strict=True):
            what = _difference(a, b, buffers)
            if what:
                size = "" if len(x) == CHECKED_BATCHES[0] else f" with a batch of {len(x)}"
                problem = f"run one after the other do not have the model's {what} in {when} mode{size}"
                remedy = IN_PLACE if what.startswith("buffer") else EXPLICIT
                raise _Differs(field, f"the layers {names}, {problem}", remedy)


def _difference(expected: _Result, found: _Result, start: Mapping[str, Tensor]) -> str:
    """Say what differs, if anything; buffers that no layer holds must be as they were at the start."""
    if not _same(expected.output, found.output):
        return "outputs"
    if not _near(expected.gradients, found.gradients):
        return "gradients"
    left = {**start, **found.buffers}
    changed = [name for name, tensor in expected.buffers.items() if not _same(tensor, left[name])]
    return f"buffer {changed[0]!r}" if changed else ""


def _same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))


def _expected(
    module: nn.Module, example: Tensor, parameters: Sequence[Tensor], training: bool
) -> tuple[list[Tensor], dict[str, Tensor], list[_Result]]:
    """Return inputs and buffers that the model can take in this mode, and what it makes of them.

    Not every model takes random samples and buffers, nor a batch of one in training: then it gets what it has.
    """
    random = [_samples(example, size) for size in CHECKED_BATCHES]
    given = [with_batch(example, size) for size in CHECKED_BATCHES]
    own = dict(module.named_buffers(remove_duplicate=False))
    shifted = _shifted(own)
    for inputs, buffers in ((random, shifted), (random, own), (given, own)):
        for some in (inputs, inputs[:-1]):
            try:
                with untouched(module), mode(module, training):
                    results = _runs(module, some, buffers, parameters)
            except Exception as error:
                last = error
                continue
            if all(torch.isfinite(result.output).all() for result in results) or inputs is given:
                return some, buffers, results
    when = "training" if training else "evaluation"
    problem = f"{type(module).__name__} itself fails in {when} mode, forward or backward: {first_line(last)}"
    raise InvalidInput("model", problem, "Make it run with batches of any size, and its loss backward") from last


def _samples(example: Tensor, size: int) -> Tensor:
    """Return different samples: random ones, or of whole numbers the first sample's, rotated."""
    if example.is_floating_point() or example.is_complex():
        generator = torch.Generator().manual_seed(size)
        shape = (size, *example.shape[1:])
        return torch.randn(shape, generator=generator, dtype=torch.float32).to(example)
    flat = example[0].flatten()
    return torch.stack([flat.roll(k).view_as(example[0]) for k in range(size)])


def _shifted(buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return floating-point buffers a little larger, so that variances stay positive; one that has two names once."""
    moved: dict[int, Tensor] = {}
    for k, tensor in enumerate(buffers.values()):
        if tensor.is_floating_point() and id(tensor) not in moved:
            generator = torch.Generator().manual_seed(k)
            noise = torch.rand(tensor.shape, generator=generator, dtype=torch.float32).to(tensor)
            moved[id(tensor)] = tensor + SHIFT * noise
    return {name: moved.get(id(tensor), tensor) for name, tensor in buffers.items()}


def _runs(
    module: nn.Module, inputs: Sequence[Tensor], buffers: Mapping[str, Tensor], parameters: Sequence[Tensor]
) -> list[_Result]:
    """Run one batch after the other; each finds the buffers as the one before left them."""
    copies = {id(tensor): tensor.detach().clone() for tensor in buffers.values()}
    state = {name: copies[id(tensor)] for name, tensor in buffers.items()}
    with _seeded(), torch.enable_grad():
        return [_run(module, x, state, parameters) for x in inputs]


def _run(module: nn.Module, x: Tensor, state: dict[str, Tensor], parameters: Sequence[Tensor]) -> _Result:
    output = _tensors(torch.func.functional_call(module, state, (x.clone(),)))[0]
    state.update({name: tensor.detach() for name, tensor in state.items()})
    left = {name: tensor.clone() for name, tensor in state.items()}
    if not output.requires_grad or not parameters:
        return _Result(output.detach(), [], left)
    weights = torch.linspace(-1, 1, output.numel(), dtype=output.dtype, device=output.device).view_as(output)
    gradients = torch.autograd.grad((output * weights).sum(), parameters, allow_unused=True)
    return _Result(output.detach(), list(gradients), left)


@contextmanager
def _seeded() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


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
