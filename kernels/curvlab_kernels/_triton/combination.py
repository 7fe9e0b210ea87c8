"""``M' c`` on one tile of columns: what every second pass has in common."""

import triton
import triton.language as tl

from curvlab_kernels._triton.tiles import load_codes, load_scales


@triton.jit
def added_up(partials, vector, row, inside, m, count, chunks, CHUNKS: tl.constexpr):
    """Partial sums ``(chunks, count, m + 1)`` of a vector (int64), over chunks: ``(ROWS,)``."""
    chunk = tl.arange(0, CHUNKS)
    # fmt: off
    at = (chunk.to(tl.int64) * count + vector)[:, None] * (m + 1) + row[None, :]
    partial = tl.load(partials + at, mask=(chunk < chunks)[:, None] & inside[None, :], other=0.0)
    # fmt: on
    return tl.sum(partial, axis=0)


@triton.jit
def load_weights(
    coefficients,
    row,
    vector,
    m,
    count,
    chunks,
    CHUNKS: tl.constexpr,
    WORK: tl.constexpr,
):
    """Coefficients ``(ROWS,)`` of the vector number ``vector`` (int64); zero beyond ``m``.

    With CHUNKS they are added up from partial sums.
    """
    if CHUNKS:
        return added_up(coefficients, vector, row, row < m, m, count, chunks, CHUNKS).to(WORK)
    return tl.load(coefficients + vector * m + row, mask=row < m, other=0.0).to(WORK)


@triton.jit
def judged(
    products,
    coefficients,
    sums,
    vector,
    m,
    count,
    chunks,
    keep,
    again,
    ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Squares of a vector before a projection, and what it leaves of them.

    ``products`` are ``M g`` and ``||g||^2`` ``(count, m + 1)``, or with CHUNKS partial sums of
    them, and then the rows are orthonormal: ``coefficients``, ``G^-1 M g``, are the same. To be
    kept they are stored in ``sums`` ``(count, m)``, ``again`` added to what is there.
    """
    inner = tl.zeros([ROWS], tl.float64)
    before = tl.zeros([ROWS], tl.float64)
    for first in range(0, m + 1, ROWS):
        row = (first + tl.arange(0, ROWS)).to(tl.int64)
        if CHUNKS:
            product = added_up(products, vector, row, row <= m, m, count, chunks, CHUNKS)
            weight = product
            if keep:
                at = sums + vector * m + row
                total = product + tl.load(at, mask=(row < m) & again, other=0.0)
                tl.debug_barrier()  # several threads load what one of them stores
                tl.store(at, total, mask=row < m)
        else:
            product = tl.load(products + vector * (m + 1) + row, mask=row <= m, other=0.0)
            weight = tl.load(coefficients + vector * m + row, mask=row < m, other=0.0)
        inner += tl.where(row < m, product * weight, 0.0)
        before += tl.where(row == m, product, 0.0)
    squares = tl.sum(before, axis=0)
    return squares, squares - tl.sum(inner, axis=0)


@triton.jit
def weighted(codes, scale, weight, SCALED: tl.constexpr):
    """The rows of a tile times their weights, ``(ROWS, BLOCK)``."""
    if SCALED:
        ROWS: tl.constexpr = codes.shape[0]
        BLOCK: tl.constexpr = codes.shape[1]
        factor = (weight[:, None] * scale)[:, :, None]
        each = tl.reshape(tl.reshape(codes, [ROWS, BLOCK // 64, 64]) * factor, [ROWS, BLOCK])
    else:
        each = weight[:, None] * codes
    return each


@triton.jit
def combination(
    rows,
    scales,
    coefficients,
    v0,
    m,
    count,
    n,
    ld,
    scale_ld,
    start,
    chunks,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTORS: tl.constexpr,
    CHUNKS: tl.constexpr,
    SCALED: tl.constexpr,
    SPLIT: tl.constexpr,
    MASKED: tl.constexpr,
    WORK: tl.constexpr,
):
    """``M' c`` ``(BLOCK,)`` on the columns from ``start``, for the vectors from ``v0`` on.

    With SPLIT, of one vector, threads take different rows and add up at the end: a narrow tile
    then keeps a whole program busy, and a short vector has tiles for all processors.
    """
    t0 = tl.zeros([ROWS, BLOCK] if SPLIT else [BLOCK], WORK)
    t1 = tl.zeros([BLOCK], WORK)
    t2 = tl.zeros([BLOCK], WORK)
    t3 = tl.zeros([BLOCK], WORK)
    # Beyond the last vector the last one is taken again, and its result not stored.
    v1 = tl.minimum(v0 + 1, count - 1)
    v2 = tl.minimum(v0 + 2, count - 1)
    v3 = tl.minimum(v0 + 3, count - 1)
    # fmt: off
    for first in range(0, m, ROWS):
        row = (first + tl.arange(0, ROWS)).to(tl.int64)
        tile = load_codes(rows, row, row < m, ld, start, n, BLOCK, MASKED, WORK)
        scale = tile
        if SCALED:
            scale = load_scales(scales, row, row < m, scale_ld, start, BLOCK, WORK)
        weight = load_weights(coefficients, row, v0, m, count, chunks, CHUNKS, WORK)
        if SPLIT:
            t0 += weighted(tile, scale, weight, SCALED)
        else:
            t0 += tl.sum(weighted(tile, scale, weight, SCALED), axis=0)
        if VECTORS > 1:
            weight = load_weights(coefficients, row, v1, m, count, chunks, CHUNKS, WORK)
            t1 += tl.sum(weighted(tile, scale, weight, SCALED), axis=0)
            weight = load_weights(coefficients, row, v2, m, count, chunks, CHUNKS, WORK)
            t2 += tl.sum(weighted(tile, scale, weight, SCALED), axis=0)
            weight = load_weights(coefficients, row, v3, m, count, chunks, CHUNKS, WORK)
            t3 += tl.sum(weighted(tile, scale, weight, SCALED), axis=0)
    # fmt: on
    if SPLIT:
        t0 = tl.sum(t0, axis=0)
    return t0, t1, t2, t3
