"""``g -= M' c`` in place, and ``M' c`` out of place in float64 for Cholesky QR.

A program takes one tile of columns and walks over all rows in groups, whose sum stays within a
thread; for a short vector the rows are split over the threads of a program. Programs run from the
last column to the first: in a projection the coefficients were computed from the first to the
last, so what was read last is still in the L2 cache.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from curvlab_kernels._triton.combination import combination, judged
from curvlab_kernels._triton.dots import FEW, Unless, mostly_left
from curvlab_kernels._triton.launch import launch
from curvlab_kernels._triton.shapes import SHORT, tile
from curvlab_kernels._triton.sums import sum_chunks
from curvlab_kernels._triton.tiles import VECTORS, load_piece, row_stride, work_dtype

SCRATCH = 1 << 26  # elements of mixed rows that wait to be copied over their own sources


def apply_(
    rows: Tensor, coefficients: Tensor, vectors: Tensor, scales: Tensor | None = None
) -> None:
    """``g -= M' c`` in place. ``coefficients`` are ``(m,)`` or ``(b, m)``, float64."""
    if rows.shape[0] == 0 or vectors.numel() == 0:
        return
    work = work_dtype(vectors, rows)
    _launch(rows, coefficients.contiguous(), vectors, vectors, work=work, scales=scales)


def subtract_into(
    rows: Tensor,
    coefficients: Tensor,
    vector: Tensor,
    target: Tensor,
    unless: Unless | None = None,
) -> Tensor:
    """``target = g - M' c`` for one vector ``(n,)``; returns the sum of its squares, ``(1,)``.

    ``target`` may be ``vector``. ``m >= 1``.
    """
    work = work_dtype(vector, rows)
    tiles = -(-vector.shape[0] // tile("sum", rows, work).columns)
    squares = torch.empty(tiles, 1, dtype=torch.float64, device=rows.device)
    _launch(rows, coefficients, vector, target, work=work, squares=squares, unless=unless)
    return sum_chunks(squares)


class Found(NamedTuple):
    """What a projection is to subtract.

    Attributes:
        weights: ``G^-1 M g`` ``(b, m)``; with ``chunks`` partial sums ``(chunks, b, m + 1)``, at
            most ``FEW`` of them, which every program adds up for itself in the same order.
        removed: ``(b, m)``; with ``chunks`` the kernel stores the weights there, or in a second
            pass adds them.
        products: ``M g`` and ``||g||^2`` ``(b, m + 1)``, or partial sums of them.
    """

    weights: Tensor
    removed: Tensor
    products: Tensor
    chunks: int


def subtract(
    rows: Tensor,
    vectors: Tensor,
    scales: Tensor | None,
    found: Found,
    enough: Unless,
    unless: Unless | None,
) -> None:
    """One launch of a projection, which fills ``enough``. ``m >= 1`` and ``b >= 1``."""
    _launch(
        rows,
        found.weights,
        vectors,
        vectors,
        work=work_dtype(vectors, rows),
        scales=scales,
        unless=unless,
        judge=(found, enough),
    )


def mix_(rows: Tensor, mixing: Tensor, into: Tensor) -> None:
    """``into = mixing @ rows``, summed in float64 and rounded once; may be in place.

    One launch; two per ``SCRATCH`` elements of the result where it overlaps ``rows``, because a
    program may not overwrite what another still reads.

    Args:
        rows: ``(m, ld)``, float32 or float64, padded.
        mixing: ``(k, m)`` float64.
        into: ``(k, n)`` of the rows' dtype.
    """
    (k, m), n = mixing.shape, into.shape[1]
    if m == 0 or k * n == 0:
        into.zero_()
        return
    mixing = mixing.contiguous()
    if not _overlap(rows, into):
        _launch(rows, mixing, into, into, work=tl.float64, mix=True)
        return
    columns = tile("sum" if k == 1 else "sums", rows, tl.float64).columns
    width = max(SCRATCH // k // columns, 1) * columns
    scratch = torch.empty(k, min(width, n), dtype=rows.dtype, device=rows.device)
    for start in range(0, n, width):
        part = into[:, start : start + width]
        mixed = scratch[:, : part.shape[1]]
        _launch(rows, mixing, part, mixed, work=tl.float64, mix=True, start=start)
        part.copy_(mixed)


def mix(mixing: Tensor, rows: Tensor, n: int) -> Tensor:
    """Rows ``(k, ld)`` of ``mixing @ rows``; columns ``n..ld`` are zero."""
    mixed = torch.zeros(mixing.shape[0], rows.shape[1], dtype=rows.dtype, device=rows.device)
    mix_(rows, mixing, mixed[:, :n])
    return mixed


def _overlap(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors may share memory."""
    if first.is_meta:
        return first.untyped_storage()._cdata == second.untyped_storage()._cdata
    begin, other = first.data_ptr(), second.data_ptr()
    last = other + ((len(second) - 1) * second.stride(0) + second.shape[1]) * second.itemsize
    return other < begin + first.nbytes and begin < last


def _launch(
    rows: Tensor,
    coefficients: Tensor,
    vectors: Tensor,
    target: Tensor,
    *,
    work: tl.dtype,
    scales: Tensor | None = None,
    squares: Tensor | None = None,
    unless: Unless | None = None,
    judge: tuple[Found, Unless] | None = None,
    mix: bool = False,
    start: int = 0,
) -> None:
    """One launch over the columns of ``vectors``; to mix, over those of the rows from ``start``."""
    m, ld = rows.shape
    b, n = vectors.shape if vectors.ndim == 2 else (1, vectors.shape[0])
    tile_vectors = 1 if b == 1 else VECTORS
    # Threads that add up what they split hold one result each, several times over: squares of
    # float64 would be added to other bits in each of them.
    split = b == 1 and n <= SHORT and squares is None and not mix
    name = "sum short" if split else "sum" if b == 1 else "sums"
    chosen = tile(name, rows, work)
    tiles = -(-n // chosen.columns)
    vector_groups = -(-b // tile_vectors)
    stride, unit = row_stride(target)
    chunks = 0 if judge is None else judge[0].chunks
    launch(
        apply_kernel,
        tiles * vector_groups,
        rows,
        rows if scales is None else scales,
        coefficients,
        vectors,
        target,
        coefficients if judge is None else judge[0].removed,
        coefficients if squares is None else squares,
        coefficients if unless is None else unless.before,
        coefficients if unless is None else unless.after,
        0.0 if unless is None else unless.share,
        coefficients if judge is None else judge[0].products,
        coefficients if judge is None else judge[1].before,
        coefficients if judge is None else judge[1].after,
        m,
        b,
        start + n,
        ld // 16,
        0 if scales is None else scales.shape[1],
        stride,
        start // chosen.columns,
        chunks,
        tiles,
        vector_groups,
        tile=chosen,
        ROWS=chosen.rows,
        BLOCK=chosen.columns,
        VECTORS=tile_vectors,
        UNIT=unit,
        CHUNKS=FEW if chunks else 0,
        SCALED=scales is not None,
        SPLIT=split,
        SQUARES=squares is not None,
        JUDGE=judge is not None,
        MIX=mix,
        WORK=work,
    )


@triton.jit
def finish_tile(
    total,
    vectors,
    target,
    squares,
    vector,
    vector_ld,
    start,
    n,
    tile_index,
    first_tile,
    BLOCK: tl.constexpr,
    VECTORS: tl.constexpr,
    SQUARES: tl.constexpr,
    MIX: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Store ``g - M' c`` (or ``M' c``) for one tile of one vector, and the sum of its squares."""
    column = start + tl.arange(0, BLOCK)
    if MIX:
        result = total
    else:
        result = load_piece(vectors, vector, vector_ld, start, n, BLOCK, VECTORS, MASKED) - total
    rounded = result.to(target.dtype.element_ty)
    at = target + column if VECTORS == 1 else target + vector * vector_ld + column
    if MIX:
        at -= first_tile * BLOCK
    if MASKED:
        tl.store(at, rounded, mask=column < n)
        rounded = tl.where(column < n, rounded, 0.0)
    else:
        tl.store(at, rounded)
    if SQUARES:
        exact = rounded.to(tl.float64)
        tl.store(squares + tile_index, tl.sum(exact * exact, axis=0))


@triton.jit
def apply_tile(
    rows,
    scales,
    coefficients,
    vectors,
    target,
    squares,
    v0,
    m,
    count,
    n,
    ld,
    scale_ld,
    vector_ld,
    chunks,
    tile_index,
    first_tile,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTORS: tl.constexpr,
    CHUNKS: tl.constexpr,
    SCALED: tl.constexpr,
    SPLIT: tl.constexpr,
    SQUARES: tl.constexpr,
    MIX: tl.constexpr,
    MASKED: tl.constexpr,
    WORK: tl.constexpr,
):
    """One tile of columns, from the basis to the stored result."""
    start = tile_index * BLOCK
    # fmt: off
    t0, t1, t2, t3 = combination(rows, scales, coefficients, v0, m, count, n, ld, scale_ld,
                                 start, chunks, ROWS, BLOCK, VECTORS, CHUNKS, SCALED, SPLIT,
                                 MASKED, WORK)
    finish_tile(t0, vectors, target, squares, v0, vector_ld, start, n, tile_index, first_tile,
                BLOCK, VECTORS, SQUARES, MIX, MASKED)
    if VECTORS > 1:
        if v0 + 1 < count:
            finish_tile(t1, vectors, target, squares, v0 + 1, vector_ld, start, n, tile_index,
                        first_tile, BLOCK, VECTORS, False, MIX, MASKED)
        if v0 + 2 < count:
            finish_tile(t2, vectors, target, squares, v0 + 2, vector_ld, start, n, tile_index,
                        first_tile, BLOCK, VECTORS, False, MIX, MASKED)
        if v0 + 3 < count:
            finish_tile(t3, vectors, target, squares, v0 + 3, vector_ld, start, n, tile_index,
                        first_tile, BLOCK, VECTORS, False, MIX, MASKED)
    # fmt: on


@triton.jit(
    do_not_specialize=[
        "share",
        "m",
        "count",
        "n",
        "ld16",
        "scale_ld",
        "vector_ld",
        "first_tile",
        "chunks",
        "tiles",
        "vector_groups",
    ]
)
def apply_kernel(
    rows,
    scales,
    coefficients,
    vectors,
    target,
    sums,
    squares,
    before,
    after,
    share: tl.float64,
    products,
    found_before,
    found_after,
    m,
    count,
    n: tl.int64,
    ld16: tl.int64,
    scale_ld: tl.int64,
    vector_ld: tl.int64,
    first_tile: tl.int64,
    chunks,
    tiles,
    vector_groups,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTORS: tl.constexpr,
    UNIT: tl.constexpr,
    CHUNKS: tl.constexpr,
    SCALED: tl.constexpr,
    SPLIT: tl.constexpr,
    SQUARES: tl.constexpr,
    JUDGE: tl.constexpr,
    MIX: tl.constexpr,
    WORK: tl.constexpr,
):
    program = tl.program_id(0)
    v0 = (program % vector_groups).to(tl.int64) * VECTORS
    if share > 0:
        if mostly_left(before, after, share, v0, count, VECTORS):
            return
    tile_index = (tiles - 1 - program // vector_groups).to(tl.int64)
    if MIX:
        tile_index += first_tile
    vector_ld *= UNIT
    if JUDGE:
        if tile_index == 0:
            for vector in range(v0, tl.minimum(v0 + VECTORS, count)):
                # fmt: off
                squares_before, squares_after = judged(products, coefficients, sums, vector, m,
                                                       count, chunks, True, share > 0, ROWS,
                                                       CHUNKS)
                # fmt: on
                tl.store(found_before + vector, squares_before)
                tl.store(found_after + vector, squares_after)
    # fmt: off
    if (tile_index + 1) * BLOCK <= n:
        apply_tile(rows, scales, coefficients, vectors, target, squares, v0, m, count, n,
                   ld16 * 16, scale_ld, vector_ld, chunks, tile_index, first_tile,
                   ROWS, BLOCK, VECTORS, CHUNKS, SCALED, SPLIT, SQUARES, MIX, False, WORK)
    else:
        apply_tile(rows, scales, coefficients, vectors, target, squares, v0, m, count, n,
                   ld16 * 16, scale_ld, vector_ld, chunks, tile_index, first_tile,
                   ROWS, BLOCK, VECTORS, CHUNKS, SCALED, SPLIT, SQUARES, MIX, True, WORK)
    # fmt: on
