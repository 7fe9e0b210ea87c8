"""The soft form of protection, and how far a protected subspace has drifted."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from curvlab import Basis, Dense, Hessian, SpectralPenalty, lanczos, parameter_count
from curvlab.metrics import subspace_drift
from curvlab.nets import mlp


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def with_rows(model, rows=5, values=None):
    basis = Basis(parameter_count(model), 20, dtype=torch.float64)
    basis.extend(numbers(rows, basis.n), values=values)
    return basis


def test_the_penalty_and_its_gradient_are_those_of_the_weighted_squares():
    model = mlp((4, 3, 2), seed=0, dtype=torch.float64)
    values = [5.0, -2.0, 1.0, 0.5, 0.1]
    basis = with_rows(model, values=values)
    penalty = SpectralPenalty(basis, model)
    assert float(penalty().detach()) == 0.0
    step = numbers(basis.n, seed=3)
    with torch.no_grad():
        place = 0
        for p in model.parameters():
            p += step[place : place + p.numel()].view(p.shape)
            place += p.numel()
    rows, weights = basis.rows(), torch.tensor(values, dtype=torch.float64).abs()
    along = rows @ step
    value = penalty()
    torch.testing.assert_close(value, 0.5 * (weights * along**2).sum())
    (3.0 * value).backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
    torch.testing.assert_close(gradient, 3.0 * (weights * along) @ rows)
    basis.append(step)  # a row without an eigenvalue weighs 1
    assert float(penalty().detach()) > float(value.detach())


def test_a_strong_penalty_keeps_the_parameters_off_the_rows_and_lets_the_rest_learn():
    model = mlp((4, 3, 2), seed=0, dtype=torch.float64)
    inputs, targets = numbers(12, 4, seed=1), torch.arange(12) % 2
    basis = Basis(parameter_count(model), 3, dtype=torch.float64)
    pairs = lanczos(Hessian(model, cross_entropy, (inputs, targets)), k=3, progress=False)
    basis.extend(pairs.vectors, values=pairs.values)
    before = torch.cat([p.detach().flatten() for p in model.parameters()])
    moved = {}
    for strength in (0.0, 100.0):
        trained = mlp((4, 3, 2), seed=0, dtype=torch.float64)
        penalty = SpectralPenalty(basis, trained)
        optimizer = torch.optim.SGD(trained.parameters(), 0.01)
        for _ in range(50):
            optimizer.zero_grad()
            loss = cross_entropy(trained(numbers(12, 4, seed=2)), 1 - targets)
            (loss + strength * penalty()).backward()
            optimizer.step()
        change = torch.cat([p.detach().flatten() for p in trained.parameters()]) - before
        moved[strength] = float((basis.rows() @ change).norm() / change.norm())
    assert moved[100.0] < 0.2 * moved[0.0]


def test_a_basis_of_another_model_has_no_penalty_here():
    with pytest.raises(ValueError, match="have 23 elements together, the basis covers 9"):
        SpectralPenalty(Basis(9, 2), mlp((4, 3, 2), seed=0))


def test_drift_is_none_where_the_hessian_stayed_and_all_where_the_space_turned_away():
    q = torch.linalg.qr(numbers(30, 30)).Q
    values = torch.cat([torch.tensor([9.0, 7.0, 5.0]), torch.linspace(0.5, 0.1, 27)]).double()
    basis = Basis(30, 3, dtype=torch.float64)
    basis.extend(q.T[:3])
    same = subspace_drift(basis, Dense(q @ torch.diag(values) @ q.T))
    assert same.kept == pytest.approx(1.0, abs=1e-6)
    assert same.curvature == pytest.approx(1.0, abs=1e-6)
    turned = torch.cat([values[3:6], values[:3], values[6:]])
    away = subspace_drift(basis, Dense(q @ torch.diag(turned) @ q.T))
    assert away.kept == pytest.approx(0.0, abs=1e-6)
    assert away.curvature == pytest.approx(float(values[3:6].sum() / 21.0), abs=1e-6)
    half = q.clone()
    half[:, 0], half[:, 5] = (q[:, 0] + q[:, 5]) / 2**0.5, (q[:, 0] - q[:, 5]) / 2**0.5
    partly = subspace_drift(basis, Dense(half @ torch.diag(values) @ half.T))
    assert partly.kept == pytest.approx(2.5 / 3, abs=1e-6)
    with pytest.raises(ValueError, match="basis covers 30 parameters, the operator 4"):
        subspace_drift(basis, Dense(torch.eye(4)))
    with pytest.raises(ValueError, match="nothing that could drift"):
        subspace_drift(Basis(30, 1), Dense(torch.eye(30)))
