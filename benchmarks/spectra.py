"""Prescribed spectra: operators as cheap as they can be, with known eigenvalues."""

import torch
from torch import Tensor


class Diagonal:
    """A prescribed spectrum."""

    def __init__(self, values: Tensor) -> None:
        self.values = values
        self.n, self.dtype, self.device = len(values), values.dtype, values.device

    def __matmul__(self, vectors: Tensor) -> Tensor:
        return vectors * self.values


def outliers(n: int = 100_000) -> Diagonal:
    """Hessian-shaped: thirty outliers, a decaying bulk, small negative values."""
    top = torch.logspace(2, 0.3, 30, dtype=torch.float64)
    bulk = torch.logspace(0, -6, n - 1030, dtype=torch.float64)
    negative = -torch.logspace(-1.5, -6, 1000, dtype=torch.float64)
    return Diagonal(torch.cat([top, bulk, negative]).float())
