"""Projection kernels against float64 arithmetic written out here, on every CPU path."""

import importlib
import sys

import pytest
import torch
from curvlab_kernels import _cpu, reference
from curvlab_kernels._cpu import path

# Relative to the vector's norm.
TOLERANCE = {torch.float64: 1e-13, torch.float32: 3e-7}
SHAPES = [(0, 7), (1, 1), (1, 1024), (3, 1025), (17, 4999), (41, 18010), (6, 70001)]
STORAGE = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.float8_e4m3fn,
]


def look_for_numba_anew():
    path._choose.cache_clear()
    path._compiled.cache_clear()


@pytest.fixture(params=["reference", "cpu", "cpu without numba"])
def kernels(request, monkeypatch):
    if request.param == "reference":
        yield reference
        return
    look_for_numba_anew()
    if request.param == "cpu without numba":
        monkeypatch.setitem(sys.modules, "numba", None)  # importing it now raises ImportError
    yield _cpu
    look_for_numba_anew()


def stored(m, n, dtype, generator, working=torch.float32):
    """Rows orthonormal up to storage, their scales, and their exact values, float64 ``(m, n)``."""
    vectors = torch.linalg.qr(torch.randn(n, m, generator=generator, dtype=torch.float64))[0].T
    rows, scales = reference.quantise(vectors.to(working), dtype)
    values = rows[:, :n].double()
    if scales is not None:
        spread = torch.repeat_interleave(scales.double(), 64, dim=1)
        values = values * spread[:, :n]
    return rows, scales, values


def draw(shape, generator, dtype):
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def cases():
    for dtype in STORAGE:
        for working in (torch.float32, torch.float64):
            if dtype != torch.float64 or working == torch.float64:
                yield pytest.param(dtype, working, id=f"{dtype}-{working}".replace("torch.", ""))


@pytest.mark.parametrize(("dtype", "working"), list(cases()))
@pytest.mark.parametrize(("m", "n"), SHAPES)
def test_projection_removes_what_float64_removes(kernels, m, n, dtype, working, generator):
    rows, scales, values = stored(m, n, dtype, generator, working)
    spd = values @ values.T + torch.eye(m, dtype=torch.float64)
    factor = torch.linalg.cholesky(spd)
    for lead in ((), (3,)):
        vectors = draw((*lead, n), generator, working)
        exact = vectors.double()
        size = float(exact.norm())
        close = TOLERANCE[working] * size
        weights = exact @ values.T
        assert (kernels.coefficients(rows, vectors, scales) - weights).norm() <= close

        changed = vectors.clone()
        kernels.apply_(rows, weights, changed, scales)
        assert (changed.double() - (exact - weights @ values)).norm() <= 2 * close

        solved = weights @ torch.linalg.inv(spd)
        changed = vectors.clone()
        removed = kernels.project_(rows, changed, factor, scales)
        assert (removed - solved).norm() <= close
        assert (changed.double() - (exact - solved @ values)).norm() <= 2 * close

        # Rounded rows are not quite orthonormal, so that a second pass finds something.
        rest = exact - weights @ values
        if (rest.norm(dim=-1) < 0.1 * exact.norm(dim=-1)).any():
            weights, rest = weights + rest @ values.T, rest - (rest @ values.T) @ values
        changed = vectors.clone()
        removed = kernels.project_(rows, changed, None, scales)
        assert (removed - weights).norm() <= close
        assert (changed.double() - rest).norm() <= 2 * close


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize(
    "shapes",
    [
        [(7,)],
        [(3, 5), (), (0,), (2, 2, 2)],
        [(40_001,), (33, 3), (1,), (50_000,), (13,)],  # in place, gathered, gathered, ...
        [(65_537,), (70_000,)],
    ],
)
@pytest.mark.parametrize("with_factor", [False, True])
def test_a_list_is_projected_as_one_vector(kernels, shapes, dtype, with_factor, generator):
    n = sum(torch.Size(shape).numel() for shape in shapes)
    rows, scales, values = stored(5, n, dtype, generator)
    factor = torch.linalg.cholesky(values @ values.T + torch.eye(5)) if with_factor else None
    tensors = [draw(shape, generator, torch.float32) for shape in shapes]
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors]).double()
    weights = reference.solve(factor, values @ flat)
    removed = kernels.project_list_(rows, tensors, factor, scales)
    after = torch.cat([tensor.reshape(-1) for tensor in tensors]).double()
    close = TOLERANCE[torch.float32] * float(flat.norm())
    assert (removed - weights).norm() <= close
    assert (after - (flat - weights @ values)).norm() <= 2 * close


def test_a_strided_tensor_in_a_list_changes_in_place(kernels, generator):
    rows, _, values = stored(4, 200 * 300, torch.float32, generator)
    base = draw((300, 200), generator, torch.float32)
    before = base.T.reshape(-1).double()
    kernels.project_list_(rows, [base.T])
    exact = before - (values @ before) @ values
    assert (base.T.reshape(-1).double() - exact).norm() <= 1e-6 * before.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int8], ids=str)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("shapes", [[(30, 20), (5,)], [(40_000,), (11,), (300_001,)]])
def test_sgd_step_follows_its_formula(kernels, shapes, momentum, dtype, generator):
    n = sum(torch.Size(shape).numel() for shape in shapes)
    rows, scales, values = stored(6, n, dtype, generator)

    def tensors():
        return [draw(shape, generator, torch.float32) for shape in shapes]

    def flat(list_):
        return torch.cat([tensor.reshape(-1) for tensor in list_]).double()

    parameters, gradients, momenta = tensors(), tensors(), tensors() if momentum else []
    step = flat(gradients) + 0.1 * flat(parameters)
    weights = values @ step
    step = step - weights @ values
    if momentum:
        step = momentum * flat(momenta) + step
    expected = flat(parameters) - 0.5 * step
    given = flat(gradients)
    removed = kernels.sgd_step_(
        rows, parameters, gradients, momenta, 0.5, 0.1, momentum, None, scales
    )
    size = float(expected.norm())
    assert (removed - weights).norm() <= 1e-6 * size
    assert (flat(parameters) - expected).norm() <= 1e-6 * size
    assert torch.equal(flat(gradients), given)
    if momentum:
        assert (flat(momenta) - step).norm() <= 1e-6 * size


def test_decay_does_not_leak_into_protected_directions(kernels, generator):
    rows, _, _ = stored(5, 3000, torch.float32, generator)
    reference.orthonormalise_block_(rows[:0], rows)
    parameters = [draw((3000,), generator, torch.float32)]
    before = rows[:, :3000].double() @ parameters[0].double()
    kernels.sgd_step_(rows, parameters, [torch.zeros(3000)], [], 1.0, 0.5)
    after = rows[:, :3000].double() @ parameters[0].double()
    assert (after - before).abs().max() <= 1e-5


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize(("m", "n"), [(1, 1), (2, 64), (3, 65), (4, 1000)])
def test_quantised_rows_are_within_half_a_step_of_their_block(m, n, dtype, generator):
    vectors = torch.randn(m, n, generator=generator)
    vectors[0, : n // 2] = 0.0  # a block of zeros has no scale
    rows, scales = reference.quantise(vectors, dtype)
    assert rows.shape == (m, reference.padded(n))
    assert not rows[:, n:].float().any()
    error = (reference.dequantise(rows, scales, n) - vectors).abs()
    blocks = torch.nn.functional.pad(vectors.abs(), (0, -n % 64)).view(m, -1, 64).amax(-1)
    largest = torch.repeat_interleave(blocks, 64, dim=1)[:, :n]
    relative = {torch.int8: 0.5 / 127, torch.float8_e4m3fn: 2**-4, torch.float8_e5m2: 2**-3}
    assert (error <= relative[dtype] * largest * 1.001).all()


def test_the_norm_is_right_to_seven_digits_at_the_size_of_a_vit(kernels, generator):
    vector = torch.rand(12_400_000, generator=generator)
    exact = float(vector.double().square().sum().sqrt())
    assert abs(float(kernels.norm(vector)) - exact) <= 1e-7 * exact


def test_the_leak_at_the_size_of_a_vit_is_that_of_rounding(kernels, generator):
    n = 12_400_000
    signs = torch.randint(0, 2, (n // 4,), generator=generator).float().repeat_interleave(4) * 2 - 1
    patterns = torch.tensor([[1.0, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1]]).repeat(1, n // 4)
    rows = patterns * signs / n**0.5  # orthonormal to 1e-8, whatever the signs
    gradient = torch.randn(n, generator=generator) + 3000 * rows.sum(0)
    kernels.project_(rows, gradient)
    inside = torch.stack([torch.dot(row.double(), gradient.double()) for row in rows])
    assert float(inside.norm() / gradient.double().norm()) <= 1e-6


def test_missing_numba_is_said_once(monkeypatch, caplog):
    look_for_numba_anew()
    monkeypatch.setitem(sys.modules, "numba", None)
    rows, _ = reference.quantise(torch.ones(2, 10), torch.bfloat16)
    with caplog.at_level("INFO", logger="curvlab_kernels._cpu.path"):
        _cpu.coefficients(rows, torch.ones(10))
        _cpu.coefficients(rows, torch.ones(10))
    assert [record.message for record in caplog.records if "numba" in record.message] != []
    assert len(caplog.records) == 1
    look_for_numba_anew()


def test_narrow_rows_take_the_compiled_loops(monkeypatch, generator):
    look_for_numba_anew()
    compiled = importlib.import_module("curvlab_kernels._cpu.compiled")
    calls = []
    original = compiled.accumulate
    monkeypatch.setattr(compiled, "accumulate", lambda *a: (calls.append(1), original(*a)))
    rows, _, _ = stored(3, 100, torch.float16, generator)
    _cpu.coefficients(rows, torch.ones(100))
    assert calls == [1]


@pytest.mark.parametrize("lead", [(), (2,)])
@pytest.mark.parametrize("n", [18_010, 60_001, 160_000])
def test_small_terms_of_a_long_sum_are_not_lost_behind_a_large_one(kernels, n, lead, generator):
    """A few large coordinates and a bulk of small ones: what outliers do to Lanczos vectors."""
    shares = torch.full((n,), 0.3, dtype=torch.float64)
    shares[:10] = 0.3 * n**0.5
    rows, _, values = stored(2, n, torch.float32, generator)
    rows[:, :n] *= shares
    values = rows[:, :n].double()
    vectors = (draw((*lead, n), generator, torch.float64) * shares + 1.0).float()
    exact = vectors.double() @ values.T
    error = (kernels.coefficients(rows, vectors) - exact).abs().max()
    assert error <= TOLERANCE[torch.float32] * vectors.double().norm()


@pytest.mark.parametrize(("dtype", "outside"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("with_factor", [False, True])
@pytest.mark.parametrize(("m", "n"), [(3, 1025), (20, 18010), (6, 70001)])
def test_a_vector_almost_inside_the_span_comes_out_orthogonal_to_it(
    kernels, m, n, with_factor, dtype, outside, generator
):
    rows, _, values = stored(m + 1, n, dtype, generator, dtype)
    values, other = values[:m], values[m]
    mixing = torch.eye(m, dtype=torch.float64)
    if with_factor:  # the same span by rows that are not orthonormal
        mixing += 0.3 * torch.tril(torch.ones(m, m, dtype=torch.float64), -1)
    inside = torch.randn(m, generator=generator, dtype=torch.float64) @ values
    given = (inside / inside.norm() + outside * other).to(dtype)
    rows = reference.quantise((mixing @ values).to(dtype), dtype)[0]
    values = rows[:, :n].double()
    factor = torch.linalg.cholesky(values @ values.T) if with_factor else None
    exact = torch.linalg.qr(values.T).Q
    for lead in (1, 3):
        vectors = given.repeat(lead, 1) if lead > 1 else given.clone()
        kernels.project_(rows, vectors, factor)
        left = vectors.double().view(lead, n)
        # Relative to what is left, as for any other vector: without a second pass 1e-4 and 1e-2.
        assert ((left @ exact).norm(dim=1) / left.norm(dim=1)).max() <= 20 * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("k", "m", "n"), [(1, 1, 1), (3, 5, 1000), (4, 40, 70_001), (0, 3, 50)])
def test_mixed_rows_are_rounded_once_also_in_place(kernels, k, m, n, dtype, generator):
    rows = reference.quantise(draw((m, n), generator, dtype), dtype)[0]
    mixing = torch.randn(k, m, generator=generator, dtype=torch.float64)
    expected = mixing @ rows[:, :n].double()
    into = torch.full((k, n), torch.nan, dtype=dtype)
    kernels.mix_(rows, mixing, into)
    close = torch.finfo(dtype).eps * (mixing.abs() @ rows[:, :n].double().abs())
    assert ((into.double() - expected).abs() <= close).all()
    kernels.mix_(rows, mixing, rows[:k])
    assert ((rows[:k, :n].double() - expected).abs() <= close).all()
    assert not rows[:k, n:].any()
