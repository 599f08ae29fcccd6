"""The layers of a split model as modules: each runs its part of the traced graph on the original model's state."""

import linecache
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import getitem, mul
from typing import Any, Self

from torch import Tensor, fx, nn
from torch.nn.modules.instancenorm import _InstanceNorm

from adaptsfl.models.cuts import Flow, InputDevice, PerSample
from adaptsfl.models.state import attach, targets
from adaptsfl.models.trace import mode

Run = Callable[[nn.Module, Tensor], Tensor]
Modes = Mapping[bool, frozenset[str]]


@dataclass(frozen=True)
class TracedLayer:
    """One layer: how it runs in either mode, on any root module that has the attributes named in `targets`.

    `operations` are the names of the functions that it calls directly, not through modules, in training mode.
    """

    name: str
    training: Run
    evaluating: Run
    targets: tuple[str, ...]
    constants: Mapping[str, Any]
    operations: frozenset[str]


class Piece(nn.Module):
    """Consecutive layers of a model. Its parameters are the model's own, and so are its state_dict keys.

    `train()` and `eval()` choose between the two traces of the model. A piece without layers returns its input.
    `modes` names, for each mode of the model, the submodules that stay in the other mode.
    """

    def __init__(self, module: nn.Module, layers: Sequence[TracedLayer], modes: Modes) -> None:
        super().__init__()
        self._traced_layers = tuple(layers)
        self._modes = modes
        names = dict.fromkeys(name for layer in layers for name in layer.targets)
        constants = {name: value for layer in layers for name, value in layer.constants.items()}
        attach(self, module, names, constants)
        self.training = module.training

    def forward(self, x: Tensor) -> Tensor:
        """Run the layers in order."""
        for layer in self._traced_layers:
            x = (layer.training if self.training else layer.evaluating)(self, x)
        return x

    @property
    def operations(self) -> frozenset[str]:
        """The names of the functions that the layers call directly, because tracing replaced the module."""
        return frozenset(name for layer in self._traced_layers for name in layer.operations)

    def train(self, mode: bool = True) -> Self:
        """Set the mode; submodules that the model's train() keeps in the other mode (frozen norms) stay so."""
        for name, part in self.named_modules(remove_duplicate=False):
            part.training = mode != (name in self._modes[mode])
        self.training = mode
        return self

    def extra_repr(self) -> str:
        """Return the names of the layers."""
        return ", ".join(layer.name for layer in self._traced_layers)


def tracked_norms(piece: nn.Module) -> dict[str, tuple[str, str]]:
    """Return the batch-norms of a piece whose running statistics training updates: name → names of mean and variance.

    Tracing may have turned them into plain operations; the statistics keep their names. Not included: norms without
    running statistics, instance-norm, and norms that the model's own train() keeps in evaluation mode (frozen).
    """
    means = [name for name, _ in piece.named_buffers() if name.rpartition(".")[2] == "running_mean"]
    with mode(piece, True):
        holders = {name.removesuffix("running_mean"): piece.get_submodule(name.rpartition(".")[0]) for name in means}
        moving = [k for k, part in holders.items() if part.training and not isinstance(part, _InstanceNorm)]
    return {prefix.rstrip("."): (f"{prefix}running_mean", f"{prefix}running_var") for prefix in moving}


@dataclass(frozen=True)
class Segment:
    """The ordered nodes `start`..`stop`-1 of a flow, which become one layer."""

    flow: Flow
    start: int
    stop: int

    def graph(self) -> fx.Graph:
        """Return the segment as a graph of its own, from the tensor that enters to the tensor that leaves."""
        flow = self.flow
        graph = fx.Graph()
        x = graph.placeholder("x")
        env: dict[fx.Node, Any] = {flow.crossing(self.start)[0] if self.start else flow.placeholder: x}
        for node in flow.ordered[self.start : self.stop]:
            for static in flow.static_inputs(node):
                if static not in env:
                    env[static] = self._copy_static(graph, static, env, x)
            env[node] = graph.node_copy(node, env.__getitem__)
        last = flow.crossing(self.stop)[0] if self.stop < len(flow.ordered) else flow.output
        graph.output(env[last])
        return graph

    def _copy_static(self, graph: fx.Graph, node: fx.Node, env: dict[fx.Node, Any], x: fx.Node) -> Any:
        if all(source in env for source in node.all_input_nodes):
            return graph.node_copy(node, env.__getitem__)
        return _build(graph, self.flow.stand_in(node), x)  # a property of a tensor that does not cross the cut


def compile_layer(name: str, training: Segment, evaluating: Segment, constants: Mapping[str, Any]) -> TracedLayer:
    """Compile one layer from its segment of either trace."""
    train_graph = training.graph()
    eval_graph = train_graph if evaluating is training else evaluating.graph()
    run_train = _compile(train_graph, name, "training")
    run_eval = run_train if eval_graph is train_graph else _compile(eval_graph, name, "evaluating")
    names = dict.fromkeys([*targets(train_graph.nodes), *targets(eval_graph.nodes)])
    kept = {key: constants[key] for key in names if key in constants}
    calls = [node.target for node in train_graph.nodes if node.op == "call_function"]
    called = frozenset(str(getattr(target, "__name__", target)) for target in calls)
    return TracedLayer(name, run_train, run_eval, tuple(names), kept, called)


def _build(graph: fx.Graph, value: Any, x: fx.Node) -> Any:
    if isinstance(value, tuple):
        return tuple(_build(graph, part, x) for part in value)
    if isinstance(value, InputDevice):
        return graph.call_function(getattr, (x, "device"))
    if isinstance(value, PerSample):
        size = graph.call_function(getitem, (graph.call_function(getattr, (x, "shape")), 0))
        return size if value.times == 1 else graph.call_function(mul, (size, value.times))
    return value


def _compile(graph: fx.Graph, name: str, mode: str) -> Run:
    code = graph.python_code("self")
    file = f"<layer {name} {mode} {id(graph):x}>"
    linecache.cache[file] = (len(code.src), None, code.src.splitlines(keepends=True), file)  # for tracebacks
    scope = dict(code.globals)
    exec(compile(code.src, file, "exec"), scope)  # code that torch.fx wrote from our own graph, as GraphModule runs it
    run: Run = scope["forward"]
    return run
