"""``g -= M' G^-1 M g``: coefficients, then ``g -= M' c``; the basis is read twice.

Twice is the least: the coefficients need every column before the first can be corrected, and no
cache holds the basis. A short vector takes two launches (the second adds up the few partial sums
by itself); a long one, or one with a Gram factor, takes one more for the sums.

As many follow for the second pass that a vector almost inside the span needs. The GPU decides: the
first pass leaves what it removed, and kernels that are not needed return at once, so that no
training step waits.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from curvlab_kernels._triton.apply import Found, subtract
from curvlab_kernels._triton.dots import FEW, Unless, partial_coefficients, undecided
from curvlab_kernels._triton.sums import sum_chunks
from curvlab_kernels._triton.tiles import work_dtype
from curvlab_kernels.algebra import INSIDE, solve


class Pass(NamedTuple):
    """What was removed so far, ``G^-1 M g``, and whether that was enough."""

    removed: Tensor
    enough: Unless


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
    first = project_once_(rows, vectors, factor, scales)
    return project_once_(rows, vectors, factor, scales, first)[0]


def project_once_(
    rows: Tensor,
    vectors: Tensor,
    factor: Tensor | None = None,
    scales: Tensor | None = None,
    before: Pass | None = None,
) -> Pass:
    """One pass, which does nothing where the one ``before`` was enough; what both removed."""
    m, b = rows.shape[0], len(vectors) if vectors.ndim == 2 else 1
    shape = (*vectors.shape[:-1], m)
    enough = undecided(b, INSIDE, rows.device)
    if m == 0 or vectors.numel() == 0:
        return Pass(vectors.new_zeros(shape, dtype=torch.float64), enough)
    unless = None if before is None else before.enough
    work = work_dtype(vectors, rows)
    summed = factor is not None
    partials = partial_coefficients(rows, vectors, scales, work, True, unless, summed)
    found = finished(partials, factor, before)
    subtract(rows, vectors, scales, found, enough, unless)
    return Pass(found.removed.view(shape), enough)


def finished(partials: Tensor, factor: Tensor | None, before: Pass | None) -> Found:
    """What stage two needs, from partial sums ``(chunks, b, m + 1)`` of products and squares."""
    chunks, b, width = partials.shape
    done = None if before is None else before.removed.view(b, width - 1)
    if factor is None and chunks <= FEW:
        if done is None:
            done = torch.empty(b, width - 1, dtype=partials.dtype, device=partials.device)
        return Found(partials, done, partials, chunks)
    products = sum_chunks(partials.view(chunks, -1)).view(b, width)
    weights = solve(factor, products[:, :-1]).contiguous()
    return Found(weights, weights if done is None else done + weights, products, 0)
