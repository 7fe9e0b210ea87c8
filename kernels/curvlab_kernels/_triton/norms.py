"""Euclidean norms summed in float64, and scaling by them."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from curvlab_kernels._triton.dots import chunking
from curvlab_kernels._triton.launch import launch
from curvlab_kernels._triton.sums import sum_chunks

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
    stride = vector.stride(0) if b > 1 else 0
    launch(squares_kernel, chunks * b, vector, partials, b, n, stride, tiles, BLOCK=COLUMNS)
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
    strides = source.stride(0), target.stride(0)
    launch(scale_kernel, b * tiles, source, target, norms, n, *strides, tiles, BLOCK=COLUMNS)


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
    vectors, partials, count, n: tl.int64, stride: tl.int64, tiles, BLOCK: tl.constexpr
):
    program = tl.program_id(0)
    vector = (program % count).to(tl.int64)
    chunk = (program // count).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float64)
    full = n // BLOCK
    first = chunk * tiles
    for tile_index in range(first, tl.minimum(first + tiles, full)):
        at = vectors + vector * stride + tile_index * BLOCK + lane
        piece = tl.load(at).to(tl.float64)
        total += piece * piece
    if (first + tiles > full) & (full * BLOCK < n):
        column = full * BLOCK + lane
        at = vectors + vector * stride + column
        piece = tl.load(at, mask=column < n, other=0.0).to(tl.float64)
        total += piece * piece
    tl.store(partials + chunk * count + vector, tl.sum(total, axis=0))


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
):
    program = tl.program_id(0)
    vector = (program // tiles).to(tl.int64)
    column = (program % tiles).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    length = tl.load(norms + vector)
    factor = tl.where(length == 0.0, 0.0, 1.0 / tl.where(length == 0.0, 1.0, length))
    value = tl.load(source + vector * source_ld + column, mask=column < n, other=0.0)
    scaled = (value.to(tl.float64) * factor).to(target.dtype.element_ty)
    tl.store(target + vector * target_ld + column, scaled, mask=column < n)


@triton.jit(do_not_specialize=["n", "tolerance"])
def normalise_kernel(
    vector, before, after, length, n: tl.int64, tolerance: tl.float64, BLOCK: tl.constexpr
):
    column = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    now = tl.sqrt(tl.load(after))
    independent = now > tl.sqrt(tl.load(before)) * tolerance
    # Infinity and NaN are not hidden: they fail the first comparison and stay.
    now = tl.where((now < float("inf")) & (independent == 0), 0.0, now)
    factor = tl.where(now == 0.0, 0.0, 1.0 / tl.where(now == 0.0, 1.0, now))
    value = tl.load(vector + column, mask=column < n, other=0.0)
    scaled = (value.to(tl.float64) * factor).to(vector.dtype.element_ty)
    tl.store(vector + column, scaled, mask=column < n)
    if tl.program_id(0) == 0:
        tl.store(length, now)
