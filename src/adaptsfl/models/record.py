"""Run a traced graph once and record the value of every node, and which tensors each node changed."""

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate

from adaptsfl.errors import InvalidInput, first_line
from adaptsfl.models.trace import EXPLICIT, INNER


def label(node: fx.Node) -> str:
    """Return the readable name of a node, without the prefix of the tracing wrapper."""
    return node.name.removeprefix(f"{INNER}_")


def storage(tensor: Tensor) -> int:
    """Return the identity of a tensor's memory, which views of it share; on the meta device there is no address."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except NotImplementedError:  # such as a sparse tensor
        return id(tensor)


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors inside a nested value."""
    found: list[Tensor] = []
    map_aggregate(value, lambda part: found.append(part) if isinstance(part, Tensor) else None)
    return found


@dataclass(frozen=True)
class Record:
    """One run of a graph: the value of every node, the storages of its tensors, and those the node changed."""

    values: dict[fx.Node, Any]
    storages: dict[fx.Node, frozenset[int]]
    changed: dict[fx.Node, frozenset[int]]


class _Recorder(fx.Interpreter):
    """Runs a graph and keeps the value of every node, and which of its input tensors the node changed."""

    def __init__(self, root: nn.Module, graph: fx.Graph) -> None:
        super().__init__(root, garbage_collect_values=False, graph=graph)
        self.extra_traceback = False
        self.last = next(iter(graph.nodes))
        self.changed: dict[fx.Node, frozenset[int]] = {}

    def run_node(self, n: fx.Node) -> Any:
        self.last = n
        inputs = [tensor for source in n.all_input_nodes for tensor in tensors_in(self.env.get(source))]
        versions = [tensor._version for tensor in inputs]
        result = super().run_node(n)
        pairs = zip(inputs, versions, strict=True)
        self.changed[n] = frozenset(storage(tensor) for tensor, version in pairs if tensor._version != version)
        return result

    def record(self) -> Record:
        """Return the record of the last run."""
        storages = {node: frozenset(map(storage, tensors_in(value))) for node, value in self.env.items()}
        values = {node: map_aggregate(value, _shape_only) for node, value in self.env.items()}
        return Record(values, storages, self.changed)


class _Run(nn.Module):
    """Runs a graph over a root whose state functional_call replaces by tensors without memory."""

    def __init__(self, root: nn.Module, graph: fx.Graph) -> None:
        super().__init__()
        self.root = root
        self.recorder = [_Recorder(root, graph)]  # in a list: not a submodule

    def forward(self, x: Tensor) -> Record:
        self.recorder[0].run(x)
        return self.recorder[0].record()


def record_run(root: nn.Module, graph: fx.Graph, example: Tensor) -> Record:
    """Run the graph on the meta device, which computes shapes only and does not touch the model's state.

    A module that reads values of its data cannot run there. A chain of whole modules then runs on real tensors, with
    copies of the buffers. A traced graph is rejected: a number that was read from the data could be taken for a size.
    """
    run = _Run(root, graph)
    chain = all(node.op in ("placeholder", "call_module", "output") for node in graph.nodes)
    buffers = dict(run.named_buffers())
    state = {name: tensor.to("meta") for name, tensor in [*run.named_parameters(), *buffers.items()]}
    with torch.no_grad():
        try:
            return cast("Record", torch.func.functional_call(run, state, (example.to("meta"),)))
        except Exception as error:
            if not chain or example.device.type == "meta":
                raise _failed("cannot run on shapes alone", run, error) from error
        copies = {name: tensor.clone() for name, tensor in buffers.items()}
        try:
            return cast("Record", torch.func.functional_call(run, copies, (example,)))
        except Exception as error:
            raise _failed("fails", run, error) from error


def _failed(how: str, run: _Run, error: Exception) -> InvalidInput:
    return InvalidInput("model", f"{how} at {label(run.recorder[0].last)!r} ({first_line(error)})", EXPLICIT)


def _shape_only(value: Any) -> Any:
    return value.to("meta") if isinstance(value, Tensor) else value
