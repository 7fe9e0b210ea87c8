"""The public operators: clear errors, autograd, vmap, compile, and one choice of back end."""

import sys
import warnings

import pytest
import torch
from curvlab_kernels import _cpu, ops, reference, registered
from torch.library import opcheck


@pytest.fixture
def rows(generator):
    vectors = torch.linalg.qr(torch.randn(50, 4, generator=generator, dtype=torch.float64)).Q.T
    return reference.quantise(vectors.contiguous(), torch.float64)[0]


@pytest.fixture
def rows32(rows):
    return rows.float()


def vector(generator, *shape, dtype=torch.float64, requires_grad=False):
    return torch.randn(*shape, generator=generator, dtype=dtype, requires_grad=requires_grad)


def test_every_face_has_the_same_names():
    names = set(_cpu.__all__)
    assert names <= set(ops.__all__)
    assert all(callable(getattr(reference, name)) for name in names)


def test_a_call_nobody_watches_goes_straight_to_the_kernel(rows, generator, monkeypatch):
    def forbidden(*_):
        raise AssertionError("went through the dispatcher")

    monkeypatch.setattr(registered, "project_", forbidden)
    flat = vector(generator, 50)
    expected = flat - rows[:, :50].T @ (rows[:, :50] @ flat)
    ops.project_(rows, flat)
    assert (flat - expected).norm() <= 1e-13


def test_importing_the_operators_imports_neither_triton_nor_numba():
    import subprocess

    code = (
        "import sys, curvlab_kernels.ops, curvlab.basis; "
        "assert not {'triton', 'numba', 'scipy', 'matplotlib'} & set(sys.modules), sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# What is wrong is said, and what was given is not changed.

WRONG = [
    (lambda r, v: ops.project_(r[:, :50], v), ValueError, "multiple of 16"),
    (lambda r, v: ops.project_(r.T, v), ValueError, "contiguous"),
    (lambda r, v: ops.project_(r[0], v), ValueError, r"\(m, ld\)"),
    (lambda r, v: ops.project_(r.to(torch.int32), v), TypeError, "rows must be one of"),
    (lambda r, v: ops.project_(r.to(torch.int8), v), ValueError, "scales"),
    (lambda r, v: ops.project_(r, v, scales=torch.ones(4, 1)), ValueError, "no scales"),
    (lambda r, v: ops.project_(r, v.repeat(2)), ValueError, "at most the rows' length 64"),
    (lambda r, v: ops.project_(r, v.view(1, 1, 50)), ValueError, r"\(n,\) or \(b, n\)"),
    (lambda r, v: ops.project_(r, v.half()), TypeError, "float32 or float64"),
    (lambda r, v: ops.project_(r, v.float()), TypeError, "float64 rows need float64"),
    (lambda r, v: ops.project_(r, v[::2]), ValueError, "contiguous"),
    (lambda r, v: ops.project_(r, v, factor=torch.eye(3)), ValueError, "Cholesky factor"),
    (lambda r, v: ops.project_(r, v.clone().requires_grad_()), ValueError, "no_grad"),
    (lambda r, v: ops.project_(r, v.to("meta")), ValueError, "move one"),
    (lambda r, v: ops.project_list_(r, [v, v]), ValueError, "100 elements together"),
    (lambda r, v: ops.project_list_(r, [v[:5], v[5:].float()]), TypeError, r"tensors\[1\]"),
    (lambda r, v: ops.apply_(r, torch.zeros(3).double(), v), ValueError, "coefficients"),
    (lambda r, v: ops.sgd_step_(r, [v], [v[:9]], [], 0.1), ValueError, "agree"),
    (lambda r, v: ops.sgd_step_(r, [v], [v], [], 0.1, 0.0, 0.9), ValueError, "needs momenta"),
    (lambda r, v: ops.orthonormalise_(r.float(), v), TypeError, "vectors' dtype"),
    (lambda r, v: ops.orthonormalise_(r, v.view(1, 50)), ValueError, "dimension"),
    (lambda r, v: ops.lanczos_step_(r[:1], v, 0.5), ValueError, "at least 2 row"),
    (lambda r, _: ops.combine(r, torch.zeros(4).double(), 65), ValueError, "at most"),
    (lambda _, v: ops.quantise(v.view(1, 50), torch.int16), TypeError, "not stored as"),
    (lambda _, v: ops.norm(v.view(1, 1, 50)), ValueError, "norm needs"),
]


@pytest.mark.parametrize(("call", "kind", "words"), WRONG, ids=[words for _, _, words in WRONG])
def test_wrong_arguments_are_named_and_nothing_changes(call, kind, words, rows, generator):
    given = vector(generator, 50)
    before, rows_before = given.clone(), rows.clone()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(kind, match=words):
            call(rows, given)
    assert torch.equal(given, before)
    assert torch.equal(rows, rows_before)


# Operators of the dispatcher


def test_registered_operators_keep_torchs_rules(rows, rows32, generator):
    watched = vector(generator, 50, requires_grad=True)
    block = vector(generator, 3, 50, requires_grad=True)
    factor = torch.linalg.cholesky(torch.eye(4, dtype=torch.float64) * 2)
    weights = vector(generator, 4, requires_grad=True)

    def tensors():
        return [
            vector(generator, 5, 4, dtype=torch.float32),
            vector(generator, 30, dtype=torch.float32),
        ]

    opcheck(registered.coefficients, (rows, watched, None))
    opcheck(registered.coefficients, (rows, block, None))
    opcheck(registered.combine, (rows, weights, None, 50, True))
    opcheck(registered.project, (rows, watched, factor, None))
    opcheck(registered.project, (rows, block, None, None))
    opcheck(registered.project_, (rows, vector(generator, 50), None, None))
    opcheck(registered.project_list_, (rows32, tensors(), None, None))
    opcheck(
        registered.sgd_step_, (rows32, tensors(), tensors(), tensors(), 0.1, 0.1, 0.9, None, None)
    )


def test_the_projection_is_its_own_derivative(rows, generator):
    watched = vector(generator, 50, requires_grad=True)
    weights = vector(generator, 4, requires_grad=True)
    check = torch.autograd.gradcheck
    assert check(lambda v: ops.project(rows, v), watched)
    assert check(lambda v: ops.coefficients(rows, v), watched)
    assert check(lambda c: ops.combine(rows, c, 50, dtype=torch.float64), weights)
    assert check(
        lambda v: torch.cat([t.reshape(-1) for t in ops.project_list(rows, [v[:20], v[20:]])]),
        watched,
    )
    assert torch.autograd.gradgradcheck(lambda v: ops.project(rows, v).pow(3), watched)


def test_function_transforms_go_through(rows, generator):
    def loss(v):
        return ops.project(rows, v).pow(3).sum() + ops.coefficients(rows, v).pow(4).sum()

    point, block = vector(generator, 50), vector(generator, 6, 50)
    projector = torch.eye(50, dtype=torch.float64) - rows[:, :50].T @ rows[:, :50]
    assert (torch.func.jacrev(lambda v: ops.project(rows, v))(point) - projector).norm() <= 1e-12
    assert (torch.func.jacfwd(lambda v: ops.project(rows, v))(point) - projector).norm() <= 1e-12
    hessian = torch.func.hessian(loss)(point)
    dense = projector @ torch.diag(6 * projector @ point) @ projector
    inside = rows[:, :50].T @ torch.diag(12 * (rows[:, :50] @ point) ** 2) @ rows[:, :50]
    assert (hessian - dense - inside).norm() <= 1e-10
    each = torch.func.vmap(torch.func.grad(loss))(block)
    one = torch.stack([torch.func.grad(loss)(row) for row in block])
    assert (each - one).norm() <= 1e-10


def test_vmap_over_any_dimension_is_a_block(rows, generator):
    block = vector(generator, 6, 50)
    expected = ops.project(rows, block)
    assert (torch.vmap(lambda v: ops.project(rows, v))(block) - expected).norm() <= 1e-13
    columns = torch.vmap(lambda v: ops.project(rows, v), in_dims=1, out_dims=1)(block.T)
    assert (columns.T - expected).norm() <= 1e-13
    nested = torch.vmap(torch.vmap(lambda v: ops.coefficients(rows, v)))(block.view(2, 3, 50))
    assert (nested.view(6, 4) - ops.coefficients(rows, block)).norm() <= 1e-13
    with pytest.raises(ValueError, match="vmap over the basis"):
        torch.vmap(lambda r: registered.project(r, block[0], None, None))(torch.stack([rows, rows]))


def test_compiled_programs_contain_the_kernels_whole(rows, rows32, generator):
    point, other = vector(generator, 50), vector(generator, 50)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def loss(v):
        return ops.project(rows, 2 * v) @ other + ops.coefficients(rows, v).sum()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(parameters, gradients, momenta):
        removed = ops.project_list_(rows32, gradients)
        ops.sgd_step_(rows32, parameters, gradients, momenta, 0.1, 0.01, 0.9)
        return removed

    watched = point.clone().requires_grad_()
    value = loss(watched)
    value.backward()
    plain = ops.project(rows, 2 * point) @ other + ops.coefficients(rows, point).sum()
    assert (value - plain).abs() <= 1e-12
    expected = 2 * ops.project(rows, other) + rows[:, :50].sum(0)
    assert (watched.grad - expected).norm() <= 1e-12

    def tensors():
        return [
            vector(generator, 5, 4, dtype=torch.float32),
            vector(generator, 30, dtype=torch.float32),
        ]

    parameters, gradients, momenta = tensors(), tensors(), tensors()
    copies = [[t.clone() for t in group] for group in (parameters, gradients, momenta)]
    step(parameters, gradients, momenta)
    ops.project_list_(rows32, copies[1])
    ops.sgd_step_(rows32, copies[0], copies[1], copies[2], 0.1, 0.01, 0.9)
    for changed, same in zip((parameters, gradients, momenta), copies, strict=True):
        assert all(map(torch.equal, changed, same))


def test_combine_is_the_transpose_of_coefficients(rows, generator):
    weights, point = vector(generator, 3, 4), vector(generator, 3, 50)
    together = ops.combine(rows, weights, 50, dtype=torch.float64)
    left = (together * point).sum()
    right = (weights * ops.coefficients(rows, point)).sum()
    assert (left - right).abs() <= 1e-12
