"""The span of many rows, seen a block at a time: only a triangle is kept.

Rows ``R (N, width)`` can be many (tokens, patches). Their QR factorisation is updated block by
block in float64, and only the triangle stays: it has the singular values and the row space of
``R``. Unlike ``R'R`` it does not square the condition number, so directions 1e-14 below the
largest are still seen.
"""

import torch
from torch import Tensor

from curvlab.basis import Basis

AT_ONCE = 64  # rows added together: the basis sorts out dependent ones with loops over them
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
        """Relative distance of the Gram matrices, by their products with a random vector."""
        generator = torch.Generator().manual_seed(0)
        vector = torch.randn(self.width, generator=generator, dtype=torch.float64)
        one, two = (torch.zeros(self.width, dtype=torch.float64) if found is None
                    else (found.T @ (found @ vector.to(found.device))).cpu()
                    for found in (self.whole(), other.whole()))  # fmt: skip
        return float((one - two).norm() / max(float(one.norm()), 1e-300))


def extend_to_share(
    basis: Basis,
    triangle: Tensor,
    share: float,
    *,
    task: str = "",
    rounded: torch.dtype | None = None,
) -> None:
    """Add the fewest directions with which ``basis`` holds ``share`` of the rows' energy.

    The share counts the whole energy of the rows: what the basis already holds, plus what is
    added. The first task follows the same rule (GPM's public code stops one direction short there).

    Args:
        basis: Rows of ``width`` elements; may be empty. The energy of each direction that is added
            is stored as its value.
        triangle: Any matrix ``(m, width)`` with the Gram matrix of the input rows, float64.
        share: In [0, 1]; 1 keeps every direction that rounding can tell from zero.
        task: Kept as provenance.
        rounded: A dtype that the rows went through, by default that of ``basis``. In float32 they
            are off by its rounding, and what that leaves of rows they hold is no direction.
    """
    rest = triangle.clone(memory_format=torch.contiguous_format)
    total = float(rest.square().sum())  # in the order in which the rest is summed
    for _ in range(2):  # twice is enough
        basis.project_out_(rest)
    values, directions = _leading(rest, share)
    rounding = float(torch.finfo(torch.float64).eps) * max(triangle.shape)
    if (rounded or basis.dtype) != torch.float64:
        rounding = max(rounding, 2 * float(torch.finfo(torch.float32).eps))
    real = int((values > rounding * total**0.5).sum())
    held = total - float(rest.square().sum())
    reached = held + values.square().cumsum(0)
    missing = 0
    # the sum of all squares may miss the total by rounding, and a share of 1 asks for it all
    if share >= 1.0:
        missing = real
    elif held < share * total:
        missing = min(int((reached < share * total).sum()) + 1, real)
    missing = min(missing, basis.n - basis.size)
    for start in range(0, missing, AT_ONCE):
        some = slice(start, min(start + AT_ONCE, missing))
        basis.extend(directions[some], task=task, values=values[some].square())


def _leading(matrix: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """Singular values, largest first, and right singular vectors as rows.

    The eigenvectors of the Gram matrix take a quarter of the time. They lose directions 1e-8 below
    the largest, whose energy is beyond what a share clearly below 1 asks for.
    """
    if share > COARSE:
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
