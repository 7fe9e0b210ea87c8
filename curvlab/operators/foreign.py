"""Operators from elsewhere: a function, a SciPy LinearOperator; and back to SciPy."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from curvlab.operators.operator import Operator
from curvlab.probe import LinearOperator, OperatorError


class FromFunction(Operator):
    """A function of one vector ``(n,) -> (n,)``, or of rows ``(b, n) -> (b, n)``, as an operator.

    Args:
        function: Linear and symmetric; what it returns is copied, so it may reuse its buffer.
        n: Length of a vector.
        blocks: Whether ``function`` takes rows.
    """

    def __init__(
        self,
        function: Callable[[Tensor], Tensor],
        n: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        blocks: bool = False,
    ) -> None:
        if not callable(function):
            raise TypeError(f"FromFunction needs a callable; got {type(function).__name__}")
        if n < 1:
            raise ValueError(f"n= is the length of a vector, at least 1; got {n}")
        super().__init__(n, dtype, torch.device(device))
        self.function, self.blocks = function, blocks

    def _product(self, block: Tensor) -> Tensor:
        if self.blocks:
            return self._checked(self._called(block), block)
        if not len(block):
            return block.clone()
        return torch.stack([self._checked(self._called(v), v) for v in block])

    def _called(self, vectors: Tensor) -> Tensor:
        try:
            return self.function(vectors.clone())
        except RuntimeError as error:
            error.add_note(
                f"the function was given {vectors.dtype} {tuple(vectors.shape)} on "
                f"{vectors.device}; where it needs another dtype or device, pass "
                "curvlab.operators.FromFunction(function, n, dtype=torch.float64, device=...)"
            )
            raise

    def _checked(self, image: Tensor, vectors: Tensor) -> Tensor:
        if not isinstance(image, Tensor) or image.shape != vectors.shape:
            came = tuple(image.shape) if isinstance(image, Tensor) else type(image).__name__
            raise ValueError(f"the function must return shape {tuple(vectors.shape)}; got {came}")
        if not image.is_floating_point():
            raise OperatorError(
                f"the function must return real floats; got {image.dtype}. A real symmetric "
                "operator has real images: take .real if the imaginary part vanishes"
            )
        return image.detach().to(device=self.device, dtype=self.dtype, copy=True)


def from_scipy(operator: Any) -> FromFunction:
    """A SciPy ``LinearOperator``, sparse matrix or array as an operator on the CPU."""
    from scipy.sparse.linalg import aslinearoperator

    linear = aslinearoperator(operator)
    rows, columns = linear.shape
    if rows != columns:
        raise ValueError(f"a symmetric operator is square; got {linear.shape}")
    dtype = torch.float32 if str(linear.dtype) == "float32" else torch.float64
    if str(linear.dtype).startswith("complex"):
        raise TypeError("curvlab's operators are real; got a complex SciPy operator")

    def function(block: Tensor) -> Tensor:
        # SciPy's blocks are columns
        return torch.as_tensor(linear.matmat(block.numpy().T).T.copy())

    return FromFunction(function, rows, dtype=dtype, blocks=True)


def to_scipy(operator: LinearOperator) -> Any:
    """``operator`` as a ``scipy.sparse.linalg.LinearOperator``; its blocks are columns."""
    import numpy
    from scipy.sparse.linalg import LinearOperator as SciPyOperator

    dtype = numpy.float32 if operator.dtype == torch.float32 else numpy.float64

    def matmat(columns: Any) -> Any:
        block = torch.from_numpy(numpy.ascontiguousarray(columns.T, dtype=dtype))
        return (operator @ block.to(operator.device)).cpu().numpy().T

    def matvec(vector: Any) -> Any:
        return matmat(numpy.reshape(vector, (-1, 1)))[:, 0]

    return SciPyOperator(
        (operator.n, operator.n), matvec=matvec, rmatvec=matvec, matmat=matmat, dtype=dtype
    )
