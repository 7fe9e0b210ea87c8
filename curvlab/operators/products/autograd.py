"""Hessian products of one chunk by autograd: the graph kept, linearised or compiled.

Only compositions that torch differentiates correctly are used: reverse over reverse, and forward
over reverse (``jvp`` of ``grad``). Reverse over forward is silently wrong through LayerNorm and
BatchNorm in torch 2.13.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from curvlab.operators.products.layers import rewriting
from curvlab.operators.products.linearise import linearise
from curvlab.parameters import Layout

Product = Callable[[Tensor], Tensor]  # (b, n) -> (b, n)
Scalar = Callable[[Sequence[Tensor]], Tensor]
Around = Callable[[], AbstractContextManager[object]]


def by_rows(
    layout: Layout,
    image: Callable[[list[Tensor], bool], Iterable[Tensor | None]],
    keep: bool = True,
) -> Product:
    """A product from ``image(pieces of a vector, whether the graph stays)``.

    Without ``keep`` the last vector of the first block frees the graph as it goes. Each piece of an
    image is freed when it has been copied: all of them and the result are never there together.
    """

    def product(block: Tensor) -> Tensor:
        result = torch.empty_like(block)
        for number, (vector, row) in enumerate(zip(block, result, strict=True), start=1):
            pieces = list(image(layout.unflatten(vector), keep or number < len(block)))
            layout.flatten((pieces.pop(0) for _ in range(len(pieces))), out=row)
        return result

    return product


def kept(
    value: Callable[[], Tensor],
    parameters: Sequence[Tensor],
    layout: Layout,
    keep: bool = True,
    around: Around = nullcontext,
) -> Product:
    """Make the graph of the gradient of ``value()``: one backward pass through it per vector.

    ``around()`` is a context for all backward passes, in which checkpointed parts of a model run
    again.
    """

    def gradients() -> tuple[Tensor | None, ...]:
        return torch.autograd.grad(value(), parameters, create_graph=True, allow_unused=True)

    with around():
        # what runs again has to run as it did the first time
        made = rewriting(gradients, second=True) if around is nullcontext else gradients()
    return backward(made, parameters, layout, keep, around)


def backward(
    gradients: Sequence[Tensor | None],
    parameters: Sequence[Tensor],
    layout: Layout,
    keep: bool = True,
    around: Around = nullcontext,
) -> Product:
    """Vectors through the graph of ``gradients``, one per parameter."""
    dependent = [(i, g) for i, g in enumerate(gradients) if g is not None and g.requires_grad]
    used, roots = [i for i, _ in dependent], [g for _, g in dependent]

    if not roots:  # the gradient does not depend on the parameters
        return torch.zeros_like

    def image(pieces: list[Tensor], stays: bool) -> Iterable[Tensor | None]:
        seeds = [pieces[i] for i in used]
        with around():
            return torch.autograd.grad(
                roots, parameters, seeds, retain_graph=stays, allow_unused=True
            )

    return by_rows(layout, image, keep)


def linearised(scalar: Scalar, parameters: Sequence[Tensor], layout: Layout) -> Product:
    """Trace the derivative of the gradient once, with everything that is constant folded."""
    push = linearise(torch.func.grad(scalar), parameters)

    def image(pieces: list[Tensor], _stays: bool) -> Iterable[Tensor | None]:
        with torch.no_grad():
            found: Iterable[Tensor | None] = push(*pieces)
        return found

    return by_rows(layout, image)


def compiled(scalar: Scalar, parameters: Sequence[Tensor], layout: Layout) -> Product:
    """Compile the gradient; its backward, with the primal kept, is the product.

    Compiling takes minutes: for long work, or a GPU.
    """
    from torch._functorch import config
    from torch.fx.experimental.proxy_tensor import make_fx

    point = tuple(parameter.detach() for parameter in parameters)
    traced = make_fx(lambda *p: torch.func.grad(scalar)(p))(*point)
    # donated buffers would be overwritten by the first product
    with config.patch(donated_buffer=False):
        gradients = torch.compile(traced, dynamic=False)(*parameters)
        product = backward(gradients, parameters, layout)
        product(torch.zeros(1, layout.n, dtype=point[0].dtype, device=point[0].device))
    return product
