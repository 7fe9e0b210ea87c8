"""What is left of Gram-Schmidt once the long vectors are summed: small matrices in float64.

Every back end shares these: ``(m, m)`` or ``(b, b)`` matrices cost nothing beside ``(m, n)`` rows.
"""

import torch
from torch import Tensor


def solve(factor: Tensor | None, right: Tensor) -> Tensor:
    """``G^-1 c`` for ``c`` ``(m,)`` or rows ``(b, m)``; ``factor`` is lower, with ``G = L L'``."""
    if factor is None or right.numel() == 0:
        return right
    columns = right.reshape(-1, right.shape[-1]).T
    return torch.cholesky_solve(columns, factor).T.reshape(right.shape)


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


def shift_if_needed(products: Tensor, remaining: Tensor) -> tuple[Tensor | None, Tensor]:
    """The first stage of shifted CholeskyQR3, for a Gram matrix ``(b, b)`` with unit diagonal.

    Returns:
        The matrix that mixes the rows, or ``None`` when the Gram matrix can be trusted as it is;
        and ``remaining`` ``(b,)``, the norms left by Gram-Schmidt so far, brought up to date.
    """
    _, pivots, _ = _ordered_cholesky(products, torch.zeros_like(remaining))
    if pivots.numel() == 0 or float(pivots.min()) > 1e-8:
        return None, remaining
    # Large enough for the factorisation never to break down on rounding, small enough for the
    # second stage to see what the rank rule needs: norms down to eps of the block's dtype.
    shift = 1e-13 * max(1, products.shape[0])
    lower = torch.linalg.cholesky(products + shift * torch.eye(*products.shape).to(products))
    return _inverse(lower), remaining * lower.diagonal()


def cholesky_mixing(products: Tensor, remaining: Tensor, tolerance: float) -> tuple[Tensor, Tensor]:
    """Cholesky QR in the given order, with the rank rule.

    Args:
        products: Gram matrix ``(b, b)``, float64.
        remaining: Norms ``(b,)`` left by earlier stages, which a pivot multiplies.
        tolerance: Norms at or below it are dependent.

    Returns:
        The matrix ``(k, k)`` that mixes the kept rows into orthonormal ones, and the indices
        ``(k,)`` of the kept rows.
    """
    lower, _, kept = _ordered_cholesky(products, tolerance / remaining)
    return _inverse(lower[kept][:, kept]), kept


def _ordered_cholesky(products: Tensor, floor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Lower factor, pivots and kept indices; a row whose ``sqrt(pivot) <= floor`` is skipped."""
    rest = products.cpu().clone()
    lower = torch.zeros_like(rest)
    pivots = torch.zeros(rest.shape[0], dtype=torch.float64)
    kept = []
    for row, least in enumerate(floor.cpu().tolist()):
        pivot = float(rest[row, row])
        pivots[row] = pivot
        if pivot <= max(least, 0.0) ** 2:
            continue
        kept.append(row)
        lower[row:, row] = rest[row:, row] / pivot**0.5
        rest[row:, row:] -= torch.outer(lower[row:, row], lower[row:, row])
    to = products.device
    return lower.to(to), pivots.to(to), torch.tensor(kept, dtype=torch.int64).to(to)


def _inverse(lower: Tensor) -> Tensor:
    identity = torch.eye(*lower.shape).to(lower)
    inverse: Tensor = torch.linalg.solve_triangular(lower, identity, upper=False)
    return inverse
