"""Blocks of a model that are computed again when they are differentiated: the memory of one block.

A block (one layer of a transformer, one stage of a ResNet) is one node of the graph, see
:mod:`curvlab.operators.products.recompute`: what passes between blocks is kept, what is inside them
is not. The products are exact for any model: blocks may take and return tuples and dictionaries,
masks, shared and tied weights, and write into dictionaries and lists that they are given: what they
leave there is a result. What a block reads must reach it as an argument, a parameter or a buffer,
and what it makes must leave as a result. A tensor that it finds elsewhere is a constant to it, and
so is to the others one that it leaves on itself; an argument of another class that it changes, such
as a cache, is not the same when it is run again. All show in the first gradient, at the parameters
or at a distance from them. It is compared with a plain one at both when the operator is made
(:func:`curvlab.operators.verify.require_same_gradient`).
"""

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from curvlab.operators.policy import generators
from curvlab.operators.products.layers import Rewritten
from curvlab.operators.products.recompute import recomputed
from curvlab.parameters import call_with
from curvlab.probe import OperatorError

REMEDY = (
    "Blocks are computed again when they are differentiated: they may read only their arguments, "
    "parameters and buffers, may not change an argument that is no dictionary or list, such as a "
    "cache of keys and values or a tensor (write x = x + y in place of x += y), may not leave a "
    "tensor on self for use outside, and "
    "must pass tensors bare or in tuples, lists and dictionaries: no other class is looked into. "
    "Hooks that compute a weight before forward do so outside the block: replace the old "
    "torch.nn.utils.weight_norm and spectral_norm by those of torch.nn.utils.parametrizations. "
    "For a Hugging Face model set model.config.use_cache = False; otherwise pass engine="
    '"rebuilt" with chunk=1, or a larger budget='
)
TENSOR = object()  # stands where a tensor belongs; None is a result of its own
Context = Callable[[nn.Module], contextlib.AbstractContextManager[None]]


class Holding(Protocol):
    """How parameters are held while they are not in use; ``parameters`` are a block's own."""

    def pieces(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """What a graph keeps of each."""
        ...

    def open(self, parameters: Sequence[Tensor], pieces: Sequence[Tensor]) -> list[Tensor]:
        """What a block works with, of what is kept of each, or of something as long."""
        ...

    def close(
        self, parameters: Sequence[Tensor], tensors: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """The other way, for derivatives."""
        ...


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """The elements of the outermost lists of layers that have parameters, in order.

    A list is an ``nn.Sequential``, ``nn.ModuleList`` or ``nn.ModuleDict`` with two such elements
    or more; a longer chain inside a block stays part of the block.
    """
    found: list[nn.Module] = []

    def descend(module: nn.Module) -> None:
        children = [child for child in module.children() if _owns(child)]
        listed = isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict)
        if listed and len(children) > 1:
            found.extend(child for child in children if child not in found)
            return
        for child in children:
            descend(child)

    descend(model)
    return found


def _owns(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


@contextlib.contextmanager
def recomputing(
    blocks: Sequence[nn.Module], again: Context, second: bool, holding: Holding | None = None
) -> Iterator[None]:
    """Within the context a call of one of ``blocks`` keeps its inputs and nothing of its inside.

    Args:
        blocks: None of them inside another.
        again: Makes the context in which the given block is run again: modes, attention with second
            derivatives, arithmetic.
        second: Whether second derivatives are wanted in full, as for a Hessian. If not, the first
            derivatives can be differentiated with respect to their seed only, as for ``J v``.
        holding: How the blocks' parameters are held between their uses; by default as they are.
    """
    for block in blocks:
        # An attribute, which hides the method of the class; hooks run around it as always.
        block.__dict__["forward"] = _Recomputed(block, block.forward, again, second, holding)
    try:
        yield
    finally:
        for block in blocks:
            replaced = block.__dict__.pop("forward").original
            if getattr(replaced, "__func__", None) is not type(block).forward:
                block.__dict__["forward"] = replaced  # the user's own, patched in before


@dataclass(frozen=True, slots=True)
class _Recomputed:
    """Stands for the ``forward`` of a block."""

    block: nn.Module
    original: Callable[..., Any]
    again: Context
    second: bool
    holding: Holding | None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        parameters, buffers = dict(self.block.named_parameters()), dict(self.block.named_buffers())
        leaves, spec = tree_flatten((args, kwargs))
        where = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        # Kept as they are now: a block may change its buffers, as BatchNorm does.
        before = [buffer.clone() for buffer in buffers.values()]
        own: list[Tensor] = list(parameters.values())
        pieces = own if self.holding is None else self.holding.pieces(own)
        tensors = [*pieces, *before, *(leaves[i] for i in where)]
        differentiated = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
        # The transforms of torch.func (vmap) cannot follow a block: they have its inside instead.
        wrapped = any(map(torch._C._functorch.is_functorch_wrapped_tensor, tensors))
        if self.holding is None and (wrapped or not differentiated):
            return self.original(*args, **kwargs)
        states = [generator.get_state() for generator in generators(tensors[0].device)]
        call = _Call(self, own, [*parameters, *buffers], leaves, spec, where, states)
        found = recomputed(call, tensors) if differentiated else call.run(tensors)
        result, written = call.structured(found, leaves)
        if written is not None:
            _fill((args, kwargs), written)
        return result


@dataclass(eq=False)
class _Call:
    """One call of a block: how to run it again on other tensors, and how its results lie."""

    of: _Recomputed
    own: list[Tensor]  # the parameters
    names: list[str]  # of the parameters, then of the buffers
    leaves: list[Any]
    spec: TreeSpec
    where: list[int]
    states: list[Tensor] = field(default_factory=list)  # of the generators, before the block ran
    written: list[int] = field(default_factory=list)  # tensors that it wrote into in place
    results: list[Any] = field(default_factory=list)  # with TENSOR where one belongs
    results_spec: TreeSpec | None = None

    def __post_init__(self) -> None:
        self.leaves = list(self.leaves)
        for i in self.where:
            self.leaves[i] = TENSOR  # held by autograd, which frees them

    def run(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The tensors that the block returns; it may change its own buffers, this first time."""
        opened = self.open(tensors, range(len(tensors)))
        versions = [tensor._version for tensor in tensors]
        results = self._run(opened, self.names[: len(self.own)])
        self.written = [i for i, t in enumerate(tensors) if t._version != versions[i]]
        return results

    @property
    def parameters(self) -> int:
        return len(self.own)

    def open(self, tensors: Sequence[Tensor], places: Sequence[int]) -> list[Tensor]:
        if self.of.holding is None:
            return list(tensors)
        own = [self.own[place] for place in places if place < len(self.own)]
        return [*self.of.holding.open(own, tensors[: len(own)]), *tensors[len(own) :]]

    def close(self, tensors: Sequence[Tensor | None], places: Sequence[int]) -> list[Tensor | None]:
        if self.of.holding is None:
            return list(tensors)
        own = [self.own[place] for place in places if place < len(self.own)]
        return [*self.of.holding.close(own, tensors[: len(own)]), *tensors[len(own) :]]

    def _run(self, tensors: Sequence[Tensor], given: Sequence[str]) -> list[Tensor]:
        """The tensors that the block returns for these arguments and these ``given`` tensors."""
        count = len(self.names)
        state = {f"block.{name}": tensor for name, tensor in zip(given, tensors, strict=False)}
        leaves = list(self.leaves)
        for i, tensor in zip(self.where, tensors[count:], strict=True):
            leaves[i] = tensor
        args, kwargs = tree_unflatten(leaves, self.spec)
        inside = _Inside(self.of.block, self.of.original)
        result = call_with(inside, state, args, kwargs)
        flat, spec = tree_flatten((args, kwargs))
        same = spec == self.spec and all(a is b for a, b in zip(flat, leaves, strict=True))
        if not same:  # what was there before stays what it is
            place = {id(leaf): i for i, leaf in enumerate(leaves)}
            flat = [_Given(place[id(leaf)]) if id(leaf) in place else leaf for leaf in flat]
        written = None if same else tree_unflatten(flat, spec)
        flat, self.results_spec = tree_flatten((result, written))
        self.results = [TENSOR if isinstance(leaf, Tensor) else leaf for leaf in flat]
        return [leaf for leaf in flat if isinstance(leaf, Tensor)]

    @property
    def name(self) -> str:
        return f"a block ({type(self.of.block).__name__})"

    @property
    def second(self) -> bool:
        return self.of.second

    def again(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """:meth:`run` later, in a backward pass, as it was the first time; with a graph."""
        with self.of.again(self.of.block), Rewritten(second=self.of.second):
            for generator, state in zip(generators(tensors[0].device), self.states, strict=True):
                generator.set_state(state)  # the context puts back the caller's
            first, end = len(self.own), len(self.names)
            # Changed once more: buffers, and what others may still have use for.
            copied = {*range(first, end), *self.written}
            given = [t.clone() if i in copied else t for i, t in enumerate(tensors)]
            try:
                return self._run(given, self.names)
            except (TypeError, AttributeError, IndexError, KeyError, RuntimeError) as error:
                raise OperatorError(
                    f"{self.name} could not be run again: {error}. {REMEDY}"
                ) from error

    def structured(self, tensors: Sequence[Tensor], leaves: list[Any]) -> tuple[Any, Any]:
        """The block's result, and its arguments if it has written into them."""
        if self.results_spec is None:
            raise RuntimeError("a block's results are asked for before it has run")
        given = iter(tensors)
        flat = [next(given) if leaf is TENSOR else leaf for leaf in self.results]
        flat = [leaves[leaf.place] if isinstance(leaf, _Given) else leaf for leaf in flat]
        result, written = tree_unflatten(flat, self.results_spec)
        return result, written


@dataclass(frozen=True, slots=True)
class _Given:
    """Stands for what was given at this place."""

    place: int


def _fill(old: Any, new: Any) -> Any:
    """``new``, with the dictionaries and lists of ``old`` where it has them, filled in place."""
    if isinstance(old, dict) and isinstance(new, dict):
        items = {key: _fill(old.get(key), value) for key, value in new.items()}
        old.clear()
        old.update(items)
        return old
    if isinstance(old, list | deque | tuple) and isinstance(new, list | deque | tuple):
        before = [*old, *[None] * (len(new) - len(old))]
        filled = [_fill(one, other) for one, other in zip(before, new, strict=False)]
        if not isinstance(old, tuple):
            old.clear()
            old.extend(filled)
            return old
        return old if all(a is b for a, b in zip(old, filled, strict=True)) else new
    return new


class _Inside(nn.Module):
    """Gives :func:`call_with` a module whose forward is the block's own, without its hooks."""

    def __init__(self, block: nn.Module, original: Callable[..., Any]) -> None:
        super().__init__()
        self.block = block
        self.original = original

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.original(*args, **kwargs)
