"""Sparse matrices and diagonally preconditioned curvature, against dense matrices in float64."""

import pytest
import torch
from torch.nn.functional import cross_entropy

import curvlab
from curvlab import Hessian, OperatorError, Sparse, adaptive_preconditioner, lanczos
from curvlab.nets import mlp
from curvlab.operators import Dense

LAYOUTS = {
    "coo": lambda m: m.to_sparse(),
    "csr": lambda m: m.to_sparse_csr(),
    "csc": lambda m: m.to_sparse_csc(),
    "bsr": lambda m: m.to_sparse_bsr((3, 3)),
}


def sparse_matrix(n=90, seed=0):
    generator = torch.Generator().manual_seed(seed)
    full = torch.randn(n, n, generator=generator, dtype=torch.float64)
    kept = torch.rand(n, n, generator=generator) < 0.03
    upper = torch.triu(full * kept)
    return upper + upper.T


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_sparse_tensor_multiplies_like_its_dense_matrix(layout, dtype):
    matrix = sparse_matrix().to(dtype)
    operator = Sparse(LAYOUTS[layout](matrix))
    vectors = torch.randn(5, 90, dtype=dtype)
    tolerance = {torch.float64: 1e-14, torch.float32: 1e-6}[dtype]
    for given in (vectors, vectors[0], vectors[:0]):
        difference = (operator @ given - given @ matrix).norm()
        assert float(difference) <= tolerance * float((given @ matrix).norm())
    assert torch.equal(operator.dense(), matrix)


def test_solvers_take_a_sparse_tensor_as_it_is():
    matrix = sparse_matrix(300)
    pairs = lanczos(matrix.to_sparse(), k=4, tol=1e-8).require_converged(complete=True)
    true = torch.linalg.eigvalsh(matrix)
    true = true[true.abs().argsort(descending=True)][:4]
    torch.testing.assert_close(pairs.values, true, rtol=1e-9, atol=0)


def test_a_matrix_of_zeros_and_unsorted_repeated_entries_are_read_right():
    empty = torch.zeros(7, 7).to_sparse()
    assert not (Sparse(empty) @ torch.ones(7)).any()
    index = torch.tensor([[2, 0, 2, 0, 1], [0, 2, 0, 2, 1]])
    twice = torch.sparse_coo_tensor(
        index, torch.tensor([1.0, 2.0, 3.0, 2.0, 5.0]), (3, 3), check_invariants=True
    )
    assert torch.equal(Sparse(twice).dense(), twice.to_dense())


@pytest.mark.parametrize(
    ("bad", "error", "match"),
    [
        (torch.triu(sparse_matrix()).to_sparse(), OperatorError, "one triangle"),
        (torch.ones(3, 4).to_sparse(), ValueError, "square"),
        (torch.ones(3, 3, dtype=torch.int64).to_sparse(), TypeError, "float32 or float64"),
        (torch.full((2, 2), float("nan")).to_sparse(), ValueError, "NaN"),
        (torch.ones(3, 3), TypeError, "curvlab.Dense"),
    ],
)
def test_what_is_no_symmetric_sparse_matrix_is_refused(bad, error, match):
    with pytest.raises(error, match=match):
        Sparse(bad)


# -- preconditioned --------------------------------------------------------------------------------


def test_preconditioning_gives_the_eigenvalues_of_the_unsymmetric_product():
    matrix = sparse_matrix(60)
    diagonal = torch.logspace(-3, 3, 60, dtype=torch.float64)
    scaled = Dense(matrix).precondition(diagonal)
    true = torch.linalg.eigvals(matrix / diagonal[:, None])  # P^-1 A
    found = torch.linalg.eigvalsh(scaled.dense())
    torch.testing.assert_close(found, true.real.sort().values, rtol=1e-9, atol=1e-9)
    pairs = lanczos(scaled, k=1, which="LA", tol=1e-8)
    direction = pairs.vectors[0] / diagonal.sqrt()
    image = (matrix @ direction) / diagonal
    assert float((image - pairs.values[0] * direction).norm()) < 1e-6 * float(image.norm())


@pytest.mark.parametrize(
    "bad", [torch.ones(59), torch.zeros(60), -torch.ones(60), torch.full((60,), float("inf")), 1.0]
)
def test_a_preconditioner_must_be_a_positive_vector(bad):
    with pytest.raises(ValueError, match="preconditioner"):
        Dense(sparse_matrix(60)).precondition(bad)


OPTIMIZERS = {
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-4, betas=(0.0, 0.99), eps=1e-6),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-4, betas=(0.0, 0.99), weight_decay=0.0),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=1e-4, betas=(0.0, 0.9), amsgrad=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-4),
    "centered RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-4, centered=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-4, lr_decay=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_diagonal_is_what_the_optimizer_divided_the_gradient_by(name):
    """Without momentum a step is lr * gradient / P: the step itself says what P is."""
    model = mlp((6, 5, 3), seed=0, dtype=torch.float64)
    inputs, targets = torch.randn(40, 6, dtype=torch.float64), torch.randint(3, (40,))
    optimizer = OPTIMIZERS[name](model.parameters())
    for _ in range(4):
        optimizer.zero_grad()
        cross_entropy(model(inputs), targets).backward()
        gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
        before = curvlab.parameter_vector(model)
        optimizer.step()
        step = before - curvlab.parameter_vector(model)
        diagonal = adaptive_preconditioner(optimizer, model)
        moved = gradient.abs() > 1e-12
        torch.testing.assert_close(
            step[moved], (1e-4 * gradient / diagonal)[moved], rtol=1e-6, atol=0
        )


def test_momentum_is_corrected_for_its_start():
    model = mlp((6, 5, 3), seed=0, dtype=torch.float64)
    inputs, targets = torch.randn(40, 6, dtype=torch.float64), torch.randint(3, (40,))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(3):
        optimizer.zero_grad()
        cross_entropy(model(inputs), targets).backward()
        before = curvlab.parameter_vector(model)
        optimizer.step()
    mean = torch.cat([optimizer.state[p]["exp_avg"].flatten() for p in model.parameters()])
    step = before - curvlab.parameter_vector(model)
    diagonal = adaptive_preconditioner(optimizer, model)
    torch.testing.assert_close(step, 1e-3 * mean / diagonal, rtol=1e-6, atol=1e-15)
    H = Hessian(model, cross_entropy, (inputs, targets)).precondition(diagonal)
    sharpness = float(lanczos(H, k=1, which="LA", tol=1e-6).values)
    full = torch.linalg.eigvals(H.base.dense() / diagonal[:, None]).real.max()
    assert sharpness == pytest.approx(float(full), rel=1e-6)


def test_an_optimizer_that_cannot_be_read_is_refused_with_the_cure():
    model = mlp((6, 5, 3), seed=0)
    with pytest.raises(ValueError, match="take a step first"):
        adaptive_preconditioner(torch.optim.Adam(model.parameters()), model)
    with pytest.raises(ValueError, match="does not train"):
        adaptive_preconditioner(torch.optim.Adam([torch.nn.Parameter(torch.ones(1))]), model)
    sgd = torch.optim.SGD(model.parameters(), momentum=0.9)
    cross_entropy(model(torch.randn(3, 6)), torch.tensor([0, 1, 2])).backward()
    sgd.step()
    with pytest.raises(TypeError, match="Adam, AdamW"):
        adaptive_preconditioner(sgd, model)
