"""All eigenvalues beyond a threshold, against prescribed spectra."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from curvlab import Hessian, eigenpairs_above
from curvlab.nets import mlp
from curvlab.operators import Dense
from tests.dense_truth import rotated

GENERATOR = torch.Generator().manual_seed(4)
BULK = 0.1 * torch.randn(270, generator=GENERATOR, dtype=torch.float64)
SPECTRA = {
    "separated": torch.cat([torch.linspace(9, 2, 20), -torch.linspace(8, 3, 10)]).double(),
    "copies": torch.cat([torch.full((12,), 5.0), torch.full((10,), -4.0), torch.full((8,), 2.0)]),
}
BEYOND = {
    "LA": lambda values, t: values[values > t],
    "SA": lambda values, t: values[values < t],
    "LM": lambda values, t: values[values.abs() > t],
}


@pytest.mark.parametrize("spectrum", SPECTRA)
@pytest.mark.parametrize(
    ("which", "threshold"), [("LA", 1.0), ("LA", 4.5), ("LA", 20.0), ("SA", -1.0), ("LM", 3.9)]
)
def test_every_eigenvalue_beyond_the_threshold_is_found_and_no_other(spectrum, which, threshold):
    values = torch.cat([SPECTRA[spectrum].double(), BULK])
    matrix = rotated(values)
    found = eigenpairs_above(Dense(matrix), threshold, which=which, tol=1e-6)
    wanted = BEYOND[which](values, threshold).sort().values
    torch.testing.assert_close(found.values.sort().values, wanted, rtol=1e-8, atol=1e-10)
    assert found.complete
    residuals = (found.vectors @ matrix - found.values[:, None] * found.vectors).norm(dim=1)
    assert bool((residuals <= found.residuals).all())


def test_a_small_matrix_is_decomposed_as_a_whole():
    found = eigenpairs_above(torch.diag(torch.tensor([3.0, 1.0, -2.0]).double()), 0.5)
    assert found.values.tolist() == [3.0, 1.0]
    assert len(eigenpairs_above(torch.eye(5), 2.0)) == 0


def test_directions_that_a_learning_rate_makes_unstable():
    model = mlp((6, 20, 3), seed=0, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(50, 6, generator=generator, dtype=torch.float64)
    operator = Hessian(model, cross_entropy, (inputs, torch.arange(50) % 3))
    true = torch.linalg.eigvalsh(operator.dense())
    middle = float((true[-6] + true[-5]) / 2)  # between the fifth and the sixth
    found = eigenpairs_above(operator, middle, tol=1e-6)
    torch.testing.assert_close(found.values, true[-5:].flip(0), rtol=1e-8, atol=0)


def test_too_many_is_an_error_that_says_so():
    matrix = rotated(torch.linspace(1, 2, 200, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"12 eigenvalues or more lie beyond 0\.5.*largest="):
        eigenpairs_above(Dense(matrix), 0.5, largest=12)


@pytest.mark.parametrize("n", [50, 150])
@pytest.mark.parametrize("which", ["LA", "SA", "LM"])
def test_values_on_the_other_side_need_not_be_known_to_their_own_size(n, which):
    """In float32 a relative 1e-3 of them is out of reach; two are beyond, and that is certain."""
    values = torch.cat([torch.tensor([1.0, 0.9]), 1e-5 * torch.linspace(0.1, 1, n - 2)]).double()
    sign = -1.0 if which == "SA" else 1.0
    found = eigenpairs_above(rotated(sign * values).float(), sign * 0.5, which=which)
    assert found.require_converged(complete=True) is found
    torch.testing.assert_close(found.values.abs(), values[:2], rtol=1e-5, atol=0)
    assert bool((found.residuals <= 1e-3 * found.values.abs()).all())


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"threshold": float("nan")}, "threshold="),
        ({"threshold": -1.0, "which": "LM"}, "threshold="),
        ({"threshold": 1.0, "which": "both"}, "which="),
        ({"threshold": 1.0, "largest": 0}, "largest="),
    ],
)
def test_bad_arguments_are_named(options, match):
    with pytest.raises(ValueError, match=match):
        eigenpairs_above(torch.eye(70), **options)
