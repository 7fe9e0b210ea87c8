"""The memory: what it keeps, what it removes, and what it refuses."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from curvlab.basis import Basis, Segment, basis_bytes, largest_basis
from curvlab.rows import store

# Storage dtype: leak of a projected vector against the stored span (rounding of the arithmetic),
# and against the span that was asked for (rounding of the storage).
LEAK = {
    torch.float64: (1e-14, 1e-14),
    torch.float32: (1e-6, 1e-6),
    torch.float16: (1e-6, 1e-4),
    torch.bfloat16: (1e-6, 1e-3),
    torch.int8: (1e-6, 3e-3),
    torch.float8_e4m3fn: (1e-6, 3e-2),
}


def working(dtype):
    return torch.float64 if dtype == torch.float64 else torch.float32


def draw(generator, *shape, dtype=torch.float32):
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def span(vectors):
    """Orthonormal rows of the span, float64."""
    return torch.linalg.qr(vectors.double().T).Q.T


@pytest.mark.parametrize("dtype", LEAK, ids=str)
@pytest.mark.parametrize("slab_bytes", [store.SLAB_BYTES, 1])
@pytest.mark.parametrize("n", [37, 5003])
def test_projected_vectors_have_nothing_left_in_the_span(
    dtype, slab_bytes, n, generator, monkeypatch
):
    monkeypatch.setattr(store, "SLAB_BYTES", slab_bytes)
    basis = Basis(n, 30, dtype=dtype)
    vectors = draw(generator, 11, n, dtype=working(dtype))
    assert basis.extend(vectors[:5]).all()
    assert basis.extend(vectors[5:]).all()
    assert len(basis) == basis.size == 11
    assert (basis.whole is None) == (slab_bytes == 1)  # two slabs, as it was extended twice
    gradient = draw(generator, n, dtype=working(dtype)) + 0.3 * vectors.sum(0)
    exact = span(vectors)
    stored = span(basis.rows())
    removed = gradient.double() - (exact @ gradient.double()) @ exact
    changed = gradient.clone()
    coefficients = basis.project_out_(changed)
    size = float(changed.double().norm())
    stored_leak, true_leak = LEAK[dtype]
    assert float((stored @ changed.double()).norm()) <= 3 * stored_leak * size
    assert float((exact @ changed.double()).norm()) <= 3 * true_leak * size
    assert float((changed.double() - removed).norm()) <= 3 * true_leak * float(gradient.norm())
    assert float(basis.leak(changed)) <= 3 * stored_leak
    again = gradient.double() - coefficients @ basis.rows().double()
    assert float((again - changed.double()).norm()) <= 1e-6 * float(gradient.norm())

    block = torch.stack([gradient, -2 * gradient])
    basis.project_out_(block)
    assert float((block[1] + 2 * changed).double().norm()) <= 1e-5 * size
    parts = [gradient[:5].clone(), gradient[5:].clone().view(1, -1)]
    basis.project_out_(parts)
    together = torch.cat([part.reshape(-1) for part in parts])
    assert float((together - changed).double().norm()) <= 1e-5 * size


@pytest.mark.parametrize("dtype", LEAK, ids=str)
def test_rows_are_certified_as_they_are_added(dtype, generator):
    basis = Basis(900, 40, dtype=dtype)
    for _ in range(3):
        basis.extend(draw(generator, 10, 900, dtype=working(dtype)))
    certificate = basis.orthogonality()
    assert certificate.passed
    certificate.require()
    stored = basis.rows().double()
    exact = stored @ stored.T
    assert certificate.error == pytest.approx(float((exact - torch.eye(30)).abs().max()), abs=1e-7)
    assert (basis.gram - exact).abs().max() <= 1e-6
    again = basis.orthogonality(recompute=True)
    assert again.passed
    assert again.drift <= 1e-6
    if basis.factor is not None:
        assert (basis.factor @ basis.factor.T - basis.gram).abs().max() <= 1e-12


def test_a_change_behind_its_back_shows_as_drift(generator):
    basis = Basis(300, 10)
    basis.extend(draw(generator, 5, 300))
    _, rows, _ = next(basis.store.pieces())
    rows[2, 7] += 0.01
    assert basis.orthogonality().passed
    found = basis.orthogonality(recompute=True)
    assert not found.passed
    with pytest.raises(ValueError, match="changed since it was stored"):
        found.require()


def test_up_to_condition_1e6_the_rows_stay_orthonormal(generator):
    n, k = 2000, 12
    left = torch.linalg.qr(torch.randn(k, k, generator=generator, dtype=torch.float64)).Q
    right = torch.linalg.qr(torch.randn(n, k, generator=generator, dtype=torch.float64)).Q
    block = (left * torch.logspace(0, -6, k, dtype=torch.float64)) @ right.T
    together, one_by_one = Basis(n, k), Basis(n, k)
    together.extend(block.float())
    for vector in block.float():
        one_by_one.append(vector)
    for basis in (together, one_by_one):
        exact = basis.rows().double()
        error = torch.linalg.matrix_norm(exact @ exact.T - torch.eye(basis.size), ord=2)
        assert float(error) <= 5e-7
        assert basis.size >= k - 1


def test_what_is_kept_is_said(generator):
    basis = Basis(100, 10)
    vectors = draw(generator, 6, 100)
    vectors[1], vectors[3] = vectors[0], 0.0
    vectors[5] = vectors[0] - vectors[2]
    kept = basis.extend(vectors, task="first", step=7, values=[6.0, 5.0, 4.0, 3.0, 2.0, 1.0])
    assert kept.tolist() == [True, False, True, False, True, False]
    assert basis.segments == (Segment("first", 0, 3, 7, (6.0, 4.0, 2.0)),)
    assert not basis.append(vectors[4], task="second")
    assert basis.append(draw(generator, 100), task="second", value=0.5)
    assert basis.segments[1] == Segment("second", 3, 4, None, (0.5,))
    basis.append(draw(generator, 100), task="second", value=0.25)
    assert basis.segments[1] == Segment("second", 3, 5, None, (0.5, 0.25))
    assert torch.equal(vectors[1], vectors[0])  # what was given is not changed


@pytest.mark.parametrize("dtype", LEAK, ids=str)
@pytest.mark.parametrize("tail", [1, 5])
def test_directions_that_are_there_already_are_not_added_again(dtype, tail, generator):
    vectors = draw(generator, 6, 3000, dtype=working(dtype)) ** tail  # odd powers: heavy tails
    basis = Basis(3000, 12, dtype=dtype)
    assert basis.extend(vectors).all()
    assert not basis.extend(vectors.flip(0)).any()
    assert not basis.extend(basis.rows()).any()
    new = draw(generator, 3000, dtype=working(dtype)) ** tail
    assert basis.append(new + vectors[0])


def test_a_basis_can_fill_its_space(generator):
    basis = Basis(20, 50)
    assert basis.extend(draw(generator, 30, 20)).sum() == 20
    vector = draw(generator, 20)
    size = float(vector.norm())
    basis.project_out_(vector)
    assert float(vector.norm()) <= 1e-6 * size


def test_merging_and_truncating_keep_provenance(generator):
    first, second = Basis(200, 12), Basis(200, 12, dtype=torch.float16)
    vectors = draw(generator, 9, 200)
    first.extend(vectors[:4], task="a", values=[4.0, 3.0, 2.0, 1.0])
    second.extend(vectors[2:6], task="b", values=[9.0, 8.0, 7.0, 6.0])
    second.extend(vectors[6:9], task="c", step=2)
    kept = first.merge(second, at_once=2)
    # What float16 changed in the two shared directions is rounding, not a new direction.
    assert kept.tolist() == [False, False, True, True, True, True, True]
    assert [segment.task for segment in first.segments] == ["a", "b", "c"]
    assert first.segments[-1].step == 2
    gradient = draw(generator, 200)
    first.project_out_(gradient)
    exact = span(vectors)
    assert float((exact @ gradient.double()).norm() / gradient.double().norm()) <= 1e-3

    full = first.rows()
    first.truncate(5)
    assert first.size == 5
    assert first.segments == (
        Segment("a", 0, 4, None, (4.0, 3.0, 2.0, 1.0)),
        Segment("b", 4, 5, None, (7.0,)),
    )
    assert torch.equal(first.rows(), full[:5])
    assert first.gram.shape == (5, 5)
    first.extend(vectors[6:])
    assert first.orthogonality(recompute=True).passed
    first.truncate(0)
    assert first.segments == ()
    assert first.project_out_(gradient).shape == (0,)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.int8], ids=str)
def test_principal_angles_are_right_at_both_ends(dtype, generator):
    n = 400
    frame = torch.linalg.qr(torch.randn(n, 10, generator=generator, dtype=torch.float64)).Q.T
    angles = torch.tensor([0.0, 1e-4, 0.3, 1.2, math.pi / 2], dtype=torch.float64)
    first = frame[:5]
    second = angles.cos().unsqueeze(1) * frame[:5] + angles.sin().unsqueeze(1) * frame[5:]
    mixed = torch.linalg.qr(torch.randn(5, 5, generator=generator, dtype=torch.float64)).Q @ second
    bases = [Basis(n, 5, dtype=dtype) for _ in range(2)]
    for basis, rows in zip(bases, (first, mixed), strict=True):
        basis.extend(rows.to(working(dtype)))
    close = {torch.float64: 2e-8, torch.float32: 1e-6, torch.int8: 2e-2}[dtype]
    for found in (bases[0].principal_angles(bases[1]), bases[1].principal_angles(bases[0])):
        assert (found - angles).abs().max() <= close
    bases[1].truncate(2)
    assert bases[0].principal_angles(bases[1]).shape == (2,)
    assert bases[0].principal_angles(bases[0]).max() <= 1e-6


def test_a_models_gradients_are_projected_where_they_are(generator):
    model = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3))
    parameters = list(model.parameters())
    n = sum(parameter.numel() for parameter in parameters)
    basis = Basis(n, 4)
    basis.extend(draw(generator, 4, n))
    for parameter in parameters[:-1]:
        parameter.grad = draw(generator, *parameter.shape)
    before = torch.cat([p.grad.reshape(-1) for p in parameters[:-1]] + [torch.zeros(3)])
    owners = [parameter.grad.data_ptr() for parameter in parameters[:-1]]
    basis.project_gradients_(parameters)
    after = torch.cat([parameter.grad.reshape(-1) for parameter in parameters])
    exact = basis.rows().double()
    expected = before.double() - (exact @ before.double()) @ exact
    assert (after.double() - expected).norm() <= 1e-6 * before.norm()
    assert [parameter.grad.data_ptr() for parameter in parameters[:-1]] == owners


@pytest.mark.parametrize("slab_bytes", [store.SLAB_BYTES, 1])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_an_sgd_step_leaves_the_protected_coordinates_alone(
    slab_bytes, momentum, generator, monkeypatch
):
    monkeypatch.setattr(store, "SLAB_BYTES", slab_bytes)
    basis = Basis(230, 6)
    basis.extend(draw(generator, 3, 230))
    basis.extend(draw(generator, 2, 230))
    parameters = [draw(generator, 20, 10).requires_grad_(), draw(generator, 30).requires_grad_()]
    momenta = [torch.zeros(20, 10), torch.zeros(30)] if momentum else []

    def coordinates():
        flat = torch.cat([parameter.detach().reshape(-1) for parameter in parameters])
        return basis.rows().double() @ flat.double()

    start, first = coordinates(), parameters[0].detach().clone()
    for _ in range(3):
        gradients = [draw(generator, 20, 10), draw(generator, 30)]
        basis.sgd_step_(parameters, gradients, momenta, 0.1, 0.01, momentum)
    assert (coordinates() - start).abs().max() <= 1e-5
    assert (parameters[0].detach() - first).norm() > 0.1


WRONG = [
    (lambda b, v: b.extend(v[:, :99]), ValueError, r"\(k, 100\)"),
    (lambda b, v: b.extend(v[0]), ValueError, r"\(k, 100\)"),
    (lambda b, v: b.append(v), ValueError, r"\(100,\)"),
    (lambda b, v: b.append(v[0, :50]), ValueError, r"\(k, 100\)"),
    (lambda b, v: b.extend(v.half()), TypeError, "float32 or float64"),
    (lambda b, v: b.extend(v.to("meta")), ValueError, "the basis on cpu"),
    (lambda b, v: b.extend(v, values=[1.0]), ValueError, "as many values"),
    (lambda b, v: b.extend(torch.cat([v, v.roll(1, 1)])), ValueError, "do not fit"),
    (lambda b, v: b.extend(v.masked_fill(v > 2, float("nan"))), ValueError, "NaN"),
    (lambda b, v: b.append(v[0] * float("inf")), ValueError, "NaN or infinity"),
    (lambda b, v: b.project_out_(v[0, :50]), ValueError, r"\(100,\) or \(b, 100\)"),
    (lambda b, v: b.project_out_(v.int()), TypeError, "float32 or float64"),
    (lambda b, v: b.project_out_([v[0], v[1]]), ValueError, "200 elements together"),
    (lambda b, v: b.project_out_([v[0, :50], v[0, 50:].int()]), TypeError, r"tensors\[1\]"),
    (lambda b, _: b.truncate(5), ValueError, "truncate needs"),
    (lambda b, _: b.rows(2, 9), ValueError, "rows 2 to 9"),
    (lambda b, _: b.merge(b), ValueError, "itself"),
    (lambda b, _: b.merge(Basis(7, 1)), ValueError, "7 elements"),
    (lambda b, _: b.principal_angles(Basis(7, 1)), ValueError, "no angles"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=str)
@pytest.mark.parametrize(("call", "kind", "words"), WRONG, ids=[words for _, _, words in WRONG])
def test_wrong_use_is_named_and_the_basis_unchanged(call, kind, words, dtype, generator):
    basis = Basis(100, 7, dtype=dtype)
    basis.extend(draw(generator, 3, 100), task="before")
    before, segments, gram = basis.rows(), basis.segments, basis.gram.clone()
    with pytest.raises(kind, match=words):
        call(basis, draw(generator, 4, 100))
    assert basis.size == 3
    assert torch.equal(basis.rows(), before)
    assert basis.segments == segments
    assert torch.equal(basis.gram, gram)
    assert basis.orthogonality(recompute=True).passed


def test_a_merge_that_does_not_fit_changes_nothing(generator):
    basis, other = Basis(100, 5), Basis(100, 9)
    basis.extend(draw(generator, 3, 100), task="before")
    other.extend(draw(generator, 9, 100), task="other")
    before = basis.rows()
    with pytest.raises(ValueError, match="do not fit"):
        basis.merge(other, at_once=2)
    assert torch.equal(basis.rows(), before)
    assert basis.segments == (Segment("before", 0, 3),)


def test_a_basis_that_cannot_be_is_refused():
    for n, capacity in ((0, 1), (5, -1)):
        with pytest.raises(ValueError, match="a basis needs"):
            Basis(n, capacity)
    with pytest.raises(TypeError, match="not stored as"):
        Basis(5, 5, dtype=torch.int32)


def test_bytes_follow_the_dtype():
    # The ViT of the paper at 20 tasks of 20 vectors.
    n, vectors = 11_700_000, 400
    gigabytes = {
        dtype: basis_bytes(n, vectors, dtype) / 1e9
        for dtype in (torch.float32, torch.float16, torch.int8)
    }
    assert n * vectors == 4.68e9
    assert gigabytes[torch.float32] == pytest.approx(18.72, abs=0.01)
    assert gigabytes[torch.float16] == pytest.approx(9.36, abs=0.01)
    assert gigabytes[torch.int8] == pytest.approx(4.97, abs=0.01)
    for dtype in gigabytes:
        for available in (24e9, 40e9, 80e9):
            most = largest_basis(n, int(available), dtype)
            assert basis_bytes(n, most, dtype) <= available < basis_bytes(n, most + 1, dtype)
    basis = Basis(1000, 6, dtype=torch.int8)
    basis.extend(torch.eye(3, 1000))
    assert basis.bytes == basis_bytes(1000, 3, torch.int8) == 3 * (1008 + 4 * 16) + 2 * 8 * 9
    assert largest_basis(n, 100) == 0


def test_the_rounding_of_float32_rows_is_no_direction_of_its_own_to_a_float64_basis(generator):
    fine = Basis(50, 50, dtype=torch.float64)
    fine.extend(draw(generator, 5, 50, dtype=torch.float64))
    coarse = Basis(50, 50)
    coarse.extend(fine.rows().float())
    assert not bool(fine.merge(coarse).any())
    assert fine.size == 5


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int8])
def test_a_copy_has_the_same_bits_and_memory_of_its_own(dtype, generator):
    basis = Basis(70, 9, dtype=dtype)
    basis.extend(draw(generator, 4, 70), task="first", values=[4.0, 3.0, 2.0, 1.0])
    other = basis.copy()
    assert torch.equal(other.rows(), basis.rows())
    assert torch.equal(other.gram, basis.gram)
    assert other.segments == basis.segments
    other.extend(draw(generator, 2, 70), task="second")
    assert (basis.size, other.size) == (4, 6)
    if dtype.is_floating_point and dtype.itemsize >= 4:
        again = Basis.exactly(other.rows(), 9)
        assert torch.equal(again.rows(), other.rows())
        assert again.orthogonality().passed
        assert again.extend(draw(generator, 1, 70)).all()


@pytest.mark.parametrize("form", ["vector", "list", "block"])
@pytest.mark.parametrize("n", [300, 20_011])
def test_a_float64_vector_almost_inside_float32_rows_comes_out_orthogonal(n, form):
    generator = torch.Generator().manual_seed(n)
    basis = Basis(n, 5)
    basis.extend(torch.randn(5, n, generator=generator))
    span = torch.linalg.qr(basis.rows().double().T).Q.T
    outside = torch.randn(n, generator=generator, dtype=torch.float64)
    for _ in range(2):
        outside -= span.T @ (span @ outside)
    vector = span.T @ torch.ones(5, dtype=torch.float64) + 1e-12 * outside / outside.norm()
    if form == "list":
        parts = [vector[:7].clone(), vector[7:].clone()]
        basis.project_out_(iter(parts))
        left = torch.cat(parts)
    else:
        left = vector.clone() if form == "vector" else vector.repeat(2, 1)
        basis.project_out_(left)
        left = left.reshape(-1, n)[-1]
    # Coefficients are summed in float64: rounding of the vector before is what may stay.
    assert float((span @ left).norm()) <= 1e-6 * float(left.norm())


def test_sizes_and_rows_that_cannot_be_are_refused_by_name():
    assert Basis(np.int64(10), np.int32(3)).n == 10
    for n, capacity in ((10.0, 3), (10, 2.5), ("10", 3)):
        with pytest.raises(TypeError, match="whole numbers"):
            Basis(n, capacity)
    for index in (-1, 3, 99):
        with pytest.raises(IndexError, match="room for 3"):
            Basis(10, 3).row(index)


@pytest.mark.parametrize("which", ["parameters", "gradients", "momenta"])
def test_a_step_refuses_lists_of_different_dtypes(which):
    basis = Basis(1000, 4)
    basis.extend(torch.randn(2, 1000))
    lists = {
        name: [torch.zeros(1000, dtype=torch.float64 if name == which else torch.float32)]
        for name in ("parameters", "gradients", "momenta")
    }
    with pytest.raises(TypeError, match="one dtype"):
        basis.sgd_step_(*lists.values(), lr=0.1, momentum=0.9)


@pytest.mark.parametrize("scale", [1e-300, 1e-200, 1e-44, 1e44, 1e200, 1e300])
def test_directions_that_are_no_float32_numbers_are_kept_in_float32_rows(scale, generator):
    vectors = draw(generator, 2, 50).double()
    basis, other = Basis(50, 2), Basis(50, 2)
    assert other.extend(vectors).all()
    assert basis.extend(vectors * scale).all()
    assert float(basis.principal_angles(other).max()) < 1e-5


def test_float64_rows_take_float64_vectors_by_every_way(generator):
    basis = Basis(50, 2, dtype=torch.float64)
    basis.extend(draw(generator, 2, 50).double())
    single = torch.ones(50)
    for call in (
        lambda: basis.project_out_(single),
        lambda: basis.project_out_(single.view(1, 50)),
        lambda: basis.sgd_step_([single], [single.clone()], [], 0.1),
    ):
        with pytest.raises(TypeError, match="float64 rows need float64"):
            call()
    assert bool((single == 1).all())


def test_a_row_of_the_basis_is_not_projected_in_place_nor_a_rate_that_is_no_number(generator):
    basis = Basis(50, 3)
    basis.extend(draw(generator, 3, 50))
    row, given, slope = basis.store.whole[0][1, :50], draw(generator, 50), draw(generator, 50)
    before, kept = basis.store.whole[0].clone(), given.clone()
    with pytest.raises(ValueError, match=r"rows and the vector .* share memory"):
        basis.project_out_(row)
    with pytest.raises(ValueError, match=r"rows and parameters\[0\] share memory"):
        basis.sgd_step_([row], [slope], [], 0.1)
    with pytest.raises(ValueError, match=r"parameters\[0\] and momenta\[0\] share memory"):
        basis.sgd_step_([given], [slope], [given], 0.1, 0.0, 0.9)
    with pytest.raises(ValueError, match="lr must be finite; got nan"):
        basis.sgd_step_([given], [slope], [], math.nan)
    assert torch.equal(basis.store.whole[0], before)
    assert torch.equal(given, kept)
