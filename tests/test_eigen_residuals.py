"""No residual is reported below the true one, where more than a product's usual rounding is lost.

The true one is that of the vector as it is returned, with the matrix's own entries, in float64: it
sees none of the roundings that are asked about.
"""

import numpy as np
import pytest
import torch

from curvlab.eigen import Certify, block_lanczos, lanczos, power_iteration
from curvlab.eigen.products import Products
from curvlab.operators import Dense, FromFunction
from tests.dense_truth import rotated

N = 150


def shares(pairs, matrix, deflated=None):
    """The true residuals by the reported ones."""
    vectors, matrix = pairs.vectors.double(), matrix.double()
    if deflated is not None:
        kept = torch.eye(len(matrix), dtype=torch.float64) - deflated.T @ deflated
        matrix = kept @ matrix @ kept
    rest = vectors @ matrix - pairs.values[:, None] * vectors
    return torch.linalg.vector_norm(rest, dim=1) / pairs.residuals


def product_with(matrix):
    return FromFunction(lambda v: (v.float() @ matrix.float()).to(v.dtype), len(matrix),
                        dtype=matrix.dtype)  # fmt: skip


@pytest.mark.parametrize("certify", [True, False])
@pytest.mark.parametrize("solver", [lanczos, block_lanczos])
def test_what_is_dropped_of_a_product_as_rounding_is_in_the_residuals(solver, certify):
    """Starts that all but are eigenvectors: remainders of every length near the limit."""
    generator = torch.Generator().manual_seed(0)
    values = torch.cat([torch.tensor([2.0]), torch.linspace(-1, 1, N - 1)])
    operator = FromFunction(lambda v: v * values, N, dtype=torch.float32)
    for off in np.linspace(2, 16, 57) * torch.finfo(torch.float32).eps:
        start = off * torch.randn(N, generator=generator) / N**0.5
        start[0] = 1.0
        pairs = solver(operator, 1, which="LA", v0=start, certify=certify)
        assert (shares(pairs, torch.diag(values)) <= 1.0).all()


@pytest.mark.parametrize("n", [300, 1000])
def test_the_roundings_of_sums_that_grow_evenly_are_in_the_residuals(n):
    """The leading vector of a positive matrix, which a random one does not resemble."""
    for matrix in (torch.ones(n, n) / n, torch.ones(n, n) / n + torch.eye(n) / 2):
        pairs = lanczos(matrix, 1, which="LA", dense=False)
        assert pairs.converged.all()
        assert (shares(pairs, matrix) <= 1.0).all()


@pytest.mark.parametrize("certify", [True, Certify(explicit=True)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_vectors_that_are_rounded_to_be_returned_have_the_residuals_of_rounded_vectors(
    dtype, certify
):
    for seed in range(10):
        values = 0.8 ** torch.arange(N, dtype=torch.float64)
        matrix = rotated(values, seed=seed).to(dtype)
        matrix = torch.triu(matrix) + torch.triu(matrix, 1).T
        pairs = lanczos(product_with(matrix), 3, tol=0.1, seed=seed, certify=certify)
        assert pairs.converged.all()
        assert (shares(pairs, matrix) <= 1.0).all()
        inner = pairs.vectors.double() @ pairs.vectors.double().T
        assert pairs.orthogonality == float((inner - torch.eye(3)).abs().max())


@pytest.mark.parametrize("explicit", [True, False])
def test_what_projections_leave_is_in_the_residuals_in_few_dimensions_too(explicit):
    """Values far below the norm, most of which is deflated: all that is left is rounding."""
    for seed in range(60):
        generator = torch.Generator().manual_seed(seed)
        u = torch.rand(8, generator=generator, dtype=torch.float64)
        matrix = torch.outer(u, u).float()
        rows = torch.randn(8, 2, generator=generator, dtype=torch.float64)
        deflated = torch.linalg.qr(rows).Q.T.float()
        basis = torch.linalg.qr(deflated.double().T).Q.T
        pairs = lanczos(product_with(matrix), 5, tol=1e-7, deflate=deflated, dense=False,
                        which="LA", certify=Certify(explicit=explicit))  # fmt: skip
        assert (shares(pairs, matrix, basis) <= 1.0).all()


def test_the_rounding_of_products_below_the_normal_numbers_is_known():
    for seed in range(60):
        matrix = rotated(1e-40 * torch.linspace(-1, 1, 20, dtype=torch.float64), seed=seed).float()
        generator = torch.Generator().manual_seed(seed)
        vector = torch.randn(20, generator=generator)
        vector /= vector.norm()
        products = Products(Dense(matrix), None)
        products.probe(seed)
        image = torch.empty_like(vector)
        products.into(vector, image)
        exact = vector.double() @ products.operator.matrix.double()
        assert float((image - exact).norm()) <= products.rounding(1e-40)


@pytest.mark.parametrize("stop", ["residual", "value"])
def test_power_iteration_counts_the_roundings_of_its_products_and_of_its_vectors(stop):
    much = torch.full((N, N), 100.0)
    for seed in range(10):
        matrix = rotated(0.6 ** torch.arange(N, dtype=torch.float64), seed=seed).float()
        inaccurate = FromFunction(lambda v, m=matrix: v @ (m + much) - v @ much, N)
        exact = (matrix + much).double() - much.double()
        pairs = power_iteration(inaccurate, 2, stop=stop, seed=seed, max_products=200)
        assert (shares(pairs, exact) <= 1.0).all()
    matrix = rotated(0.6 ** torch.arange(N, dtype=torch.float64)).bfloat16()
    matrix = torch.triu(matrix) + torch.triu(matrix, 1).T
    pairs = power_iteration(product_with(matrix), 2, stop=stop, tol=0.05, max_products=200)
    inner = pairs.vectors.double() @ pairs.vectors.double().T
    assert pairs.orthogonality == float((inner - torch.eye(2)).abs().max())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_probe_in_few_dimensions_that_shows_no_rounding_was_lucky(dtype):
    for seed in range(100):
        n = 2 + seed % 3
        matrix = rotated(torch.linspace(-1, 0.9, n, dtype=torch.float64), seed=seed).to(dtype)
        matrix = torch.triu(matrix) + torch.triu(matrix, 1).T
        pairs = lanczos(product_with(matrix), n, tol=1e-6, dense=False, seed=seed)
        assert (shares(pairs, matrix) <= 1.0).all()
