"""What a solve may take is what it takes: rows, bytes, a file; or it is refused beforehand."""

from functools import partial

import pytest
import torch

from curvlab.eigen import Certify, Room, block_lanczos, lanczos
from curvlab.eigen.checkpoint import write_checkpoint
from curvlab.eigen.finish import eigenpairs
from curvlab.eigen.outcome import Outcome
from curvlab.eigen.products import Products
from curvlab.eigen.request import check_start, request
from curvlab.eigen.room import ASIDE, PASSING, result_vectors, solve_bytes
from curvlab.eigen.solver import Solver
from curvlab.eigen.starting import start
from curvlab.operators import FromFunction
from curvlab.operators.products.sizing import LiveBytes
from curvlab.rows import MappedFile
from curvlab.rows.sizes import row_bytes
from curvlab.storage import load_tensors
from tests.dense_truth import rotated

N = 600
VALUES = torch.cat([torch.tensor([9.0, 7.0, 7.0, -6.0, 4.0]), torch.linspace(-1, 1, N - 5)])


def diagonal(values=VALUES):
    return FromFunction(lambda v: v * values, len(values), dtype=values.dtype)


@pytest.mark.parametrize("rows", [13, 16, 24, 60])
@pytest.mark.parametrize("certify", [True, False])
def test_rows_are_all_rows_certification_included(rows, certify):
    products = Products(diagonal(), None)
    asked = request(products, 4, room=Room(rows=rows), certify=certify)
    solver = Solver(products, asked, products.probe(0))
    start(solver, None)
    most = 0
    while solver.outcome is None:
        solver.step()
        most = max(most, solver.krylov.size + len(solver.krylov.aside))
    assert solver.krylov.rows.capacity <= rows
    assert most <= rows
    wanted = torch.tensor([9.0, 7.0, 7.0, -6.0] if certify else [9.0]).double()
    found = lanczos(diagonal(), 4, room=Room(rows=rows), certify=certify)
    assert torch.allclose(found.values[: len(wanted)], wanted, rtol=1e-4)


def test_a_chain_of_more_products_than_there_are_rows_for_certifies():
    """A long vector meets a hidden eigenvector less: more products than rows that are left."""
    n = 200_000
    values = torch.zeros(n)
    values[:60] = torch.linspace(-1.3, 1.3, 60)  # so that eight products do not do
    values[60:65] = torch.tensor([3.0, -2.8, 2.5, 2.2, -2.0])
    pairs = lanczos(diagonal(values), 5, tol=1e-2, room=Room(rows=24))
    assert pairs.complete
    assert torch.allclose(pairs.values, values[60:65].double(), rtol=1e-3)


@pytest.mark.parametrize("certify", [True, False])
def test_a_search_may_fill_every_row_that_there_is(certify):
    values = torch.linspace(1, 2, 5000, dtype=torch.float64)
    products = Products(diagonal(values), None)
    solver = Solver(products, request(products, 4, room=Room(rows=20), certify=certify), None)
    start(solver, None)
    while not solver.krylov.restarts:
        before = solver.krylov.size
        solver.step()
    assert before == 20


def test_a_result_is_made_without_a_copy_of_it():
    n, k = 100_000, 5
    vectors = torch.randn(k, n, generator=torch.Generator().manual_seed(0))
    space = Products(diagonal(torch.ones(n)), None).space
    with LiveBytes() as live:
        space.canonical_signs_(vectors)
    assert live.peak < vectors.nbytes / k
    assert bool((vectors.gather(1, vectors.abs().argmax(1, keepdim=True)) > 0).all())


@pytest.mark.parametrize(
    ("certify", "dtype", "k"),
    [
        (True, torch.float32, 3),
        (False, torch.float32, 3),
        (Certify(explicit=True), torch.float32, 8),
        (False, torch.bfloat16, 8),
    ],
    ids=str,
)
def test_the_last_check_and_the_result_take_what_was_planned(certify, dtype, k, tmp_path):
    n = 1_500_000
    values = torch.zeros(n)
    values[: k + 2] = torch.arange(k + 2, 0, -1)
    products = Products(diagonal(values.to(dtype)), None)
    room, tol = Room(rows=k + 12, file=tmp_path / "rows"), 0.1 if dtype == torch.bfloat16 else 1e-3
    solver = Solver(products, request(products, k, tol=tol, room=room, certify=certify), None)
    start(solver, None)
    while solver.outcome is None:
        solver.step()
    made, vector = products.count, row_bytes(n, products.dtype)
    with LiveBytes() as live:
        pairs = eigenpairs(solver, began=0.0, method="lanczos")
    assert bool(pairs.converged.all())
    assert products.count > made  # the check was made
    # What is set aside was there before; a product of this operator takes two vectors of its own,
    # kernels take 4 MB and a little in float64.
    held = max(result_vectors(k, dtype.itemsize), PASSING - ASIDE + 2)
    assert live.peak <= (held + 0.8) * vector


def test_a_checkpoint_is_written_without_a_copy_of_the_rows(tmp_path):
    n = 100_001  # rows are padded: there are gaps between them
    products = Products(diagonal(torch.linspace(0, 1, n)), None)
    solver = Solver(products, request(products, 3), None)
    start(solver, None)
    for _ in range(8):
        solver.step()
    with LiveBytes() as live:
        write_checkpoint(tmp_path / "state", solver, asked={}, seconds=0.0)
    assert live.peak < 2 * row_bytes(n, torch.float32)
    saved, _ = load_tensors(tmp_path / "state", "lanczos checkpoint")
    assert torch.equal(saved["rows"], solver.krylov.rows.rows())


def test_bytes_hold_rows_result_and_what_is_in_the_making():
    products = Products(diagonal(), None)
    for count in (60_000, 90_000, 10**6):
        rows = request(products, 3, room=Room(bytes=count)).quota
        assert solve_bytes(rows.total, 3, row_bytes(N, torch.float32)) <= count
    with pytest.raises(ValueError, match=r"bytes=20000.*needs at least 12 rows \(\d+ bytes"):
        request(products, 3, room=Room(bytes=20_000))


@pytest.mark.parametrize("solver", [lanczos, block_lanczos])
def test_rows_in_a_file_give_the_same_bits_and_leave_nothing_behind(solver, tmp_path):
    mapped = solver(diagonal(), 4, room=Room(rows=40, file=tmp_path / "rows"))
    plain = solver(diagonal(), 4, room=Room(rows=40))
    assert torch.equal(mapped.vectors, plain.vectors)
    assert torch.equal(mapped.residuals, plain.residuals)
    assert list(tmp_path.iterdir()) == []


def test_a_file_takes_rows_to_a_disk_and_keeps_what_it_held(tmp_path):
    named = tmp_path / "rows"
    named.write_text("of the user")
    products = Products(diagonal(), None)
    solver = Solver(products, request(products, 4, room=Room(file=named)), products.probe(0))
    assert isinstance(solver.krylov.rows.tier, MappedFile)
    start(solver, None)
    while solver.outcome is None:
        solver.step()
    assert solver.krylov.rows.whole is not None  # computed on where it is mapped, in one piece
    assert named.read_text() == "of the user"


def test_a_solve_that_does_not_fit_is_refused_before_its_first_product():
    made = 0

    def function(vector):
        nonlocal made
        made += 1
        return vector

    huge = FromFunction(function, 10**12, dtype=torch.float64)
    with pytest.raises(MemoryError, match=r"takes \d+ bytes.*Room\(file=.*float32.*deflate="):
        lanczos(huge, 10)
    assert made == 0


@pytest.mark.parametrize("k", [5, 20])
@pytest.mark.parametrize("n", [100, 150, 200])
def test_a_small_space_costs_hardly_more_products_than_it_has_directions(n, k):
    """The four of the probe and a chain that looks for copies may come on top of n."""
    values = torch.linspace(1, 2, n, dtype=torch.float64)  # no gap: nothing converges early
    pairs = lanczos(diagonal(values), k, tol=1e-8, dense=False)
    assert bool(pairs.converged.all())
    assert pairs.matvecs <= n + 4 + 24
    assert torch.allclose(pairs.values, values.flip(0)[:k], rtol=1e-8)


@pytest.mark.parametrize("certify", [True, False])
def test_rows_that_hold_a_tiny_space_are_enough_for_it(certify):
    for n in range(1, 8):
        values = torch.arange(1, n + 1).double().square().clamp_min(5)  # with copies
        for k in range(1, n + 1):
            for solver in (partial(lanczos, dense=False), partial(block_lanczos, block=2)):
                if solver.func is block_lanczos and n < 2:
                    continue
                room = Room(rows=n + (3 if solver.func is lanczos else 4))
                pairs = solver(diagonal(values), k, room=room, certify=certify)
                assert pairs.converged.all()
                assert pairs.complete or not certify
                if certify:
                    assert torch.allclose(pairs.values, values.flip(0)[:k])


def test_a_warm_start_holds_no_copy_of_its_rows():
    n, k = 1_000_000, 20
    products = Products(diagonal(torch.linspace(0, 1, n)), None)
    given = torch.randn(k, n, generator=torch.Generator().manual_seed(0))
    solver = Solver(products, request(products, k), None)
    with LiveBytes() as live:
        start(solver, check_start(given, products))
    assert solver.krylov.size == k
    # the vectors in the making, and what a few columns of all rows take in float64
    assert live.peak <= 4 * given[0].nbytes + 8 * (1 << 20)


POWER_LAW = 3 * torch.arange(1, 401).double() ** -0.4  # small gaps: a chain needs many steps


@pytest.mark.parametrize("rows", [14, 16, 20])
def test_a_chain_that_fills_its_rows_goes_on_without_the_older_ones(rows):
    usual = lanczos(diagonal(POWER_LAW), 5, tol=1e-3, dense=False)
    products = Products(diagonal(POWER_LAW), None)
    solver = Solver(products, request(products, 5, room=Room(rows=rows)), products.probe(0))
    start(solver, None)
    gone = 0
    while solver.outcome is None:
        solver.step()
        gone = max(gone, 0 if solver.proof.chain is None else solver.proof.chain.gone)
    assert gone > 0
    assert solver.draws == 2  # the start, and one chain
    assert solver.outcome is Outcome.CONVERGED
    assert solver.proof.doubt <= 1e-3
    assert products.count <= 1.5 * usual.matvecs
    assert torch.allclose(solver.ritz().values[:5], POWER_LAW[:5], rtol=1e-3)


def test_a_chain_without_its_older_rows_has_the_recurrence_of_one_with_all():
    """Until orthogonality goes: that of rounding, which grows with every step."""
    chains = []
    for slides in (True, False):
        products = Products(diagonal(POWER_LAW), None)
        solver = Solver(products, request(products, 5), products.probe(0))
        start(solver, None)
        while solver.proof.chain is None:
            solver.step()
        chain, krylov = solver.proof.chain, solver.krylov
        while len(chain) < 12:
            solver.expand()
            krylov.settle()
            chain.read(krylov)
            if slides and len(chain) > 1:
                chain.slide(krylov)
                assert krylov.size == chain.first + 2
        chains.append(torch.tensor([chain.alphas, chain.betas], dtype=torch.float64))
    assert torch.allclose(*chains, rtol=1e-9)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("side", [1, -1])
def test_what_a_chain_finds_without_its_older_rows_comes_into_sight_with_the_next_product(
    side, seed
):
    """Near the last wanted value, where a chain sees a copy only after many products."""
    values = POWER_LAW.clone()
    values[5] = values[4] * 1.003  # a start vector without it leaves it to the chain
    values[6:] *= 0.9
    values *= side
    given = torch.rand(1, len(values), generator=torch.Generator().manual_seed(seed)).double()
    given[0, 5] = 0.0
    products = Products(diagonal(values), None)
    solver = Solver(products, request(products, 5, room=Room(rows=14)), products.probe(0))
    start(solver, given)
    sights = 0
    while solver.outcome is None:
        chain, finds = solver.proof.chain, solver.proof.finds
        edge = None if chain is None else next(iter(chain.edges.values()))
        solver.step()
        if solver.proof.finds > finds and chain.gone > 0:
            solver.step()
            beyond = edge.side * (solver.ritz().values - edge.point) > 0.0
            assert int(beyond.sum()) == 5  # four of the wanted, and what was found
            sights += 1
    assert sights > 0
    assert solver.outcome is Outcome.CONVERGED
    wanted = values[values.abs().argsort(descending=True)[:5]]
    assert torch.allclose(solver.ritz().values[:5], wanted, rtol=1e-3)


def test_copies_are_missed_in_chains_of_few_rows_no_more_often_than_the_doubt_says():
    values = POWER_LAW.clone()
    values[5] = values[2]  # one start vector never shows both
    wanted = values.sort(descending=True).values[:5]
    missed = 0
    for seed in range(60):
        pairs = lanczos(diagonal(values), 5, tol=1e-3, dense=False, room=Room(rows=14),
                        certify=Certify(doubt=0.05), seed=seed)  # fmt: skip
        assert pairs.complete
        missed += not torch.allclose(pairs.values, wanted, rtol=2e-3)
    assert missed <= 0.05 * 60


@pytest.mark.parametrize("rows", [11, 12])
def test_a_value_just_beyond_the_edge_is_missed_no_more_often_than_the_doubt_says(rows):
    """From the least rows on; the start does not meet it, and chains find it again and again."""
    missed = complete = 0
    for seed in range(200):
        generator = torch.Generator().manual_seed(seed)
        values = 0.9 * torch.rand(60, generator=generator, dtype=torch.float64)
        values[:3] = torch.tensor([3.0, 1.0022, 1.0])
        matrix = rotated(values, seed=seed)
        given = torch.linalg.eigh(matrix).eigenvectors.T[[-1, -3]]
        pairs = lanczos(matrix, 2, which="LA", dense=False, seed=seed, v0=given,
                        room=Room(rows=rows),
                        certify=Certify(doubt=0.1, products=2000), max_products=20000)  # fmt: skip
        complete += pairs.complete
        missed += pairs.complete and float(pairs.values[1]) < 1.0011
    assert complete == 200
    assert missed <= 0.1 * 200 + 3.0 * (0.1 * 0.9 * 200) ** 0.5


@pytest.mark.parametrize("rows", [12, 16])
def test_a_chain_without_room_for_what_it_would_bring_back_is_not_begun(rows):
    """Chains that find something leave more frontier rows than there is room for beside one."""
    products = Products(diagonal(torch.ones(N)), None)
    solver = Solver(products, request(products, 1, room=Room(rows=rows)), products.probe(0))
    start(solver, None)
    while solver.add_random() and solver.krylov.size < rows - 1:
        pass
    while solver.outcome is None:
        solver.step()
    assert solver.outcome is Outcome.NOT_EXCLUDED
    assert "no room" in solver.reason


def test_a_search_with_a_basis_of_the_whole_space_has_a_budget_too():
    products = Products(diagonal(torch.ones(60)), None)
    assert request(products, 1).max_products <= 3 * 60 + 10
    assert request(products, 1, max_products=700).max_products == 700
