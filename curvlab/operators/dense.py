"""A symmetric matrix as an operator."""

import torch
from torch import Tensor

from curvlab.operators.operator import Operator, symmetrised_


class Dense(Operator):
    """A symmetric matrix ``(n, n)``; it is copied, and asymmetry beyond rounding is refused."""

    def __init__(self, matrix: Tensor) -> None:
        if not isinstance(matrix, Tensor) or matrix.dim() != 2 or len(set(matrix.shape)) > 1:
            came = tuple(matrix.shape) if isinstance(matrix, Tensor) else type(matrix).__name__
            raise ValueError(f"Dense needs a square matrix (n, n); got {came}")
        if matrix.dtype not in (torch.float32, torch.float64):
            raise TypeError(f"Dense needs a float32 or float64 matrix; got {matrix.dtype}")
        if not bool(torch.isfinite(matrix).all()):
            raise ValueError("the matrix holds NaN or infinity")
        super().__init__(len(matrix), matrix.dtype, matrix.device)
        rounding = 1e4 * float(torch.finfo(matrix.dtype).eps)
        cause = "only symmetric matrices have what is computed here; (M + M.T) / 2 is one"
        self.matrix = symmetrised_(matrix.detach().clone(), rounding, cause)

    def _product(self, block: Tensor) -> Tensor:
        return block @ self.matrix

    def dense(self) -> Tensor:
        """A copy of the matrix ``(n, n)``."""
        return self.matrix.clone()
