"""One projected SGD step over lists of tensors, in two passes.

``d = P(g + wd p)``, ``buf = momentum buf + d``, ``p -= lr buf``. The first pass reads the basis,
gradients and parameters for the coefficients; the second reads them again with the momenta and
writes parameters and momenta. Neither ``d`` nor the decayed gradient is stored, except where so
little is left of ``d`` that it has to be projected once more.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from curvlab_kernels._triton.combination import judged
from curvlab_kernels._triton.dots import (
    mostly_left,
    partial_coefficients,
    undecided,
)
from curvlab_kernels._triton.project import Pass, finished
from curvlab_kernels._triton.project_list import launch_list, list_combination, list_partials
from curvlab_kernels._triton.segments import (
    Segments,
    contiguous,
    elements,
    meeting,
    segment,
    segments,
)
from curvlab_kernels._triton.tiles import work_dtype
from curvlab_kernels.algebra import INSIDE


def sgd_step_(
    rows: Tensor,
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    momenta: Sequence[Tensor],
    lr: float,
    weight_decay: float = 0.0,
    momentum: float = 0.0,
    factor: Tensor | None = None,
    scales: Tensor | None = None,
) -> Tensor:
    """``parameters`` and ``momenta`` change in place, ``gradients`` do not.

    Args:
        parameters: All float32 or all float64, together at most ``ld`` elements.
        gradients: One per parameter, of its shape and dtype.
        momenta: One per parameter, zeros before the first step; empty for no momentum.

    Returns:
        The coefficients removed from ``g + wd p``: ``(m,)`` float64.
    """
    m = rows.shape[0]
    if sum(tensor.numel() for tensor in parameters) == 0:
        return torch.zeros(m, dtype=torch.float64, device=rows.device)
    numbers = lr, weight_decay, momentum
    with contiguous(parameters) as weights, contiguous(momenta) as buffers:
        # Only read, so a copy of a strided one need not be written back as the others are.
        slopes = [gradient.contiguous() for gradient in gradients]
        lists = [slopes, weights, buffers] if momenta else [slopes, weights]
        where = segments(*lists)
        step = Step(rows, scales, where, weights[0], len(lists), numbers)
        if m == 0:
            return step.take(torch.zeros(1, 1, 1, dtype=torch.float64, device=rows.device), None)
        partials = list_partials(rows, scales, where, weights[0], len(lists), weight_decay)
        first = Pass(step.take(partials, factor), step.enough)
        work = work_dtype(weights[0], rows)
        partials = partial_coefficients(
            rows, step.rest, scales, work, True, first.enough, factor is not None
        )
        return step.take(partials, factor, first)


class Step:
    """The second half of a step, for the first pass and for the one that may follow.

    Attributes:
        rest: The projected step ``(n,)`` where too little is left of it: then the parameters are
            not touched before the pass that follows.
        enough: Squares of the step before the projection and after it.
    """

    def __init__(
        self,
        rows: Tensor,
        scales: Tensor | None,
        where: Segments,
        example: Tensor,
        lists: int,
        numbers: tuple[float, float, float],
    ) -> None:
        self.of, self.lists, self.numbers = (rows, scales, where, example), lists, numbers
        self.rest = example.new_empty(where.n if len(rows) else 1)
        self.enough = undecided(1, INSIDE, rows.device)

    def take(self, partials: Tensor, factor: Tensor | None, before: Pass | None = None) -> Tensor:
        """One launch; returns the coefficients removed ``(m,)``, with those of the pass before."""
        found = finished(partials, factor, before)
        share = 0.0 if before is None else before.enough.share
        launch_list(
            sgd_kernel,
            *self.of,
            found,
            self.enough.before,
            self.enough.after,
            share,
            INSIDE,
            found.products,
            self.rest,
            *self.numbers,
            LISTS=self.lists,
            DECAY=self.numbers[1] != 0.0,
        )
        return found.removed.view(-1)


@triton.jit(
    do_not_specialize=[
        "share",
        "inside",
        "lr",
        "weight_decay",
        "momentum",
        "m",
        "n",
        "ld16",
        "scale_ld",
        "chunks",
        "tiles",
    ]
)
def sgd_kernel(
    rows,
    scales,
    coefficients,
    sums,
    table,
    index,
    before,
    after,
    share: tl.float64,
    inside: tl.float64,
    products,
    scratch,
    lr: tl.float64,
    weight_decay: tl.float64,
    momentum: tl.float64,
    m,
    n: tl.int64,
    ld16: tl.int64,
    scale_ld: tl.int64,
    chunks,
    tiles,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
    LISTS: tl.constexpr,
    CHUNKS: tl.constexpr,
    DECAY: tl.constexpr,
    SCALED: tl.constexpr,
    SPLIT: tl.constexpr,
    ELEMENT: tl.constexpr,
    WORK: tl.constexpr,
):
    # The first pass ended with the last columns: the L2 cache still holds them.
    start = (tiles - 1 - tl.program_id(0)).to(tl.int64) * BLOCK
    if share > 0:
        if mostly_left(before, after, share, 0, 1, 1):
            return
    # fmt: off
    squares = judged(products, coefficients, sums, start * 0, m, 1, chunks, start == 0, share > 0,
                     ROWS, CHUNKS)
    # fmt: on
    # Every program decides for itself, from the same sums in the same order: if they did not agree,
    # some parameters would be stepped twice.
    again = (share == 0) & (squares[1] < inside * squares[0])
    if (share == 0) & (start == 0):
        tl.store(before, squares[0])
        tl.store(after, squares[1])
    # fmt: off
    removed = list_combination(rows, scales, coefficients, m, n, ld16 * 16, scale_ld, start,
                               chunks, ROWS, BLOCK, CHUNKS, SCALED, SPLIT, WORK)
    # fmt: on
    first, last = meeting(index, start, n, BLOCK, WINDOW)
    for number in range(first, last + 1):
        offset, meets, address = segment(table, number, start, BLOCK, LISTS)
        parameter_at = elements(address + 1, offset, BLOCK, ELEMENT)
        parameter = tl.load(parameter_at, mask=meets, other=0.0)
        scratch_at = scratch + start + tl.arange(0, BLOCK)
        if share > 0:
            step = tl.load(scratch_at, mask=meets, other=0.0)
        else:
            step = tl.load(elements(address, offset, BLOCK, ELEMENT), mask=meets, other=0.0)
            if DECAY:
                step += tl.full([], weight_decay, ELEMENT) * parameter
        step = (step - removed).to(ELEMENT)
        # Of a difference that cancels, mostly rounding is left: it waits for the second pass.
        if again:
            tl.store(scratch_at, step, mask=meets)
        else:
            if LISTS == 3:
                buffer_at = elements(address + 2, offset, BLOCK, ELEMENT)
                step += tl.full([], momentum, ELEMENT) * tl.load(buffer_at, mask=meets, other=0.0)
                tl.store(buffer_at, step, mask=meets)
            tl.store(parameter_at, parameter - tl.full([], lr, ELEMENT) * step, mask=meets)
