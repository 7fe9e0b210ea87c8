"""What is left of Gram-Schmidt once the long vectors are summed: small matrices in float64.

Every back end shares these: ``(m, m)`` or ``(b, b)`` matrices cost nothing beside ``(m, n)`` rows.
"""

from collections.abc import Callable

import torch
from torch import Tensor

# Where a projection leaves less than this share of the squared norm, rounding of what it removed
# is more than ten roundings of what is left, and it is done once more (Kahan, Parlett).
INSIDE = 0.01
# Rows that are orthonormal to e leave e^p of a vector inside their span after p passes. Of float32
# rows and a float64 vector that lies 1e-12 outside, two leave 5e-5 of the rest in it, three 1e-13
# (300 elements, 5 rows). On GPUs there are two: a third would be launched where nobody needs it.
PASSES = 3


def solve(factor: Tensor | None, right: Tensor) -> Tensor:
    """``G^-1 c`` for ``c`` ``(m,)`` or rows ``(b, m)``; ``factor`` is lower, with ``G = L L'``."""
    if factor is None or right.numel() == 0:
        return right
    if right.dim() == 1:
        return torch.cholesky_solve(right.unsqueeze(1), factor).squeeze(1)
    return torch.cholesky_solve(right.T, factor).T.contiguous()


def mostly_removed(squares: Tensor, products: Tensor, removed: Tensor) -> bool:
    """Whether a projection left so little of a vector that it should be done once more.

    Args:
        squares: ``||g||^2`` before it, ``()`` or ``(b,)``.
        products: ``M g`` ``(m,)`` or ``(b, m)``, float64.
        removed: ``G^-1 M g``, of that shape.
    """
    left = squares - (products * removed).sum(-1)
    return bool((left < INSIDE * squares).any())


def passes(once: Callable[[], tuple[Tensor, bool]]) -> Tensor:
    """What passes of a projection remove together, as many as are needed.

    Args:
        once: One pass: what it removed, and whether another should follow.
    """
    removed, again = once()
    for _ in range(PASSES - 1):
        if not again:
            break
        more, again = once()
        removed = removed + more
    return removed


def rank_tolerance(dtype: torch.dtype, m: int) -> float:
    """Relative norm at or below which a vector projected against ``m`` others is only rounding."""
    multiple: float = max(8.0, m**0.5)
    return torch.finfo(dtype).eps * multiple


def require_finite(norms: Tensor) -> Tensor:
    """The norms ``(b,)`` unchanged; raises if a vector holds NaN or infinity."""
    if not bool(norms.isfinite().all()):
        wrong = (~norms.isfinite()).nonzero().flatten().tolist()
        raise ValueError(f"vectors {wrong} of the block hold NaN or infinity; nothing was changed")
    return norms


def shift_if_needed(products: Tensor) -> Tensor | None:
    """The first stage of shifted CholeskyQR3, for a Gram matrix ``(b, b)`` with unit diagonal.

    Returns:
        A lower factor ``(b, b)`` to divide the block by, or ``None`` when the Gram matrix can be
        trusted as it is.
    """
    _, pivots = _cholesky(products, 0.0)
    if pivots.numel() == 0 or float(pivots.min()) > 1e-8:
        return None
    # Large enough for the factorisation never to break down on rounding, small enough for the
    # second stage to see what the rank rule needs: norms down to eps of the block's dtype.
    shift = 1e-13 * products.shape[0]
    lower: Tensor = torch.linalg.cholesky(
        products + shift * torch.eye(*products.shape).to(products)
    )
    return lower


def ordered_mixing(
    products: Tensor, lower: Tensor | None, remaining: Tensor, tolerance: float
) -> tuple[Tensor, Tensor]:
    """Gram-Schmidt in the given order, with the rank rule, on coordinates instead of vectors.

    A block ``X = L Y`` with ``Y Y' = C C'`` has the coordinates ``L C`` in an orthonormal basis;
    Gram-Schmidt on those small rows is Gram-Schmidt on the long ones.

    Args:
        products: Gram matrix ``(b, b)`` of ``Y``, float64.
        lower: ``L`` ``(b, b)``, what the block was divided by; ``None`` if it was not.
        remaining: Norms ``(b,)`` left of the vectors by earlier stages.
        tolerance: A norm, left of a vector after removal of the kept ones before it, at or below
            which it is dependent.

    Returns:
        The matrix ``(k, b)`` that makes orthonormal rows of ``Y``, and which vectors ``(k,)`` of
        the block they stand for.
    """
    b = products.shape[0]
    factor, pivots = _cholesky(products, 1e-15 * b)
    coordinates = factor if lower is None else lower.cpu() @ factor
    found, kept = torch.zeros(b, b, dtype=torch.float64), list[int]()
    for row, left in enumerate(remaining.tolist()):
        rest = coordinates[row]
        before = found[: len(kept)]
        for _ in range(2):
            rest = rest - before.T @ (before @ rest)
        size = float(rest.norm())
        if size * left > tolerance:
            found[len(kept)] = rest / size
            kept.append(row)
    sound = (pivots > 1e-15 * b).nonzero().flatten()
    mixing = torch.zeros(len(kept), b, dtype=torch.float64)
    mixing[:, sound] = found[: len(kept), sound] @ inverse(factor[sound][:, sound])
    to = products.device
    return mixing.to(to), torch.tensor(kept, dtype=torch.int64).to(to)


def needs_another_pass(products: Tensor) -> bool:
    """Whether a Gram matrix ``(k, k)`` was so far from the identity that one pass is not enough."""
    if products.numel() == 0:
        return False
    return float((products - torch.eye(*products.shape).to(products)).abs().max()) > 1e-3


def inverse(lower: Tensor) -> Tensor:
    """Of a lower triangular matrix."""
    identity = torch.eye(*lower.shape).to(lower)
    solved: Tensor = torch.linalg.solve_triangular(lower, identity, upper=False)
    return solved


def _cholesky(products: Tensor, least: float) -> tuple[Tensor, Tensor]:
    """Lower factor and pivots, on the CPU; a pivot of at most ``least`` leaves a zero column."""
    rest = products.cpu().clone()
    lower, pivots = torch.zeros_like(rest), rest.new_zeros(len(rest))
    for row in range(len(rest)):
        pivot = float(rest[row, row])
        pivots[row] = pivot
        if pivot > least:
            lower[row:, row] = rest[row:, row] / pivot**0.5
            rest[row:, row:] -= torch.outer(lower[row:, row], lower[row:, row])
    return lower, pivots
