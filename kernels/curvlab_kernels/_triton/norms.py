"""Euclidean norms summed in float64, and scaling by them."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from curvlab_kernels._triton.dots import chunking
from curvlab_kernels._triton.launch import launch
from curvlab_kernels._triton.sums import sum_chunks
from curvlab_kernels._triton.tiles import row_stride

COLUMNS = 1024  # of a tile


def norm(vector: Tensor) -> Tensor:
    """Euclidean norm of ``(n,)`` or of every row of ``(b, n)``, float64."""
    if vector.numel() == 0:
        return vector.new_zeros(vector.shape[:-1], dtype=torch.float64)
    return squares(vector).sqrt().view(vector.shape[:-1])


def squares(vector: Tensor) -> Tensor:
    """Sums of squares of ``(n,)`` or of every row of ``(b, n)``: ``(b,)`` float64; not empty."""
    b, n = vector.shape if vector.ndim == 2 else (1, vector.shape[0])
    chunks, tiles = chunking(n, COLUMNS, b, 4, vector.device)
    partials = torch.empty(chunks, b, dtype=torch.float64, device=vector.device)
    stride, unit = row_stride(vector)
    launch(
        squares_kernel,
        chunks * b,
        vector,
        partials,
        b,
        n,
        stride,
        tiles,
        BLOCK=COLUMNS,
        UNIT=unit,
    )
    return sum_chunks(partials)


def scale(source: Tensor, norms: Tensor, target: Tensor) -> None:
    """``target = source / norms`` row by row; a row whose norm is zero becomes zero.

    Args:
        source: ``(b, n)``, may be ``target``.
        norms: ``(b,)`` float64.
    """
    b, n = source.shape
    if b == 0:
        return
    tiles = -(-n // COLUMNS)
    (source_ld, unit), (target_ld, target_unit) = row_stride(source), row_stride(target)
    launch(
        scale_kernel,
        b * tiles,
        source,
        target,
        norms,
        n,
        source_ld,
        target_ld,
        tiles,
        BLOCK=COLUMNS,
        UNIT=unit,
        TARGET_UNIT=target_unit,
    )


def normalise_(vector: Tensor, before: Tensor, after: Tensor, tolerance: float) -> Tensor:
    """Scale ``vector`` ``(n,)`` to unit norm by the rank rule of the reference; returns the norm.

    Args:
        before: Sum of squares before the projection, ``(1,)`` float64.
        after: Sum of squares now, ``(1,)`` float64.
        tolerance: A norm at most this much of the one before is rounding: the vector becomes zero.
    """
    length = torch.empty((), dtype=torch.float64, device=vector.device)
    n = vector.shape[0]
    launch(
        normalise_kernel,
        -(-n // COLUMNS),
        vector,
        before,
        after,
        length,
        n,
        tolerance,
        BLOCK=COLUMNS,
    )
    return length


@triton.jit(do_not_specialize=["count", "n", "stride", "tiles"])
def squares_kernel(
    vectors,
    partials,
    count,
    n: tl.int64,
    stride: tl.int64,
    tiles,
    BLOCK: tl.constexpr,
    UNIT: tl.constexpr,
):
    program = tl.program_id(0)
    vector = (program % count).to(tl.int64)
    chunk = (program // count).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float64)
    full = n // BLOCK
    first = chunk * tiles
    begin = vectors + vector * stride * UNIT
    for tile_index in range(first, tl.minimum(first + tiles, full)):
        piece = tl.load(begin + tile_index * BLOCK + lane).to(tl.float64)
        total += piece * piece
    if (first + tiles > full) & (full * BLOCK < n):
        column = full * BLOCK + lane
        piece = tl.load(begin + column, mask=column < n, other=0.0).to(tl.float64)
        total += piece * piece
    tl.store(partials + chunk * count + vector, tl.sum(total, axis=0))


@triton.jit
def scale_tile(source, target, factor, start, n, BLOCK: tl.constexpr):
    """``target = source * factor``, in float64, on the columns from ``start``; once rounded."""
    column = start + tl.arange(0, BLOCK)
    # Without a mask the accesses of all tiles but the last are wide.
    if start + BLOCK <= n:
        value = tl.load(source + column).to(tl.float64) * factor
        tl.store(target + column, value.to(target.dtype.element_ty))
    else:
        value = tl.load(source + column, mask=column < n, other=0.0).to(tl.float64) * factor
        tl.store(target + column, value.to(target.dtype.element_ty), mask=column < n)


@triton.jit(do_not_specialize=["n", "source_ld", "target_ld", "tiles"])
def scale_kernel(
    source,
    target,
    norms,
    n: tl.int64,
    source_ld: tl.int64,
    target_ld: tl.int64,
    tiles,
    BLOCK: tl.constexpr,
    UNIT: tl.constexpr,
    TARGET_UNIT: tl.constexpr,
):
    program = tl.program_id(0)
    vector = (program // tiles).to(tl.int64)
    start = (program % tiles).to(tl.int64) * BLOCK
    length = tl.load(norms + vector)
    factor = tl.where(length == 0.0, 0.0, 1.0 / tl.where(length == 0.0, 1.0, length))
    begin = source + vector * source_ld * UNIT
    scale_tile(begin, target + vector * target_ld * TARGET_UNIT, factor, start, n, BLOCK)


@triton.jit(do_not_specialize=["n", "tolerance"])
def normalise_kernel(
    vector, before, after, length, n: tl.int64, tolerance: tl.float64, BLOCK: tl.constexpr
):
    now = tl.sqrt(tl.load(after))
    independent = now > tl.sqrt(tl.load(before)) * tolerance
    # Infinity and NaN are not hidden: they fail the first comparison and stay.
    now = tl.where((now < float("inf")) & (independent == 0), 0.0, now)
    factor = tl.where(now == 0.0, 0.0, 1.0 / tl.where(now == 0.0, 1.0, now))
    scale_tile(vector, vector, factor, tl.program_id(0).to(tl.int64) * BLOCK, n, BLOCK)
    if tl.program_id(0) == 0:
        tl.store(length, now)
