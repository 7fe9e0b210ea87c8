"""The chain that shows that no eigenvalue is missing: its operator, its points and its doubt."""

from itertools import pairwise

import pytest
import torch

from curvlab.eigen import Certify, lanczos
from curvlab.eigen.certifying import Account
from curvlab.eigen.hidden import Chain, tilted
from curvlab.eigen.products import Products
from curvlab.eigen.request import request
from curvlab.eigen.ritz import Ritz
from curvlab.eigen.selection import Edge
from curvlab.eigen.solver import Solver
from curvlab.eigen.starting import start
from curvlab.operators import Dense
from curvlab.probe import Certificate
from tests.test_eigen_conformance import Diagonal


def symmetric(values: torch.Tensor, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    square = torch.randn(len(values), len(values), generator=generator, dtype=torch.float64)
    vectors = torch.linalg.qr(square).Q
    matrix = (vectors * values.double()) @ vectors.T
    return (matrix + matrix.T) / 2


def searched(matrix: torch.Tensor, steps: int, k: int, block: int = 1) -> tuple[Solver, Ritz]:
    """A search that was stopped after some products, with its frontier set aside."""
    products = Products(Dense(matrix), None)
    certificate: Certificate = products.probe(0)
    solver = Solver(products, request(products, k, block=block, which="LM"), certificate)
    start(solver, None)
    for _ in range(steps):
        solver.expand()
    solver.krylov.settle()
    solver.krylov.set_aside()
    return solver, solver.ritz()


@pytest.mark.parametrize("block", [1, 3])
@pytest.mark.parametrize("steps", [3, 6, 12])
def test_the_tilted_operator_counts_what_the_wanted_pairs_leave_beyond_a_point(steps, block):
    """Sylvester's law against the spectrum of what is left, for points at all heights."""
    generator = torch.Generator().manual_seed(steps)
    values = torch.randn(60, generator=generator, dtype=torch.float64)
    matrix = symmetric(values, steps)
    solver, ritz = searched(matrix, steps, 3, block)
    krylov = solver.krylov
    basis, aside = krylov.rows.rows(), krylov.aside.rows
    complement = torch.linalg.svd(basis).Vh[len(basis) :]
    couplings = krylov.aside.coupling[:, : krylov.multiplied] @ ritz.mixing
    pairs = ritz.mixing.T @ basis
    counts = set()
    for side in (1, -1):
        for height in torch.linspace(-2.3, 2.3, 24).tolist():
            chosen, tilt = tilted({0: Edge(height, side)}, ritz.values, couplings, 3, 0.0)
            beyond = side * (ritz.values - height) > 0.0
            rest = torch.cat([pairs[~beyond], complement])
            left = torch.linalg.eigvalsh(rest @ matrix @ rest.T)
            seen = torch.linalg.eigvalsh(
                complement @ (matrix + aside.T @ tilt @ aside) @ complement.T
            )
            point = chosen[0].point
            assert point == height
            expected = int((side * (left - height) > 0.0).sum())
            assert int((side * (seen - point) > 0.0).sum()) == expected
            counts.add(expected)
    assert 0 in counts
    assert len(counts) > 3


def test_one_chain_shows_a_second_edge_where_the_difference_of_the_tilts_allows_it():
    values = torch.randn(60, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    matrix = symmetric(values, 1)
    solver, ritz = searched(matrix, 8, 3)
    krylov, aside = solver.krylov, solver.krylov.aside.rows
    couplings = krylov.aside.coupling[:, : krylov.multiplied] @ ritz.mixing
    complement = torch.linalg.svd(krylov.rows.rows()).Vh[krylov.multiplied :]
    for far in (4.0, 8.0, 16.0):
        ends = {0: Edge(2.5, 1), 1: Edge(-far, -1)}
        both, tilt = tilted(ends, ritz.values, couplings, 3, 0.0)
        alone, _ = tilted({0: ends[0]}, ritz.values, couplings, 3, 0.0)
        _, other = tilted({1: ends[1]}, ritz.values, couplings, 3, 0.0)
        assert both[0] == alone[0]
        assert both[1].point > -far  # moved inwards
        here, there = (
            torch.linalg.eigvalsh(complement @ (matrix + aside.T @ m @ aside) @ complement.T)
            for m in (tilt, other)
        )
        # below the moved point here if below the point there
        assert float(here.min() - both[1].point) <= float(there.min() + far) + 1e-12
    near = {0: Edge(2.5, 1), 1: Edge(float(ritz.values[3:].min()) - 1e-3, -1)}
    assert list(tilted(near, ritz.values, couplings, 3, 0.0)[0]) == [1]  # the nearer one first


def test_an_edge_just_beyond_a_ritz_value_moves_inside_by_at_most_half_of_its_slack():
    values = torch.tensor([3.0, 2.0, 0.1, -0.2], dtype=torch.float64)
    couplings = torch.tensor([[0.05, 0.001, 0.3, 0.3]], dtype=torch.float64)
    chosen, tilt = tilted({0: Edge(3.0 + 1e-9, 1, 0.1)}, values, couplings, 1, 1e-6)
    assert 2.95 - 2e-6 <= chosen[0].point < 3.0
    assert float(tilt.abs().max()) < 0.1
    # where nothing is near, only by the error of products
    chosen, _ = tilted({0: Edge(2.5, 1, 0.1)}, values, couplings, 1, 1e-6)
    assert chosen[0].point == 2.5 - 1e-6


def test_the_doubt_falls_as_the_chain_grows_and_is_that_of_a_normal_variable():
    chain = Chain(0, {0: Edge(2.0, 1), 1: Edge(-3.0, -1)})
    assert chain.doubts(100)[0] == pytest.approx(1.0)
    doubts = []
    for _ in range(6):
        chain.alphas.append(0.0)
        chain.betas.append(0.5)
        doubts.append(chain.doubts(100))
    assert all(later[0] < earlier[0] for earlier, later in pairwise(doubts))
    # after one step: sum p_i(2)^2 = 1 + (2 / 0.5)^2 = 17, so P(g^2 < 100 / 17)
    assert doubts[0][0] == pytest.approx(0.98470, abs=1e-4)
    assert doubts[5][1] < doubts[5][0]  # further away
    assert not chain.found()


def test_a_ritz_value_beyond_an_edge_is_found_and_another_edge_is_left_to_another_chain():
    chain = Chain(0, {0: Edge(2.0, 1), 1: Edge(-2.0, -1)}, [0.0, 0.0, 0.0], [0.5, 0.5, 0.5])
    assert chain.doubts(100).keys() == {0, 1}
    chain.alphas.append(-2.5)
    chain.betas.append(0.5)
    assert chain.doubts(100).keys() == {0}
    assert not chain.found()
    chain.alphas.append(2.5)
    chain.betas.append(0.5)
    assert chain.doubts(100) == {0: 1.0}
    assert chain.found()


@pytest.mark.parametrize("seed", [3, 8, 17, 22, 25])
def test_an_eigenvalue_that_is_just_emerging_is_not_missed_at_a_loose_tolerance(seed):
    """Of 30 seeds, those on which an untilted chain, or a bound on residuals in its place, does."""
    generator = torch.Generator().manual_seed(seed)
    turned = torch.rand(100, generator=generator, dtype=torch.float64) < 0.3
    values = 0.95 ** torch.arange(100).double() * (1 - 2 * turned.double())
    pairs = lanczos(Diagonal(values), 40, tol=0.1, seed=seed, dense=False)
    assert pairs.complete
    found, places = pairs.values.abs().sort(descending=True)
    assert ((values[:40].abs() - found).abs() <= pairs.tolerances[places] + pairs.floor).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("which", ["LM", "LA"])
@pytest.mark.parametrize("relative_to", ["value", "norm"])
def test_a_wanted_value_of_zero_is_a_boundary_as_any_other(relative_to, which, dtype):
    """The start is orthogonal to a value below half of the others: nothing shows it but a chain."""
    values = torch.zeros(500, dtype=dtype)
    values[:2], values[7] = torch.tensor([10.0, 5.0]), 2.4
    units = torch.eye(500, dtype=dtype)[[0, 1, 9]]
    for given in (units, units.sum(0)):
        for hidden in (2.4, 0.4, 0.04):
            values[7] = hidden
            pairs = lanczos(Diagonal(values, dtype), 3, which=which, relative_to=relative_to,
                            v0=given, dense=False)  # fmt: skip
            assert pairs.complete
            assert abs(float(pairs.values[2]) - hidden) <= float(pairs.tolerances[2]) + pairs.floor


@pytest.mark.parametrize("relative_to", ["value", "norm"])
@pytest.mark.parametrize("rank", [0, 1, 5])
def test_zeros_among_the_wanted_are_found_and_shown_by_a_few_short_chains(rank, relative_to):
    """Each closes on the rounding of its product and shows little; 27 products were seen."""
    values = torch.zeros(400, dtype=torch.float64)
    values[:rank] = torch.arange(rank, 0.0, -1.0)
    for matrix in (symmetric(values, rank), symmetric(values, rank).float()):
        pairs = lanczos(matrix, 10, relative_to=relative_to, dense=False)
        assert pairs.complete
        assert pairs.matvecs <= 30


@pytest.mark.parametrize("seed", range(3))
def test_wanted_values_at_both_ends_take_one_chain_where_few_ritz_vectors_tilt_it_enough(seed):
    """The bulk of a network's Hessian, and wanted values on either side of it."""
    n = 4000
    angles = torch.linspace(0.0, torch.pi, n - 20, dtype=torch.float64)
    outside = torch.linspace(1.3, 3.0, 10, dtype=torch.float64)
    values = torch.cat([outside, -outside - 0.01, torch.cos(angles)])
    costs = {}
    for which, k in (("LM", 20), ("LA", 10)):
        found, plain = (
            lanczos(Diagonal(values), k, which=which, seed=seed, certify=certify, progress=False)
            for certify in (True, False)
        )
        assert found.complete
        costs[which] = found.matvecs - plain.matvecs
    assert costs["LM"] < 1.5 * costs["LA"], costs


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("seed", range(4))
def test_a_chain_that_closes_on_rounding_does_not_hide_values_of_a_few_roundings(seed, dtype):
    """The products of a random vector are as short as what counts as rounding of a long one."""
    n, small = 20_000, 1700 * torch.finfo(dtype).eps
    values = torch.zeros(n, dtype=dtype)
    values[:3] = torch.tensor([1.0, small, small / 2])
    given = torch.eye(n, dtype=dtype)[[0, 2]]  # lacks the second
    pairs = lanczos(Diagonal(values, dtype), 2, v0=given, seed=seed, dense=False)
    assert not pairs.complete or abs(float(pairs.values[1]) - small) <= 1e-3 * small + pairs.floor


def test_values_at_two_edges_are_missed_no_more_often_than_the_doubt_says():
    """A chain for one edge that sees something beyond the other leaves that to another chain."""
    missed = 0
    for seed in range(400):
        spread = torch.rand(60, generator=torch.Generator().manual_seed(seed)).double()
        values = 0.97 * (2.0 * spread - 1.0)
        values[:4] = torch.tensor([3.0, -2.0, 1.0, -1.0105])
        given = torch.eye(60, dtype=torch.float64)[[0, 1, 2]]  # lacks the last
        pairs = lanczos(Diagonal(values, torch.float64), 3, tol=0.01, v0=given, seed=seed,
                        dense=False, certify=Certify(doubt=0.1, products=2000),
                        max_products=20000)  # fmt: skip
        missed += pairs.complete and float(pairs.values[2]) > 0.0
    assert missed <= 0.1 * 400 + 3.0 * (0.1 * 0.9 * 400) ** 0.5


def test_doubts_of_chains_that_closed_are_those_of_a_product_of_uniform_numbers():
    generator = torch.Generator().manual_seed(0)
    numbers = torch.rand(100_000, 3, generator=generator, dtype=torch.float64)
    for doubts in ((0.1, 0.3), (0.02, 0.2, 0.05)):
        account = Account()
        for doubt in doubts[:-1]:
            account.close(doubt)
        account.enter(doubts[-1])
        before = len(doubts) - 1
        share = 0.1 / (before * (before + 1))
        product = torch.tensor(doubts).prod()
        chance = float((numbers[:, : len(doubts)].prod(1) <= product).double().mean())
        assert account.doubt == pytest.approx(min(1.0, chance / share), rel=0.05)
