"""The derivative of a function at a point as a traced graph, constants folded.

``torch.func.linearize`` does this too, but in torch 2.13 its folded graphs keep in-place operations
on the folded constants: through ``nn.MultiheadAttention`` the first product is right and every
later one is silently wrong. Here the trace is functionalised first, so nothing is written in place.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

Push = Callable[..., Any]


def linearise(function: Callable[[Sequence[Tensor]], Any], point: Sequence[Tensor]) -> Push:
    """``push(*tangents)``: the derivative of ``function`` at ``point`` along ``tangents``."""
    start = tuple(tensor.detach() for tensor in point)

    def along(*tangents: Tensor) -> Any:
        return torch.func.jvp(function, (start,), (tangents,))[1]

    example = tuple(torch.zeros_like(tensor) for tensor in start)
    with torch.no_grad():
        traced = make_fx(torch.func.functionalize(along))(*example)
        return fold(traced)


def fold(traced: fx.GraphModule) -> fx.GraphModule:
    """Evaluate once all that does not depend on the inputs; keep what the rest needs of it."""
    known: dict[fx.Node, Any] = {}
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    constants: dict[str, Any] = {}

    def use(node: fx.Node) -> fx.Node:
        if node in known and node not in copies:
            name = f"constant_{len(constants)}"
            constants[name] = known[node]
            copies[node] = graph.get_attr(name)
        return copies[node]

    for node in traced.graph.nodes:
        if node.op == "get_attr":
            known[node] = _attribute(traced, node.target)
        elif node.op == "call_function" and all(n in known for n in node.all_input_nodes):
            arguments, keywords = fx.node.map_arg((node.args, node.kwargs), known.__getitem__)
            known[node] = node.target(*arguments, **keywords)
        elif node.op == "output":
            graph.output(fx.node.map_arg(node.args[0], use))
        else:
            copies[node] = graph.node_copy(node, use)
    graph.eliminate_dead_code()
    return fx.GraphModule(constants, graph)


def _attribute(module: Any, target: Any) -> Any:
    for part in str(target).split("."):
        module = getattr(module, part)
    return module
