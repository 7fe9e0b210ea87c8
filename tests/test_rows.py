"""Rows: one owner of orthonormal rows, in any number of pieces, on any tier."""

import copy
import threading

import pytest
import torch

from curvlab.basis import Basis
from curvlab.eigen import lanczos
from curvlab.operators import Dense
from curvlab.rows import DeviceMemory, MappedFile, PinnedHost, Rows, Whole, store, tiers

TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-6}


def draw(generator, *shape, dtype=torch.float64):
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


@pytest.fixture(params=["one piece", "slabs", "host", "file"])
def make(request, tmp_path, monkeypatch):
    """Rows in one piece of memory, in a slab each, and where pieces of two rows pass through."""
    if request.param != "one piece":
        monkeypatch.setattr(store, "SLAB_BYTES", 1)
        monkeypatch.setattr(tiers, "PIECE_BYTES", 2 * 700 * 8)
    tier = {"host": PinnedHost(), "file": MappedFile(tmp_path)}.get(request.param, DeviceMemory())
    return lambda n, capacity, dtype: Rows(n, capacity, dtype=dtype, tier=tier)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_lanczos_process_on_rows_satisfies_its_recurrence(make, dtype, generator):
    """``A V = V T + beta v e'``, ``V'V = I``, in any kind of storage, a product a row."""
    n, steps, close = 301, 25, TOLERANCE[dtype]
    matrix = draw(generator, n, n)
    matrix = ((matrix + matrix.T) / n**0.5).to(dtype)
    rows = make(n, steps + 1, dtype)
    first = draw(generator, n, dtype=dtype)
    rows.orthonormalise_(first)
    rows.put(0, first)
    rows.admit()
    recurrence = torch.zeros(steps + 1, steps, dtype=torch.float64)
    beta = None
    for step in range(steps):
        target = rows.row(rows.size)
        target.copy_(matrix @ rows.row(step))
        _, length, removed = rows.lanczos_step_(target, beta)
        rows.put(rows.size, target)
        rows.admit()
        recurrence[: step + 1, step], recurrence[step + 1, step] = removed, length
        beta = float(length)
    vectors = rows.rows().double()
    assert (vectors @ vectors.T - torch.eye(steps + 1)).abs().max() <= 4 * close
    rest = vectors[:steps] @ matrix.double() - recurrence.T @ vectors
    assert rest.abs().max() <= 4 * close
    assert rows.orthogonality(recompute=True).passed


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("m", "p"), [(9, 4), (9, 9), (6, 1), (3, 0)])
def test_mixing_replaces_rows_by_combinations_and_moves_the_others_up(make, dtype, m, p, generator):
    rows = make(333, 12, dtype)
    for _ in range(3):
        rows.extend(draw(generator, 3, 333, dtype=dtype))
    before = rows.rows().double()
    weights = torch.linalg.qr(draw(generator, m, m)).Q[:, :p]
    expected = torch.cat([weights.T @ before[:m], before[m:]])
    assert largest(rows.combine(weights).double() - expected[:p]) <= TOLERANCE[dtype]
    rows.mix(weights)
    assert rows.size == p + 9 - m
    assert largest(rows.rows().double() - expected) <= TOLERANCE[dtype]
    assert rows.orthogonality().passed
    assert rows.extend(draw(generator, 2, 333, dtype=dtype)).all()


def test_rows_reserved_are_the_same_rows(make, generator):
    rows = make(333, 5, torch.float64)
    for _ in range(2):
        rows.extend(draw(generator, 2, 333))
    before = rows.rows()
    recorded = rows.gram.clone()
    rows.reserve(40)
    assert rows.capacity == 40
    assert (rows.whole is not None) == rows.tier.resident
    assert torch.equal(rows.rows(), before)
    assert largest(rows.gram - recorded) <= 1e-13


def test_what_is_added_is_not_copied_to_grow(monkeypatch, generator):
    monkeypatch.setattr(store, "SLAB_BYTES", 1)
    rows = Rows(100, 1000)
    rows.extend(draw(generator, 3, 100, dtype=torch.float32))
    first = rows.row(0).data_ptr()
    rows.extend(draw(generator, 5, 100, dtype=torch.float32))
    assert rows.store.allocated == 8
    assert rows.row(0).data_ptr() == first


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int8], ids=str)
def test_a_state_comes_back(dtype, generator):
    rows, again = Rows(100, 9, dtype=dtype), Rows(100, 9, dtype=dtype)
    again.load_state(rows.state())
    assert again.size == 0
    rows.extend(draw(generator, 5, 100, dtype=torch.float32))
    again.load_state(rows.state())
    assert torch.equal(again.rows(), rows.rows())
    assert torch.equal(again.gram, rows.gram)


def test_rounded_rows_are_not_written_behind_their_gram_matrix(generator):
    rows = Rows(100, 9, dtype=torch.int8)
    rows.extend(draw(generator, 5, 100, dtype=torch.float32))
    for call in (rows.admit, lambda: rows.mix(torch.eye(5).double())):
        with pytest.raises(TypeError, match="added with extend"):
            call()
    assert rows.size == 5


# How far rows are from orthonormal, and whether that is rounding or a mistake.
OFF = [
    (torch.float64, 2e-11, True),
    (torch.float64, 2e-9, False),
    (torch.float32, 1e-5, True),
    (torch.float32, 1e-3, False),
]


@pytest.mark.parametrize(("dtype", "off", "accepted"), OFF)
def test_deflation_and_projection_ask_the_same_of_given_rows(dtype, off, accepted, generator):
    """Rows that are accepted are put right, so that what is left out is left out exactly."""
    n = 60
    frame = torch.linalg.qr(draw(generator, n, n)).Q
    spectrum = torch.arange(n, 0, -1, dtype=torch.float64)
    operator = Dense(((frame * spectrum) @ frame.T).to(dtype))
    given = frame[:, :3].T.clone()
    given[0] += off * given[1]
    given = given.to(dtype)
    if not accepted:
        for call in (lambda: operator.project(given), lambda: lanczos(operator, 2, deflate=given)):
            with pytest.raises(ValueError, match="needs orthonormal rows"):
                call()
        return
    close = 100 * torch.finfo(dtype).eps
    assert lanczos(operator, 2, deflate=given, tol=1e-4).values[0] == pytest.approx(57.0, rel=1e-4)
    projected = operator.project(given)
    vector = projected @ draw(generator, n, dtype=dtype)
    assert largest(frame[:, :3].T @ vector.double()) <= close * float(vector.norm())
    assert largest((projected @ given).double()) <= close * n


def test_whole_vectors_have_at_least_one_element():
    with pytest.raises(ValueError, match="at least one element"):
        Whole(0)


def largest(difference):
    return float(difference.abs().max()) if difference.numel() else 0.0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.int8], ids=str)
@pytest.mark.parametrize("where", ["one piece", "slabs", "host", "file"])
def test_a_vector_almost_inside_the_span_comes_out_orthogonal_to_it(
    where, dtype, generator, tmp_path, monkeypatch
):
    """Relative to what is left of it, though no single piece holds most of it."""
    if where != "one piece":
        monkeypatch.setattr(store, "SLAB_BYTES", 1)
        monkeypatch.setattr(tiers, "PIECE_BYTES", 1)
    tier = {"host": PinnedHost(), "file": MappedFile(tmp_path)}.get(where, DeviceMemory())
    n, exact = 500, torch.float64 if dtype == torch.float64 else torch.float32
    rows = Rows(n, 4, dtype=dtype, tier=tier)
    for _ in range(4):
        rows.extend(draw(generator, 1, n, dtype=exact))
    outside = 1e-12 if dtype == torch.float64 else 1e-5
    inside = rows.rows().double().sum(0)
    vectors = (inside + outside * draw(generator, 2, n)).to(exact)
    for given in (vectors[0], vectors):
        left = given.clone()
        removed = rows.project_out_(left)
        assert float(rows.leak(left).max()) <= 4 * float(torch.finfo(exact).eps)
        again = given.double() - removed @ rows.rows().double()
        assert largest(again - left.double()) <= 16 * float(torch.finfo(exact).eps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=str)
def test_threads_that_extend_one_basis_take_turns(dtype):
    basis = Basis(400, 200, dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randn(16, 8, 400, generator=generator)
    kept, start = [None] * 16, threading.Barrier(16)

    def add(index):
        start.wait()
        kept[index] = basis.extend(blocks[index], task=str(index))

    threads = [threading.Thread(target=add, args=(index,)) for index in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert basis.size == 128
    assert all(bool(mask.all()) for mask in kept)
    assert sorted(int(s.task) for s in basis.segments) == list(range(16))
    assert basis.orthogonality(recompute=True).passed


@pytest.mark.parametrize("scale", [1e-300, 1e-200, 1e-160, 1e160, 1e200, 1e300])
def test_vectors_of_any_scale_are_directions(scale):
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(5, 300, generator=generator, dtype=torch.float64)
    vectors[3] = vectors[0] - vectors[1]
    plain, far = (Basis(300, 9, dtype=torch.float64) for _ in range(2))
    scales = torch.tensor([1.0, scale, scale, 1.0, scale], dtype=torch.float64)
    assert plain.extend(vectors).tolist() == [True, True, True, False, True]
    assert far.extend(scales[:, None] * vectors).tolist() == [True, True, True, False, True]
    assert far.principal_angles(plain).max() <= 1e-7


@pytest.mark.parametrize("scale", [1e-310, 1e-200, 1e-160, 1e160, 1e200, 1e300])
def test_the_leak_of_a_vector_of_any_scale_is_its_share(scale):
    generator = torch.Generator().manual_seed(0)
    rows, vector = torch.randn(5, 300, generator=generator, dtype=torch.float64).split([4, 1])
    basis = Basis(300, 9, dtype=torch.float64)
    basis.extend(rows)
    inside = torch.linalg.qr(rows.T).Q.T @ vector[0]
    expected = float(inside.norm() / vector[0].norm())
    assert float(basis.leak(scale * vector[0])) == pytest.approx(expected, rel=1e-9)
    several = torch.cat([vector, scale * vector, 0.0 * vector])
    assert basis.leak(several).tolist() == pytest.approx([expected, expected, 0.0], rel=1e-9)


def test_nothing_of_a_vector_of_zeros_lies_in_the_span(generator):
    basis = Basis(100, 9)
    assert basis.leak(torch.zeros(100)) == 0.0
    basis.extend(draw(generator, 3, 100, dtype=torch.float32))
    assert basis.leak(torch.zeros(100)) == 0.0
    assert basis.leak(torch.full((100,), float("nan"))).isnan()


def test_rows_can_be_copied(generator):
    basis = Basis(100, 9, dtype=torch.float16)
    basis.extend(draw(generator, 3, 100, dtype=torch.float32), task="first")
    again = copy.deepcopy(basis)
    assert again.store.allocated == 3  # nothing of what is reserved for others
    assert again.whole[0].data_ptr() != basis.whole[0].data_ptr()
    assert torch.equal(again.rows(), basis.rows())
    again.extend(draw(generator, 2, 100, dtype=torch.float32), task="second")
    assert (basis.size, again.size) == (3, 5)
    assert [segment.task for segment in again.segments] == ["first", "second"]


def test_no_more_rows_are_admitted_than_the_capacity_holds():
    rows = Rows(70, 4)
    rows.extend(torch.randn(2, 70, generator=torch.Generator().manual_seed(0)))
    with pytest.raises(ValueError, match="capacity of 4"):
        rows.admit(3)
    assert rows.size == 2
