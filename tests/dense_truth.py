"""Matrices written out entry by entry, and how far a result is from them."""

import torch


class Dense:
    """A symmetric matrix as an operator that counts its products."""

    def __init__(self, matrix):
        self.matrix, self.n = matrix, matrix.shape[0]
        self.dtype, self.device, self.products = matrix.dtype, matrix.device, 0

    def __matmul__(self, vectors):
        self.products += 1 if vectors.dim() == 1 else vectors.shape[0]
        return vectors @ self.matrix


def symmetric(n, generator, rank=None):
    """Positive semidefinite, of full rank unless told; float64 ``(n, n)``."""
    factor = torch.randn(n, rank or n, generator=generator, dtype=torch.float64)
    return factor @ factor.T / n


def rotated(values, seed=0):
    """The matrix ``(n, n)`` with eigenvalues ``values`` and random eigenvectors, float64."""
    generator, n = torch.Generator().manual_seed(seed), len(values)
    q = torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64)).Q
    matrix = (q * values) @ q.T
    return (matrix + matrix.T) / 2


def dense_hessian(model, objective):
    """The Hessian of ``objective(model)`` by torch's own reverse over reverse, row by row."""
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(objective(model), parameters, create_graph=True)
    flat = torch.cat([g.reshape(-1) for g in gradients])
    rows = [torch.autograd.grad(entry, parameters, retain_graph=True) for entry in flat]
    return torch.stack([torch.cat([piece.reshape(-1) for piece in row]) for row in rows])


def relative(value, truth):
    """``|value - truth| / |truth|``: not a number, and so below no tolerance, where truth is 0."""
    return float((value.double() - truth.double()).norm() / truth.double().norm())
