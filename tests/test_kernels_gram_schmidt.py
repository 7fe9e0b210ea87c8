"""Gram-Schmidt kernels: orthonormal rows whatever comes in, and a rank rule instead of NaN."""

from math import fsum

import pytest
import torch
from curvlab_kernels import _cpu, reference

from benchmarks.measure import peak_memory

ORTHOGONAL = {torch.float32: 5e-7, torch.float64: 2e-13}  # spectral norm of Q Q' - I
SEEN = {torch.float32: 4e-6, torch.float64: 1e-12}  # relative norm that a block may lose
FACES = [reference, _cpu]
DTYPES = [torch.float32, torch.float64]


@pytest.fixture(params=FACES, ids=["reference", "cpu"])
def kernels(request):
    return request.param


def departure(rows):
    exact = rows.double()
    return float(torch.linalg.matrix_norm(exact @ exact.T - torch.eye(len(rows)), ord=2))


def orthonormal(m, n, dtype, generator):
    """Padded orthonormal rows ``(m, ld)``."""
    vectors = torch.randn(n, m, generator=generator, dtype=torch.float64)
    rows, _ = reference.quantise(torch.linalg.qr(vectors).Q.T.contiguous(), dtype)
    return rows


def prescribed(b, n, condition, generator):
    """``(b, n)`` with singular values from 1 to 1/condition, float64."""
    left = torch.linalg.qr(torch.randn(b, b, generator=generator, dtype=torch.float64)).Q
    right = torch.linalg.qr(torch.randn(n, b, generator=generator, dtype=torch.float64)).Q
    exponents = torch.linspace(0, 1, b, dtype=torch.float64)
    return (left * condition**-exponents) @ right.T


def hilbert(b, n):
    return 1.0 / (torch.arange(b).unsqueeze(1) + torch.arange(1, n + 1)).double()


def lauchli(b, n, small):
    block = torch.zeros(b, n, dtype=torch.float64)
    block[:, 0] = 1.0
    block[torch.arange(b), torch.arange(1, b + 1)] = small
    return block


def awkward(b, n, generator):
    """Name and block of everything that makes Gram-Schmidt fail."""
    duplicate = torch.randn(b, n, generator=generator, dtype=torch.float64)
    duplicate[1], duplicate[2] = duplicate[0], 0.0
    duplicate[3] = 2 * duplicate[0] - 3 * duplicate[4]
    return {
        "condition 1": prescribed(b, n, 1.0, generator),
        "condition 1e3": prescribed(b, n, 1e3, generator),
        "condition 1e6": prescribed(b, n, 1e6, generator),
        "condition 1e12": prescribed(b, n, 1e12, generator),
        "hilbert": hilbert(b, n),
        "lauchli 1e-4": lauchli(b, n, 1e-4),
        "lauchli 1e-9": lauchli(b, n, 1e-9),
        "duplicate, zero and dependent": duplicate,
        "zeros": torch.zeros(b, n, dtype=torch.float64),
        "tiny": 1e-30 * prescribed(b, n, 10.0, generator),
        "huge": 1e30 * prescribed(b, n, 10.0, generator),
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("m", "b", "n"), [(0, 8, 501), (10, 8, 5000), (20, 20, 7001)])
def test_a_block_becomes_orthonormal_whatever_it_is(kernels, m, b, n, dtype, generator):
    rows = orthonormal(m, n, dtype, generator)
    for name, exact in awkward(b, n, generator).items():
        block = exact.to(dtype)
        kept = kernels.orthonormalise_block_(rows, block)
        assert block.isfinite().all(), name
        assert not block[~kept].any(), name
        together = torch.cat([rows[:, :n], block[kept]])
        assert departure(together) <= ORTHOGONAL[dtype], name
        if name == "zeros":
            assert not kept.any()
        if name.startswith("duplicate"):
            # Of dependent vectors the first is kept: 3 was made of 0 and 4, so 4 goes.
            assert (~kept).nonzero().flatten().tolist() == [1, 2, 4]
        # Nothing is lost: what a dropped or kept vector had outside rows and block is rounding.
        basis, scale = together.double(), exact.norm(dim=1, keepdim=True).clamp(min=1e-300)
        rest = exact.to(dtype).double() / scale
        rest = rest - (rest @ basis.T) @ basis
        assert float(rest.norm(dim=1).max()) <= SEEN[dtype], name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("m", [9, 12, 13])
def test_a_block_has_no_more_directions_than_the_rows_leave(kernels, m, dtype, generator):
    for _ in range(200):
        rows = orthonormal(m, 13, dtype, generator)
        block = torch.randn(4, m, generator=generator, dtype=torch.float64) @ rows[:, :13].double()
        outside = torch.randn(4, 13, generator=generator, dtype=torch.float64)
        block = (block + 100 * torch.finfo(dtype).eps * outside).to(dtype)
        kept = kernels.orthonormalise_block_(rows, block)
        together = torch.cat([rows[:, :13], block[kept]])
        assert len(together) <= 13
        assert departure(together) <= ORTHOGONAL[dtype]


def exact_products(rows, others):
    """``rows @ others.T`` of float64 matrices, each sum rounded once."""
    sums = [[fsum((row * other).tolist()) for other in others] for row in rows]
    return torch.tensor(sums, dtype=torch.float64).view(len(rows), len(others))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("m", "n"), [(0, 5), (1, 1000), (30, 4999), (7, 70_001)])
def test_a_vector_becomes_orthogonal_and_unit(kernels, m, n, dtype, generator):
    rows = orthonormal(m, n, dtype, generator)
    exact = torch.randn(n, generator=generator, dtype=torch.float64).to(dtype)
    if m:
        exact = exact + 1e4 * rows[0, :n]
    vector = exact.clone()
    removed, norm = kernels.orthonormalise_(rows, vector)
    basis = rows[:, :n].double()
    # Summed exactly, and the rows as they are: orthonormal to a few roundings, not quite.
    inner = exact_products(basis, torch.cat([basis, exact.double().unsqueeze(0)]))
    truth = torch.linalg.solve(inner[:, :m], inner[:, m])
    rest = exact.double() - truth @ basis
    close = 10 * torch.finfo(dtype).eps * float(exact.double().norm())
    assert (removed - truth).norm() <= close
    assert abs(float(norm) - float(rest.norm())) <= close
    assert departure(torch.cat([rows[:, :n], vector.unsqueeze(0)])) <= ORTHOGONAL[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("m", [1, 40, 400])
def test_a_vector_in_the_span_is_reported_as_dependent(kernels, m, dtype, generator):
    rows = orthonormal(m, 2000, dtype, generator)
    weights = torch.randn(m, generator=generator, dtype=torch.float64)
    for vector in (
        (weights @ rows[:, :2000].double()).to(dtype),
        rows[0, :2000].clone(),
        torch.zeros(2000, dtype=dtype),
    ):
        _, norm = kernels.orthonormalise_(rows, vector)
        assert float(norm) == 0.0
        assert not vector.any()


def test_a_nearly_dependent_vector_is_kept_and_orthogonal(kernels, generator):
    rows = orthonormal(20, 5000, torch.float32, generator)
    other = torch.randn(5000, generator=generator)
    other /= other.norm()
    vector = rows[:, :5000].sum(0) + 3e-5 * other
    _, norm = kernels.orthonormalise_(rows, vector)
    assert 1e-5 < float(norm) < 1e-4
    assert departure(torch.cat([rows[:, :5000], vector.unsqueeze(0)])) <= 5e-7


def test_nan_is_neither_hidden_nor_kept(kernels, generator):
    rows = orthonormal(3, 100, torch.float32, generator)
    block = torch.randn(4, 100, generator=generator)
    block[2, 50] = float("nan")
    before = block.clone()
    with pytest.raises(ValueError, match=r"vectors \[2\]"):
        kernels.orthonormalise_block_(rows, block)
    assert torch.equal(block.nan_to_num(7.0), before.nan_to_num(7.0))
    _, norm = kernels.orthonormalise_(rows, before[2])
    assert torch.isnan(norm)


def spectrum_operator(n, values, generator):
    vectors = torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64)).Q
    return (vectors * values) @ vectors.T, vectors


def run_lanczos(kernels, matrix, steps, dtype, generator, deflated=None):
    """Lanczos with the kernel alone; returns rows ``(steps + 1, ld)`` and T ``(steps, steps)``."""
    n = matrix.shape[0]
    base = 0 if deflated is None else deflated.shape[0]
    rows = torch.zeros(base + steps + 1, reference.padded(n), dtype=dtype)
    if deflated is not None:
        rows[:base, :n] = deflated
    start = torch.randn(n, generator=generator, dtype=dtype)
    kernels.orthonormalise_(rows[:base], start)
    rows[base, :n] = start
    small = torch.zeros(steps, steps, dtype=torch.float64)
    beta = None
    for j in range(steps):
        w = (matrix @ rows[base + j, :n].double()).to(dtype)
        previous = None if j == 0 else float(beta)
        alpha, beta, removed = kernels.lanczos_step_(rows[: base + j + 1], w, previous)
        assert alpha == removed[-1]
        small[j, j] = alpha
        if j + 1 < steps:
            small[j, j + 1] = small[j + 1, j] = beta
        rows[base + j + 1, :n] = w
        if float(beta) == 0.0:
            return rows[: base + j + 1], small[: j + 1, : j + 1]
    return rows, small


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_lanczos_steps_keep_the_basis_orthonormal_and_find_no_ghosts(kernels, dtype, generator):
    n = 300
    values = torch.logspace(2, -6, n, dtype=torch.float64)
    values[5:9] *= -1
    matrix, _ = spectrum_operator(n, values, generator)
    rows, small = run_lanczos(kernels, matrix, 80, dtype, generator)
    assert departure(rows[:, :n]) <= ORTHOGONAL[dtype]
    found = torch.linalg.eigvalsh(small)
    order = found.abs().argsort(descending=True)[:20]
    exact = values[values.abs().argsort(descending=True)[:20]]
    assert (found[order] - exact).abs().max() <= 20 * torch.finfo(dtype).eps * 100
    # A V = V T + beta v e'
    basis = rows[:-1, :n].double()
    rest = matrix @ basis[:-1].T - basis.T @ small[:, :-1]
    assert rest.abs().max() <= 20 * torch.finfo(dtype).eps * 100


def test_lanczos_steps_work_beside_deflated_rows(kernels, generator):
    n = 200
    values = torch.logspace(2, -2, n, dtype=torch.float64)
    matrix, vectors = spectrum_operator(n, values, generator)
    # Not eigenvectors: products have large components along them in every step.
    mixed = vectors[:, :6].T + 0.3 * vectors[:, 10:16].T
    deflated = torch.linalg.qr(mixed.T).Q.T.float()
    rows, small = run_lanczos(kernels, matrix, 60, torch.float32, generator, deflated)
    assert departure(rows[:, :n]) <= ORTHOGONAL[torch.float32]
    keep = torch.eye(n, dtype=torch.float64) - deflated.T.double() @ deflated.double()
    exact = torch.linalg.eigvalsh(keep @ matrix @ keep)[-5:]
    assert (torch.linalg.eigvalsh(small)[-5:] - exact).abs().max() <= 1e-4


def test_a_product_that_lies_mostly_in_other_rows_gets_another_pass(kernels, generator):
    """The recurrence sees two rows only; the first full pass then takes nearly everything."""
    n = 3000
    rows = orthonormal(8, n, torch.float32, generator)
    other = torch.randn(n, generator=generator)
    w = 3e4 * rows[:6, :n].sum(0) + 0.5 * rows[6, :n] + 2.0 * rows[7, :n] + other / other.norm()
    exact = w.double()
    alpha, beta, removed = kernels.lanczos_step_(rows, w, 0.5)
    assert departure(torch.cat([rows[:, :n], w.unsqueeze(0)])) <= ORTHOGONAL[torch.float32]
    assert (removed - rows[:, :n].double() @ exact).abs().max() <= 1e-6 * exact.norm()
    assert alpha == removed[-1]
    assert 0.9 < float(beta) < 1.1


def test_an_exhausted_space_ends_with_beta_zero(kernels, generator):
    matrix, _ = spectrum_operator(12, torch.arange(1.0, 13.0).double(), generator)
    rows, small = run_lanczos(kernels, matrix, 20, torch.float64, generator)
    assert small.shape == (12, 12)
    assert (torch.linalg.eigvalsh(small) - torch.arange(1.0, 13.0)).abs().max() <= 1e-12
    assert departure(rows[:, :12]) <= 1e-13


def test_a_thick_restart_goes_on_with_every_coupling(kernels, generator):
    """After a restart the first product meets every Ritz vector: no previous_beta."""
    n, keep = 150, 8
    values = torch.logspace(1, -3, n, dtype=torch.float64)
    matrix, _ = spectrum_operator(n, values, generator)
    rows, small = run_lanczos(kernels, matrix, 30, torch.float64, generator)
    ritz, mixing = torch.linalg.eigh(small)
    restarted = torch.zeros(keep + 2, rows.shape[1], dtype=torch.float64)
    restarted[:keep] = mixing[:, -keep:].T @ rows[:30]
    restarted[keep] = rows[30]
    w = matrix @ restarted[keep, :n]
    exact = restarted[: keep + 1, :n] @ w
    alpha, beta, removed = kernels.lanczos_step_(restarted[: keep + 1], w)
    assert (removed - exact).abs().max() <= 1e-13 * 10
    assert alpha == removed[-1]
    restarted[keep + 1, :n] = w
    assert float(beta) > 0
    assert departure(restarted[:, :n]) <= 1e-13
    assert (matrix @ restarted[0, :n] - ritz[-keep] * restarted[0, :n]).norm() <= 1.0


def test_a_block_is_orthonormalised_in_its_own_memory(generator):
    block = torch.randn(32, 1_000_000, generator=generator)
    rows = block.new_zeros(0, block.shape[1])
    _cpu.orthonormalise_block_(rows[:, :64], block[:, :64].clone())  # loads what loads on first use
    extra = peak_memory(lambda: _cpu.orthonormalise_block_(rows, block), threads=1)
    assert extra < 0.5 * block.nbytes  # a float64 copy would be twice the block
