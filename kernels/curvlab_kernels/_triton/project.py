"""``g -= M' G^-1 M g``: coefficients, then ``g -= M' c``; the basis is read twice.

Twice is the least: the coefficients need every column before the first can be corrected, and no
cache holds the basis. A short vector takes two launches (the second adds up the few partial sums
by itself); a long one, or one with a Gram factor, takes one more for the sums. There is no second
pass for a vector almost inside the span: to know of it the host would have to wait.
"""

import torch
from torch import Tensor

from curvlab_kernels._triton.apply import subtract
from curvlab_kernels._triton.dots import FEW, partial_coefficients
from curvlab_kernels._triton.sums import sum_chunks
from curvlab_kernels._triton.tiles import work_dtype
from curvlab_kernels.algebra import solve


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
    m = rows.shape[0]
    shape = (*vectors.shape[:-1], m)
    if m == 0 or vectors.numel() == 0:
        return vectors.new_zeros(shape, dtype=torch.float64)
    partials = partial_coefficients(rows, vectors, scales, work_dtype(vectors, rows))
    chunks = partials.shape[0]
    flat = partials.view(chunks, -1)
    if factor is None and chunks <= FEW:
        removed = torch.empty(shape, dtype=torch.float64, device=rows.device)
        subtract(rows, partials, vectors, scales, sums=removed)
        return removed
    removed = solve(factor, sum_chunks(flat).view(shape)).contiguous()
    subtract(rows, removed, vectors, scales)
    return removed
