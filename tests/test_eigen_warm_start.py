"""A start from earlier eigenvectors: right, and hardly ever more products than from nothing."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from curvlab.cli.demo import digits
from curvlab.eigen import SpectrumTracker, lanczos
from curvlab.nets import mlp
from curvlab.operators import FromFunction, Hessian


def trained(steps, lr, model, data):
    optimiser = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    for _ in range(steps):
        optimiser.zero_grad()
        cross_entropy(model(data[0]), data[1]).backward()
        optimiser.step()


@pytest.mark.parametrize("lr", [0.002, 0.05])
@pytest.mark.parametrize(("k", "tol"), [(5, 1e-2), (10, 1e-3)])
def test_rows_of_earlier_eigenvectors_cost_no_more_than_a_cold_start_but_for_one_product(
    k, tol, lr
):
    """The one was seen: 36 against 35 on one kind of processor, for rows that had moved far.

    There the start is the sum of the rows, as good as a random vector but not better.
    """
    samples = digits()[:200]
    data = samples.inputs, samples.targets
    model = mlp(seed=1)
    trained(200, 0.05, model, data)
    before = lanczos(Hessian(model, cross_entropy, data), k, tol=tol)
    for gap in (1, 20):
        trained(gap, lr, model, data)
        hessian = Hessian(model, cross_entropy, data)
        cold, warm = (
            lanczos(hessian, k, tol=tol, certify=False, v0=v0) for v0 in (None, before.vectors)
        )
        assert warm.matvecs <= cold.matvecs + (1 if gap == 20 and lr == 0.05 else 0), gap
        found, whole = (lanczos(hessian, k, tol=tol, v0=v0) for v0 in (before.vectors, None))
        assert bool(found.converged.all())
        assert torch.allclose(found.values, whole.values, rtol=2 * tol)
        before = found


def test_the_tracker_starts_from_the_last_vectors_and_finds_what_a_fresh_solve_finds():
    generator = torch.Generator().manual_seed(0)
    n = 400
    values = torch.cat([torch.tensor([9.0, 8.0, -7.0, 6.0]), torch.linspace(-2, 2, n - 4)]).double()
    q = torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64)).Q
    noise = torch.randn(n, n, generator=generator, dtype=torch.float64)
    tracker = SpectrumTracker(4, tol=1e-6)
    for step in range(3):
        matrix = (q * values) @ q.T + 1e-3 * step * (noise + noise.T)
        matrix = (matrix + matrix.T) / 2
        found = tracker.update(matrix, step, dense=False)
        exact = torch.linalg.eigvalsh(matrix)
        wanted = exact[exact.abs().argsort(descending=True)[:4]]
        assert torch.allclose(found.values, wanted, rtol=1e-9)
        assert found.complete
    assert tracker.table().shape == (3, 4)


def test_rows_that_nearly_are_eigenvectors_are_multiplied_once_each():
    n, k = 2000, 8
    values = torch.cat([torch.linspace(20, 10, k), torch.linspace(-1, 1, n - k)]).double()
    operator = FromFunction(lambda v: v * values, n, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    moved = torch.eye(k, n, dtype=torch.float64)
    moved += 1e-5 * torch.randn(k, n, generator=generator, dtype=torch.float64)
    pairs = lanczos(operator, k, tol=1e-3, v0=moved, certify=False)
    # four of the probe, and one that looks at the operator again at the end
    assert pairs.matvecs == 4 + k + 1
    assert torch.allclose(pairs.values, values[:k], rtol=1e-6)
    far = moved + 3e-3 * torch.randn(k, n, generator=generator, dtype=torch.float64)
    cold, warm = (lanczos(operator, k, tol=1e-3, v0=v0, certify=False) for v0 in (None, far))
    assert 4 + k + 1 < warm.matvecs < cold.matvecs
    assert bool(warm.converged.all())


@pytest.mark.parametrize("held", [2, 3, 7])
def test_rows_that_lack_pairs_or_hold_others_cost_no_more_than_nothing(held):
    n, k = 3000, 8
    top = torch.logspace(1.5, 0.5, 2 * k)
    values = torch.cat([top, torch.linspace(-1, 1, n - 2 * k)]).double()
    operator = FromFunction(lambda v: v * values, n, dtype=torch.float64)
    rows = torch.eye(n, dtype=torch.float64)[:held]
    others = torch.eye(n, dtype=torch.float64)[100 : 100 + k - held]
    cold, short, mixed = (
        lanczos(operator, k, v0=v0) for v0 in (None, rows, torch.cat([rows, others]))
    )
    assert short.matvecs <= cold.matvecs + 1  # the chance of a random start
    assert mixed.matvecs <= cold.matvecs + 2
    for pairs in (short, mixed):
        assert pairs.complete
        assert torch.allclose(pairs.values, values[:k], rtol=1e-3)


@pytest.mark.parametrize(("moved", "tol"), [(1e-3, 1e-2), (1e-5, 1e-3)])
def test_rows_of_many_pairs_that_have_all_moved_are_not_multiplied_one_by_one(moved, tol):
    """Twenty remainders would ask for twenty products more than the rows themselves."""
    n, k = 3000, 20
    values = torch.cat([torch.linspace(20, 10, k), torch.linspace(-1, 1, n - k)]).double()
    operator = FromFunction(lambda v: v * values, n, dtype=torch.float64)
    assert operator.certificate.passed  # before anything is counted
    noise = torch.randn(k, n, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    noise *= (moved / (1 - moved)) ** 0.5 / noise.norm(dim=1, keepdim=True)
    start = torch.linalg.qr((torch.eye(k, n, dtype=torch.float64) + noise).T).Q.T.contiguous()
    cold, warm = (lanczos(operator, k, tol=tol, v0=v0, certify=False) for v0 in (None, start))
    assert warm.matvecs <= cold.matvecs
    assert torch.allclose(warm.values, values[:k], rtol=tol)
