"""Products ``J' A J v`` of one chunk: J the Jacobian of the outputs, A how the loss curves there.

``J'`` is one backward pass through the kept graph of the outputs. ``J v`` is a backward pass
through the graph *of that backward pass*, which is linear in its seed: no forward-mode rules are
needed, so everything that can be trained works.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from curvlab.operators.products.autograd import Around, Product, by_rows
from curvlab.operators.products.layers import rewriting
from curvlab.operators.products.linearise import linearise
from curvlab.parameters import Layout

OutputCurvature = Callable[[Tensor], Tensor]  # of the outputs' shape, symmetric and linear


def kept(
    output: Callable[[], Tensor],
    curvature: Callable[[Tensor], OutputCurvature],
    parameters: Sequence[Tensor],
    layout: Layout,
    keep: bool = True,
    around: Around = nullcontext,
) -> Product:
    """Make the graph of the outputs and of its transpose.

    Args:
        output: Makes the outputs and their graph.
        curvature: Gives A at the outputs.
        parameters: Leaves of the graph.
        layout: The layout of the parameters.
        keep: As for :func:`curvlab.operators.products.autograd.by_rows`.
        around: Makes a context for all backward passes, in which checkpointed parts run again.
    """

    def transpose() -> tuple[Tensor, Tensor, tuple[Tensor | None, ...]]:
        outputs = output()
        seed = torch.zeros_like(outputs, requires_grad=True)
        return (
            outputs,
            seed,
            torch.autograd.grad(outputs, parameters, seed, create_graph=True, allow_unused=True),
        )

    with around():
        # what runs again has to run as it did the first time
        made = rewriting(transpose, second=False) if around is nullcontext else transpose()
    outputs, seed, gradients = made
    bend = curvature(outputs.detach())
    dependent = [(i, g) for i, g in enumerate(gradients) if g is not None and g.requires_grad]
    used, roots = [i for i, _ in dependent], [g for _, g in dependent]

    if not roots:  # the outputs do not depend on the parameters
        return torch.zeros_like

    def image(pieces: list[Tensor], stays: bool) -> Iterable[Tensor | None]:
        with around():
            seeds = [pieces[i] for i in used]
            (along,) = torch.autograd.grad(roots, seed, seeds, retain_graph=stays)
            return torch.autograd.grad(
                outputs, parameters, bend(along), retain_graph=stays, allow_unused=True
            )

    return by_rows(layout, image, keep)


def linearised(
    output: Callable[[Sequence[Tensor]], Tensor],
    curvature: OutputCurvature,
    parameters: Sequence[Tensor],
    layout: Layout,
) -> Product:
    """``J v`` from a traced forward derivative, ``J'`` from the kept graph."""
    push = linearise(output, parameters)
    outputs = output(parameters)

    def image(pieces: list[Tensor], _stays: bool) -> Iterable[Tensor | None]:
        with torch.no_grad():
            along = push(*pieces)
        return torch.autograd.grad(
            outputs, parameters, curvature(along), retain_graph=True, allow_unused=True
        )

    return by_rows(layout, image)
