"""Gram-Schmidt on a CPU: the basis is read three times for two passes over one vector.

The second reading serves both passes: a chunk of columns is small enough to stay in the cache
while the first pass is subtracted from it and the coefficients of the second are summed. A Lanczos
step reads the basis twice: its first pass is the three-term recurrence. Norms are taken on the way.
"""

import torch
from torch import Tensor

from curvlab_kernels import block
from curvlab_kernels._cpu import loops
from curvlab_kernels._cpu.products import subtract, subtract_and_accumulate
from curvlab_kernels._cpu.project import coefficients, project_
from curvlab_kernels.algebra import rank_tolerance
from curvlab_kernels.block import orthonormalise_with_

__all__ = ["lanczos_step_", "norm", "orthonormalise_", "orthonormalise_block_"]


def norm(vector: Tensor) -> Tensor:
    """See :func:`curvlab_kernels.block.norm`; torch's own float64 sum is 15 times slower."""
    fast = loops.choose_vector(vector)
    return block.norm(vector) if fast is None else loops.squares(fast, vector).sqrt()


def orthonormalise_(rows: Tensor, vector: Tensor) -> tuple[Tensor, Tensor]:
    """See :func:`curvlab_kernels.reference.orthonormalise_`."""
    before = norm(vector)
    removed = coefficients(rows, vector)
    again = subtract_and_accumulate(rows, removed, vector)
    after = _subtract(rows, again, vector)
    return removed + again, _normalise_(vector, before, after, rows.shape[0])


def lanczos_step_(
    rows: Tensor, vector: Tensor, previous_beta: float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """See :func:`curvlab_kernels.reference.lanczos_step_`."""
    if previous_beta is None:
        before = norm(vector)
        removed = coefficients(rows, vector)
        again = subtract_and_accumulate(rows, removed, vector)
        passed = norm(vector)
        after = _subtract(rows, again, vector)
    else:
        removed = vector.new_zeros(rows.shape[0], dtype=torch.float64)
        # As the vector's dtype has it: what rounding leaves is the second pass's to find.
        removed[-2] = torch.tensor(previous_beta, dtype=vector.dtype)
        beta, alone = float(removed[-2]), loops.choose_alone(rows, vector)
        if alone is not None:
            tolerance = rank_tolerance(vector.dtype, rows.shape[0])
            again, *norms, done = loops.lanczos_step(alone, rows, beta, vector, tolerance)
            passed, before, removed[-1], after = torch.tensor(norms, dtype=torch.float64)
            if done:
                removed += again
                return removed[-1], after, removed
        else:
            before, removed[-1], again, passed = _recurrence(rows, beta, vector)
            after = _subtract(rows, again, vector)
    removed += again
    if float(after) ** 2 < 0.5 * float(passed) ** 2:
        removed += project_(rows, vector)
        after = norm(vector)
    beta_next = _normalise_(vector, before, after, rows.shape[0])
    return removed[-1], beta_next, removed


def orthonormalise_block_(rows: Tensor, block: Tensor) -> Tensor:
    """See :func:`curvlab_kernels.reference.orthonormalise_block_`."""
    return orthonormalise_with_(lambda vectors: project_(rows, vectors), block, rows.shape[0])


def _recurrence(rows: Tensor, beta: float, vector: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Remove the last two rows: the first pass, and what the second needs.

    Returns:
        The norm before, the last row's coefficient, all rows' coefficients after, the norm after.
    """
    fast = loops.choose(rows, [(0, vector)])
    if fast is None:
        before = norm(vector)
        subtract(rows[-2:-1], None, torch.tensor([beta], dtype=torch.float64), [(0, vector)])
        along = project_(rows[-1:], vector)[0]
        return before, along, coefficients(rows, vector), norm(vector)
    # The rows are orthogonal to rounding, and the second pass sees what that leaves: the last
    # row's coefficient may be taken before the other is removed, which saves writing the vector.
    square, along = loops.recurrence(fast, rows[-1], vector)
    along = along.to(vector.dtype).double()
    found = loops.recur_and_accumulate(fast, rows, beta, float(along), vector)
    return square.sqrt(), along, found[:-1], found[-1].sqrt()


def _subtract(rows: Tensor, weights: Tensor, vector: Tensor) -> Tensor:
    """``g -= M' c`` in place; the norm after it."""
    fast = loops.choose(rows, [(0, vector)]) if rows.shape[0] else None
    if fast is None:
        subtract(rows, None, weights, [(0, vector)])
        return norm(vector)
    return loops.subtract_and_square(fast, rows, weights.to(vector.dtype), vector).sqrt()


def _normalise_(vector: Tensor, before: Tensor, after: Tensor, m: int) -> Tensor:
    fast = loops.choose_vector(vector)
    length = block.length_after(before, after, m, vector.dtype)
    if fast is None:
        block.scale_(vector, length)
    else:
        loops.scale(fast, vector, 1.0 / float(length) if float(length) != 0.0 else 0.0)
    return length
