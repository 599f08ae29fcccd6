"""Export a module with torch.export, without the device, the batch size and the checks of the example input."""

from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate
from torch.utils._sympy.numbers import int_oo

CHECKS = ("_guards_fn", "_assert", "sym_constrain")  # export's checks that inputs look like the example


def export_graph(module: nn.Module, example: Tensor) -> fx.GraphModule:
    """Export `module` for any batch size and device; its parameters in the result are the module's own."""
    batch = torch.export.Dim.DYNAMIC
    program = torch.export.export(module, (example,), dynamic_shapes=({0: batch},), strict=False)
    for allowed in program.range_constraints.values():
        if allowed.lower > example.shape[0] or allowed.upper != int_oo:
            raise ValueError(f"it only holds for batch sizes from {allowed.lower} to {allowed.upper}")
    exported = program.module()
    assert isinstance(exported, fx.GraphModule)
    _inline_no_grad(exported)
    for node in reversed(list(exported.graph.nodes)):
        if not node.users and any(check in str(node.target) for check in CHECKS):
            exported.graph.erase_node(node)
    _free_device(exported.graph, example.device)
    return exported


def _inline_no_grad(exported: fx.GraphModule) -> None:
    """Replace each `with torch.no_grad():` region by its operations, with detached results."""
    graph = exported.graph
    for node in list(graph.nodes):
        if node.target is not torch.ops.higher_order.wrap_with_set_grad_enabled:
            continue
        enabled, region, *inputs = node.args
        inner = exported.get_submodule(str(region.target))
        assert isinstance(inner, fx.GraphModule)
        places = [place for place in inner.graph.nodes if place.op == "placeholder"]
        with graph.inserting_before(node):
            results: Any = graph.graph_copy(inner.graph, dict(zip(places, inputs, strict=True)))
            for user in list(node.users):
                result = results[user.args[1]] if user.target is getitem else results
                kept = result if enabled else graph.call_function(torch.ops.aten.detach.default, (result,))
                user.replace_all_uses_with(kept)
                graph.erase_node(user)
        graph.erase_node(node)
        graph.erase_node(region)


def _free_device(graph: fx.Graph, device: torch.device) -> None:
    """Create the graph's own tensors on the input's device; export hard-codes the device of the example."""
    placeholder = next(node for node in graph.nodes if node.op == "placeholder")
    with graph.inserting_after(placeholder):
        where = graph.call_function(getattr, (placeholder, "device"))
    for node in graph.nodes:
        if node is not where:
            node.args = map_aggregate(node.args, lambda value: where if value == device else value)
            node.kwargs = map_aggregate(node.kwargs, lambda value: where if value == device else value)
    if not where.users:
        graph.erase_node(where)
