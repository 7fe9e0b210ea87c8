"""``g -= M' G^-1 M g`` where ``g`` is a list of tensors, such as a model's gradients.

Bytes and launches are those of a flat vector; nothing is copied. See
:mod:`curvlab_kernels._triton.segments` for why the tiles follow the basis and not the tensors.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from curvlab_kernels._triton.combination import combination
from curvlab_kernels._triton.dots import FEW, chunking, dot_tile, products
from curvlab_kernels._triton.launch import launch
from curvlab_kernels._triton.segments import (
    WINDOW,
    Segments,
    elements,
    gather,
    meeting,
    segment,
    segments,
)
from curvlab_kernels._triton.shapes import SHORT, tile
from curvlab_kernels._triton.sums import sum_chunks
from curvlab_kernels._triton.tiles import load_codes, load_scales, work_dtype
from curvlab_kernels.algebra import solve

ELEMENTS = {torch.float32: tl.float32, torch.float64: tl.float64}


def project_list_(
    rows: Tensor,
    tensors: Sequence[Tensor],
    factor: Tensor | None = None,
    scales: Tensor | None = None,
) -> Tensor:
    """Project tensors of any shapes, seen as one vector in their order, in place.

    Args:
        tensors: Contiguous, all float32 or all float64, together at most ``ld`` elements.

    Returns:
        What was subtracted, ``G^-1 M g``: ``(m,)`` float64.
    """
    m = rows.shape[0]
    if m == 0 or sum(tensor.numel() for tensor in tensors) == 0:
        return torch.zeros(m, dtype=torch.float64, device=rows.device)
    where = segments(tensors)
    weights, removed = list_coefficients(rows, scales, where, factor, tensors[0], 1, 0.0)
    work = work_dtype(tensors[0], rows)
    chosen = tile("sum short" if where.n <= SHORT else "sum", rows, work)
    tiles = -(-where.n // chosen.columns)
    launch(
        list_apply_kernel,
        tiles,
        rows,
        rows if scales is None else scales,
        weights,
        removed,
        where.table,
        where.index,
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
        CHUNKS=0 if weights is removed else FEW,
        SCALED=scales is not None,
        SPLIT=where.n <= SHORT,
        ELEMENT=ELEMENTS[tensors[0].dtype],
        WORK=work,
        reaches=where.tensors,
    )
    return removed


def list_coefficients(
    rows: Tensor,
    scales: Tensor | None,
    where: Segments,
    factor: Tensor | None,
    example: Tensor,
    lists: int,
    weight_decay: float,
) -> tuple[Tensor, Tensor]:
    """The coefficients that the second pass is to subtract.

    Args:
        example: A tensor of the list, for its dtype.
        lists: Parallel lists in the table; with ``weight_decay`` that times the second list is
            added to the first before anything is multiplied.

    Returns:
        What the second pass reads and ``removed`` ``(m,)``: the same tensor, or partial sums
        ``(chunks, m)``, which the second pass adds up, and an empty tensor for it to fill.
    """
    m = rows.shape[0]
    work = work_dtype(example, rows)
    chosen = dot_tile(rows, where.n, "list", work)
    groups = -(-m // chosen.rows)
    chunks, tiles = chunking(where.n, chosen.columns, groups, chosen.warps, rows.device)
    partials = torch.empty(chunks, m, dtype=torch.float64, device=rows.device)
    launch(
        list_partials_kernel,
        chunks * groups,
        rows,
        rows if scales is None else scales,
        where.table,
        where.index,
        partials,
        weight_decay,
        m,
        where.n,
        rows.shape[1] // 16,
        0 if scales is None else scales.shape[1],
        groups,
        -(-m // groups),
        tiles,
        warps=chosen.warps,
        ROWS=chosen.rows,
        BLOCK=chosen.columns,
        WINDOW=WINDOW,
        LISTS=lists,
        DECAY=weight_decay != 0.0,
        SCALED=scales is not None,
        ELEMENT=ELEMENTS[example.dtype],
        WORK=work,
        reaches=where.tensors,
    )
    if factor is None and chunks <= FEW:
        return partials, torch.empty(m, dtype=torch.float64, device=rows.device)
    removed = solve(factor, sum_chunks(partials)).contiguous()
    return removed, removed


@triton.jit(
    do_not_specialize=[
        "weight_decay",
        "m",
        "n",
        "ld16",
        "scale_ld",
        "groups",
        "group_rows",
        "tiles",
    ]
)
def list_partials_kernel(
    rows,
    scales,
    table,
    index,
    partials,
    weight_decay: tl.float64,
    m,
    n: tl.int64,
    ld16: tl.int64,
    scale_ld: tl.int64,
    groups,
    group_rows,
    tiles,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
    LISTS: tl.constexpr,
    DECAY: tl.constexpr,
    SCALED: tl.constexpr,
    ELEMENT: tl.constexpr,
    WORK: tl.constexpr,
):
    program = tl.program_id(0)
    group = program % groups
    chunk = (program // groups).to(tl.int64)
    local = tl.arange(0, ROWS)
    row = (group * group_rows + local).to(tl.int64)
    present = (local < group_rows) & (row < m)
    ld = ld16 * 16

    total = tl.zeros([ROWS, BLOCK // 16 if SCALED else BLOCK], WORK)
    full = n // BLOCK
    first = chunk * tiles
    # fmt: off
    for tile_index in range(first, tl.minimum(first + tiles, full)):
        total += list_products(rows, scales, table, index, weight_decay, row, present, ld, scale_ld,
                               tile_index * BLOCK, n, BLOCK, WINDOW, LISTS, DECAY, SCALED, False,
                               ELEMENT, WORK)
    if (first + tiles > full) & (full * BLOCK < n):
        total += list_products(rows, scales, table, index, weight_decay, row, present, ld, scale_ld,
                               full * BLOCK, n, BLOCK, WINDOW, LISTS, DECAY, SCALED, True,
                               ELEMENT, WORK)
    # fmt: on
    tl.store(partials + chunk * m + row, tl.sum(total.to(tl.float64), axis=1), mask=present)


@triton.jit
def list_products(
    rows,
    scales,
    table,
    index,
    weight_decay,
    row,
    present,
    ld,
    scale_ld,
    start,
    n,
    BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
    LISTS: tl.constexpr,
    DECAY: tl.constexpr,
    SCALED: tl.constexpr,
    MASKED: tl.constexpr,
    ELEMENT: tl.constexpr,
    WORK: tl.constexpr,
):
    """Products of one tile with the piece of the list that meets its columns."""
    tile = load_codes(rows, row, present, ld, start, n, BLOCK, MASKED, WORK)
    scale = tile
    if SCALED:
        scale = load_scales(scales, row, present, scale_ld, start, BLOCK, WORK)
    piece = gather(table, index, weight_decay, start, n, BLOCK, WINDOW, LISTS, DECAY, ELEMENT)
    return products(tile, scale, piece, SCALED)


@triton.jit
def list_combination(
    rows,
    scales,
    coefficients,
    sums,
    m,
    n,
    ld,
    scale_ld,
    start,
    chunks,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
    SCALED: tl.constexpr,
    SPLIT: tl.constexpr,
    WORK: tl.constexpr,
):
    """``M' c`` ``(BLOCK,)`` on the columns from ``start``, of which some may be beyond ``n``."""
    v0 = start * 0
    # fmt: off
    if start + BLOCK <= n:
        total, _, _, _ = combination(rows, scales, coefficients, sums, v0, m, 1, n, ld, scale_ld,
                                     start, chunks, ROWS, BLOCK, 1, CHUNKS, SCALED, SPLIT, False,
                                     WORK)
    else:
        total, _, _, _ = combination(rows, scales, coefficients, sums, v0, m, 1, n, ld, scale_ld,
                                     start, chunks, ROWS, BLOCK, 1, CHUNKS, SCALED, SPLIT, True,
                                     WORK)
    # fmt: on
    return total


@triton.jit(do_not_specialize=["m", "n", "ld16", "scale_ld", "chunks", "tiles"])
def list_apply_kernel(
    rows,
    scales,
    coefficients,
    sums,
    table,
    index,
    m,
    n: tl.int64,
    ld16: tl.int64,
    scale_ld: tl.int64,
    chunks,
    tiles,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNKS: tl.constexpr,
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
        offset, inside, address = segment(table, number, start, BLOCK, 1)
        at = elements(address, offset, BLOCK, ELEMENT)
        piece = tl.load(at, mask=inside, other=0.0)
        tl.store(at, (piece - removed).to(ELEMENT), mask=inside)
