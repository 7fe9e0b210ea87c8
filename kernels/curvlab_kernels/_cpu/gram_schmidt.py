"""Gram-Schmidt on a CPU: three reads of the basis for one vector instead of four.

The middle read does two things: a range of columns small enough for the cache stays in the cache
while the first pass is subtracted from it and the coefficients of the second are summed. A Lanczos
step reads the basis twice: its first pass is the three-term recurrence. Norms are taken on the way.
"""

import numpy as np
import torch
from torch import Tensor

from curvlab_kernels import block
from curvlab_kernels._cpu.path import TINY, arrays, choose, spread
from curvlab_kernels._cpu.products import coefficients, project_once_, subtract
from curvlab_kernels.algebra import rank_tolerance
from curvlab_kernels.block import orthonormalise_with_

NOTHING = (None, None)  # no rows


def norm(vector: Tensor) -> Tensor:
    """See :func:`curvlab_kernels.block.norm`; torch's own float64 sum is 15 times slower."""
    loops = choose(vector[:1], vector).loops if vector.dim() == 1 else None
    if loops is None:
        return block.norm(vector)
    return block.in_range(
        lambda values: spread(loops.squares, NOTHING, None, values, 1)[0].sqrt(), vector
    )


def orthonormalise_(rows: Tensor, vector: Tensor) -> tuple[Tensor, Tensor]:
    """See :func:`curvlab_kernels.reference.orthonormalise_`."""
    before = norm(vector)
    removed, again, _, after = _two_passes(rows, vector)
    return removed + again, _normalise_(vector, before, after, rows.shape[0])


def lanczos_step_(
    rows: Tensor, vector: Tensor, previous_beta: float | Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """See :func:`curvlab_kernels.reference.lanczos_step_`."""
    m = rows.shape[0]
    if previous_beta is None:
        before = norm(vector)
        removed, again, passed, after = _two_passes(rows, vector)
    else:
        # As the vector's dtype has it: what rounding leaves is the second pass's to find.
        weights = np.array([float(previous_beta), 0.0], dtype=arrays(vector)[0].dtype)
        path, tiny = choose(rows, vector), len(vector) <= TINY and rows.dtype == vector.dtype
        if path.alone is not None or tiny:
            sums = np.zeros(m + 5)
            tolerance = rank_tolerance(vector.dtype, m)
            if path.alone is None:
                _tiny_step_(rows, weights, vector, sums, tolerance)
            else:
                path.alone.lanczos_step_alone(
                    arrays(rows)[0], weights, vector.detach().numpy(), sums, tolerance
                )
            found = torch.from_numpy(sums)
            if sums[m + 4]:
                sums[m - 2 : m] += weights
                return found[m - 1], found[m + 3].sqrt(), found[:m]
            again, (passed, before, _, after, _) = found[:m], found[m:].sqrt()
        else:
            before, again, passed = _recurrence(rows, weights, vector)
            after = _subtract(rows, again, vector)
        removed = torch.zeros(m, dtype=torch.float64)
        removed[-2:] = torch.from_numpy(weights)
    removed += again
    if float(after) < 0.5**0.5 * float(passed):
        removed += project_once_(rows, vector)[0]
        after = norm(vector)
    beta = _normalise_(vector, before, after, m)
    return removed[-1], beta, removed


def _tiny_step_(
    rows: Tensor, weights: np.ndarray, vector: Tensor, sums: np.ndarray, tolerance: float
) -> None:
    """``lanczos_step_alone`` of the compiled loops by torch: a fifth slower up to ``TINY`` at most.

    What takes longer than thousands of such steps is to import the loops.
    """
    m, rows = len(rows), rows[:, : len(vector)]

    def square() -> float:
        wide = vector.double()
        return float(torch.dot(wide, wide))

    weights[1] = float(torch.dot(rows[-1], vector))
    before = square()
    vector.add_(rows[-2], alpha=-float(weights[0])).add_(rows[-1], alpha=-float(weights[1]))
    passed = square()
    again = torch.mv(rows, vector)
    vector.addmv_(rows.T, again, alpha=-1.0)
    after = square()
    sums[:m] = again.numpy()
    sums[m : m + 4] = passed, before, weights[1], after
    if after >= 0.5 * passed and after > tolerance**2 * before:
        vector.copy_(vector.double() * after**-0.5)
        sums[m + 4] = 1.0


def orthonormalise_block_(rows: Tensor, block: Tensor) -> Tensor:
    """See :func:`curvlab_kernels.reference.orthonormalise_block_`."""
    return orthonormalise_with_(lambda vectors: project_once_(rows, vectors), block, rows.shape[0])


def _two_passes(rows: Tensor, vector: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Both passes' coefficients, the norm between them and the one at the end."""
    first = coefficients(rows, vector)
    loops = choose(rows, vector).loops
    if loops is None:
        subtract(rows, None, first, vector)
        second = coefficients(rows, vector)
    else:
        second = spread(
            loops.subtract_and_accumulate, arrays(rows), first.numpy(), vector, len(first)
        )
    passed = norm(vector)
    return first, second, passed, _subtract(rows, second, vector)


def _recurrence(rows: Tensor, weights: np.ndarray, vector: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Remove the last two rows: the first pass, and what the second needs.

    ``weights`` are the coefficient of the last row but one and room for the last one's.

    Returns:
        The norm before, all rows' coefficients after, the norm after.
    """
    loops = choose(rows, vector).loops
    if loops is None:
        before = norm(vector)
        subtract(rows[-2:-1], None, torch.from_numpy(weights[:1]).double(), vector)
        weights[1] = float(project_once_(rows[-1:], vector)[0])
        return before, coefficients(rows, vector), norm(vector)
    # The rows are orthogonal to rounding, and the second pass sees what that leaves: the last
    # row's coefficient may be taken before the other is removed, which saves writing the vector.
    square, along = spread(loops.along_last, arrays(rows[-1:]), None, vector, 2)
    weights[1] = float(along)
    found = spread(loops.recur_and_accumulate, arrays(rows), weights, vector, len(rows) + 1)
    return square.sqrt(), found[:-1], found[-1].sqrt()


def _subtract(rows: Tensor, weights: Tensor, vector: Tensor) -> Tensor:
    """``g -= M' c`` in place; the norm after it."""
    loops = choose(rows, vector).loops
    if loops is None:
        subtract(rows, None, weights, vector)
        return norm(vector)
    return spread(loops.subtract_and_square, arrays(rows), weights.numpy(), vector, 1)[0].sqrt()


def _normalise_(vector: Tensor, before: Tensor, after: Tensor, m: int) -> Tensor:
    length = block.length_after(before, after, m, vector.dtype)
    loops = choose(vector[:1], vector).loops
    if loops is None:
        block.scale_(vector, length)
    else:
        factor = np.array([1.0 / float(length) if float(length) != 0.0 else 0.0])
        spread(loops.scale, NOTHING, factor, vector)
    return length
