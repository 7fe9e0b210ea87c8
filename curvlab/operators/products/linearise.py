"""The derivative of a function at a point as a traced graph, constants folded.

``torch.func.linearize`` does this too, but in torch 2.13 its folded graphs may write into the
folded constants: through ``nn.MultiheadAttention`` the first product is right and every later one
is silently wrong. Here the trace is functionalised, folded in its own order, and refused if a write
into a constant remains.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves

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
    traced.graph.eliminate_dead_code()
    folding = _Folding(traced)
    for node in traced.graph.nodes:
        folding.add(node)
    folding.graph.eliminate_dead_code()
    return fx.GraphModule(folding.constants, folding.graph)


class _Folding:
    """The graph that remains and the constants it reads, node by node in the order of the trace."""

    def __init__(self, traced: fx.GraphModule) -> None:
        self.traced = traced
        self.graph = fx.Graph()
        self.constants: dict[str, Any] = {}
        self.known: dict[fx.Node, Any] = {}  # values of what does not depend on the inputs
        self.copies: dict[fx.Node, fx.Node] = {}  # nodes of the remaining graph
        self.names: dict[fx.Node, str] = {}  # of constants as they are now

    def add(self, node: fx.Node) -> None:
        known = self.known
        constant = node.op == "call_function" and all(n in known for n in node.all_input_nodes)
        for written in _written(node):
            if written in known:
                self._before_write(node, written, constant)
        if node.op == "get_attr":
            known[node] = _attribute(self.traced, node.target)
        elif constant and callable(node.target):
            arguments, keywords = fx.node.map_arg((node.args, node.kwargs), known.__getitem__)
            known[node] = node.target(*arguments, **keywords)
        elif node.op == "output":
            self.graph.output(fx.node.map_arg(node.args[0], self._use))
        else:
            self.copies[node] = self.graph.node_copy(node, self._use)

    def _use(self, node: fx.Node) -> fx.Node:
        if node not in self.known:
            return self.copies[node]
        if node not in self.names:
            self.names[node] = f"constant_{len(self.constants)}"
            self.constants[self.names[node]] = self.known[node]
            self.copies[node] = self.graph.get_attr(self.names[node])
        return self.copies[node]

    def _before_write(self, node: fx.Node, written: fx.Node, constant: bool) -> None:
        """What was read before a write into a constant must keep the value it had."""
        storages = _storages(self.known[written])
        given = [n for n in self.known if n.op == "get_attr"]
        if not constant or any(storages & _storages(self.known[n]) for n in given):
            raise ValueError(
                f"this model cannot be linearised: {node.target} writes into a constant; pass "
                'engine="retained"'
            )
        for reader in [n for n in self.names if storages & _storages(self.known[n])]:
            name = self.names.pop(reader)
            self.constants[name] = self.constants[name].clone()


def _written(node: fx.Node) -> list[fx.Node]:
    """The arguments that an operation changes in place."""
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None or not schema.is_mutable:
        return []
    given = {
        **dict(zip([a.name for a in schema.arguments], node.args, strict=False)),
        **node.kwargs,
    }
    writes = [a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write]
    return [given[name] for name in writes if isinstance(given.get(name), fx.Node)]


def _storages(value: Any) -> set[int]:
    return {t.untyped_storage()._cdata for t in tree_leaves(value) if isinstance(t, Tensor)}


def _attribute(module: Any, target: Any) -> Any:
    for part in str(target).split("."):
        module = getattr(module, part)
    return module
