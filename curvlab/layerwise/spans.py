"""The span of many rows, seen a block at a time: only a triangle is kept.

Rows ``R (N, width)`` can be many (tokens, patches). Their QR factorisation is updated block by
block in float64, and only the triangle stays: it has the singular values and the row space of
``R``. Unlike ``R'R`` it does not square the condition number, so directions 1e-14 below the
largest are still seen.
"""

import torch
from torch import Tensor

COARSE = 0.9999  # share of energy up to which a Gram matrix tells directions well enough


class Triangle:
    """``(at most width, width)`` with the Gram matrix of all rows added; memory is bounded.

    Blocks are gathered until they have as many rows as columns: a factorisation of fewer would
    cost nearly as much.
    """

    def __init__(self, width: int) -> None:
        self.width = width
        self._waiting: list[Tensor] = []

    def add(self, rows: Tensor) -> None:
        """Take ``rows`` ``(N, width)``, float64."""
        self._waiting.append(rows)
        if len(self._waiting) > 1 and sum(map(len, self._waiting[1:])) >= self.width:
            self.whole()

    def whole(self) -> Tensor | None:
        """The triangle of all rows so far, or ``None`` if there were none."""
        if not self._waiting:
            return None
        stacked = torch.cat(self._waiting) if len(self._waiting) > 1 else self._waiting[0]
        if len(self._waiting) > 1 or len(stacked) > self.width:
            self._waiting = [torch.linalg.qr(stacked, mode="r").R]
        return self._waiting[0]

    def distance(self, other: "Triangle") -> float:
        """How far the Gram matrices lie apart, of the first one's size, by their products with a
        random vector."""
        generator = torch.Generator().manual_seed(0)
        vector = torch.randn(self.width, generator=generator, dtype=torch.float64)
        one, two = (torch.zeros(self.width, dtype=torch.float64) if found is None
                    else (found.T @ (found @ vector.to(found.device))).cpu()
                    for found in (self.whole(), other.whole()))  # fmt: skip
        return float((one - two).norm() / max(float(one.norm()), 1e-300))


def extended_basis(
    basis: Tensor, triangle: Tensor, threshold: float, stored: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    """Add the fewest directions with which the basis holds ``threshold`` of the rows' energy.

    The share counts the whole energy of the rows: what the basis already holds, plus what is
    added. The first task follows the same rule (GPM's public code stops one direction short there).

    Args:
        basis: Orthonormal rows ``(r, width)``, float64; ``r`` may be 0.
        triangle: Any matrix ``(m, width)`` with the Gram matrix of the input rows, float64.
        threshold: In [0, 1]; 1 keeps every direction that rounding can tell from zero.
        stored: How the rows of ``basis`` are kept. In float32 they are off by its rounding, and
            what that leaves of rows they hold is no direction of its own.

    Returns:
        Orthonormal rows ``(r', width)``, ``r <= r' <= width``, the first ``r`` being ``basis``; and
        the energy along each of those that were added ``(r' - r,)``.
    """
    total = float(triangle.square().sum())
    rest = triangle - (triangle @ basis.T) @ basis
    rest = rest - (rest @ basis.T) @ basis  # twice is enough
    values, directions = _leading(rest, threshold)
    rounding = float(torch.finfo(torch.float64).eps) * max(triangle.shape)
    if stored != torch.float64:
        rounding = max(rounding, 2 * float(torch.finfo(stored).eps))
    noise = rounding * total**0.5
    real = int((values > noise).sum())
    held = total - float(rest.square().sum())
    reached = held + values.square().cumsum(0)
    missing = 0
    # the sum of all squares may miss the total by rounding, and a threshold of 1 asks for it all
    if threshold >= 1.0:
        missing = real
    elif held < threshold * total:
        missing = min(int((reached < threshold * total).sum()) + 1, real)
    missing = min(missing, basis.shape[1] - len(basis))
    added = directions[:missing]
    added = added - (added @ basis.T) @ basis
    rows = torch.cat([basis, torch.linalg.qr(added.T).Q.T])
    return rows, values[:missing].square()


def _leading(matrix: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """Singular values, largest first, and right singular vectors as rows.

    The eigenvectors of the Gram matrix take a quarter of the time. They lose directions 1e-8 below
    the largest, whose energy is beyond what a threshold clearly below 1 asks for.
    """
    if threshold > COARSE:
        _, values, directions = torch.linalg.svd(matrix, full_matrices=False)
        return values, directions
    squares, vectors = torch.linalg.eigh(matrix.T @ matrix)
    return squares.flip(0).clamp(min=0.0).sqrt(), vectors.flip(1).T


def require_finite(name: str, rows: Tensor, what: str) -> None:
    """Raise if what a layer received holds NaN or infinity."""
    if not bool(rows.isfinite().all()):
        raise ValueError(
            f"{what} of layer {name!r} hold NaN or infinity: look at the data, or at the model, "
            "which may have diverged"
        )
