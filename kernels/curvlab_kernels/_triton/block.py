"""Orthonormalise a block: CholeskyQR2 with a float64 Gram matrix, CholeskyQR3 where needed.

The passes over ``n`` are kernels; the ``b x b`` algebra is shared with the reference. The block is
worked on in a padded copy, so that its rows too are read 128 bits at a time for every ``n``.
"""

import torch
import triton.language as tl
from torch import Tensor

from curvlab_kernels._triton.apply import mix
from curvlab_kernels._triton.dots import partial_coefficients
from curvlab_kernels._triton.norms import norm, scale
from curvlab_kernels._triton.project import project_once_
from curvlab_kernels._triton.sums import sum_chunks
from curvlab_kernels.algebra import (
    inverse,
    needs_another_pass,
    ordered_mixing,
    rank_tolerance,
    require_finite,
    shift_if_needed,
)
from curvlab_kernels.formats import padded


def orthonormalise_block_(rows: Tensor, block: Tensor) -> Tensor:
    """Make ``block`` ``(b, n)`` orthonormal, and orthogonal to orthonormal ``rows``, in place.

    The rank rule is the reference's: dependent vectors become zero. Needs room for the block
    twice more. Returns which vectors were kept: bool ``(b,)``.
    """
    b, n = block.shape
    kept_mask = torch.zeros(b, dtype=torch.bool, device=block.device)
    if b == 0:
        return kept_mask
    tolerance = rank_tolerance(block.dtype, rows.shape[0] + b)
    before = require_finite(norm(block))
    work = torch.zeros(b, padded(n), dtype=block.dtype, device=block.device)
    scale(block, before, work[:, :n])
    project_once_(rows, work[:, :n])
    remaining = norm(work[:, :n])  # relative to the norm before
    kept = (remaining > tolerance).nonzero().flatten()
    work, remaining = work[kept], remaining[kept]
    scale(work[:, :n], remaining, work[:, :n])
    lower = shift_if_needed(gram(work, n))
    if lower is not None:
        work = mix(inverse(lower), work, n)
    mixing, independent = ordered_mixing(gram(work, n), lower, remaining, tolerance)
    kept, work = kept[independent], mix(mixing, work, n)
    for _ in range(2):
        project_once_(rows, work[:, :n])
        products = gram(work, n)
        work = mix(inverse(torch.linalg.cholesky(products)), work, n)
        if not needs_another_pass(products):
            break
    block.zero_()
    block[kept] = work[:, :n]
    kept_mask[kept] = True
    return kept_mask


def gram(rows: Tensor, n: int | None = None) -> Tensor:
    """``M M'`` ``(m, m)``: products and sums in float64.

    Products of float32 numbers are exact there, which Cholesky QR needs: the Gram matrix squares
    the condition number.

    Args:
        rows: ``(m, ld)`` of a float dtype, ``ld`` a multiple of 16.
        n: Columns in use; all of them without it.
    """
    m = rows.shape[0]
    if m == 0:
        return torch.zeros(0, 0, dtype=torch.float64, device=rows.device)
    vectors = rows if n is None else rows[:, :n]
    partials = partial_coefficients(rows, vectors, None, tl.float64)
    return sum_chunks(partials.view(partials.shape[0], -1)).view(m, m)
