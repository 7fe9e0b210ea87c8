"""One Lanczos step: three-term recurrence, reorthogonalisation and norm, in two reads of the basis.

The recurrence touches two rows. Its subtraction, the coefficients of the reorthogonalisation and
the norm it is judged by come from one read; the second read subtracts and sums the squares.
"""

import torch
from torch import Tensor

from curvlab_kernels._triton.apply import subtract_into
from curvlab_kernels._triton.dots import Unless
from curvlab_kernels._triton.norms import normalise_
from curvlab_kernels._triton.orthonormalise import coefficients_and_squares, subtract_and_dot
from curvlab_kernels.algebra import rank_tolerance


def lanczos_step_(
    rows: Tensor, vector: Tensor, previous_beta: float | Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Turn ``w = A v`` ``(n,)`` into the next Lanczos vector, in place; ``v`` is the last row.

    See the reference for the rule. Reads of the basis: two with ``previous_beta``, three without,
    and two more if a pass took away more than half of the squared norm. The host does not wait.

    Returns:
        ``alpha`` ``()``, ``beta`` ``()`` (0 when exhausted), all coefficients removed ``(m,)``.
    """
    removed, before, passed, after = two_passes(rows, vector, previous_beta)
    removed, after = third_pass(rows, vector, removed, passed, after)
    beta = normalise_(vector, before, after, rank_tolerance(vector.dtype, rows.shape[0]))
    return removed[-1], beta, removed


def two_passes(
    rows: Tensor, vector: Tensor, previous_beta: float | Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Recurrence (or a first pass) and reorthogonalisation, without waiting for the GPU.

    Returns:
        The coefficients removed ``(m,)`` and the sums of squares ``(1,)`` of the vector as it
        came, after the recurrence, and after the reorthogonalisation.
    """
    m = rows.shape[0]
    if previous_beta is None:
        start = 0
        removed, before = coefficients_and_squares(rows, vector)
    else:
        start = m - 2
        removed = torch.zeros(m, dtype=torch.float64, device=rows.device)
        removed[-2] = previous_beta
        alpha, before = coefficients_and_squares(rows[-1:], vector)
        removed[-1:] = alpha
    more, passed, rest = subtract_and_dot(rows, removed, start, vector)
    after = subtract_into(rows, more, rest, vector)
    return removed + more, before, passed, after


def third_pass(
    rows: Tensor, vector: Tensor, removed: Tensor, passed: Tensor, after: Tensor
) -> tuple[Tensor, Tensor]:
    """One more pass if the last took away more than half of the squares.

    The GPU decides: the kernels are launched in any case and return at once where they are not
    needed, so the host can be several steps ahead.

    Returns:
        The coefficients removed ``(m,)`` and the sum of squares ``(1,)``, with or without it.
    """
    enough = Unless(passed, after, 0.5)
    more, _ = coefficients_and_squares(rows, vector, enough)
    again = subtract_into(rows, more, vector, vector, enough)
    return removed + more, torch.where(after < 0.5 * passed, again, after)
