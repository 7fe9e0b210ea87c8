"""Classical Gram-Schmidt, twice, on one vector: three reads of the basis instead of four.

The middle pass does two things with one read: a program holds a tile of *all* rows in registers,
subtracts the first pass' combination from its columns of the vector, and multiplies the same tile
with the result for the second pass' coefficients.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from curvlab_kernels._triton.apply import apply_, subtract_into
from curvlab_kernels._triton.dots import Unless, chunking, partial_coefficients
from curvlab_kernels._triton.launch import launch
from curvlab_kernels._triton.norms import normalise_, squares
from curvlab_kernels._triton.shapes import Tile
from curvlab_kernels._triton.sums import sum_chunks
from curvlab_kernels._triton.tiles import load_codes, work_dtype
from curvlab_kernels.algebra import rank_tolerance

# By bytes of the work dtype; a tile stays in registers, so that its rows are all there are.
_SHAPES = {
    4: (Tile(32, 128, 4), Tile(128, 128, 16), Tile(256, 64, 16)),
    8: (Tile(32, 64, 4), Tile(128, 64, 16), Tile(256, 32, 16)),
}


def orthonormalise_(rows: Tensor, vector: Tensor) -> tuple[Tensor, Tensor]:
    """Make ``vector`` ``(n,)`` orthogonal to orthonormal ``rows`` ``(m, ld)`` and of unit norm.

    In place, by the rank rule of the reference: a dependent vector becomes zero.

    Returns:
        The coefficients removed ``(m,)`` and the norm before normalising ``()``; float64.
    """
    m = rows.shape[0]
    tolerance = rank_tolerance(vector.dtype, m)
    if m == 0:
        before = squares(vector)
        removed = torch.zeros(0, dtype=torch.float64, device=vector.device)
        return removed, normalise_(vector, before, before, tolerance)
    first, before = coefficients_and_squares(rows, vector)
    second, _, rest = subtract_and_dot(rows, first, 0, vector)
    after = subtract_into(rows, second, rest, vector)
    return first + second, normalise_(vector, before, after, tolerance)


def coefficients_and_squares(
    rows: Tensor, vector: Tensor, unless: Unless | None = None
) -> tuple[Tensor, Tensor]:
    """``M g`` ``(m,)`` and the sum of squares of ``g`` ``(1,)`` from one read; ``m >= 1``."""
    work = work_dtype(vector, rows)
    partials = partial_coefficients(rows, vector, None, work, squares=True, unless=unless)
    sums = sum_chunks(partials.view(partials.shape[0], -1))
    return sums[:-1], sums[-1:]


def subtract_and_dot(
    rows: Tensor, coefficients: Tensor, first_row: int, vector: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The middle pass: ``r = g - M' c`` over the rows from ``first_row`` on, then ``M r``.

    One read of the basis up to 256 rows, two beyond (the tile of all rows no longer fits).

    Args:
        coefficients: ``(m,)`` float64; those before ``first_row`` are not used.
        vector: ``g`` ``(n,)``.

    Returns:
        ``M r`` ``(m,)``, the sum of squares of ``r`` ``(1,)``, and ``r``: a new tensor, because
        several threads read the same element of ``g`` and one writes it.
    """
    m, n = rows.shape[0], vector.shape[0]
    rest = torch.empty_like(vector)
    work = work_dtype(vector, rows)
    shapes = _SHAPES[8 if work == tl.float64 else 4]
    shape = next((shape for shape in shapes if shape.rows >= m), None)
    if shape is None:
        rest.copy_(vector)
        apply_(rows[first_row:], coefficients[first_row:], rest)
        products, length = coefficients_and_squares(rows, rest)
        return products, length, rest
    chunks, tiles = chunking(n, shape.columns, 1, shape.warps, rows.device)
    partials = torch.empty(chunks, m + 1, dtype=torch.float64, device=rows.device)
    launch(
        middle_kernel,
        chunks,
        rows,
        coefficients,
        vector,
        rest,
        partials,
        m,
        first_row,
        n,
        rows.shape[1] // 16,
        tiles,
        tile=shape,
        ROWS=shape.rows,
        BLOCK=shape.columns,
        WORK=work,
    )
    sums = sum_chunks(partials)
    return sums[:-1], sums[-1:], rest


@triton.jit
def middle_tile(
    rows,
    weight,
    vector,
    rest,
    row,
    present,
    ld,
    start,
    n,
    BLOCK: tl.constexpr,
    MASKED: tl.constexpr,
    WORK: tl.constexpr,
):
    """One tile: inner products ``(ROWS,)`` of the rows with the rest, and its squares."""
    column = start + tl.arange(0, BLOCK)
    tile = load_codes(rows, row, present, ld, start, n, BLOCK, MASKED, WORK)
    if MASKED:
        piece = tl.load(vector + column, mask=column < n, other=0.0)
    else:
        piece = tl.load(vector + column)
    removed = tl.sum(weight[:, None] * tile, axis=0)
    result = (piece - removed).to(rest.dtype.element_ty)
    if MASKED:
        tl.store(rest + column, result, mask=column < n)
    else:
        tl.store(rest + column, result)
    exact = result.to(tl.float64)
    return tl.sum(tile * result.to(WORK)[None, :], axis=1), tl.sum(exact * exact, axis=0)


@triton.jit(do_not_specialize=["m", "first_row", "n", "ld16", "tiles"])
def middle_kernel(
    rows,
    coefficients,
    vector,
    rest,
    partials,
    m,
    first_row,
    n: tl.int64,
    ld16: tl.int64,
    tiles,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    WORK: tl.constexpr,
):
    chunk = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, ROWS).to(tl.int64)
    present = row < m
    used = present & (row >= first_row)
    weight = tl.load(coefficients + row, mask=used, other=0.0).to(WORK)
    ld = ld16 * 16

    total = tl.zeros([ROWS], tl.float64)
    squares = tl.zeros([], tl.float64)
    full = n // BLOCK
    first = chunk * tiles
    # fmt: off
    for tile_index in range(first, tl.minimum(first + tiles, full)):
        products, square = middle_tile(rows, weight, vector, rest, row, present, ld,
                                       tile_index * BLOCK, n, BLOCK, False, WORK)
        total += products
        squares += square
    if (first + tiles > full) & (full * BLOCK < n):
        products, square = middle_tile(rows, weight, vector, rest, row, present, ld,
                                       full * BLOCK, n, BLOCK, True, WORK)
        total += products
        squares += square
    # fmt: on
    out = partials + chunk * (m + 1)
    tl.store(out + row, total, mask=present)
    tl.store(out + m, squares)
