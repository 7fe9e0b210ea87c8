"""What every operator can do: multiply, add up, restrict, project, become dense, prove itself."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from curvlab.parameters import Layout
from curvlab.probe import Certificate, LinearOperator, OperatorError, probe

if TYPE_CHECKING:
    from curvlab.operators.preconditioned import Preconditioned
    from curvlab.operators.subspace import Projected, Restricted
    from curvlab.operators.sums import WeightedSum


class Operator(ABC):
    """A symmetric linear map over flat vectors: ``operator @ vector``, blocks as rows.

    Attributes:
        n: Length of a vector.
        layout: How model parameters lie in the vector, where the operator comes from a model.
        limit: Largest relative error the probe accepts; ``None`` is what rounding explains.
    """

    limit: float | None = None

    def __init__(
        self, n: int, dtype: torch.dtype, device: torch.device, layout: Layout | None = None
    ) -> None:
        self.n, self.dtype, self.device, self.layout = n, dtype, device, layout

    @abstractmethod
    def _product(self, block: Tensor) -> Tensor:
        """``(b, n) -> (b, n)``, a new tensor; the block is checked and must not be changed."""

    def __matmul__(self, vectors: Tensor) -> Tensor:
        """``(n,) -> (n,)`` and ``(b, n) -> (b, n)``."""
        if not isinstance(vectors, Tensor):
            raise TypeError(f"operator @ vectors needs a tensor; got {type(vectors).__name__}")
        if vectors.dim() not in (1, 2) or vectors.shape[-1] != self.n:
            raise ValueError(
                f"operator @ vectors needs shape ({self.n},) or (b, {self.n}): vectors are rows; "
                f"got {tuple(vectors.shape)}"
            )
        if vectors.dtype != self.dtype or vectors.device != self.device:
            raise TypeError(
                f"this operator works in {self.dtype} on {self.device}; the vectors are "
                f"{vectors.dtype} on {vectors.device}: convert them, or make the operator with "
                "dtype="
            )
        block = vectors.detach()
        with torch.inference_mode(False):
            # a tensor made in inference mode may not enter an autograd graph
            block = block.clone() if block.is_inference() else block
            result = self._product(block.reshape(-1, self.n))
        return result.reshape(vectors.shape)

    @cached_property
    def certificate(self) -> Certificate:
        """Repeatability, symmetry and linearity; measured when first asked for."""
        return self.probe()

    def probe(self, *, seed: int = 0) -> Certificate:
        """Measure repeatability, symmetry and linearity with four products."""
        return probe(self, seed=seed, limit=self.limit)

    def dense(self) -> Tensor:
        """The matrix ``(n, n)``, exactly symmetric; asymmetry beyond rounding raises."""
        matrix = torch.empty(self.n, self.n, dtype=self.dtype, device=self.device)
        step = max(1, min(self.n, 64, (1 << 26) // self.n))
        for start in range(0, self.n, step):
            block = torch.zeros(
                min(step, self.n - start), self.n, dtype=self.dtype, device=self.device
            )
            block.diagonal(start).fill_(1.0)
            matrix[start : start + step] = self @ block
        return symmetrised_(matrix, self.certificate.limit)

    def restrict(self, where: "str | Sequence[str] | slice | Tensor") -> "Restricted":
        """The principal submatrix of some parameters: patterns of names, a slice or indices."""
        from curvlab.operators.subspace import Restricted

        return Restricted(self, where)

    def project(self, basis: Any) -> "Projected":
        """``(I - M'M) A (I - M'M)``: the operator outside the span of a basis."""
        from curvlab.operators.subspace import Projected

        return Projected(self, basis)

    def precondition(self, diagonal: Tensor) -> "Preconditioned":
        """``P^-1/2 A P^-1/2`` for positive numbers P ``(n,)``: what Adam's steps see."""
        from curvlab.operators.preconditioned import Preconditioned

        return Preconditioned(self, diagonal)

    def to_scipy(self) -> Any:
        """This operator as a ``scipy.sparse.linalg.LinearOperator``."""
        from curvlab.operators.foreign import to_scipy

        return to_scipy(self)

    def __add__(self, other: LinearOperator) -> "WeightedSum":
        from curvlab.operators.sums import WeightedSum

        return WeightedSum([self, other], [1.0, 1.0])

    def __sub__(self, other: LinearOperator) -> "WeightedSum":
        from curvlab.operators.sums import WeightedSum

        return WeightedSum([self, other], [1.0, -1.0])

    def __mul__(self, factor: float) -> "WeightedSum":
        from curvlab.operators.sums import WeightedSum

        return WeightedSum([self], [factor])

    __rmul__ = __mul__

    def __truediv__(self, divisor: float) -> "WeightedSum":
        return self * (1.0 / divisor)

    def __neg__(self) -> "WeightedSum":
        return self * -1.0

    def __repr__(self) -> str:
        return f"{type(self).__name__}(n={self.n}, {self.dtype}, {self.device})"


def symmetrised_(
    matrix: Tensor, limit: float, cause: str = "a layer has a wrong second derivative"
) -> Tensor:
    """Average ``matrix`` ``(n, n)`` with its transpose, in place and tile by tile.

    An asymmetry above ``limit``, relative to the largest entry, is an error, not averaged away.

    Args:
        cause: What the error says of it.
    """
    n, tile = len(matrix), 2048
    largest = float(matrix.abs().amax()) if n else 0.0
    worst = 0.0
    for i in range(0, n, tile):
        for j in range(i, n, tile):
            upper, lower = matrix[i : i + tile, j : j + tile], matrix[j : j + tile, i : i + tile]
            difference = upper - lower.T
            worst = max(worst, float(difference.abs().amax()))
            mean = difference.mul_(-0.5).add_(upper)
            upper.copy_(mean)
            lower.copy_(mean.T)
    if not worst <= limit * largest:
        raise OperatorError(
            f"the dense matrix is asymmetric by {worst / largest if largest else worst:.1e} "
            f"(limit {limit:.1e}): {cause}"
        )
    return matrix
