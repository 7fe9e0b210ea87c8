"""``g -= M' G^-1 M g``: coefficients, then ``g -= M' c``; the basis is read twice.

Twice is the least: the coefficients need every column before the first can be corrected, and no
cache holds the basis. A short vector takes two launches (the second adds up the few partial sums
by itself); a long one, or one with a Gram factor, takes one more for the sums.

As many follow for the second pass that a vector almost inside the span needs. The GPU decides: the
first pass leaves what it removed, and kernels that are not needed return at once, so that no
training step waits.
"""

import torch
from torch import Tensor

from curvlab_kernels._triton.apply import subtract
from curvlab_kernels._triton.dots import FEW, Unless, partial_coefficients, undecided
from curvlab_kernels._triton.sums import sum_chunks
from curvlab_kernels._triton.tiles import work_dtype
from curvlab_kernels.algebra import INSIDE, solve


def project_(
    rows: Tensor, vectors: Tensor, factor: Tensor | None = None, scales: Tensor | None = None
) -> Tensor:
    """``g -= M' G^-1 M g`` in place; returns what was subtracted, ``G^-1 M g``, float64.

    Args:
        rows: ``(m, ld)``, ``ld`` a multiple of 16.
        vectors: ``(n,)`` or ``(b, n)``, float32 or float64.
        factor: Lower Cholesky factor ``(m, m)`` of the rows' Gram matrix, float64; ``None`` for I.
        scales: ``(m, ceil(ld / 64))`` float32 for one-byte dtypes.
    """
    if rows.shape[0] == 0 or vectors.numel() == 0:
        return project_once_(rows, vectors)[0]
    removed, enough = project_once_(rows, vectors, factor, scales)
    return removed + project_once_(rows, vectors, factor, scales, enough)[0]


def project_once_(
    rows: Tensor,
    vectors: Tensor,
    factor: Tensor | None = None,
    scales: Tensor | None = None,
    unless: Unless | None = None,
) -> tuple[Tensor, Unless]:
    """One pass: what was removed, zeros where ``unless`` held, and whether that was enough."""
    m, b = rows.shape[0], len(vectors) if vectors.ndim == 2 else 1
    shape = (*vectors.shape[:-1], m)
    enough = undecided(b, INSIDE, rows.device)
    if m == 0 or vectors.numel() == 0:
        return vectors.new_zeros(shape, dtype=torch.float64), enough
    work = work_dtype(vectors, rows)
    summed = factor is not None
    partials = partial_coefficients(rows, vectors, scales, work, True, unless, summed)
    weights, removed, products = finished(partials, factor, unless)
    sums = None if weights is removed else removed
    subtract(rows, weights, vectors, scales, sums, unless, judge=(products, enough))
    return removed.view(shape), enough


def finished(
    partials: Tensor, factor: Tensor | None, unless: Unless | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """What stage two needs, from partial sums ``(chunks, b, m + 1)`` of products and squares.

    Returns:
        What to subtract, ``removed`` ``(b, m)`` and the products. Of few chunks the first and the
        last are the partial sums, and ``removed`` is for the kernel that adds them up to fill.
    """
    chunks, b, width = partials.shape
    if factor is None and chunks <= FEW:
        empty = torch.empty if unless is None else torch.zeros
        removed = empty(b, width - 1, dtype=partials.dtype, device=partials.device)
        return partials, removed, partials
    products = sum_chunks(partials.view(chunks, -1)).view(b, width)
    removed = solve(factor, products[:, :-1]).contiguous()
    return removed, removed, products
