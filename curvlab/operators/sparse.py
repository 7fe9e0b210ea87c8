"""A sparse symmetric matrix as an operator."""

import warnings

import torch
from torch import Tensor

from curvlab.operators.operator import Operator
from curvlab.probe import OperatorError


class Sparse(Operator):
    """A sparse symmetric tensor ``(n, n)`` of any of torch's layouts.

    It is copied; asymmetry beyond rounding is refused, rounding is averaged away.
    """

    def __init__(self, matrix: Tensor) -> None:
        if not isinstance(matrix, Tensor) or matrix.layout == torch.strided:
            came = "a dense tensor" if isinstance(matrix, Tensor) else type(matrix).__name__
            raise TypeError(f"Sparse needs a sparse tensor; got {came} (curvlab.Dense takes those)")
        if matrix.dim() != 2 or matrix.shape[0] != matrix.shape[1] or not len(matrix):
            raise ValueError(f"Sparse needs a square matrix (n, n); got {tuple(matrix.shape)}")
        if matrix.dtype not in (torch.float32, torch.float64):
            raise TypeError(f"Sparse needs a float32 or float64 matrix; got {matrix.dtype}")
        listed = matrix.detach().to_sparse(layout=torch.sparse_coo).coalesce()
        if not bool(torch.isfinite(listed.values()).all()):
            raise ValueError("the matrix holds NaN or infinity")
        super().__init__(len(matrix), matrix.dtype, matrix.device)
        self.matrix = _rows(_symmetrised(listed))

    def _product(self, block: Tensor) -> Tensor:
        return (self.matrix @ block.T).T.contiguous()


def _symmetrised(matrix: Tensor) -> Tensor:
    """The mean of a coalesced ``matrix`` and its transpose, coalesced."""
    transposed = matrix.t().coalesce()
    largest = float(matrix.values().abs().max()) if matrix.values().numel() else 0.0
    difference = (matrix - transposed).coalesce().values()
    worst = float(difference.abs().max()) if difference.numel() else 0.0
    limit = 1e4 * float(torch.finfo(matrix.dtype).eps)
    if worst > limit * largest:
        raise OperatorError(
            f"the sparse matrix is asymmetric by {worst / largest:.1e} (limit {limit:.1e}): if "
            "only one triangle is stored, add the other"
        )
    return matrix if worst == 0.0 else ((matrix + transposed) * 0.5).coalesce()


def _rows(matrix: Tensor) -> Tensor:
    with warnings.catch_warnings():
        # torch calls the layout a beta feature; it is the fastest for products
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
        return matrix.to_sparse_csr()
