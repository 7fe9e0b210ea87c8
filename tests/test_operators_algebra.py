"""Sums, restrictions, projections, block diagonals, dense matrices and foreign operators."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import curvlab.nets
from curvlab.operators import (
    BlockDiagonal,
    Dense,
    FromFunction,
    FunctionalHessian,
    GaussNewton,
    Hessian,
    average,
    from_scipy,
)
from curvlab.probe import LinearOperator, OperatorError, probe

TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-5}


def symmetric(n, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(n, n, generator=generator, dtype=torch.float64)
    return (matrix + matrix.T).to(dtype)


def block(n, count=3, dtype=torch.float64):
    generator = torch.Generator().manual_seed(9)
    return torch.randn(count, n, generator=generator, dtype=torch.float64).to(dtype)


def model_and_data():
    model = curvlab.nets.mlp((4, 5, 4, 3), seed=0, dtype=torch.float64, activation=nn.Tanh)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(10, 4, generator=generator, dtype=torch.float64)
    return model, (x, torch.arange(10) % 3)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("n", [1, 2, 37])
def test_dense_multiplies_rows_and_is_certified(n, dtype):
    matrix = symmetric(n, dtype)
    operator = Dense(matrix)
    vectors = block(n, 3, dtype)
    assert torch.allclose(operator @ vectors, vectors @ matrix, rtol=TOLERANCE[dtype])
    assert torch.allclose(operator @ vectors[0], matrix @ vectors[0], rtol=1e-4)
    assert isinstance(operator, LinearOperator)
    assert operator.certificate.passed
    assert torch.equal(operator.dense(), matrix)
    matrix.zero_()
    assert float(operator.dense().abs().max()) > 0


@pytest.mark.parametrize(
    ("bad", "error", "match"),
    [
        (torch.zeros(2, 3), ValueError, "square"),
        (torch.zeros(3), ValueError, "square"),
        (torch.zeros(2, 2, dtype=torch.int64), TypeError, "float32 or float64"),
        (torch.full((2, 2), float("nan")), ValueError, "NaN"),
        (torch.tensor([[1.0, 2.0], [0.0, 1.0]]), OperatorError, r"asymmetric.*\(M \+ M.T\) / 2"),
        ([[1.0]], ValueError, "square"),
    ],
    ids=["not square", "vector", "integer", "nan", "asymmetric", "list"],
)
def test_dense_refuses_what_is_no_symmetric_matrix(bad, error, match):
    with pytest.raises(error, match=match):
        Dense(bad)


def test_sums_multiples_and_averages():
    a, b, c = (symmetric(9, seed=seed) for seed in range(3))
    A, B, C = Dense(a), Dense(b), Dense(c)
    cases = {
        "sum": (2 * A + B * 3 - C / 4, 2 * a + 3 * b - c / 4),
        "negative": (-A, -a),
        "average": (average([A, B, C]), (a + b + c) / 3),
        "weighted": (average([A, B], weights=[1, 3]), (a + 3 * b) / 4),
        "nested": (0.5 * (A + 2 * (B - C)), 0.5 * (a + 2 * (b - c))),
    }
    for name, (operator, matrix) in cases.items():
        assert torch.allclose(operator @ block(9), block(9) @ matrix, rtol=1e-12), name
        assert operator.certificate.passed
    assert len((0.5 * (A + 2 * (B - C))).operators) == 3


def test_bad_sums_are_refused():
    A = Dense(symmetric(4))
    with pytest.raises(ValueError, match="one n, dtype and device"):
        A + Dense(symmetric(5))
    with pytest.raises(ValueError, match="one n, dtype and device"):
        A + Dense(symmetric(4, torch.float32))
    with pytest.raises(TypeError, match="only operators"):
        A + 3.0
    with pytest.raises(TypeError, match="finite number"):
        A * float("nan")
    with pytest.raises(ValueError, match="at least one"):
        average([])
    with pytest.raises(ValueError, match="weights"):
        average([A, A], weights=[1.0])
    with pytest.raises(ValueError, match="positive sum"):
        average([A, A], weights=[0.0, 0.0])
    model, data = model_and_data()
    part = Hessian(model, F.cross_entropy, data, select="0.bias")
    other = Hessian(model, F.cross_entropy, data, select="2.bias").restrict(slice(0, 4))
    with pytest.raises(ValueError):
        part + other


def test_the_hessian_is_the_sum_of_its_two_parts():
    model, data = model_and_data()
    whole = Hessian(model, F.cross_entropy, data).dense()
    outer = GaussNewton(model, F.cross_entropy, data)
    rest = FunctionalHessian(model, F.cross_entropy, data)
    assert torch.allclose((outer + rest).dense(), whole, rtol=1e-10, atol=1e-14)
    difference = Hessian(model, F.cross_entropy, data) - outer
    assert torch.allclose(difference.dense(), rest.dense(), rtol=1e-10, atol=1e-14)
    values = torch.linalg.eigvalsh(outer.dense())
    assert float(values.min()) > -1e-14


def test_the_functional_part_of_a_relu_network_has_no_diagonal_blocks():
    model, data = model_and_data()
    relu = curvlab.nets.mlp((4, 5, 4, 3), seed=0, dtype=torch.float64)
    for network, hollow in ((relu, True), (model, False)):
        rest = FunctionalHessian(network, F.cross_entropy, data, engine="retained")
        blocks = float(BlockDiagonal(rest).dense().abs().max())
        assert float(rest.dense().abs().max()) > 1e-3
        assert (blocks < 1e-14) == hollow


@pytest.mark.parametrize("where", [slice(2, 7), torch.tensor([8, 0, 3]), torch.arange(9) % 2 == 0])
def test_a_restriction_is_the_principal_submatrix(where):
    matrix = symmetric(9)
    index = torch.arange(9)[where]
    operator = Dense(matrix).restrict(where)
    assert torch.allclose(operator.dense(), matrix[index][:, index], rtol=1e-13)
    assert operator.certificate.passed


def test_a_restriction_by_name_is_the_operator_of_the_selected_parameters():
    model, data = model_and_data()
    whole = Hessian(model, F.cross_entropy, data)
    for select in ("2.*", ["0.bias", "4.weight"]):
        part = whole.restrict(select)
        own = Hessian(model, F.cross_entropy, data, select=select)
        assert part.layout == own.layout
        assert torch.allclose(part.dense(), own.dense(), rtol=1e-10, atol=1e-14)


def test_bad_restrictions_are_refused():
    operator = Dense(symmetric(5))
    for where, error, match in [
        ("0.*", TypeError, "no layout"),
        (torch.tensor([0, 5]), ValueError, "lie in"),
        (torch.tensor([1, 1]), ValueError, "repeat"),
        (torch.tensor([0.5]), TypeError, "int64"),
        (slice(3, 3), ValueError, "empty"),
    ]:
        with pytest.raises(error, match=match):
            operator.restrict(where)
    model, data = model_and_data()
    with pytest.raises(ValueError, match="matches no parameter"):
        Hessian(model, F.cross_entropy, data).restrict("head.*")


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("m", [0, 1, 4])
def test_a_projected_operator_vanishes_on_the_basis(m, dtype):
    matrix = symmetric(11, dtype)
    rows = torch.linalg.qr(block(11, 4).T).Q.T[:m].to(dtype)
    operator = Dense(matrix).project(rows)
    projector = torch.eye(11, dtype=torch.float64) - rows.double().T @ rows.double()
    expected = projector @ matrix.double() @ projector
    error = (operator.dense().double() - expected).abs().max() / matrix.abs().max()
    assert float(error) < TOLERANCE[dtype]
    if m:
        assert float((operator @ rows).abs().max()) < TOLERANCE[dtype] * 10
    assert operator.certificate.passed


def test_projecting_needs_orthonormal_rows_of_the_right_length():
    operator = Dense(symmetric(6))
    with pytest.raises(ValueError, match="orthonormal"):
        operator.project(block(6, 2))
    with pytest.raises(ValueError, match=r"\(m, 6\)"):
        operator.project(torch.zeros(2, 5, dtype=torch.float64))
    with pytest.raises(TypeError, match="Basis"):
        operator.project("basis")


def test_projection_takes_a_basis():
    basis_module = pytest.importorskip("curvlab.basis")
    rows = torch.linalg.qr(block(40, 3).T).Q.T.float().contiguous()
    basis = basis_module.Basis(40, capacity=4)
    basis.extend(rows)
    matrix = symmetric(40, torch.float32)
    projected = Dense(matrix).project(basis)
    expected = Dense(matrix).project(rows)
    vectors = block(40, 5, torch.float32)
    assert torch.allclose(projected @ vectors, expected @ vectors, atol=1e-4)
    assert torch.equal(vectors, block(40, 5, torch.float32))


def test_block_diagonal_keeps_the_layers_and_nothing_between_them():
    model, data = model_and_data()
    whole = Hessian(model, F.cross_entropy, data)
    operator = BlockDiagonal(whole)
    expected = torch.zeros(whole.n, whole.n, dtype=torch.float64)
    matrix = whole.dense()
    for pieces in whole.layout.layers().values():
        for a in pieces:
            for b in pieces:
                expected[a, b] = matrix[a, b]
    assert torch.allclose(operator.dense(), expected, rtol=1e-10, atol=1e-14)
    assert list(operator.blocks) == ["0", "2", "4"]
    assert operator.certificate.passed


def test_block_diagonal_takes_blocks_of_its_own_and_checks_them():
    matrix = symmetric(6)
    operator = BlockDiagonal(Dense(matrix), {"a": [slice(0, 2), slice(4, 6)], "b": [slice(2, 4)]})
    index = torch.tensor([0, 1, 4, 5])
    mask = torch.zeros(6, 6, dtype=torch.bool)
    mask[index[:, None], index] = True
    mask[2:4, 2:4] = True
    assert torch.allclose(operator.dense(), torch.where(mask, matrix, 0.0), rtol=1e-13)
    with pytest.raises(ValueError, match="2 are missing and 1 repeat"):
        BlockDiagonal(Dense(matrix), {"a": [slice(0, 3)], "b": [slice(2, 4)]})
    with pytest.raises(TypeError, match="no layers"):
        BlockDiagonal(Dense(matrix))


def test_a_function_becomes_an_operator_even_if_it_reuses_its_buffer():
    matrix = symmetric(7)
    buffer = torch.empty(7, dtype=torch.float64)

    def function(vector):
        torch.mv(matrix, vector, out=buffer)
        vector.zero_()
        return buffer

    operator = FromFunction(function, 7, dtype=torch.float64)
    assert torch.allclose(operator @ block(7), block(7) @ matrix, rtol=1e-13)
    assert operator.certificate.passed
    rows = FromFunction(lambda v: v @ matrix, 7, dtype=torch.float64, blocks=True)
    assert torch.allclose(rows @ block(7), block(7) @ matrix, rtol=1e-13)
    with pytest.raises(ValueError, match="must return shape"):
        FromFunction(lambda v: v[:3], 7, dtype=torch.float64) @ block(7)
    with pytest.raises(ValueError, match="n="):
        FromFunction(function, 0)


def test_scipy_goes_both_ways():
    linalg = pytest.importorskip("scipy.sparse.linalg")
    model, data = model_and_data()
    operator = Hessian(model, F.cross_entropy, data)
    outside = operator.to_scipy()
    values = linalg.eigsh(outside, k=3, which="LA", return_eigenvectors=False)
    expected = torch.linalg.eigvalsh(operator.dense())[-3:]
    assert torch.allclose(torch.as_tensor(values).sort().values, expected, rtol=1e-8)
    back = from_scipy(outside)
    assert torch.allclose(back @ block(operator.n), operator @ block(operator.n), rtol=1e-12)
    matrix = symmetric(5)
    assert torch.allclose(from_scipy(matrix.numpy()).dense(), matrix, rtol=1e-13)
    single = from_scipy(matrix.float().numpy())
    assert single.dtype == torch.float32
    with pytest.raises(ValueError, match="square"):
        from_scipy(torch.zeros(2, 3).numpy())
    with pytest.raises(TypeError, match="complex"):
        from_scipy(torch.zeros(2, 2, dtype=torch.complex64).numpy())


def test_dense_refuses_to_hide_an_asymmetric_operator():
    matrix = symmetric(6)
    matrix[0, 1] += 1e-3
    operator = FromFunction(lambda v: matrix @ v, 6, dtype=torch.float64)
    assert not probe(operator).passed
    with pytest.raises(OperatorError, match="asymmetric"):
        operator.dense()


def test_an_operator_says_what_it_is():
    assert repr(Dense(symmetric(3))) == "Dense(n=3, torch.float64, cpu)"
