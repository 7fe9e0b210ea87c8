"""Gram-Schmidt on a CPU: the basis is read three times for two passes over one vector.

The second reading serves both passes: a chunk of columns is small enough to stay in the cache
while the first pass is subtracted from it and the coefficients of the second are summed.
"""

import torch
from torch import Tensor

from curvlab_kernels._cpu.products import subtract, subtract_and_accumulate
from curvlab_kernels._cpu.project import coefficients, project_
from curvlab_kernels.block import norm, normalise_, orthonormalise_with_

__all__ = ["lanczos_step_", "norm", "orthonormalise_", "orthonormalise_block_"]


def orthonormalise_(rows: Tensor, vector: Tensor) -> tuple[Tensor, Tensor]:
    """See :func:`curvlab_kernels.reference.orthonormalise_`."""
    before = norm(vector)
    removed = coefficients(rows, vector)
    again = subtract_and_accumulate(rows, removed, vector)
    subtract(rows, None, again, [(0, vector)])
    return removed + again, normalise_(vector, before, rows.shape[0])


def lanczos_step_(
    rows: Tensor, vector: Tensor, previous_beta: float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """See :func:`curvlab_kernels.reference.lanczos_step_`."""
    before = norm(vector)
    if previous_beta is None:
        removed = coefficients(rows, vector)
        again = subtract_and_accumulate(rows, removed, vector)
    else:
        removed = vector.new_zeros(rows.shape[0], dtype=torch.float64)
        removed[-2] = previous_beta
        subtract(rows[-2:-1], None, removed[-2:-1], [(0, vector)])
        removed[-1:] = project_(rows[-1:], vector)
        again = coefficients(rows, vector)
    passed = norm(vector)
    subtract(rows, None, again, [(0, vector)])
    removed += again
    if float(norm(vector)) ** 2 < 0.5 * float(passed) ** 2:
        removed += project_(rows, vector)
    beta = normalise_(vector, before, rows.shape[0])
    return removed[-1], beta, removed


def orthonormalise_block_(rows: Tensor, block: Tensor) -> Tensor:
    """See :func:`curvlab_kernels.reference.orthonormalise_block_`."""
    return orthonormalise_with_(lambda vectors: project_(rows, vectors), block, rows.shape[0])
