"""One projected SGD step over lists of tensors, in two passes.

``d = P(g + wd p)``, ``buf = momentum buf + d``, ``p -= lr buf``. The first pass reads the basis,
gradients and parameters for the coefficients; the second reads them again with the momenta and
writes parameters and momenta. Neither ``d`` nor the decayed gradient is ever stored.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from curvlab_kernels._triton.dots import FEW
from curvlab_kernels._triton.launch import launch
from curvlab_kernels._triton.project_list import ELEMENTS, list_coefficients, list_combination
from curvlab_kernels._triton.segments import WINDOW, elements, meeting, segment, segments
from curvlab_kernels._triton.shapes import SHORT, tile
from curvlab_kernels._triton.tiles import work_dtype


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
        parameters: Contiguous, all float32 or all float64, together at most ``ld`` elements.
        gradients: One per parameter, of its shape and dtype.
        momenta: One per parameter, zeros before the first step; empty for no momentum.

    Returns:
        The coefficients removed from ``g + wd p``: ``(m,)`` float64.
    """
    m = rows.shape[0]
    if sum(tensor.numel() for tensor in parameters) == 0:
        return torch.zeros(m, dtype=torch.float64, device=rows.device)
    lists = [gradients, parameters, momenta] if momenta else [gradients, parameters]
    where = segments(*lists)
    example = parameters[0]
    if m:
        weights, removed = list_coefficients(
            rows, scales, where, factor, example, len(lists), weight_decay
        )
    else:
        weights = removed = torch.zeros(0, dtype=torch.float64, device=rows.device)
    work = work_dtype(example, rows)
    chosen = tile("sum short" if where.n <= SHORT else "sum", rows, work)
    tiles = -(-where.n // chosen.columns)
    launch(
        sgd_kernel,
        tiles,
        rows,
        rows if scales is None else scales,
        weights,
        removed,
        where.table,
        where.index,
        lr,
        weight_decay,
        momentum,
        m,
        where.n,
        rows.shape[1] // 16,
        0 if scales is None else scales.shape[1],
        weights.shape[0] if weights is not removed else 0,
        tiles,
        warps=chosen.warps,
        ROWS=chosen.rows,
        BLOCK=chosen.columns,
        WINDOW=WINDOW,
        LISTS=len(lists),
        CHUNKS=0 if weights is removed else FEW,
        DECAY=weight_decay != 0.0,
        SCALED=scales is not None,
        SPLIT=where.n <= SHORT,
        ELEMENT=ELEMENTS[example.dtype],
        WORK=work,
        reaches=where.tensors,
    )
    return removed


@triton.jit(
    do_not_specialize=[
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
    start = (tiles - 1 - tl.program_id(0)).to(tl.int64) * BLOCK
    # fmt: off
    removed = list_combination(rows, scales, coefficients, sums, m, n, ld16 * 16, scale_ld, start,
                               chunks, ROWS, BLOCK, CHUNKS, SCALED, SPLIT, WORK)
    # fmt: on
    first, last = meeting(index, start, n, BLOCK, WINDOW)
    for number in range(first, last + 1):
        offset, inside, address = segment(table, number, start, BLOCK, LISTS)
        step = tl.load(elements(address, offset, BLOCK, ELEMENT), mask=inside, other=0.0)
        parameter_at = elements(address + 1, offset, BLOCK, ELEMENT)
        parameter = tl.load(parameter_at, mask=inside, other=0.0)
        if DECAY:
            step += tl.full([], weight_decay, ELEMENT) * parameter
        step = (step - removed).to(ELEMENT)
        if LISTS == 3:
            buffer_at = elements(address + 2, offset, BLOCK, ELEMENT)
            step += tl.full([], momentum, ELEMENT) * tl.load(buffer_at, mask=inside, other=0.0)
            tl.store(buffer_at, step, mask=inside)
        tl.store(parameter_at, parameter - tl.full([], lr, ELEMENT) * step, mask=inside)
