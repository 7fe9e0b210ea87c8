"""Prescribed spectra: what is reported as converged and complete is right, at a bounded cost."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from curvlab.eigen import Certify, Room, block_lanczos, lanczos
from curvlab.eigen.products import Products
from curvlab.eigen.request import request
from curvlab.eigen.run import run
from curvlab.operators import FromFunction

TOLERANCES = {torch.float64: (1e-3, 1e-8), torch.float32: (1e-3, 1e-4)}


class Diagonal:
    """A diagonal operator that counts its products: in a random start, as general as any."""

    def __init__(self, values, dtype=torch.float64):
        self.values = torch.as_tensor(values, dtype=torch.float64).to(dtype)
        self.n, self.dtype, self.device = len(values), dtype, torch.device("cpu")
        self.products = 0

    def __matmul__(self, vectors):
        self.products += 1 if vectors.ndim == 1 else len(vectors)
        return vectors * self.values


def spectra():
    rng = np.random.default_rng(0)
    bulk = np.linspace(-0.5, 1.0, 700)
    hessian_bulk = [0.05 * rng.normal(size=1500) ** 4, -0.02 * np.abs(rng.normal(size=300))]
    outliers = np.array([25, 14, 9, 8, 6, 5, 4, 3.5, 3, 2.5])
    wilkinson = np.diag(np.abs(np.arange(-60, 61.0))) + np.eye(121, k=1) + np.eye(121, k=-1)
    arrow = np.diag(np.concatenate([[0.0], np.linspace(1, 5, 299)]))
    arrow[0, 1:] = arrow[1:, 0] = 0.3
    cases = {
        "decaying": 0.9 ** np.arange(1000),
        "slowly decaying": 1 / np.arange(1, 2001),
        "graded over 12 decades": 10.0 ** (-12 * np.arange(500) / 499),
        "clusters": np.concatenate([10 + 1e-6 * np.arange(5), 5 + 1e-8 * np.arange(4), bulk]),
        "indefinite": np.concatenate([np.linspace(5, 10, 6), -np.linspace(4, 9, 6), 0.5 * bulk]),
        "tiny gaps": np.concatenate([1 + 1e-4 * np.arange(12), np.linspace(0, 0.9, 400)]),
        "low rank": np.concatenate([[5, 4, 3, -2, 1.0], np.zeros(595)]),
        "zero": np.zeros(300),
        "identity": np.ones(300),
        "Wilkinson": np.linalg.eigvalsh(wilkinson),
        "arrowhead": np.linalg.eigvalsh(arrow),
        "Hessian": np.concatenate([outliers, *hessian_bulk]),
        "Hessian with copies": np.concatenate([outliers, outliers[1:5], *hessian_bulk]),
    }
    for m in (2, 3, 4, 8):
        cases[f"multiplicity {m}"] = np.concatenate([[10.0] * m, [7.0, 7.0, 5.0, 4.0], bulk])
    return cases


SPECTRA = spectra()


def truth(values, k, which):
    """The ``k`` wanted of the values, in the result's order."""
    values = values.double()
    if which == "LM":
        return values[values.abs().argsort(descending=True, stable=True)[:k]]
    if which == "SA":
        return values.sort().values[:k]
    down = values.sort(descending=True).values
    return (
        down[:k] if which == "LA" else torch.cat([down[: k - k // 2], down[len(down) - k // 2 :]])
    )


def wrong_set(pairs, operator, k, which, tol):
    expected = truth(operator.values, k, which)
    if which == "LM":
        expected, got = expected.abs(), pairs.values.abs().sort(descending=True).values
    else:
        got = pairs.values
    return bool(((got - expected).abs() > 4 * tol * expected.abs() + pairs.floor).any())


def true_residuals(pairs, operator):
    v = pairs.vectors.double()
    return torch.linalg.vector_norm(v * operator.values.double() - pairs.values[:, None] * v, dim=1)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("name", SPECTRA)
def test_no_wrong_set_is_reported_as_converged_and_complete(name, dtype):
    for k, tol, seed in ((4, TOLERANCES[dtype][0], 0), (9, TOLERANCES[dtype][1], 1)):
        operator = Diagonal(SPECTRA[name], dtype)
        pairs = lanczos(operator, k, tol=tol, seed=seed, dense=False)
        assert pairs.matvecs == operator.products
        assert len(pairs) == k
        true = true_residuals(pairs, operator)
        # the rounding of the comparison itself
        assert (true <= pairs.residuals + torch.finfo(dtype).eps * pairs.norm).all()
        assert pairs.orthogonality < 100 * torch.finfo(dtype).eps
        if bool(pairs.converged.all()):
            assert not wrong_set(pairs, operator, k, "LM", tol) or not pairs.complete
        else:
            assert "precision" in pairs.reason or "budget" in pairs.reason


@pytest.mark.parametrize("which", ["LA", "SA", "both"])
@pytest.mark.parametrize("name", ["indefinite", "multiplicity 3", "low rank", "zero"])
def test_every_part_of_the_spectrum_is_found_in_its_order(name, which):
    operator = Diagonal(SPECTRA[name])
    pairs = lanczos(operator, 5, which=which, tol=1e-6, dense=False).require_converged()
    assert torch.allclose(pairs.values, truth(operator.values, 5, which), rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("n", [1, 2, 3, 17])
@pytest.mark.parametrize("dense", [None, False])
def test_tiny_operators_are_solved_completely(n, dense):
    operator = Diagonal(torch.arange(1.0, n + 1))
    for k in {1, n}:
        pairs = lanczos(operator, k, tol=1e-10, dense=dense).require_converged(complete=True)
        assert torch.allclose(pairs.values, truth(operator.values, k, "LM"))
        assert pairs.doubt == 0.0 or k < n


def count_missed_copies(multiplicity, dtype, seeds):
    missed, unsure = 0, 0
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        bulk = 0.3 * torch.randn(150, generator=generator, dtype=torch.float64).clamp(-3, 3)
        repeated = torch.tensor([4.0] * multiplicity + [2.0, 2.0, 6.0, -3.0], dtype=torch.float64)
        operator = Diagonal(torch.cat([repeated, bulk]), dtype)
        k = multiplicity + 3
        pairs = lanczos(operator, k, tol=1e-3, seed=seed, dense=False).require_converged()
        missed += pairs.complete and wrong_set(pairs, operator, k, "LM", 1e-3)
        unsure += not pairs.complete
    return missed, unsure


@pytest.mark.parametrize("multiplicity", [2, 4, 8])
def test_copies_are_never_silently_missing(multiplicity):
    missed, unsure = count_missed_copies(multiplicity, torch.float32, range(8))
    assert missed == 0
    assert unsure <= 1  # and it does certify, nearly always


@pytest.mark.slow
@pytest.mark.parametrize("multiplicity", range(2, 9))
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_copies_are_never_silently_missing_on_many_seeds(multiplicity, dtype):
    missed, unsure = count_missed_copies(multiplicity, dtype, range(100, 140))
    assert missed == 0
    assert unsure <= 4


@pytest.mark.slow
def test_the_suite_costs_at_most_half_more_products_than_arpack():
    from scipy.sparse.linalg import LinearOperator, eigsh

    ours, theirs = 0, 0
    for values in SPECTRA.values():
        if not values.any() or np.ptp(values) == 0.0:
            continue  # ARPACK breaks down on these
        for k in (4, 10):
            operator = Diagonal(values)
            lanczos(operator, k, tol=1e-4, dense=False)
            ours += operator.products
            other = Diagonal(values)
            start = np.random.default_rng(0).normal(size=other.n)
            scipy_operator = LinearOperator(
                (other.n, other.n),
                matvec=lambda x, a=other: (a @ torch.from_numpy(x.reshape(-1))).numpy(),
                dtype=np.float64,
            )
            eigsh(scipy_operator, k, which="LM", tol=1e-4, v0=start, return_eigenvectors=False)
            theirs += other.products
    assert ours <= 1.5 * theirs, (ours, theirs)


@pytest.mark.parametrize("rows", [17, 22])
def test_a_small_basis_restarts_and_stays_right(rows):
    operator = Diagonal(SPECTRA["slowly decaying"])
    pairs = lanczos(operator, 5, tol=1e-8, room=Room(rows=rows), dense=False)
    pairs.require_converged(complete=True)
    assert pairs.restarts > 0
    assert torch.allclose(pairs.values, truth(operator.values, 5, "LM"), rtol=1e-12)
    assert (true_residuals(pairs, operator) <= pairs.residuals).all()
    assert pairs.orthogonality < 1e-14


@pytest.mark.parametrize("tol", [1e-2, 1e-3])
@pytest.mark.parametrize("name", ["ladder", "pairs", "semicircle"])
def test_in_a_bulk_every_place_holds_its_eigenvalue_within_its_tolerance(name, tol):
    """At 1e-2 a tolerance spans several neighbours: which vectors are found is open there."""
    places = np.linspace(0, 1, 400)
    values = {"ladder": places, "pairs": np.repeat(places[::2], 2)}.get(name)
    values = np.sin(np.pi * (places - 0.5)) if values is None else values
    for seed, dtype in ((0, torch.float64), (1, torch.float32)):
        operator = Diagonal(values, dtype)
        pairs = lanczos(operator, 40, tol=tol, seed=seed, which="LA")
        off = (pairs.values - truth(operator.values, 40, "LA")).abs()
        assert pairs.converged.all()
        assert not pairs.complete or (off <= pairs.tolerances + pairs.floor).all()


def test_looking_at_the_coefficients_rarely_gives_the_same_pairs():
    values = SPECTRA["Hessian with copies"]
    often = lanczos(Diagonal(values), 6, tol=1e-6, dense=False)

    def looking(values, k, tol, stride):
        products = Products(Diagonal(values), None)
        asked = replace(request(products, k, tol=tol), stride=stride)
        return run(products, asked, vectors=None, keeping=None, progress=False, method="lanczos")

    rarely = looking(values, 6, 1e-6, 5)
    low_rank = looking(SPECTRA["low rank"], 8, 1e-3, 4)
    assert torch.allclose(often.values, rarely.values, rtol=1e-9)
    assert torch.allclose(low_rank.values.abs()[:5], torch.tensor([5, 4, 3, 2, 1.0]).double())
    assert bool(low_rank.converged.all())


@pytest.mark.parametrize("block", [2, 4])
@pytest.mark.parametrize("name", ["multiplicity 4", "Hessian", "low rank", "identity", "zero"])
def test_blocks_find_the_same_pairs(name, block):
    operator = Diagonal(SPECTRA[name])
    pairs = block_lanczos(operator, 6, block=block, tol=1e-6).require_converged()
    assert pairs.matvecs == operator.products
    assert not wrong_set(pairs, operator, 6, "LM", 1e-6)
    assert (true_residuals(pairs, operator) <= pairs.residuals + 1e-15 * pairs.norm).all()


@pytest.mark.parametrize("seed", range(6))
def test_blocks_find_no_more_directions_than_the_space_has(seed):
    for n in (88, 89, 90, 91):  # a last block that is only partly there
        values = torch.cat([torch.linspace(0, 1, n - 10), 1.05 + 1e-4 * torch.arange(10)])
        operator = Diagonal(values, torch.float32)
        pairs = block_lanczos(operator, 17, block=3, which="LA", tol=1e-3, seed=seed)
        assert pairs.converged.all()
        assert not pairs.complete or not wrong_set(pairs, operator, 17, "LA", 1e-3)


def test_explicit_verification_costs_one_product_per_pair_and_agrees():
    values = SPECTRA["Hessian"]
    cheap = lanczos(Diagonal(values), 6, dense=False)
    checked = lanczos(Diagonal(values), 6, dense=False, certify=Certify(explicit=True))
    # and then the oldest product need not be made again to see whether the operator has changed
    assert checked.matvecs == cheap.matvecs - 1 + 6
    assert torch.equal(checked.values, cheap.values)
    true = true_residuals(checked, Diagonal(values))
    assert (checked.residuals >= true).all()
    assert (checked.residuals <= true * (1 + 1e-6) + checked.floor).all()
    assert (cheap.residuals >= true * (1 - 1e-9)).all()


@pytest.mark.parametrize("certify", [True, False])
@pytest.mark.parametrize("solver", [lanczos, block_lanczos])
def test_residuals_are_the_true_ones_up_to_rounding(solver, certify):
    operator = Diagonal(SPECTRA["Hessian"])
    pairs = solver(operator, 8, tol=1e-3, certify=certify)
    true = true_residuals(pairs, operator)
    assert float(true.max()) > 1e-5  # there is something to measure
    assert (true <= pairs.residuals * (1 + 1e-9)).all()
    assert (pairs.residuals <= true * (1 + 1e-9) + pairs.floor).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("spectrum", ["ones", "ladder", "outliers"])
def test_no_residual_is_reported_below_the_true_one_at_the_level_of_rounding(spectrum, dtype):
    """The true one from products in extended precision: what is compared is a few roundings."""
    n, rng = 330, np.random.default_rng(0)
    values = {"ones": np.ones(n), "ladder": np.linspace(-1, 1, n)}.get(spectrum)
    if values is None:
        values = np.concatenate([[10, 7, 5, 4, -3.0], 0.05 * rng.normal(size=n - 5)])
    q = np.linalg.qr(rng.normal(size=(n, n)))[0]
    matrix = torch.from_numpy((q * values) @ q.T).to(dtype)
    matrix = (matrix + matrix.T) / 2
    product = FromFunction(lambda v: v @ matrix, n, dtype=dtype)
    exact = matrix.numpy().astype(np.longdouble)
    for solve in (
        lambda seed: lanczos(product, 5, tol=0.0, seed=seed, dense=False),
        lambda seed: lanczos(matrix, 5, tol=0.0, seed=seed, dense=False),
        lambda seed: lanczos(matrix, 5, tol=0.0, seed=seed, dense=True),
        lambda seed: lanczos(product, 5, tol=1e-4, seed=seed, certify=Certify(explicit=True)),
        lambda seed: lanczos(product, 5, tol=0.0, seed=seed, room=Room(rows=20)),
        lambda seed: block_lanczos(product, 5, tol=0.0, seed=seed),
    ):
        for seed in range(2):
            pairs = solve(seed)
            vectors = pairs.vectors.numpy().astype(np.longdouble)
            rest = vectors @ exact - pairs.values.numpy()[:, None] * vectors
            true = np.sqrt((rest**2).sum(1))
            assert (true <= pairs.residuals.numpy()).all()


def test_a_tolerance_below_the_precision_ends_with_that_reason():
    pairs = lanczos(Diagonal(SPECTRA["Hessian"], torch.float32), 6, tol=1e-9, dense=False)
    assert not bool(pairs.converged.all())
    assert "precision" in pairs.reason
    assert pairs.matvecs < 200
    with pytest.raises(RuntimeError, match="float64"):
        pairs.require_converged()


def test_relative_to_the_norm_is_the_looser_rule():
    values = SPECTRA["slowly decaying"]
    by_value = lanczos(Diagonal(values), 10, tol=1e-6, dense=False)
    by_norm = lanczos(Diagonal(values), 10, tol=1e-6, relative_to="norm", dense=False)
    assert by_norm.matvecs <= by_value.matvecs
    assert (by_norm.tolerances == by_norm.tolerances[0]).all()
    assert bool(by_norm.converged.all())


@pytest.mark.parametrize("n", [150, 290, 600])
def test_no_search_makes_more_products_than_the_whole_matrix_takes(n):
    values = 1.0 - torch.linspace(0, 1, n, dtype=torch.float64) ** 2 * 1e-2  # hard to tell apart
    pairs = lanczos(FromFunction(lambda v: v * values, n, dtype=torch.float64), 2, tol=1e-6)
    # the probe's products and the check at the end are not the search's
    assert pairs.matvecs <= n + (5 if n < 300 else 1)
    if n < 300:
        assert pairs.complete
        assert torch.allclose(pairs.values, values[:2], rtol=1e-6)
    else:
        assert not pairs.complete


@pytest.mark.parametrize("apart", [2e-4, 5e-3])
def test_values_that_tol_does_not_tell_apart_are_said_to_be_open(apart):
    bulk = np.linspace(-0.5, 0.5, 1000)
    spectrum = Diagonal(np.concatenate([[5, 4, 3, -1.1, 1.1 * (1 + apart)], bulk]))
    pairs = lanczos(spectrum, 4, tol=1e-3)
    assert pairs.complete
    assert ("which of them is number 4 is open" in pairs.reason) == (apart < 1e-3)
    assert abs(abs(float(pairs.values[3])) / (1.1 * (1 + apart)) - 1) < 1e-3
