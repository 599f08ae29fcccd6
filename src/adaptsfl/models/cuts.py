"""Find where a traced model can be cut: between two layers, where one tensor crosses and no weight is shared.

A layer begins at an operation that multiplies by or looks up a weight matrix (convolution, linear, embedding, …). An
operation without such a weight (activation, pooling, normalisation, flattening, dropout) belongs to the layer before
it, as far as a cut after it is legal.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _NormBase

from adaptsfl.errors import InvalidInput
from adaptsfl.models.record import Record, label, record_run, storage, tensors_in
from adaptsfl.models.state import StateRoot, parameters_of
from adaptsfl.models.trace import EXPLICIT, Trace, mode, resolve

BATCHES = (2, 3)  # two batch sizes show which dimensions scale with the batch; batch-norm may need more than 1
NORMS = (_NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm, nn.LocalResponseNorm)
WEIGHT_OPERATIONS = ("linear", "conv", "mm", "matmul", "embedding", "einsum", "dot", "rnn", "lstm", "gru", "attention")
WRITING_OPERATORS = ("setitem", "iadd", "isub", "imul", "itruediv", "ipow")
RANDOM_OPERATIONS = ("rand", "normal", "bernoulli", "multinomial", "dropout", "exponential", "uniform")


@dataclass(frozen=True)
class Cut:
    """A legal cut: before the `position`-th ordered node; `before` are the ids of the parameters used before it."""

    position: int
    before: frozenset[int]


class Flow:
    """A traced graph, sorted into what depends on the data and what does not.

    Nodes that depend on neither the data nor on chance (weights, masks, position numbers, sizes) are `static`: every
    piece that needs one computes it for itself, so they never cross a cut. All others are `ordered`, and a cut lies
    between two of them.
    """

    def __init__(self, trace: Trace, module: nn.Module, example: Tensor) -> None:
        self.graph = trace.graph
        self.root = StateRoot(module, trace)
        records = [record_run(self.root, trace.graph, with_batch(example, size)) for size in BATCHES]
        self.values = tuple(record.values for record in records)
        self._storages = records[0].storages
        self.nodes: list[fx.Node] = list(trace.graph.nodes)
        self._changes = self._changed_storages(records[0])
        with suppress(InvalidInput), mode(self.root, not module.training):  # a module may do so in one mode only
            other = record_run(self.root, trace.graph, with_batch(example, BATCHES[0]))
            for node, keys in other.changed.items():
                sources = [source for source in node.all_input_nodes if other.storages[source] & keys]
                self._changes[node] = self._changes[node].union(*(self._storages[source] for source in sources))
        self._changed_by_any = frozenset[int]().union(*self._changes.values())
        self.placeholder = next(node for node in self.nodes if node.op == "placeholder")
        self.data = self._data_nodes()
        self.static = self._static_nodes()
        body = [node for node in self.nodes if node.op not in ("placeholder", "output")]
        self.ordered = [node for node in body if node not in self.static]
        self.output = self._output()
        self._index = {node: k for k, node in enumerate(self.ordered)}
        self._index[self.placeholder] = -1
        self._index[self.nodes[-1]] = len(self.ordered)  # the graph's output node uses what the model returns
        self._used = [self._parameters(node) for node in self.ordered]
        self._last_use = {node: self._last(node.users) for node in [self.placeholder, *self.ordered]}
        self._blocked = self._blocked_positions()

    def crossing(self, position: int) -> list[fx.Node]:
        """Return the nodes before `position` whose values are used at or after it."""
        before = [self.placeholder, *self.ordered[:position]]
        return [node for node in before if self._last_use[node] >= position]

    def is_legal(self, position: int) -> bool:
        """Whether one tensor of real numbers, the batch first, crosses and both sides share no state."""
        if self._blocked[position] or self.ordered[position - 1] not in self.data:
            return False  # a pure state update, such as batch-norm's counter, belongs to the operation after it
        crossing = self.crossing(position)
        return len(crossing) == 1 and crossing[0] is not self.placeholder and self._is_batch(crossing[0])

    def changes_received(self, position: int) -> str:
        """Return the module at `position` if it changes the one tensor that would cross before it."""
        node, crossing = self.ordered[position], self.crossing(position)
        changes = node.op == "call_module" and any(self._storages[n] & self._changes[node] for n in crossing)
        return str(node.target) if changes else ""

    def shared(self, position: int) -> frozenset[int]:
        """Return the ids of the parameters used on both sides of `position`."""
        return self.used(0, position) & self.used(position, len(self.ordered))

    def used(self, start: int, stop: int) -> frozenset[int]:
        """Return the ids of the parameters that ordered nodes `start`..`stop`-1 use."""
        return frozenset[int]().union(*self._used[start:stop])

    def starts(self, whole_modules: bool) -> list[int]:
        """Return the positions at which a layer begins."""
        return [k for k, node in enumerate(self.ordered) if whole_modules or self._begins_layer(node)]

    def owner(self, position: int) -> str:
        """Return the dotted name of the module whose weight makes ordered node `position` a layer."""
        node = self.ordered[position]
        if node.op == "call_module":
            return str(node.target)
        weights = [str(n.target) for n in self.static_inputs(node) if n.op == "get_attr" and self._is_weight(n)]
        return weights[0].rpartition(".")[0] or weights[0]

    def static_inputs(self, node: fx.Node) -> list[fx.Node]:
        """Return the static nodes that `node` needs, each after its own dependencies."""
        found: dict[fx.Node, None] = {}

        def visit(current: fx.Node) -> None:
            for source in current.all_input_nodes:
                if source in self.static and source not in found:
                    visit(source)
                    found[source] = None

        visit(node)
        return list(found)

    def stand_in(self, query: fx.Node) -> Any:
        """Return a replacement for the value of `query` in a piece that has only the crossing tensor.

        In the result, a `PerSample` means a multiple of the batch size, an `InputDevice` the input's device.
        """
        return _stand_in(self.values[0][query], self.values[1][query])

    def _data_nodes(self) -> set[fx.Node]:
        data = {self.placeholder}
        for node in self.nodes:
            if any(source in data for source in node.all_input_nodes) and tensors_in(self.values[0].get(node)):
                data.add(node)
        return data

    def _static_nodes(self) -> set[fx.Node]:
        static: set[fx.Node] = set()
        for node in self.nodes:
            computed = node.op in ("call_function", "call_method") and node not in self.data and self._is_pure(node)
            steady = all(source in static or source in self.data for source in node.all_input_nodes)
            if node.op == "get_attr" or (computed and steady):
                static.add(node)
        return static

    def _is_pure(self, node: fx.Node) -> bool:
        """Whether `node` returns the same value in any piece: it is not random and uses no tensor that is changed."""
        if any(word in operation(node) for word in RANDOM_OPERATIONS):
            return False
        touched = frozenset[int]().union(*(self._storages[n] for n in [node, *node.all_input_nodes] if self._tells(n)))
        return not touched & self._changed_by_any

    def _tells(self, node: fx.Node) -> bool:
        """Whether a static node with input `node` reads its values: of data nodes, it reads only sizes and the like."""
        return node not in self.data

    def _changed_storages(self, record: "Record") -> dict[fx.Node, frozenset[int]]:
        """Return the storages that each node changes in place: those it changed in the run, and those it may change."""
        changes = {}
        for node in self.nodes:
            named = [source for source in node.all_input_nodes if mutates(node, source, self.root)]
            changes[node] = record.changed[node].union(*(self._storages[source] for source in named))
        return changes

    def _output(self) -> fx.Node:
        returned = [node for node in self.nodes[-1].all_input_nodes if node in self.data]
        if len(returned) != 1 or not isinstance(self.values[0][returned[0]], Tensor):
            names = ", ".join(repr(label(node)) for node in returned) or "none that depends on the input"
            problem = f"returns {len(returned)} tensors ({names}), and a split model returns one"
            raise InvalidInput("model", problem, f"Wrap the model so that it returns its logits only. {EXPLICIT}")
        return returned[0]

    def _begins_layer(self, node: fx.Node) -> bool:
        if node not in self.data:
            return False
        if node.op == "call_module":
            leaf = self.root.get_submodule(str(node.target))
            weights = [tensor for tensor in leaf.parameters() if tensor.dim() >= 2]
            return bool(weights) and not isinstance(leaf, NORMS)
        weighs = any(word in operation(node) for word in WEIGHT_OPERATIONS)
        return weighs and any(self._is_weight(source) for source in self.static_inputs(node) if source.op == "get_attr")

    def _is_weight(self, node: fx.Node) -> bool:
        value = resolve(self.root, str(node.target))
        return isinstance(value, nn.Parameter) and value.dim() >= 2

    def _parameters(self, node: fx.Node) -> frozenset[int]:
        held = [*self.static_inputs(node), node]
        tensors = [tensor for source in held for tensor in parameters_of(self.root, source)]
        return frozenset(id(tensor) for tensor in tensors)

    def _running_state(self, node: fx.Node) -> frozenset[int]:
        """Return the storages of the buffers that `node` uses and that some node may change.

        A module that is called as a whole may change all its own buffers.
        """
        named = [n for n in [node, *node.all_input_nodes, *self.static_inputs(node)] if n.op == "get_attr"]
        used = frozenset(storage(resolve(self.root, str(n.target))) for n in named if self._is_tensor(n))
        return (used & self._running) | self._own_buffers(node)

    @cached_property
    def _running(self) -> frozenset[int]:
        """The storages of the buffers that any node may change."""
        whole = [self._own_buffers(node) for node in self.ordered]
        named = [n for n in self.nodes if n.op == "get_attr" and self._storages[n] & self._changed_by_any]
        return frozenset(storage(resolve(self.root, str(n.target))) for n in named).union(*whole)

    def _own_buffers(self, node: fx.Node) -> frozenset[int]:
        if node.op != "call_module":
            return frozenset()
        return frozenset(storage(tensor) for tensor in self.root.get_submodule(str(node.target)).buffers())

    def _is_tensor(self, node: fx.Node) -> bool:
        return isinstance(resolve(self.root, str(node.target)), Tensor)

    def _is_batch(self, node: fx.Node) -> bool:
        values = [recorded[node] for recorded in self.values]
        return all(
            isinstance(v, Tensor) and v.dim() > 0 and v.shape[0] == b and v.is_floating_point()
            for v, b in zip(values, BATCHES, strict=True)
        )

    def _last(self, users: Iterable[fx.Node]) -> int:
        return max((self._index.get(user, -1) for user in users), default=-1)

    def _blocked_positions(self) -> list[bool]:
        """Return for every position whether both sides need something that cannot be duplicated.

        That is a parameter or a changing buffer (from its first use to its last), a tensor that is changed in place, or
        a size that is neither constant nor a multiple of the batch size.
        """
        state: dict[Any, list[int]] = {}
        blocked = [False] * (len(self.ordered) + 1)

        def block(first: int, last: int) -> None:
            blocked[first + 1 : last + 1] = [True] * (last - first)

        for k, node in enumerate(self.ordered):
            for key in [*self._used[k], *(("buffer", key) for key in self._running_state(node))]:
                state.setdefault(key, []).append(k)
            if self._changes[node]:
                same = [n for n in [self.placeholder, *self.ordered[:k]] if self._storages[n] & self._changes[node]]
                block(min((self._index[n] for n in same), default=k), k)
            for query in self._unanswerable(node):
                block(min(self._index[source] for source in query.all_input_nodes if source in self._index), k)
        for uses in state.values():
            block(uses[0], uses[-1])
        return blocked

    def _unanswerable(self, node: fx.Node) -> Iterator[fx.Node]:
        """Yield the properties of data (such as a size) that `node` depends on and that have no replacement."""
        for static in self.static_inputs(node):
            if any(source not in self.static for source in static.all_input_nodes):
                try:
                    self.stand_in(static)
                except _NoStandIn:
                    yield static


def find_cuts(flow: Flow, starts: Sequence[int]) -> list[Cut]:
    """Return the last legal cut, if there is one, between each two consecutive layers that begin at `starts`."""
    cuts = []
    for start, following in pairwise(starts):
        legal = next((p for p in range(following, start, -1) if flow.is_legal(p)), None)
        if legal is not None:
            cuts.append(Cut(legal, flow.used(0, legal)))
    return cuts


def check_input(example: object) -> None:
    """Raise unless `example` is a tensor with at least one sample."""
    if isinstance(example, Tensor) and example.dim() > 0 and len(example) > 0:
        return
    given = f"of shape {tuple(example.shape)}" if isinstance(example, Tensor) else f"a {type(example).__name__}"
    raise InvalidInput("example_input", f"is {given}", "Give one tensor of at least one sample, the batch first")


def with_batch(example: Tensor, size: int) -> Tensor:
    """Return `size` copies of the example's first sample."""
    return example[:1].expand(size, *example.shape[1:]).clone()


def operation(node: fx.Node) -> str:
    """Return the plain name of what `node` calls: `aten.conv2d.default` and `F.conv2d` are both `conv2d`."""
    if isinstance(node.target, torch._ops.OpOverload):
        return str(node.target.overloadpacket.__name__)
    return str(getattr(node.target, "__name__", node.target))


def mutates(node: fx.Node, argument: fx.Node, root: nn.Module) -> bool:
    """Whether `node` may change the tensor `argument` in place, judging by its name and signature."""
    if node.op == "call_module":
        return bool(getattr(root.get_submodule(str(node.target)), "inplace", False))
    name = operation(node)
    if name in ("batch_norm", "instance_norm"):  # their signatures do not show that they update the statistics
        first = 1 if node.target in (functional.batch_norm, functional.instance_norm) else 3
        statistics = [*node.args[first : first + 2], node.kwargs.get("running_mean"), node.kwargs.get("running_var")]
        return argument in statistics
    if isinstance(node.target, torch._ops.OpOverload):
        schema = node.target._schema.arguments
        written = [
            value
            for spec, value in zip(schema, node.args, strict=False)
            if spec.alias_info is not None and spec.alias_info.is_write
        ]
        return argument in written and name != "detach_"
    in_place = name in WRITING_OPERATORS or (name.endswith("_") and not name.endswith("__"))
    out = node.kwargs.get("out")
    return (
        bool(node.kwargs.get("inplace"))
        or (out is not None and argument is out)
        or (in_place and bool(node.args) and node.args[0] is argument)
    )


@dataclass(frozen=True)
class PerSample:
    """Placeholder for `times` the batch size."""

    times: int


@dataclass(frozen=True)
class InputDevice:
    """Placeholder for the device of the piece's input."""


class _NoStandIn(Exception):
    """A value that cannot be computed from the crossing tensor alone."""


def _stand_in(two: Any, three: Any) -> Any:
    if isinstance(two, torch.device):
        return InputDevice()
    if isinstance(two, tuple):
        if len(two) != len(three):
            raise _NoStandIn
        return tuple(_stand_in(a, b) for a, b in zip(two, three, strict=True))
    if two == three and isinstance(two, int | float | str | torch.dtype | torch.layout | None):
        return two
    if isinstance(two, int) and isinstance(three, int) and two == BATCHES[0] * (three - two):
        return PerSample(three - two)
    raise _NoStandIn
