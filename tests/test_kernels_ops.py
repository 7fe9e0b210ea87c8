"""The public operators: clear errors, nothing changed by a wrong call, one table of operations."""

import ast
import inspect
import itertools
import sys
import warnings
from pathlib import Path

import pytest
import torch
from curvlab_kernels import ops, reference
from curvlab_kernels.spans import meet, ranges_differ


@pytest.fixture
def rows(generator):
    vectors = torch.linalg.qr(torch.randn(50, 4, generator=generator, dtype=torch.float64)).Q.T
    return reference.quantise(vectors.contiguous(), torch.float64)[0]


def vector(generator, *shape, dtype=torch.float64, requires_grad=False):
    return torch.randn(*shape, generator=generator, dtype=dtype, requires_grad=requires_grad)


def test_every_operation_has_the_same_arguments_everywhere():
    found = {name for name, value in vars(ops).items() if is_operation(value)}
    assert found - {"operations", "backend", "_kernels"} == set(ops.TABLE)
    pytest.importorskip("triton")
    for name in ops.TABLE:
        faces = [getattr(ops, name), getattr(reference, name)]
        faces += [getattr(ops.backend(kind), name) for kind in ("cpu", "cuda")]
        assert len({tuple(inspect.signature(face).parameters) for face in faces}) == 1, name


def is_operation(value):
    return inspect.isfunction(value) and value.__module__ == ops.__name__


def names_in(path):
    """Every name, attribute, definition and string in a file that could mean an operation."""
    for node in ast.walk(ast.parse(path.read_text())):
        yield from (getattr(node, field, None) for field in ("id", "attr", "name", "value"))


@pytest.mark.parametrize("name", ["sgd_step_", "lanczos_step_", "project_list_", "orthonormalise_"])
def test_an_operation_is_the_reference_two_back_ends_and_the_table(name):
    """Operations that no other is made of: what guide/extending.md says must be touched."""
    package = Path(ops.__file__).parent
    files = {path.relative_to(package) for path in package.rglob("*.py") if name in names_in(path)}
    modules = {Path(f"{row.replace('.', '/')}.py") for row in ops.TABLE[name]}
    of_the_audit = {path for path in files if path.parts[0] == "audit"}
    assert files - of_the_audit == {Path("reference.py"), Path("ops.py")} | modules


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
    (lambda r, v: ops.coefficients(r, v.clone().requires_grad_()), ValueError, "no derivative"),
    (lambda r, _: ops.mix_(r, torch.zeros(2, 3).double(), r[:2]), ValueError, r"\(k, 4\)"),
    (lambda r, _: ops.mix_(r, torch.zeros(2, 4).double(), r[:3]), ValueError, "into must be"),
    (lambda r, _: ops.mix_(r, torch.zeros(2, 4).double(), r[:2].float()), TypeError, "one dtype"),
    (lambda _, v: ops.quantise(v.view(1, 50), torch.int16), TypeError, "not stored as"),
    (lambda _, v: ops.norm(v.view(1, 1, 50)), ValueError, "norm needs"),
    (lambda _, v: ops.norm(v.clone().requires_grad_()), ValueError, r"vector\.detach"),
    (lambda _, v: ops.norm(torch._neg_view(v)), ValueError, "resolve_neg"),
    (lambda r, v: ops.project_list_(r, [torch._neg_view(v)]), ValueError, "resolve_neg"),
    (lambda _, v: ops.norm(v.to("meta")), ValueError, "kernels for cpu and cuda"),
    (lambda _, v: ops.norm(v.tolist()), TypeError, "vector must be a tensor; got list"),
    (lambda r, _: ops.quantise(r.clone().requires_grad_(), torch.int8), ValueError, "no_grad"),
    (lambda r, v: ops.project_(r.numpy(), v), TypeError, "rows must be a tensor; got ndarray"),
    (lambda r, v: ops.project_(r.clone().requires_grad_(), v), ValueError, r"rows\.detach"),
    (lambda r, v: ops.project_list_(r, v), TypeError, "tensors must be a list of tensors"),
    (lambda r, v: ops.sgd_step_(r, [v], [None], [], 0.1), TypeError, r"gradients\[0\] is None"),
    (lambda r, v: ops.project_list_(r, [None, v]), TypeError, r"tensors\[0\] is None"),
    (lambda r, v: ops.project_list_(r, [v, 1.0]), TypeError, r"tensors\[1\] .* got float"),
    (lambda r, v: ops.sgd_step_(r, [v], [v], [], torch.nan), ValueError, "lr .* got nan"),
    (
        lambda r, v: ops.sgd_step_(r, [v], [v], [], torch.tensor(-torch.inf)),
        ValueError,
        "lr must be finite; got -inf",
    ),
    (
        lambda r, v: ops.sgd_step_(r, [v], [v], [], 0.1, torch.inf),
        ValueError,
        "weight_decay must be finite",
    ),
    (lambda r, v: ops.apply_(r, [1.0] * 4, v), TypeError, "coefficients must be a tensor"),
    (lambda r, v: ops.lanczos_step_(r, v, torch.ones(2)), ValueError, "previous_beta is one"),
    (lambda r, _: ops.mix_(r, torch.tensor(1.0).double(), r[:2]), ValueError, "mixing must be"),
    (lambda r, _: ops.dequantise(r, None, 65), ValueError, "length 64; got 65"),
    (lambda r, _: ops.dequantise(r, None, True), ValueError, "length 64; got True"),
    (lambda r, _: ops.project_(r, None), TypeError, "vectors must be a tensor; got NoneType"),
    (lambda _, v: ops.norm(v.to_sparse()), ValueError, "dense .* layout is sparse_coo"),
    (lambda _, v: ops.norm(torch.nested.nested_tensor([v, v])), ValueError, "layout is nested"),
    (
        lambda r, v: ops.project_list_(r, [v.to_sparse()]),
        ValueError,
        r"tensors\[0\] must be a dense",
    ),
    (
        lambda r, v: ops.project_list_(r, [v[:9], *[v[9:20]] * 2]),
        ValueError,
        r"tensors\[1\] and tensors\[2\] share",
    ),
    (
        lambda r, v: ops.project_list_(r, [v[:30], v[20:40]]),
        ValueError,
        r"tensors\[0\] and tensors\[1\] share memory",
    ),
    (lambda r, _: ops.project_list_(r, [r[0, :50]]), ValueError, r"rows and tensors\[0\] share"),
    (
        lambda r, v: ops.sgd_step_(r, [v[:40]], [v[1:41]], [], 0.1),
        ValueError,
        r"gradients\[0\] and parameters\[0\] share",
    ),
    (
        lambda r, v: ops.sgd_step_(r, [v[:20], v[20:40]], [v[20:40], v[:20]], [], 0.1),
        ValueError,
        r"gradients\[1\] and parameters\[0\] share",
    ),
    (
        lambda r, v: ops.project_list_(r, [v[:9].expand(2, 9)]),
        ValueError,
        r"tensors\[0\] .* one number twice",
    ),
    (
        lambda r, v: ops.project_list_(r, [v[:20].as_strided((4, 3), (1, 2))]),
        ValueError,
        r"tensors\[0\] .* one number twice",
    ),
    (
        lambda r, v: ops.sgd_step_(r, [v[:1].expand(2, 9)], [v[1:19].view(2, 9)], [], 0.1),
        ValueError,
        r"parameters\[0\] .* one number twice",
    ),
    (
        lambda r, v: ops.sgd_step_(
            r, [v[1:19].view(2, 9)], [v[19:37].view(2, 9)], [v[:9].expand(2, 9)], 0.1
        ),
        ValueError,
        r"momenta\[0\] .* one number twice",
    ),
    (
        lambda r, v: ops.sgd_step_(r, [v[:18].view(2, 9)], [v[:1].expand(2, 9)], [], 0.1),
        ValueError,
        r"gradients\[0\] and parameters\[0\] share",
    ),
    (
        lambda r, v: ops.project_list_(r, [v.view(5, 10)[:, :6], v.view(5, 10)[:, 5:]]),
        ValueError,
        r"tensors\[0\] and tensors\[1\] share memory",
    ),
    *(
        (lambda r, _, call=call: call(r), ValueError, "rows and the vector .* share memory")
        for call in (
            lambda r: ops.project_(r, r[0, :50]),
            lambda r: ops.project_(r, r[2:]),
            lambda r: ops.apply_(r, torch.ones(4).double(), r[3]),
            lambda r: ops.orthonormalise_(r, r[1]),
            lambda r: ops.orthonormalise_block_(r[:2], r[1:]),
            lambda r: ops.lanczos_step_(r, r[3]),
        )
    ),
    (
        lambda r, v: ops.sgd_step_(r, [v], [v], [v], 0.1),
        ValueError,
        r"parameters\[0\] and momenta\[0\]",
    ),
    (lambda r, v: ops.sgd_step_(r, [v], [v], v, 0.1), TypeError, "momenta must be a list"),
    (lambda r, v: ops.sgd_step_(r, [v], [v], [], "x"), TypeError, "lr must be one real number"),
    (
        lambda r, v: ops.sgd_step_(r, [v], [v], [], 0.1, v),
        TypeError,
        "weight_decay .* got a tensor",
    ),
    (lambda r, v: ops.lanczos_step_(r, v, "x"), TypeError, "previous_beta must be one real"),
    (
        lambda r, _: ops.mix_(r, torch.zeros(2, 4).double(), r[:1].expand(2, -1)),
        ValueError,
        "into must",
    ),
    (
        lambda r, _: ops.mix_(r, torch.zeros(2, 4).double(), r[:2, 8:50]),
        ValueError,
        "rows and into share memory",
    ),
    (
        lambda r, _: ops.mix_(r, torch.zeros(2, 4).double(), r.view(-1)[8:108].view(2, 50)),
        ValueError,
        "rows and into share memory",
    ),
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


def test_columns_of_one_matrix_and_rows_beside_the_basis_are_no_overlap(rows, generator):
    matrix = vector(generator, 50).view(5, 10)
    whole = torch.cat([matrix[:, :6].reshape(-1), matrix[:, 6:].reshape(-1)])
    ops.project_list_(rows[:3], [matrix[:, :6], matrix[:, 6:]])
    ops.project_(rows[:3], whole)
    assert torch.equal(torch.cat([matrix[:, :6].reshape(-1), matrix[:, 6:].reshape(-1)]), whole)
    ops.project_(rows[:3], rows[3])
    ops.project_list_(rows[:1], [rows[1], rows[1, :0], rows[2:2]])
    weights, row = vector(generator, 1, 4).double(), rows[1, :50].view(1, 50)
    mixed = weights @ rows[:, :50].double()
    ops.mix_(rows, weights, row)
    assert torch.equal(row, mixed.to(row.dtype))


def test_a_gradient_may_be_the_parameter_or_the_momentum_that_it_moves(rows, generator):
    given, slope = vector(generator, 50), vector(generator, 50)
    expected, change = given.clone(), slope.clone()
    ops.sgd_step_(rows, [expected], [slope.clone()], [change], 0.1, 0.0, 0.9)
    ops.sgd_step_(rows, [given], [slope], [slope], 0.1, 0.0, 0.9)
    assert torch.equal(given, expected)
    expected = given.clone()
    ops.sgd_step_(rows, [expected], [given.clone()], [], 0.1)
    ops.sgd_step_(rows, [given], [given], [], 0.1)
    assert torch.equal(given, expected)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("kind", ["number", "row", "column", "windows"])
def test_expanded_gradients_are_read_as_what_they_show(rows, kind, momentum, generator):
    """What backward makes of a sum: one number in memory for many."""
    slope = {
        "number": lambda: vector(generator, 1).expand(5, 10),
        "row": lambda: vector(generator, 10).expand(5, 10),
        "column": lambda: vector(generator, 5, 1).expand(5, 10),
        "windows": lambda: vector(generator, 14).as_strided((5, 10), (1, 1)),
    }[kind]()
    given, change = vector(generator, 5, 10), vector(generator, 5, 10)
    expected, kept = [given.clone(), change.clone()], slope.clone()
    for step, weight, buffer, grad in (
        (ops.sgd_step_, given, change, slope),
        (reference.sgd_step_, *expected, kept),
    ):
        step(rows, [weight], [grad], [buffer] if momentum else [], 0.1, 0.01, momentum)
    torch.testing.assert_close([given, change], expected, rtol=1e-14, atol=1e-14)
    assert torch.equal(slope, kept)


def test_tensors_lie_apart_where_no_two_of_them_meet(generator):
    """Of parallel lists in one buffer, some empty; asked twice, as a training does."""
    seen = set()
    for _ in range(300):
        buffer = torch.zeros(60)
        sizes = tuple(torch.randint(0, 5, (3,), generator=generator).tolist())
        starts = torch.randint(0, 56, (6,), generator=generator).tolist()
        tensors = [buffer[at : at + size] for at, size in zip(starts, 2 * sizes, strict=True)]
        low = int(torch.randint(0, 50, (), generator=generator))
        every = [buffer[low : low + 8], *tensors]
        apart = not any(meet(a, b) for a, b in itertools.combinations(every, 2))
        for _ in range(2):
            assert ranges_differ(every[0], tensors, sizes) == apart
        seen.add(apart)
    assert seen == {True, False}


@pytest.mark.parametrize("n", [50, 5000])
@pytest.mark.parametrize("scale", [1e-320, 1e-200, 1e-155, 1e-145, 1e145, 1e155, 1e200, 1e303])
def test_a_norm_is_right_where_squares_leave_the_range_of_float64(scale, n, generator):
    block = vector(generator, 4, n)
    block[1] *= scale
    block[2], block[3, 7] = 0.0, torch.nan
    unit = block[1] / scale  # of what the last places of a subnormal number hold
    exact = float(unit.norm())
    for norm in (ops.norm, reference.norm):
        for found in (norm(block), torch.stack([norm(row) for row in block])):
            assert float(found[1] / scale) == pytest.approx(exact, rel=1e-14 + 5e-324 / scale)
            assert float(found[0]) == pytest.approx(float(block[0].norm()), rel=1e-14)
            assert float(found[2]) == 0.0
            assert bool(found[3].isnan())
    block[1, 3] = torch.inf
    assert float(ops.norm(block[1])) == torch.inf
