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

from curvlab.probe import OperatorError

LARGE = 1 << 26  # bytes inside a function from which on computing it again pays, in memory
PIECE = 1 << 24  # bytes inside a piece of such a function


class Function(Protocol):
    """What can be run again.

    Attributes:
        name: For errors.
        second: Whether second derivatives are wanted in full, as for a Hessian. If not, the first
            derivatives can be differentiated with respect to their seeds only, as for ``J v``.
        parameters: How many inputs, the first ones, are parameters. A gradient that is made to be
            differentiated is only a root of its graph there: its value is not computed.
    """

    @property
    def name(self) -> str: ...
    @property
    def second(self) -> bool: ...
    @property
    def parameters(self) -> int: ...

    def run(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The outputs; called once, without gradients."""
        ...

    def again(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The same outputs with their graph; called in backward passes, with opened tensors."""
        ...

    def open(self, tensors: Sequence[Tensor], places: Sequence[int]) -> list[Tensor]:
        """What is worked with, of ``tensors`` as they are kept: inputs number ``places``."""
        ...

    def close(self, tensors: Sequence[Tensor | None], places: Sequence[int]) -> list[Tensor | None]:
        """The other way, for derivatives."""
        ...


@dataclass(frozen=True, slots=True)
class Formula:
    """A pure function of tensors with one output."""

    function: Callable[..., Tensor]
    second: bool = True
    parameters: int = 0
    name: str = "attention or cross-entropy in pieces"

    def run(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [self.function(*tensors)]

    again = run

    def open(self, tensors: Sequence[Tensor], _places: Sequence[int]) -> list[Tensor]:
        return list(tensors)

    def close(
        self, tensors: Sequence[Tensor | None], _places: Sequence[int]
    ) -> list[Tensor | None]:
        return list(tensors)


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


def _unchanged(ctx: Any, function: Function) -> tuple[Tensor, ...]:
    """The inputs that were saved; raises if one of them has been written to since."""
    try:
        saved: tuple[Tensor, ...] = ctx.saved_tensors
    except RuntimeError as error:
        if "inplace operation" not in str(error):  # freed, say: no matter of the model's
            raise
        raise OperatorError(
            f"what was given to {function.name} was changed in place, by itself or after it, and "
            f"is needed to compute it again: {error}. Write x = x + y in place of x += y, or give "
            'it x.clone(); or pass engine="rebuilt" with chunk=1, or a larger budget='
        ) from error
    return saved


def _differentiable(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


class _Value(torch.autograd.Function):
    """The outputs; their derivative is :class:`_Gradient`."""

    @staticmethod
    def forward(ctx: Any, function: Function, *tensors: Tensor) -> Any:
        with torch.no_grad():
            results = function.run(tensors)
        held = {tensor.untyped_storage()._cdata for tensor in tensors}
        # An output that shares an input's memory would carry the input's history; one that is a
        # view of something inside could not be changed in place outside.
        results = [
            r.clone() if r._is_view() or r.untyped_storage()._cdata in held else r for r in results
        ]
        ctx.mark_non_differentiable(*(r for r in results if not _differentiable(r)))
        ctx.function = function
        ctx.save_for_backward(*tensors)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *seeds: Tensor) -> Any:
        tensors = _unchanged(ctx, ctx.function)
        wanted = ctx.needs_input_grad[1:]
        if not ctx.function.second:
            tensors = tuple(tensor.detach() for tensor in tensors)
        valued = not torch.is_grad_enabled()  # or made in order to be differentiated
        asked = _Asked(ctx.function, wanted, valued)
        gradients = _Gradient.apply(asked, len(tensors), *tensors, *seeds)  # type: ignore[no-untyped-call]
        given = iter(gradients)
        return None, *(next(given) if need else None for need in wanted)


@dataclass(frozen=True, slots=True)
class _Asked:
    """Which inputs' gradients are asked for, and whether their values are used."""

    function: Function
    wanted: Sequence[bool]
    valued: bool

    @property
    def places(self) -> list[int]:
        return [place for place, want in enumerate(self.wanted) if want]


class _Gradient(torch.autograd.Function):
    """The gradients of the ``wanted`` inputs for seeds at the outputs."""

    @staticmethod
    def forward(ctx: Any, asked: _Asked, count: int, *given: Tensor) -> Any:
        ctx.asked, ctx.count = asked, count
        ctx.save_for_backward(*given)
        places = [p for p in asked.places if asked.valued or p >= asked.function.parameters]
        found = dict[int, Tensor | None]()
        if places:
            _, _, gradients = _first(
                asked.function, given[:count], given[count:], places, create=False
            )
            closed = asked.function.close(gradients, places)
            found = dict(zip(places, closed, strict=True))
        return tuple(
            # one number with the shape of many
            given[place].new_zeros(()).expand_as(given[place]) if gradient is None else gradient
            for place, gradient in ((place, found.get(place)) for place in asked.places)
        )

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *along: Tensor) -> Any:
        asked, given, count = ctx.asked, _unchanged(ctx, ctx.asked.function), ctx.count
        leaves, seeds, gradients = _first(
            asked.function, given[:count], given[count:], asked.places, create=True
        )
        directions = asked.function.open(along, asked.places)
        roots = [
            (gradient, direction)
            for gradient, direction in zip(gradients, directions, strict=True)
            if gradient is not None and gradient.requires_grad
        ]
        leaf = iter(leaves)
        sources = [next(leaf) if chosen else None for chosen in asked.wanted] + list(seeds)
        needed = enumerate(zip(sources, ctx.needs_input_grad[2:], strict=True))
        used = {
            place: source
            for place, (source, need) in needed
            if need and source is not None and source.requires_grad
        }
        result: list[Tensor | None] = [None] * len(sources)
        if roots and used:
            images = torch.autograd.grad(
                [gradient for gradient, _ in roots],
                list(used.values()),
                [direction for _, direction in roots],
                allow_unused=True,
            )
            for place, image in zip(used, images, strict=True):
                result[place] = image
        closed = asked.function.close(result[:count], range(count))
        return None, None, *closed, *result[count:]


def _first(
    function: Function,
    tensors: Sequence[Tensor],
    seeds: Sequence[Tensor],
    places: Sequence[int],
    *,
    create: bool,
) -> tuple[list[Tensor], list[Tensor], Sequence[Tensor | None]]:
    """Run the function again and differentiate it: leaves at ``places``, seeds, gradients."""
    opened = function.open(tensors, range(len(tensors)))
    fresh = [tensor.detach().requires_grad_(i in places) for i, tensor in enumerate(opened)]
    leaves = [fresh[place] for place in places]
    with torch.enable_grad():  # a Function is run without
        outputs = function.again(fresh)
        seeds = [s.detach().requires_grad_(create and _differentiable(s)) for s in seeds]
        pairs = [(o, s) for o, s in zip(outputs, seeds, strict=True) if o.requires_grad]
        gradients: Sequence[Tensor | None] = [None] * len(leaves)
        if pairs:
            gradients = torch.autograd.grad(
                [output for output, _ in pairs],
                leaves,
                [seed for _, seed in pairs],
                create_graph=create,
                allow_unused=True,
            )
    return leaves, seeds, gradients
