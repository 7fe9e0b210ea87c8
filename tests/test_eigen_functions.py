"""Functions of matrices and linear systems, against dense float64 truth."""

import math

import pytest
import torch

from curvlab import lanczos, spectral_density
from curvlab.operators import Dense
from tests.dense_truth import rotated

FUNCTIONS = {
    "inverse": torch.reciprocal,
    "root": torch.sqrt,
    "inverse root": torch.rsqrt,
    "log": torch.log,
}


def exactly(matrix, function, damping):
    values, vectors = torch.linalg.eigh(matrix)
    return (vectors * function(values + damping)) @ vectors.T


SPECTRA = {
    "falling": 10.0 * 0.8 ** torch.arange(120, dtype=torch.float64),
    "low rank": torch.cat([torch.linspace(5, 1, 8), torch.zeros(112)]).double(),
    "clustered": torch.cat([torch.full((6,), 3.0), 0.05 * torch.rand(114)]).double(),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("spectrum", SPECTRA)
@pytest.mark.parametrize("tol", [1e-2, 1e-8])
def test_a_function_of_the_pairs_is_within_its_bound(name, spectrum, tol):
    matrix, function = rotated(SPECTRA[spectrum]), FUNCTIONS[name]
    pairs = lanczos(Dense(matrix), 6, tol=tol, dense=False).require_converged(complete=True)
    found = pairs.function(function, damping=0.5, semidefinite=True)
    true = exactly(matrix, function, 0.5)
    generator = torch.Generator().manual_seed(1)
    vectors = [*torch.randn(4, 120, generator=generator, dtype=torch.float64), *pairs.vectors[:2]]
    for vector in vectors:
        error = float((found @ vector - true @ vector).norm())
        bound = found.error(vector)
        assert error <= bound
        assert math.isfinite(bound)


def test_bounds_are_infinite_where_the_rest_of_the_spectrum_is_not_known():
    matrix = rotated(SPECTRA["falling"])
    pairs = lanczos(Dense(matrix), 8, tol=1e-6, dense=False, certify=False)
    found = pairs.function(torch.reciprocal, damping=0.5, semidefinite=True)
    assert found.error(torch.ones(120, dtype=torch.float64)) == math.inf
    upper = lanczos(Dense(matrix), 8, which="LA", tol=1e-6, dense=False)
    assert upper.function(torch.log, damping=1.0).error(torch.ones(120).double()) == math.inf
    closed = upper.function(torch.log, damping=1.0, semidefinite=True)
    assert closed.error(torch.ones(120).double()) < math.inf


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize(("which", "k"), [("LA", 3), ("both", 1), ("LM", 3)])
def test_no_bound_is_finite_that_a_pole_within_the_open_rest_may_pass(name, which, k):
    """The rest reaches down to -1, unseen by the pairs, or no further up than where f ends."""
    rest = torch.linspace(-1, 1, 56, dtype=torch.float64)
    matrix, function = rotated(torch.cat([torch.full((4,), 5.0).double(), rest])), FUNCTIONS[name]
    pairs = lanczos(Dense(matrix), k, which=which, tol=0.1, dense=False)
    found, true = pairs.function(function, damping=1.02), exactly(matrix, function, 1.02)
    vectors = [*rotated(rest)[:2], torch.ones(60).double(), *pairs.vectors]
    for vector in vectors:
        vector = torch.nn.functional.pad(vector, (0, 60 - len(vector)))
        assert float((found @ vector - true @ vector).norm()) <= found.error(vector)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_trace_knows_from_its_random_vectors_where_the_open_rest_ends(name):
    rest = torch.linspace(-1, 1, 56, dtype=torch.float64)
    matrix, function = rotated(torch.cat([torch.full((4,), 5.0).double(), rest])), FUNCTIONS[name]
    pairs = lanczos(Dense(matrix), 3, which="LA", tol=1e-8, dense=False)
    seen = pairs.function(function, damping=1.1).trace(matrix)
    assert abs(seen.value - float(exactly(matrix, function, 1.1).trace())) <= 4 * seen.error
    assert math.isfinite(seen.error)


@pytest.mark.parametrize("name", ["log", "inverse", "root"])
@pytest.mark.parametrize("damping", [0.05, 1.0])
def test_the_trace_of_a_function_is_within_two_error_bars(name, damping):
    values = torch.cat([torch.logspace(1, -1, 40), 0.01 * torch.rand(160)]).double()
    function = FUNCTIONS[name]
    true = float(function(values + damping).sum())
    missed = 0
    for seed in range(20):
        operator = Dense(rotated(values, seed))
        pairs = lanczos(operator, 10, tol=1e-8, seed=seed)
        found = pairs.function(function, damping=damping, semidefinite=True).trace(
            operator, probes=4, steps=40, seed=seed
        )
        missed += abs(found.value - true) > 2 * found.error
    assert missed <= 3  # of 20 at 4.6 %: more than 3 once in 80 times


def test_density_bounds_what_too_few_steps_leave_out():
    values = torch.logspace(0, -6, 200, dtype=torch.float64)
    density = spectral_density(rotated(values), probes=60, steps=6)
    found = density.trace(lambda x: torch.log(x.clamp_min(0) + 1e-6), lowest=0.0)
    true = float(torch.log(values + 1e-6).sum())
    assert abs(found.value - true) <= 2 * found.error
    sampling = density._trace_of(torch.log(density.nodes.clamp_min(0) + 1e-6)).error
    assert abs(found.value - true) > 4 * sampling, "six nodes cannot resolve six decades"
    with pytest.raises(ValueError, match="not finite"):
        density.trace(lambda x: torch.log(x - 0.5))


def test_a_function_that_is_not_finite_at_an_eigenvalue_names_the_damping():
    pairs = lanczos(torch.diag(torch.tensor([3.0, -2.0, 1.0], dtype=torch.float64)), 2)
    with pytest.raises(ValueError, match=r"Raise damping= above 2"):
        pairs.function(torch.log, damping=1.0)
    with pytest.raises(ValueError, match="Raise damping="):
        pairs.head(1).function(torch.reciprocal)
    with pytest.raises(TypeError, match="element by element"):
        pairs.function(lambda x: x.sum(), damping=3.0)
