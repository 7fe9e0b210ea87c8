"""Functions that keep their inputs and nothing else, and are computed again to be differentiated.

A graph holds what every operation inside a function needs for its derivative; one that will be
differentiated twice holds it twice. Here a whole function is one node of the graph: its inside is
rebuilt for its first derivative and once more for its second, and freed each time. What is kept is
the inputs and, in a gradient that will be differentiated again, the seeds at the outputs. Both
derivatives are torch's own inside the function and are chained by autograd outside, so that nothing
is approximated. (Activation checkpointing does not do this: when its backward pass is itself
differentiated, the graph of all that was recomputed stays.)

Not for ``torch.func``: the derivatives are those of the autograd engine.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

LARGE = 1 << 26  # bytes inside a function from which on computing it again pays, in memory
PIECE = 1 << 24  # bytes inside a piece of such a function


class Function(Protocol):
    """What can be run again.

    Attributes:
        second: Whether second derivatives are wanted in full, as for a Hessian. If not, the first
            derivatives can be differentiated with respect to their seeds only, as for ``J v``.
    """

    @property
    def second(self) -> bool: ...

    def run(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The outputs; called once, without gradients."""
        ...

    def again(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The same outputs with their graph; called in backward passes."""
        ...


@dataclass(frozen=True, slots=True)
class Formula:
    """A pure function of tensors with one output."""

    function: Callable[..., Tensor]
    second: bool = True

    def run(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [self.function(*tensors)]

    again = run


def recomputed(function: Function, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The outputs of ``function`` for ``tensors``, as one node of the graph."""
    results: tuple[Tensor, ...] = _Value.apply(function, *tensors)  # type: ignore[no-untyped-call]
    return results


def recomputable(*tensors: Tensor) -> bool:
    """Whether the calls around are those of plain autograd, with something to differentiate."""
    return torch.is_grad_enabled() and all(
        type(tensor) in (Tensor, nn.Parameter)
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        and not torch.is_autocast_enabled(tensor.device.type)
        for tensor in tensors
    )


class _Value(torch.autograd.Function):
    """The outputs; their derivative is :class:`_Gradient`."""

    @staticmethod
    def forward(ctx: Any, function: Function, *tensors: Tensor) -> Any:
        with torch.no_grad():
            results = function.run(tensors)
        held = {tensor.untyped_storage()._cdata for tensor in tensors}
        # An output that shares an input's memory would carry the input's history.
        results = [r.clone() if r.untyped_storage()._cdata in held else r for r in results]
        ctx.mark_non_differentiable(*(r for r in results if not r.is_floating_point()))
        ctx.function = function
        ctx.save_for_backward(*tensors)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *seeds: Tensor) -> Any:
        tensors = ctx.saved_tensors
        wanted = ctx.needs_input_grad[1:]
        if not ctx.function.second:
            tensors = [tensor.detach() for tensor in tensors]
        gradients = _Gradient.apply(ctx.function, wanted, len(tensors), *tensors, *seeds)  # type: ignore[no-untyped-call]
        given = iter(gradients)
        return None, *(next(given) if need else None for need in wanted)


class _Gradient(torch.autograd.Function):
    """The gradients of the ``wanted`` inputs for seeds at the outputs."""

    @staticmethod
    def forward(
        ctx: Any, function: Function, wanted: Sequence[bool], count: int, *given: Tensor
    ) -> Any:
        ctx.function, ctx.wanted, ctx.count = function, wanted, count
        ctx.save_for_backward(*given)
        leaves, _, gradients = _first(function, wanted, given[:count], given[count:], create=False)
        return tuple(
            torch.zeros_like(leaf) if gradient is None else gradient
            for leaf, gradient in zip(leaves, gradients, strict=True)
        )

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *along: Tensor) -> Any:
        given, count = ctx.saved_tensors, ctx.count
        tensors, seeds = given[:count], given[count:]
        leaves, seeds, gradients = _first(ctx.function, ctx.wanted, tensors, seeds, create=True)
        roots = [
            (gradient, direction)
            for gradient, direction in zip(gradients, along, strict=True)
            if gradient is not None and gradient.requires_grad
        ]
        need = ctx.needs_input_grad[3:]
        leaf = iter(leaves)
        sources = [next(leaf) if chosen else None for chosen in ctx.wanted] + list(seeds)
        asked = [
            source
            for source, needed in zip(sources, need, strict=True)
            if needed and source is not None and source.requires_grad
        ]
        images = iter(
            torch.autograd.grad(
                [gradient for gradient, _ in roots],
                asked,
                [direction for _, direction in roots],
                allow_unused=True,
            )
            if roots and asked
            else [None] * len(asked)
        )
        chosen = {id(source) for source in asked}
        result = [
            next(images) if source is not None and id(source) in chosen else None
            for source in sources
        ]
        return None, None, None, *result


def _first(
    function: Function,
    wanted: Sequence[bool],
    tensors: Sequence[Tensor],
    seeds: Sequence[Tensor],
    *,
    create: bool,
) -> tuple[list[Tensor], list[Tensor], Sequence[Tensor | None]]:
    """Run the function again and take its first derivative: leaves, seeds as leaves, gradients."""
    fresh = [
        tensor.detach().requires_grad_(need) for tensor, need in zip(tensors, wanted, strict=True)
    ]
    leaves = [tensor for tensor, need in zip(fresh, wanted, strict=True) if need]
    with torch.enable_grad():  # a Function is run without
        outputs = function.again(fresh)
        seeds = [s.detach().requires_grad_(create and s.is_floating_point()) for s in seeds]
        pairs = [(o, s) for o, s in zip(outputs, seeds, strict=True) if o.requires_grad]
        gradients = torch.autograd.grad(
            [output for output, _ in pairs],
            leaves,
            [seed for _, seed in pairs],
            create_graph=create,
            allow_unused=True,
        )
    return leaves, seeds, gradients
