"""``g -= M' G^-1 M g`` where ``g`` is a list of tensors, such as a model's gradients.

Bytes and launches are those of a flat vector; nothing is copied. See
:mod:`curvlab_kernels._triton.segments` for why the tiles follow the basis and not the tensors.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from curvlab_kernels._triton.apply import Found
from curvlab_kernels._triton.combination import combination, judged
from curvlab_kernels._triton.dots import (
    FEW,
    Unless,
    add_squares,
    chunking,
    dot_tile,
    mostly_left,
    products,
    store_sums,
    undecided,
)
from curvlab_kernels._triton.launch import launch
from curvlab_kernels._triton.project import Pass, finished
from curvlab_kernels._triton.segments import (
    WINDOW,
    Segments,
    contiguous,
    elements,
    gather,
    meeting,
    segment,
    segments,
)
from curvlab_kernels._triton.shapes import SHORT, tile
from curvlab_kernels._triton.tiles import load_codes, load_scales, work_dtype
from curvlab_kernels.algebra import INSIDE

ELEMENTS = {torch.float32: tl.float32, torch.float64: tl.float64}


def project_list_(
    rows: Tensor,
    tensors: Sequence[Tensor],
    factor: Tensor | None = None,
    scales: Tensor | None = None,
) -> Tensor:
    """Project tensors of any shapes, seen as one vector in their order, in place.

    Args:
        tensors: All float32 or all float64, together at most ``ld`` elements.

    Returns:
        What was subtracted, ``G^-1 M g``: ``(m,)`` float64.
    """
    m = rows.shape[0]
    if m == 0 or sum(tensor.numel() for tensor in tensors) == 0:
        return torch.zeros(m, dtype=torch.float64, device=rows.device)
    with contiguous(tensors) as dense:
        where = segments(dense)
        first = project_list_once_(rows, scales, where, factor, dense[0])
        return project_list_once_(rows, scales, where, factor, dense[0], first)[0]


def project_list_once_(
    rows: Tensor,
    scales: Tensor | None,
    where: Segments,
    factor: Tensor | None,
    example: Tensor,
    before: Pass | None = None,
) -> Pass:
    """One pass over the list, as ``project_once_`` is one over a vector."""
    unless = None if before is None else before.enough
    partials = list_partials(rows, scales, where, example, 1, 0.0, unless, factor is not None)
    found, enough = finished(partials, factor, before), undecided(1, INSIDE, rows.device)
    skipped = (partials, partials, 0.0) if unless is None else unless
    decided = enough.before, enough.after
    launch_list(
        list_apply_kernel, rows, scales, where, example, found, *skipped, found.products, *decided
    )
    return Pass(found.removed.view(-1), enough)


def launch_list(
    kernel: Any,
    rows: Tensor,
    scales: Tensor | None,
    where: Segments,
    example: Tensor,
    found: Found,
    *given: Any,
    **constants: Any,
) -> None:
    """Launch what removes ``found`` from lists, with arguments of the kernel's own in between."""
    work, short = work_dtype(example, rows), where.n <= SHORT
    chosen = tile("sum short" if short else "sum", rows, work)
    tiles = -(-where.n // chosen.columns)
    launch(
        kernel,
        tiles,
        rows,
        rows if scales is None else scales,
        found.weights,
        found.removed,
        where.table,
        where.index,
        *given,
        rows.shape[0],
        where.n,
        rows.shape[1] // 16,
        0 if scales is None else scales.shape[1],
        found.chunks,
        tiles,
        tile=chosen,
        ROWS=chosen.rows,
        BLOCK=chosen.columns,
        WINDOW=WINDOW,
        CHUNKS=FEW if found.chunks else 0,
        SCALED=scales is not None,
        SPLIT=short,
        ELEMENT=ELEMENTS[example.dtype],
        WORK=work,
        reaches=where.tensors,
        **constants,
    )


def list_partials(
    rows: Tensor,
    scales: Tensor | None,
    where: Segments,
    example: Tensor,
    lists: int,
    weight_decay: float,
    unless: Unless | None = None,
    summed: bool = True,
) -> Tensor:
    """Partial sums ``(chunks, 1, m + 1)`` of products and squares, as ``partial_coefficients``.

    Args:
        example: A tensor of the list, for its dtype.
        lists: Parallel lists in the table; with ``weight_decay`` that times the second list is
            added to the first before anything is multiplied.
    """
    m = rows.shape[0]
    work = work_dtype(example, rows)
    chosen = dot_tile(rows, where.n, "list", work)
    groups = -(-m // chosen.rows)
    chunks, tiles = chunking(where.n, chosen.columns, groups, chosen.warps, rows.device)
    # A skipped launch leaves its output as it was, and what is added up from it must be zero.
    looked_at = unless is not None and (summed or chunks > FEW)
    empty = torch.zeros if looked_at else torch.empty
    partials = empty(chunks, 1, m + 1, dtype=torch.float64, device=rows.device)
    launch(
        list_partials_kernel,
        chunks * groups,
        rows,
        rows if scales is None else scales,
        where.table,
        where.index,
        partials,
        partials if unless is None else unless.before,
        partials if unless is None else unless.after,
        0.0 if unless is None else unless.share,
        weight_decay,
        m,
        where.n,
        rows.shape[1] // 16,
        0 if scales is None else scales.shape[1],
        groups,
        -(-m // groups),
        tiles,
        tile=chosen,
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
    return partials


@triton.jit(
    do_not_specialize=[
        "share",
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
    before,
    after,
    share: tl.float64,
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
    if share > 0:
        if mostly_left(before, after, share, 0, 1, 1):
            return
    program = tl.program_id(0)
    group = program % groups
    chunk = (program // groups).to(tl.int64)
    local = tl.arange(0, ROWS)
    row = (group * group_rows + local).to(tl.int64)
    present = (local < group_rows) & (row < m)
    ld = ld16 * 16

    # One sum per column and row, folded once at the end: a fold in every tile would cost shuffles.
    total = tl.zeros([ROWS, BLOCK // 16 if SCALED else BLOCK], WORK)
    square = tl.zeros([BLOCK], tl.float64)
    full = n // BLOCK  # tiles without a mask; the ragged one comes once, after the loop
    first = chunk * tiles
    # fmt: off
    for tile_index in range(first, tl.minimum(first + tiles, full)):
        total, square = add_list_tile(
            total, square, rows, scales, table, index, weight_decay, row, present, ld, scale_ld,
            tile_index * BLOCK, n, BLOCK, WINDOW, LISTS, DECAY, SCALED, False, ELEMENT, WORK)
    if (first + tiles > full) & (full * BLOCK < n):
        total, square = add_list_tile(
            total, square, rows, scales, table, index, weight_decay, row, present, ld, scale_ld,
            full * BLOCK, n, BLOCK, WINDOW, LISTS, DECAY, SCALED, True, ELEMENT, WORK)
    # fmt: on
    store_sums(partials + chunk * (m + 1), total, square, row, present, m, group, True)


@triton.jit
def add_list_tile(
    total,
    square,
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
    """Add the products of one tile with the piece of the list that meets its columns."""
    tile = load_codes(rows, row, present, ld, start, n, BLOCK, MASKED, WORK)
    scale = tile
    if SCALED:
        scale = load_scales(scales, row, present, scale_ld, start, BLOCK, WORK)
    piece = gather(table, index, weight_decay, start, n, BLOCK, WINDOW, LISTS, DECAY, ELEMENT)
    return total + products(tile, scale, piece, SCALED), add_squares(square, piece, True)


@triton.jit
def list_combination(
    rows,
    scales,
    coefficients,
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
        total, _, _, _ = combination(rows, scales, coefficients, v0, m, 1, n, ld, scale_ld,
                                     start, chunks, ROWS, BLOCK, 1, CHUNKS, SCALED, SPLIT, False,
                                     WORK)
    else:
        total, _, _, _ = combination(rows, scales, coefficients, v0, m, 1, n, ld, scale_ld,
                                     start, chunks, ROWS, BLOCK, 1, CHUNKS, SCALED, SPLIT, True,
                                     WORK)
    # fmt: on
    return total


@triton.jit(do_not_specialize=["share", "m", "n", "ld16", "scale_ld", "chunks", "tiles"])
def list_apply_kernel(
    rows,
    scales,
    coefficients,
    sums,
    table,
    index,
    before,
    after,
    share: tl.float64,
    products,
    found_before,
    found_after,
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
    # The first pass ended with the last columns: the L2 cache still holds them.
    start = (tiles - 1 - tl.program_id(0)).to(tl.int64) * BLOCK
    if share > 0:
        if mostly_left(before, after, share, 0, 1, 1):
            return
    if start == 0:  # one program writes what all of them know
        # fmt: off
        squares = judged(products, coefficients, sums, start, m, 1, chunks, True, share > 0, ROWS,
                         CHUNKS)
        # fmt: on
        tl.store(found_before, squares[0])
        tl.store(found_after, squares[1])
    # fmt: off
    removed = list_combination(rows, scales, coefficients, m, n, ld16 * 16, scale_ld, start,
                               chunks, ROWS, BLOCK, CHUNKS, SCALED, SPLIT, WORK)
    # fmt: on
    first, last = meeting(index, start, n, BLOCK, WINDOW)
    for number in range(first, last + 1):
        offset, inside, address = segment(table, number, start, BLOCK, 1)
        at = elements(address, offset, BLOCK, ELEMENT)
        piece = tl.load(at, mask=inside, other=0.0)
        tl.store(at, (piece - removed).to(ELEMENT), mask=inside)
