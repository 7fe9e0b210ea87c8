"""No residual is reported below the true one, where more than a product's usual rounding is lost.

The true one is that of the vector as it is returned, with the matrix's own entries, in float64: it
sees none of the roundings that are asked about.
"""

import math
from dataclasses import replace
from functools import partial

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("n", [137, 1000])
@pytest.mark.parametrize(
    "solver",
    [
        partial(lanczos, dense=False),
        partial(lanczos, dense=False, certify=Certify(explicit=True)),
        block_lanczos,
        power_iteration,
    ],
)
def test_terms_that_are_all_equal_and_round_alike_are_in_the_residuals_of_a_matrix(
    solver, n, dtype
):
    matrix = torch.ones(n, n, dtype=dtype) / n
    start = {} if solver is power_iteration else {"v0": torch.ones(n)}
    pairs = solver(matrix, 1, **start)
    vector = pairs.vectors[0].double()
    image = math.fsum(vector.tolist()) * float(matrix[0, 0])  # the same in every place, and exact
    true = torch.linalg.vector_norm(image - pairs.values[0] * vector)
    assert pairs.converged.all()
    assert float(true) <= float(pairs.residuals[0])


def test_a_matrix_has_the_residuals_of_its_entries_in_float64():
    """Of more vectors than are taken at once."""
    matrix = rotated(0.95 ** torch.arange(N, dtype=torch.float64)).float()
    pairs = lanczos(matrix, 40, tol=1e-4, dense=False, certify=False)
    rest = shares(pairs, matrix) * pairs.residuals - pairs.residuals
    assert pairs.converged.all()
    assert (rest.abs() < 1e-14).all()


def test_a_matrix_far_from_one_that_is_deflated_has_residuals_of_its_own_size():
    matrix, scale = rotated(0.95 ** torch.arange(N, dtype=torch.float64)), 2.0**900
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(N, 2, generator=generator, dtype=torch.float64)
    deflated = torch.linalg.qr(rows).Q.T
    pairs = lanczos(matrix * scale, 20, tol=1e-4, deflate=deflated, dense=False, certify=False)
    near = replace(pairs, values=pairs.values / scale, residuals=pairs.residuals / scale)
    share = shares(near, matrix, deflated)
    assert pairs.converged.all()
    assert (share <= 1.0).all()
    assert float(share.max()) > 0.99


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
        products = Products(Dense(matrix), None, near_one=True)
        products.probe(seed)
        image = torch.empty_like(vector)
        products.into(vector, image)
        exact = vector.double() @ products.operator.matrix.double() / products.unit
        assert float((image - exact).norm()) <= products.rounding(1e-40 / products.unit)


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


@pytest.mark.parametrize("seed", range(12))
def test_rows_that_were_set_aside_and_brought_back_leave_the_deflated_directions_out(seed):
    """Few distinct eigenvalues: a chain closes on short remainders, again and again."""
    generator = torch.Generator().manual_seed(seed)
    distinct = torch.randn(4, generator=generator, dtype=torch.float64)
    values = distinct[torch.randint(0, 4, (60,), generator=generator)]
    vectors = torch.linalg.qr(torch.randn(60, 60, generator=generator, dtype=torch.float64)).Q
    matrix = (vectors * values) @ vectors.T
    matrix = (matrix + matrix.T) / 2
    deflated = torch.linalg.qr(torch.randn(60, 3, generator=generator, dtype=torch.float64)).Q.T
    operator = FromFunction(lambda v: v @ matrix, 60, dtype=torch.float64)
    pairs = lanczos(operator, 8, deflate=deflated.contiguous(), tol=1e-9, seed=seed, dense=False)
    assert pairs.complete
    assert float(shares(pairs, matrix, deflated).max()) <= 1.0
    assert float((pairs.vectors @ deflated.T).abs().max()) < 1e-14
    assert pairs.norm <= float(values.abs().max()) * (1.0 + 1e-12)
