"""Linear systems by conjugate gradients: true residuals, indefinite systems, deflation."""

import math
from functools import partial

import pytest
import torch
from torch.nn.functional import cross_entropy

from curvlab import GaussNewton, Hessian, NotConvergedError, lanczos, solve
from curvlab.eigen import block_lanczos
from curvlab.nets import mlp
from curvlab.operators import Dense, FromFunction
from tests.dense_truth import rotated

SPECTRA = {
    "well conditioned": torch.linspace(1, 3, 150, dtype=torch.float64),
    "outliers": torch.cat([torch.logspace(4, 2, 10), torch.rand(140) + 0.1]).double(),
    "falling": torch.logspace(1, -4, 150, dtype=torch.float64),
    "low rank": torch.cat([torch.ones(5), torch.zeros(145)]).double(),
    "zero": torch.zeros(150, dtype=torch.float64),
    "one": torch.ones(150, dtype=torch.float64),
}
LIMIT = {torch.float64: 1e-9, torch.float32: 1e-3}


@pytest.mark.parametrize("dtype", LIMIT)
@pytest.mark.parametrize("name", SPECTRA)
@pytest.mark.parametrize("k", [0, 8])
def test_the_reported_residual_is_not_below_the_true_one(name, dtype, k):
    matrix = rotated(SPECTRA[name]).to(dtype)
    operator = Dense(matrix)
    b = torch.randn(150, generator=torch.Generator().manual_seed(1)).to(dtype)
    pairs = lanczos(operator, k, tol=1e-3) if k else None
    found = solve(operator, b, damping=0.01, pairs=pairs, tol=LIMIT[dtype])
    # with outliers of 1e4 and x of 1e1, products in float32 leave 1e-2 of b: it says so
    assert found.converged or (dtype == torch.float32 and "products are right" in found.reason)
    exact = operator.dense().double() + 0.01 * torch.eye(150, dtype=torch.float64)
    true = (b.double() - exact @ found.x.double()).norm() / b.double().norm()
    assert float(true) <= found.residual
    assert found.x.dtype == dtype


@pytest.mark.parametrize("narrow", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", LIMIT, ids=str)
def test_a_right_hand_side_in_a_narrower_dtype_does_not_round_the_solution(dtype, narrow):
    matrix = rotated(SPECTRA["well conditioned"]).to(dtype)
    b = torch.randn(150, generator=torch.Generator().manual_seed(1)).to(narrow)
    found = solve(Dense(matrix), b, tol=LIMIT[dtype]).require_converged()
    exact = Dense(matrix).dense().double()
    true = (b.double() - exact @ found.x.double()).norm() / b.double().norm()
    assert float(true) <= found.residual
    assert found.x.dtype == dtype


def test_damping_that_a_matrix_all_but_cancels_hides_nothing_of_its_rounding():
    operator = FromFunction(lambda v: -3.0 * v, 60)
    pairs = lanczos(operator, 5, which="LA")
    for seed in range(20):
        b = torch.randn(60, generator=torch.Generator().manual_seed(seed))
        found = solve(operator, b, damping=3.03, pairs=pairs, tol=1e-8)
        x = found.x.double()
        true = (b.double() + 3.0 * x - 3.03 * x).norm() / b.double().norm()
        assert float(true) <= found.residual


def test_deflating_the_outliers_saves_most_of_the_steps():
    operator = Dense(rotated(SPECTRA["outliers"]))
    b = torch.randn(150, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    pairs = lanczos(operator, 10, tol=1e-3)
    plain = solve(operator, b, damping=0.01, tol=1e-6)
    deflated = solve(operator, b, damping=0.01, tol=1e-6, pairs=pairs)
    # 1e4 / 0.1 and 1 / 0.1 are the condition numbers: steps go with their roots
    assert deflated.products < 0.5 * plain.products


def test_an_indefinite_system_is_refused_with_the_damping_it_needs():
    values = torch.cat([torch.linspace(1, 3, 149), torch.tensor([-0.5])]).double()
    operator = Dense(rotated(values))
    b = torch.randn(150, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"not positive definite.*damping above 0\.\d+"):
        solve(operator, b, damping=0.1, tol=1e-10)
    assert solve(operator, b, damping=0.6, tol=1e-10).converged
    pairs = lanczos(operator, 3, which="both", tol=1e-6)
    with pytest.raises(ValueError, match=r"not positive definite.*damping above 0\.5"):
        solve(operator, b, damping=0.1, pairs=pairs)


def test_a_newton_step_of_a_network_solves_its_dense_system():
    model = mlp((6, 8, 3), seed=0, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(40, 6, generator=generator, dtype=torch.float64)
    batch = inputs, torch.randint(3, (40,), generator=generator)
    operator = GaussNewton(model, cross_entropy, batch)
    gradient = Hessian(model, cross_entropy, batch).gradient()
    found = solve(operator, gradient, damping=1e-2, tol=1e-8).require_converged()
    exact = operator.dense() + 1e-2 * torch.eye(operator.n, dtype=torch.float64)
    error = (found.x - torch.linalg.solve(exact, gradient)).norm()
    assert float(error) <= found.residual * float(gradient.norm()) / 1e-2  # no value is below this


def test_what_cannot_be_reached_is_said():
    operator = Dense(rotated(SPECTRA["falling"]).float())
    b = torch.randn(150)
    short = solve(operator, b, tol=1e-3, max_products=8)
    assert not short.converged
    assert short.products <= 8
    with pytest.raises(NotConvergedError, match="budget of 8 products"):
        short.require_converged()
    fine = solve(operator, b, damping=0.01, tol=1e-12)
    assert not fine.converged
    assert "products are right to" in fine.reason


def test_nothing_to_solve_costs_nothing():
    found = solve(Dense(rotated(SPECTRA["one"])), torch.zeros(150, dtype=torch.float64))
    assert found.converged
    assert not found.x.any()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"b": torch.ones(149)}, r"vector \(150,\)"),
        ({"b": torch.ones(150, dtype=torch.int64)}, "real floats"),
        ({"b": torch.full((150,), math.nan)}, "NaN"),
        ({"damping": -1.0}, "damping="),
        ({"damping": math.nan}, "damping="),
        ({"tol": 0.0}, "tol="),
        ({"max_products": 0}, "max_products="),
    ],
)
def test_bad_arguments_are_named(options, match):
    with pytest.raises(ValueError, match=match):
        solve(Dense(torch.eye(150)), **{"b": torch.ones(150), **options})


def test_an_operator_that_returns_nan_later_is_an_error():
    calls = 0

    def product(vector):
        nonlocal calls
        calls += 1
        return vector * (math.nan if calls > 8 else torch.linspace(1, 50, 30))

    with pytest.raises(ValueError, match="NaN"):
        solve(FromFunction(product, 30), torch.ones(30), tol=1e-6)


@pytest.mark.parametrize("scale", [1e200, 1e-200])
@pytest.mark.parametrize("with_pairs", [False, True])
def test_an_operator_far_from_one_is_solved_like_one_that_is_not(scale, with_pairs):
    generator = torch.Generator().manual_seed(0)
    half = torch.randn(40, 40, generator=generator, dtype=torch.float64)
    matrix = half @ half.T / 40 + torch.eye(40, dtype=torch.float64)
    b = torch.randn(40, generator=generator, dtype=torch.float64)
    far = FromFunction(lambda v: matrix @ v * scale, 40, dtype=torch.float64)
    pairs = lanczos(matrix * scale, 3) if with_pairs else None
    found = solve(far, b, damping=0.5 * scale, pairs=pairs, tol=1e-9)
    exact = torch.linalg.solve(matrix + 0.5 * torch.eye(40, dtype=torch.float64), b)
    assert found.converged
    assert torch.allclose(found.x * scale, exact, rtol=1e-7)
    with pytest.raises(ValueError, match=r"damping above [12]\.[0-9]*e[+-](200|199)"):
        solve(FromFunction(lambda v: -(far @ v), 40, dtype=torch.float64), b)


@pytest.mark.parametrize("solver", [partial(lanczos, dense=False), block_lanczos])
def test_rows_stay_orthonormal_when_the_deflated_part_is_removed_from_them(solver):
    # The remainder of a product with the identity is rounding, and much of that is deflated rows.
    generator = torch.Generator().manual_seed(0)
    q = torch.linalg.qr(torch.randn(600, 600, generator=generator, dtype=torch.float64))[0]
    matrix = q @ q.T
    matrix = (matrix + matrix.T) / 2
    operator = FromFunction(lambda v: v @ matrix, 600, dtype=torch.float64)
    deflate = q[:, :8].T.contiguous()
    for seed in range(3):
        pairs = solver(operator, 5, deflate=deflate, seed=seed, progress=False)
        assert torch.allclose(pairs.values, torch.ones(5, dtype=torch.float64))
        assert pairs.orthogonality < 1e-12
