"""Operators that no solver may accept, and the awkward ones that it must."""

from functools import partial

import pytest
import torch
from torch.nn.functional import cross_entropy

from curvlab.basis import Basis
from curvlab.eigen import (
    Room,
    block_lanczos,
    lanczos,
    power_iteration,
    solve as solve_system,
    spectral_density,
    spectral_energy,
    trace,
)
from curvlab.nets import mlp
from curvlab.operators import FromFunction, GaussNewton
from curvlab.probe import Certificate, OperatorError, usual_limit
from tests.dense_truth import rotated

N = 120
VALUES = torch.cat([torch.tensor([9.0, 7.0, -6.0, 4.0]), torch.linspace(-1, 1, N - 4)]).double()


A = rotated(VALUES)


class Drifting:
    """Like A, but from product ``after`` on it is another operator."""

    def __init__(self, after, change):
        self.n, self.dtype, self.device = N, torch.float64, torch.device("cpu")
        self.after, self.change, self.count = after, change, 0

    def __matmul__(self, vectors):
        self.count += 1 if vectors.ndim == 1 else len(vectors)
        return vectors @ (A if self.count <= self.after else A + self.change)


def solve(matvec, k=3, **options):
    return lanczos(FromFunction(matvec, N, dtype=torch.float64), k, dense=False, **options)


def test_an_asymmetric_operator_is_refused():
    skew = torch.zeros(N, N, dtype=torch.float64)
    skew[0, 1] = 0.5
    with pytest.raises(OperatorError, match="u'Av"):
        solve(lambda v: (A + skew) @ v)


def test_a_noisy_operator_is_refused():
    generator = torch.Generator().manual_seed(0)
    with pytest.raises(OperatorError, match="two products with one vector differ"):
        solve(lambda v: A @ v + 1e-6 * torch.randn(N, generator=generator, dtype=torch.float64))


def test_an_affine_and_a_nonlinear_operator_are_refused():
    with pytest.raises(OperatorError, match="constant term"):
        solve(lambda v: A @ v + 0.1)
    with pytest.raises(OperatorError):
        solve(lambda v: A @ v.clamp(-1, 1))


@pytest.mark.parametrize("after", [6, 10, 14])
@pytest.mark.parametrize("certify", [True, False])
def test_an_operator_that_changes_during_the_solve_is_refused(after, certify):
    change = 1e-3 * rotated(VALUES, seed=1)
    with pytest.raises(OperatorError, match=r"contradict|disagree|differs"):
        lanczos(Drifting(after, change), 3, tol=1e-8, dense=False, certify=certify)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("solver", [lanczos, block_lanczos])
def test_products_that_are_not_finite_are_refused_at_any_time(bad, solver):
    count = 0

    def matvec(v):
        nonlocal count
        count += 1
        return A @ v if count < 11 else torch.full_like(v, bad)

    with pytest.raises(OperatorError, match="NaN or infinity"):
        solver(FromFunction(matvec, N, dtype=torch.float64), 3, tol=1e-8)


def test_an_operator_that_reuses_its_buffer_or_overwrites_its_input_is_harmless():
    expected = solve(lambda v: A @ v, tol=1e-10)
    buffer = torch.zeros(N, dtype=torch.float64)

    def reusing(v):
        torch.mv(A, v, out=buffer)
        return buffer

    def overwriting(v):
        image = A @ v
        v.fill_(float("nan"))
        return image

    def in_place(v):
        v.copy_(A @ v)
        return v

    for matvec in (reusing, overwriting, in_place):
        assert torch.equal(solve(matvec, tol=1e-10).values, expected.values)
    raw = Drifting(10**9, 0)  # not wrapped: the solver's own protection

    class InPlace(Drifting):
        def __matmul__(self, vectors):
            return vectors.copy_(vectors @ A)

    assert torch.equal(
        lanczos(InPlace(0, 0), 3, tol=1e-10, dense=False).vectors,
        lanczos(raw, 3, tol=1e-10, dense=False).vectors,
    )


@pytest.mark.parametrize("dtype", [torch.complex128, torch.int64], ids=str)
def test_complex_and_integer_products_are_refused_by_name(dtype):
    class Wrong(Drifting):
        def __matmul__(self, vectors):
            return super().__matmul__(vectors).to(dtype)

    with pytest.raises(OperatorError, match=str(dtype)):
        lanczos(Wrong(10**9, 0), 3)
    with pytest.raises(OperatorError, match=str(dtype)):
        solve(lambda v: (A @ v).to(dtype))


@pytest.mark.parametrize("as_basis", [False, True])
@pytest.mark.parametrize("dense", [True, False])
def test_deflated_directions_are_left_out(as_basis, dense):
    first = lanczos(A, 2, tol=1e-12)
    directions = first.vectors
    if as_basis:
        basis = Basis(N, 4, dtype=torch.float64)
        basis.extend(directions)
        directions = basis
    pairs = lanczos(A, 2, tol=1e-10, deflate=directions, dense=dense)
    assert torch.allclose(pairs.values, torch.tensor([-6.0, 4.0], dtype=torch.float64))
    assert float((pairs.vectors @ first.vectors.T).abs().max()) < 1e-12
    with pytest.raises(ValueError, match="2 deflated"):
        lanczos(A, N - 1, deflate=directions)
    rest = lanczos(A, N - 2, tol=1e-8, deflate=directions, dense=dense).require_converged()
    assert rest.complete


def test_deflating_directions_that_are_no_eigenvectors_gives_the_projected_operator():
    generator = torch.Generator().manual_seed(5)
    q = torch.linalg.qr(torch.randn(N, 3, generator=generator, dtype=torch.float64)).Q.T
    p = torch.eye(N, dtype=torch.float64) - q.T @ q
    expected = torch.linalg.eigvalsh(p @ A @ p)
    pairs = lanczos(A, 3, tol=1e-10, deflate=q.contiguous(), dense=False)
    assert torch.allclose(pairs.values.max(), expected.max())


def test_a_warm_start_on_some_eigenvectors_still_finds_the_others():
    q = lanczos(A, 4, tol=1e-12).vectors
    for start in (q[1:], q[2], q[1:].sum(0)):
        pairs = solve(lambda v: A @ v, v0=start, tol=1e-6).require_converged(complete=True)
        assert torch.allclose(pairs.values, torch.tensor([9.0, 7.0, -6.0]).double())
    warm = solve(lambda v: A @ v, v0=q[:3], tol=1e-6)
    cold = solve(lambda v: A @ v, tol=1e-6)
    assert warm.matvecs < cold.matvecs


@pytest.mark.parametrize("scale", [1e-300, 1e-200, 1e-150, 1e150, 1e200, 1e300])
@pytest.mark.parametrize("dense", [True, False])
def test_operators_whose_squares_are_not_numbers_are_solved_as_any_other(scale, dense):
    truth = VALUES[VALUES.abs().argsort(descending=True)][:4]
    for operator in (scale * A, FromFunction(lambda v: (scale * A) @ v, N, dtype=torch.float64)):
        pairs = lanczos(operator, 4, tol=1e-8, dense=dense)
        assert pairs.complete
        torch.testing.assert_close(pairs.values / scale, truth, rtol=1e-12, atol=0.0)
        rest = pairs.vectors @ A - (pairs.values / scale)[:, None] * pairs.vectors
        assert bool((pairs.residuals / scale >= rest.norm(dim=1) - 1e-14).all())
        assert bool((pairs.residuals <= 1e-8 * pairs.values.abs()).all())


@pytest.mark.parametrize("kept", [0, 3])
@pytest.mark.parametrize("room", [None, Room(rows=12)])
def test_float32_matrices_whose_squares_are_not_float32_are_solved_as_any_other(room, kept):
    signs = torch.randn(N, generator=torch.Generator().manual_seed(1)).sign().double()
    matrix, deflate = rotated(signs).float(), torch.eye(kept, N)
    made = set()
    for exponent in (0, 50, 62, 83, 120, -66, -100):
        pairs = lanczos(matrix * 2.0**exponent, 1, which="SA", tol=1e-2, room=room, seed=3,
                        deflate=deflate, dense=False)  # fmt: skip
        assert pairs.complete
        assert abs(float(pairs.values[0]) / 2.0**exponent + 1.0) < 1e-5
        made.add(pairs.matvecs)
    assert len(made) == 1


def test_an_asymmetric_operator_is_refused_at_any_scale():
    skew = torch.zeros(N, N, dtype=torch.float64)
    skew[0, 1] = 0.5
    for scale in (1e-200, 1e200):
        with pytest.raises(OperatorError, match="u'Av"):
            solve(lambda v, scale=scale: (scale * (A + skew)) @ v)


@pytest.mark.parametrize("drift", [1e-7, 1e-6, 1e-5])
def test_a_slow_drift_is_refused_or_part_of_the_residuals(drift):
    # in float32 the probe cannot tell it from rounding; the oldest product, made again, can
    n, made = 2000, 0
    values = torch.cat([torch.tensor([9.0, 7.0, 6.0, 4.0, 3.0]), torch.linspace(0, 1, n - 5)])

    def product(vector):
        nonlocal made
        made += 1
        return (1.0 + drift * made) * values * vector

    try:
        pairs = lanczos(FromFunction(product, n), 5, progress=False)
    except OperatorError:
        return
    off = (pairs.values.cpu() - values[:5].double()).abs()
    assert bool((pairs.residuals >= off).all())


def test_a_start_that_the_operator_takes_to_zero_is_no_sign_of_drift():
    n = 2000
    values = torch.cat([torch.tensor([9.0, 7.0, 6.0, 4.0, 3.0]), torch.linspace(0, 1, n - 6)])
    values = torch.cat([values, torch.zeros(1)])
    for share in (0.0, 1e-7, 1e-5, 1e-3):
        start = share * torch.randn(n, generator=torch.Generator().manual_seed(0))
        start[-1] = 1.0
        operator = FromFunction(lambda vector: values * vector, n)
        assert lanczos(operator, 5, v0=start, progress=False).complete


@pytest.mark.parametrize("solver", [partial(lanczos, dense=False), partial(block_lanczos, block=2)])
@pytest.mark.parametrize("given", ["matrix", "function"])
@pytest.mark.parametrize("kept", [0, 1])
def test_starts_of_which_the_operator_leaves_rounding_are_no_sign_of_asymmetry(given, kept, solver):
    values = torch.zeros(400, dtype=torch.float64)
    values[:5] = torch.tensor([5.0, 4.0, 3.0, -2.0, 1.0])
    matrix = rotated(values)
    columns = torch.linalg.eigh(matrix).eigenvectors
    null = columns[:, 1:-4].T.float().contiguous()
    matrix = matrix.float()
    operator = matrix if given == "matrix" else FromFunction(lambda v: v @ matrix, 400, blocks=True)
    deflate = columns[:, -kept:].T.float().contiguous() if kept else None
    for seed in range(5):
        for count in (1, 2, 12):
            pairs = solver(operator, 3, v0=null[-count:], deflate=deflate, seed=seed)
            assert pairs.complete
            torch.testing.assert_close(pairs.values, values[kept : kept + 3], rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("skewed", [0.003, 0.1])
def test_asymmetry_is_refused_from_a_start_that_the_operator_takes_to_zero(skewed):
    """Where only the solve can see it: the certificate is another operator's."""
    values = torch.zeros(400, dtype=torch.float64)
    values[:50] = torch.linspace(5.0, 1.0, 50)
    matrix = rotated(values)
    null = torch.linalg.eigh(matrix).eigenvectors[:, :2].T.float().contiguous()
    noise = torch.randn(400, 400, generator=torch.Generator().manual_seed(2)).double() / 20.0
    wrong = (matrix + skewed * noise @ matrix).float()  # takes to zero what the matrix does
    operator = FromFunction(lambda v: v @ wrong.T, 400)
    operator.certificate = Certificate(0.0, 0.0, 0.0, usual_limit(torch.float32, 400), 0)
    with pytest.raises(OperatorError, match="disagree"):
        block_lanczos(operator, 3, v0=null, block=2)


def test_a_low_rank_matrix_smaller_than_a_few_blocks_is_solved_from_every_start():
    values = torch.zeros(13, dtype=torch.float64)
    values[:6] = torch.tensor([3.0, 3.0, 2.0, 1.0, 0.01, 1e-4])
    for seed in range(40):
        generator = torch.Generator().manual_seed(seed)
        normal = torch.randn(13, generator=generator, dtype=torch.float64)
        turn = torch.eye(13).double() - 2 * torch.outer(normal, normal) / normal.square().sum()
        pairs = block_lanczos(turn @ torch.diag(values) @ turn, 3, block=4, seed=seed)
        assert pairs.complete
        assert pairs.orthogonality < 1e-13
        torch.testing.assert_close(pairs.values, values[:3], rtol=1e-12, atol=0.0)


@pytest.mark.parametrize("solver", [partial(lanczos, dense=False), partial(block_lanczos, block=2)])
@pytest.mark.parametrize("k", [1, 3, 8])
def test_start_vectors_of_which_nothing_is_left_are_skipped(solver, k):
    units = torch.eye(20, dtype=torch.float64)
    q = torch.linalg.eigh(rotated(torch.linspace(1, 2, 20).double())).eigenvectors.T.contiguous()
    weights = torch.randn(3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for matrix, gone in ((torch.diag(torch.linspace(1, 2, 20).double()), units[:3]),
                         (rotated(torch.linspace(1, 2, 20).double()), q[:3]),
                         (torch.zeros(20, 20).double(), units[:3])):  # fmt: skip
        truth = torch.linalg.eigvalsh(matrix).flip(0)[:k]
        for start in (gone[0], weights @ gone, gone, gone[[0, 0]], torch.cat([gone, units[9:10]]),
                      torch.stack([units[9], -units[9]])):  # fmt: skip
            pairs = solver(matrix, k, tol=1e-9, deflate=gone, v0=start)
            assert pairs.complete
            torch.testing.assert_close(pairs.values, truth, rtol=1e-9, atol=1e-15)
            assert float((pairs.vectors @ gone.T).abs().max()) < 1e-14


@pytest.mark.parametrize("name", ["symmetry", "repeatability", "linearity", "limit"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_certificate_that_is_not_finite_is_refused_before_any_product(name, bad):
    operator = Drifting(1000, 0.0)
    errors = {"symmetry": 0.0, "repeatability": 0.0, "linearity": 0.0, "limit": 1e-12}
    if bad == float("inf"):  # an infinite error is within an infinite limit
        errors["limit"] = bad
    operator.certificate = Certificate(**errors | {name: bad}, products=4)
    for solver in (lanczos, block_lanczos):
        with pytest.raises(OperatorError):
            solver(operator, 3)
    assert operator.count == 0


@pytest.mark.parametrize("solver", [partial(lanczos, dense=False), block_lanczos])
@pytest.mark.parametrize("given", [[50], [2], [50, 51], [2, 50], [2, 3, 50]])
def test_a_start_without_any_wanted_direction_still_finds_them(given, solver):
    """Exact eigenvectors that are not wanted, and null vectors: a product leads nowhere else."""
    values = torch.zeros(100, dtype=torch.float64)
    values[:4] = torch.tensor([5.0, 4.0, 3.0, -2.0])
    operator = FromFunction(lambda v: v * values, 100, dtype=torch.float64)
    start = torch.eye(100, dtype=torch.float64)[given]
    pairs = solver(operator, 2, v0=start).require_converged(complete=True)
    assert torch.allclose(pairs.values, values[:2])
    unproved = solver(operator, 2, v0=start, certify=False)
    assert not unproved.complete


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("dense", [None, False])
def test_an_operator_of_which_deflation_leaves_only_rounding_is_not_refused(dense, dtype):
    """A Gauss-Newton of few samples, all of whose directions are deflated."""
    for seed in range(6):
        generator = torch.Generator().manual_seed(seed)
        count = 1 + seed % 3
        batch = torch.randn(count, 20, generator=generator, dtype=dtype), torch.zeros(count).long()
        model = mlp((20, 30, 3), seed=seed, dtype=dtype)
        operator = GaussNewton(model, cross_entropy, batch)
        tol = 1e-4 if dtype == torch.float32 else 1e-10
        found = lanczos(operator, 2 * count, tol=tol)
        rest = lanczos(operator, 2, deflate=found.vectors, dense=dense)
        assert float(rest.values.abs().max()) <= 10 * tol * found.norm
        assert bool(rest.converged.all())


def tiny(exponent):
    """A float32 matrix of small whole numbers times a power of two: its entries are exact."""
    generator = torch.Generator().manual_seed(3)
    upper = torch.randint(-4, 5, (N, N), generator=generator).triu(1).float()
    near = upper + upper.T + torch.diag(torch.tensor([90.0, 70.0, 50.0] + [0.0] * (N - 3)))
    return near.double(), near * 2.0**exponent


@pytest.mark.parametrize("exponent", [-110, -130, -146, 118])
def test_float32_matrices_at_the_ends_of_the_range_are_solved_as_any_other(exponent):
    near, matrix = tiny(exponent)
    truth, unit = torch.linalg.eigvalsh(near).flip(0), 2.0**exponent
    for pairs in (
        lanczos(matrix, 3, which="LA", dense=False),
        block_lanczos(matrix, 3, which="LA", block=2),
        power_iteration(matrix, 2),
    ):
        assert pairs.converged.all()
        vectors = pairs.vectors.double()
        rest = (vectors @ near - pairs.values[:, None] / unit * vectors).norm(dim=1)
        assert (rest <= pairs.residuals / unit).all()
        torch.testing.assert_close(pairs.values / unit, truth[: len(pairs)], rtol=1e-5, atol=0.0)
    density = spectral_density(matrix, probes=2, steps=30)
    assert float(density.nodes.max()) / unit == pytest.approx(float(truth[0]), rel=1e-5)
    found = trace(matrix, probes=N // 2)
    assert abs(found.value / unit - float(near.trace())) <= 4.0 * found.error / unit
    right = torch.ones(N)
    solution = solve_system(matrix, right * unit, damping=100.0 * unit)
    assert ((near @ solution.x.double() + 100.0 * solution.x) - 1.0).norm() <= 1e-4 * N**0.5


def test_functions_whose_products_have_few_digits_left_are_refused_by_that_name():
    near, matrix = tiny(-146)
    few = FromFunction(lambda v: matrix @ v, N)
    for call in (partial(lanczos, few, 3), partial(trace, few)):
        with pytest.raises(OperatorError, match="few digits in float32"):
            call()
    with pytest.raises(OperatorError, match="few digits in float32"):
        spectral_energy(matrix, 0.1, dense=False)
    near, matrix = tiny(-126)
    pairs = lanczos(FromFunction(lambda v: matrix @ v, N), 3, which="LA")
    vectors = pairs.vectors.double()
    rest = (vectors @ near - pairs.values[:, None] * 2.0**126 * vectors).norm(dim=1)
    assert pairs.converged.all()
    assert (rest <= pairs.residuals * 2.0**126).all()


def test_a_solution_beyond_the_numbers_of_its_dtype_is_refused():
    with pytest.raises(ValueError, match="beyond the numbers of"):
        solve_system(tiny(-146)[1], torch.ones(N), damping=100.0 * 2.0**-146)
