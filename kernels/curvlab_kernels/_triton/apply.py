"""``g -= M' c`` in place, and ``M' c`` out of place in float64 for Cholesky QR.

A program takes one tile of columns and walks over all rows in groups, whose sum stays within a
thread. Programs run from the last column to the first: in a projection the coefficients were
computed from the first to the last, so what was read last is still in the L2 cache.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from curvlab_kernels._triton.coefficients import FEW
from curvlab_kernels._triton.combination import combination
from curvlab_kernels._triton.launch import launch
from curvlab_kernels._triton.sums import sum_chunks
from curvlab_kernels._triton.tiles import (
    VECTORS,
    combination_shape,
    load_piece,
    work_dtype,
)


def apply_(
    rows: Tensor, coefficients: Tensor, vectors: Tensor, scales: Tensor | None = None
) -> None:
    """``g -= M' c`` in place. ``coefficients`` are ``(m,)`` or ``(b, m)``, float64."""
    if rows.shape[0] == 0 or vectors.numel() == 0:
        return
    subtract(rows, coefficients.contiguous(), vectors, scales)


def subtract_into(rows: Tensor, coefficients: Tensor, vector: Tensor, target: Tensor) -> Tensor:
    """``target = g - M' c`` for one vector ``(n,)``; returns the sum of its squares, ``(1,)``.

    ``target`` may be ``vector``. ``m >= 1``.
    """
    work = work_dtype(vector, rows)
    tiles = -(-vector.shape[0] // combination_shape(rows.dtype, 1, work)[1])
    squares = torch.empty(tiles, 1, dtype=torch.float64, device=rows.device)
    _launch(rows, coefficients, vector, target, work=work, squares=squares)
    return sum_chunks(squares)


def subtract(
    rows: Tensor,
    coefficients: Tensor,
    vectors: Tensor,
    scales: Tensor | None,
    sums: Tensor | None = None,
) -> None:
    """One launch of ``g -= M' c``. ``m >= 1`` and ``b >= 1``.

    Args:
        coefficients: ``(b, m)``; with ``sums`` partial sums ``(chunks, b, m)``, at most ``FEW``
            of them, which every program adds up for itself in the same order.
        sums: Receives the coefficients ``(b, m)`` added up from partial sums.
    """
    work = work_dtype(vectors, rows)
    _launch(rows, coefficients, vectors, vectors, work=work, scales=scales, sums=sums)


def mix(mixing: Tensor, rows: Tensor, n: int) -> Tensor:
    """Rows ``(k, ld)`` of ``mixing @ rows``, summed in float64; columns ``n..ld`` are zero.

    Args:
        mixing: ``(k, b)`` float64.
        rows: ``(b, ld)``, float32 or float64, padded.
    """
    mixed = torch.zeros(mixing.shape[0], rows.shape[1], dtype=rows.dtype, device=rows.device)
    if mixed.numel() and rows.shape[0]:
        target = mixed[:, :n]
        _launch(rows, mixing.contiguous(), target, target, work=tl.float64, mix=True)
    return mixed


def _launch(
    rows: Tensor,
    coefficients: Tensor,
    vectors: Tensor,
    target: Tensor,
    *,
    work: tl.dtype,
    scales: Tensor | None = None,
    sums: Tensor | None = None,
    squares: Tensor | None = None,
    mix: bool = False,
) -> None:
    m, ld = rows.shape
    b, n = vectors.shape if vectors.ndim == 2 else (1, vectors.shape[0])
    tile_vectors = 1 if b == 1 else VECTORS
    tile_rows, columns = combination_shape(rows.dtype, tile_vectors, work)
    tiles = -(-n // columns)
    vector_groups = -(-b // tile_vectors)
    launch(
        apply_kernel,
        tiles * vector_groups,
        rows,
        rows if scales is None else scales,
        coefficients,
        vectors,
        target,
        coefficients if sums is None else sums,
        coefficients if squares is None else squares,
        m,
        b,
        n,
        ld // 16,
        0 if scales is None else scales.shape[1],
        vectors.stride(0) if b > 1 else 0,
        0 if sums is None else coefficients.shape[0],
        tiles,
        vector_groups,
        ROWS=tile_rows,
        BLOCK=columns,
        VECTORS=tile_vectors,
        CHUNKS=0 if sums is None else FEW,
        SCALED=scales is not None,
        SQUARES=squares is not None,
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
    sums,
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
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTORS: tl.constexpr,
    CHUNKS: tl.constexpr,
    SCALED: tl.constexpr,
    SQUARES: tl.constexpr,
    MIX: tl.constexpr,
    MASKED: tl.constexpr,
    WORK: tl.constexpr,
):
    """One tile of columns, from the basis to the stored result."""
    start = tile_index * BLOCK
    # fmt: off
    t0, t1, t2, t3 = combination(rows, scales, coefficients, sums, v0, m, count, n, ld, scale_ld,
                                 start, chunks, ROWS, BLOCK, VECTORS, CHUNKS, SCALED, MASKED, WORK)
    finish_tile(t0, vectors, target, squares, v0, vector_ld, start, n, tile_index,
                BLOCK, VECTORS, SQUARES, MIX, MASKED)
    if VECTORS > 1:
        if v0 + 1 < count:
            finish_tile(t1, vectors, target, squares, v0 + 1, vector_ld, start, n, tile_index,
                        BLOCK, VECTORS, False, MIX, MASKED)
        if v0 + 2 < count:
            finish_tile(t2, vectors, target, squares, v0 + 2, vector_ld, start, n, tile_index,
                        BLOCK, VECTORS, False, MIX, MASKED)
        if v0 + 3 < count:
            finish_tile(t3, vectors, target, squares, v0 + 3, vector_ld, start, n, tile_index,
                        BLOCK, VECTORS, False, MIX, MASKED)
    # fmt: on


@triton.jit(
    do_not_specialize=[
        "m",
        "count",
        "n",
        "ld16",
        "scale_ld",
        "vector_ld",
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
    m,
    count,
    n: tl.int64,
    ld16: tl.int64,
    scale_ld: tl.int64,
    vector_ld: tl.int64,
    chunks,
    tiles,
    vector_groups,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTORS: tl.constexpr,
    CHUNKS: tl.constexpr,
    SCALED: tl.constexpr,
    SQUARES: tl.constexpr,
    MIX: tl.constexpr,
    WORK: tl.constexpr,
):
    program = tl.program_id(0)
    tile_index = (tiles - 1 - program // vector_groups).to(tl.int64)
    v0 = (program % vector_groups).to(tl.int64) * VECTORS
    # fmt: off
    if (tile_index + 1) * BLOCK <= n:
        apply_tile(rows, scales, coefficients, vectors, target, sums, squares, v0, m, count, n,
                   ld16 * 16, scale_ld, vector_ld, chunks, tile_index,
                   ROWS, BLOCK, VECTORS, CHUNKS, SCALED, SQUARES, MIX, False, WORK)
    else:
        apply_tile(rows, scales, coefficients, vectors, target, sums, squares, v0, m, count, n,
                   ld16 * 16, scale_ld, vector_ld, chunks, tile_index,
                   ROWS, BLOCK, VECTORS, CHUNKS, SCALED, SQUARES, MIX, True, WORK)
    # fmt: on
