"""More pairs from the same Krylov space: no product twice, and nothing hidden in the end."""

import pytest
import torch

from curvlab.eigen import lanczos, spectral_energy
from curvlab.eigen.growing import Growing
from curvlab.eigen.products import Products

N = 3000
ORTHOGONAL = {torch.float32: 1e-6, torch.float64: 1e-13}
PROBED = 4 + 24  # products of the operator's probe and of the energy's random vectors


class Diagonal:
    """A prescribed spectrum that counts its products."""

    def __init__(self, values):
        self.values = values
        self.n, self.dtype, self.device = len(values), values.dtype, values.device
        self.count = 0

    def __matmul__(self, vectors):
        self.count += 1 if vectors.ndim == 1 else len(vectors)
        return vectors * self.values


def falling(rate, dtype=torch.float64):
    return torch.exp(-torch.arange(N, dtype=torch.float64) / rate).to(dtype)


def growing(operator, tol=1e-6):
    products = Products(operator, None)
    return Growing(products, products.probe(0), tol=tol, seed=0, progress=False)


def test_energy_that_needs_several_attempts_costs_about_one_solve():
    operator = Diagonal(falling(30))
    found = spectral_energy(operator, 0.01, dense=False, progress=False)
    assert found.products == operator.count
    assert found.k > 2 * 16  # so the first attempt was not enough, nor twice it
    assert found.pairs.complete
    fresh = lanczos(operator, found.k, tol=1e-3, progress=False).matvecs
    assert found.products <= PROBED + 1.25 * fresh


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_more_pairs_are_those_of_one_solve_for_fewer_products_than_two(dtype):
    values = falling(12, dtype)
    operator = Diagonal(values)
    solve = growing(operator, tol=1e-4)
    few = solve.pairs(8, certify=True)
    more = solve.pairs(24, certify=True)
    assert few.complete
    assert more.complete
    assert operator.count == 4 + few.matvecs + more.matvecs
    assert (more.values - values[:24].double()).abs().max() <= 1e-6
    images = more.vectors.double() * values.double()
    true = (images - more.values[:, None] * more.vectors.double()).norm(dim=1)
    assert bool((true <= more.residuals).all())
    assert bool((true <= 1e-4 * more.values.abs()).all())
    assert more.orthogonality <= ORTHOGONAL[dtype]
    fresh = lanczos(Diagonal(values), 24, tol=1e-4, progress=False).matvecs - 4
    looking = 12  # products that the first attempt spent on hidden copies
    assert few.matvecs + more.matvecs <= fresh + looking


def test_copies_that_an_attempt_did_not_look_for_are_found_when_asked():
    values = falling(12)
    values[3:6] = values[3].clone()  # one value three times: a single start vector sees it once
    solve = growing(Diagonal(values))
    unlooked = solve.pairs(10, certify=False)
    assert not unlooked.complete
    looked = solve.pairs(10, certify=True)
    assert looked.complete
    assert (looked.values - values[:10]).abs().max() <= 1e-9
