"""Arguments of the eigensolvers: what is refused, in which words, and what is taken as it is."""

import re
from functools import partial

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from curvlab.eigen import (
    Certify,
    Checkpoint,
    NotConvergedError,
    Room,
    block_lanczos,
    diagonal,
    eigenpairs_above,
    lanczos,
    layer_spectra,
    power_iteration,
    solve as solve_system,
    spectral_density,
    spectral_energy,
    trace,
)
from curvlab.nets import mlp
from curvlab.operators import FromFunction, GaussNewton
from tests.dense_truth import rotated
from tests.test_eigen_refusals import A, Drifting, N, solve


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"k": 0}, "between 1 and n"),
        ({"k": -1}, "between 1 and n"),
        ({"k": N + 1}, "between 1 and n"),
        ({"k": 2.0}, "whole number"),
        ({"k": True}, "whole number"),
        ({"which": "XX"}, "which="),
        ({"tol": -1.0}, "tol="),
        ({"tol": float("nan")}, "tol="),
        ({"relative_to": "trace"}, "relative_to="),
        ({"seed": -1}, "seed="),
        ({"certify": "maybe"}, "certify="),
        ({"room": 40}, "room="),
        ({"room": Room(rows=4)}, "needs at least 12 rows"),
        ({"room": Room(bytes=2000)}, "bytes=2000"),
        ({"max_products": 0}, "max_products="),
        ({"max_products": 12.5}, "max_products="),
        ({"max_products": True}, "max_products="),
        ({"tol": "1e-3"}, "tol="),
        ({"checkpoint": 3}, "file="),
        ({"v0": torch.ones(N - 1, dtype=torch.float64)}, "v0="),
        ({"v0": torch.ones(N, dtype=torch.int64)}, "v0="),
        ({"v0": [1.0] * N}, "v0="),
        ({"v0": torch.zeros(N, dtype=torch.float64)}, "zeros"),
        ({"v0": torch.full((N,), float("nan"), dtype=torch.float64)}, "v0="),
        ({"v0": torch.ones(N, dtype=torch.float64, device="meta")}, "v0="),
        ({"deflate": torch.ones(2, N, dtype=torch.float64)}, "orthonormal"),
        ({"deflate": torch.eye(3, N - 1, dtype=torch.float64)}, "deflate="),
        ({"deflate": "basis"}, "deflate="),
    ],
)
def test_arguments_that_cannot_be_met_are_refused_with_advice(options, match):
    arguments = {"k": 3, **options}
    with pytest.raises((ValueError, TypeError), match=match):
        lanczos(FromFunction(lambda v: A @ v, N, dtype=A.dtype), arguments.pop("k"), **arguments)
    arguments = {"k": 3, **options}
    if "deflate" not in arguments or not isinstance(arguments["deflate"], str):
        with pytest.raises((ValueError, TypeError), match=match):  # the dense way checks as much
            lanczos(A, arguments.pop("k"), dense=True, **arguments)


@pytest.mark.parametrize(
    ("made", "match"),
    [
        (lambda: Certify(doubt=0.0), "doubt="),
        (lambda: Certify(products=0), "products="),
        (lambda: Checkpoint("file", every=0), "every="),
        (lambda: Room(rows=40, bytes=10**6), "not both"),
        (lambda: Certify(doubt="0.1"), "doubt="),
        (lambda: Certify(products=2.5), "products="),
        (lambda: Certify(explicit="no"), "explicit="),
        (lambda: Checkpoint("file", every=1.5), "every="),
        (lambda: Checkpoint(True), "file="),
        (lambda: Room(rows=20.5), "rows="),
        (lambda: Room(bytes=1e9), "bytes="),
        (lambda: Room(file=3), "file="),
    ],
)
def test_what_is_said_of_proof_room_and_files_is_checked(made, match):
    with pytest.raises((ValueError, TypeError), match=match):
        made()


@pytest.mark.parametrize("dense", ["no", 0])
def test_dense_is_a_choice_of_two(dense):
    with pytest.raises(TypeError, match="dense="):
        lanczos(A, 3, dense=dense)


def test_a_function_that_wants_another_dtype_is_told_how_to_get_it():
    matrix = torch.eye(40, dtype=torch.float64)
    with pytest.raises(RuntimeError) as raised:
        lanczos((lambda v: matrix @ v, 40), 2)
    assert "FromFunction(function, n, dtype=torch.float64" in raised.value.__notes__[0]
    pairs = lanczos(FromFunction(lambda v: matrix @ v, 40, dtype=torch.float64), 2)
    assert pairs.values.tolist() == pytest.approx([1.0, 1.0])


def test_operators_of_the_wrong_kind_are_refused():
    for bad, error in (
        (torch.ones(3, 4), ValueError),
        (torch.ones(3, 3, dtype=torch.int64), TypeError),
        (torch.tensor([[0.0, 1.0], [0.0, 0.0]]), ValueError),
        ((len,), ValueError),
        ((len, 2.5), TypeError),
        (object(), TypeError),
    ):
        with pytest.raises(error):
            lanczos(bad, 1)
    with pytest.raises(ValueError, match="shape"):
        lanczos((lambda v: v[:-1], N), 1)


def test_every_kind_of_operator_gives_the_same_pairs():
    from scipy.sparse.linalg import aslinearoperator

    class Own:
        n, dtype, device = N, torch.float64, torch.device("cpu")

        def __matmul__(self, vectors):
            return vectors @ A

    expected = torch.tensor([9.0, 7.0, -6.0], dtype=torch.float64)
    strided = torch.zeros(N, 2 * N, dtype=torch.float64)[:, ::2].copy_(A)
    for source in (A, A.numpy(), aslinearoperator(A.numpy()), Own(), strided):
        assert torch.allclose(lanczos(source, 3, tol=1e-8, dense=False).values, expected)
    pairs = lanczos(A, 3)
    assert pairs.method.startswith("dense")
    assert pairs.matvecs == 0
    assert torch.allclose(pairs.values, expected)


def test_a_budget_that_runs_out_is_said_and_required_convergence_raises():
    pairs = solve(lambda v: A @ v, k=3, tol=1e-10, max_products=12)
    assert pairs.matvecs == 12
    assert pairs.reason == "max_products ran out"
    assert not pairs.complete
    with pytest.raises(NotConvergedError, match="max_products="):
        pairs.require_converged()
    assert len(solve(lambda v: A @ v, k=9, max_products=8)) == 4  # four went into the probe


def test_skipping_certification_is_said_and_can_be_required():
    pairs = solve(lambda v: A @ v, certify=False).require_converged()
    assert not pairs.complete
    with pytest.raises(NotConvergedError, match="none is missing"):
        pairs.require_converged(complete=True)


def test_the_global_generator_is_left_alone_and_a_seed_gives_the_same_bits():
    before = torch.random.get_rng_state()
    first, second = solve(lambda v: A @ v, seed=3), solve(lambda v: A @ v, seed=3)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(first.vectors, second.vectors)
    assert torch.equal(first.residuals, second.residuals)


@pytest.mark.parametrize("certify", [True, False, Certify(explicit=True)])
@pytest.mark.parametrize("solver", [lanczos, partial(block_lanczos, block=3)])
def test_no_more_products_are_made_than_are_allowed(solver, certify):
    values = torch.linspace(0, 1, 500, dtype=torch.float64) ** 3
    operator = FromFunction(lambda v: v * values, 500, dtype=torch.float64)
    for most in (20, 33, 70):
        pairs = solver(operator, 4, tol=1e-9, max_products=most, certify=certify)
        assert pairs.matvecs <= most
        assert not pairs.complete
        true = (pairs.vectors * values - pairs.values[:, None] * pairs.vectors).norm(dim=1)
        assert bool((true <= pairs.residuals).all())
    with pytest.raises(ValueError, match="leaves none for the search"):
        solver(operator, 4, max_products=4, certify=Certify(explicit=True))


@pytest.mark.parametrize("deflate", [None, torch.eye(2, 60, dtype=torch.float64)])
@pytest.mark.parametrize("given", ["function", "own", "matrix"])
def test_the_dense_way_makes_no_more_products_than_are_allowed(given, deflate):
    matrix = rotated(torch.linspace(1, 2, 60).double())

    class Own:
        n, dtype, device = 60, torch.float64, torch.device("cpu")

        def __matmul__(self, vectors):
            return vectors @ matrix

    for most in (5, 40, 63, 64, 65, 66, 200):
        operator = {
            "function": FromFunction(lambda v: matrix @ v, 60, dtype=torch.float64),
            "own": Own(),
            "matrix": matrix,
        }[given]
        pairs = lanczos(operator, 30, max_products=most, deflate=deflate)
        assert pairs.matvecs <= most
        if most == 200:
            assert pairs.method.startswith("dense")
        elif most == 5 and pairs.matvecs:
            with pytest.raises(ValueError, match="max_products="):
                lanczos(operator, 30, max_products=most, deflate=deflate, dense=True)


@pytest.mark.parametrize("progress", ["a", 1, 0.0])
def test_progress_is_a_choice_of_two_or_left_open(progress):
    operator = Drifting(1000, 0.0)
    ask = {"progress": progress}
    for call in (
        lambda: lanczos(operator, 3, **ask),
        lambda: lanczos(operator, N, **ask, dense=True),
        lambda: block_lanczos(operator, 3, **ask),
        lambda: eigenpairs_above(operator, 5.0, **ask),
        lambda: layer_spectra(operator, 3, **ask),
        lambda: power_iteration(operator, 1, **ask),
        lambda: solve_system(operator, torch.ones(N, dtype=torch.float64), **ask),
        lambda: spectral_density(operator, **ask),
        lambda: spectral_energy(operator, 0.1, **ask),
        lambda: trace(operator, **ask),
        lambda: diagonal(operator, **ask),
    ):
        with pytest.raises(TypeError, match="progress= is True, False, or None"):
            call()
    assert operator.count == 0


@pytest.mark.parametrize(
    "call",
    [
        lambda i, file: lanczos(
            A, i(3), seed=i(1), max_products=i(90), dense=False, room=Room(rows=i(40)),
            certify=Certify(products=i(30)), checkpoint=Checkpoint(file, every=i(1)),
        ),
        lambda i, file: block_lanczos(
            (lambda v: A.float() @ v, i(N)), i(2), block=i(3), seed=i(1), max_products=i(90),
            room=Room(bytes=i(10**7)), checkpoint=file,
        ),
        lambda i, file: power_iteration(
            A, i(2), seed=i(1), steps=i(9), max_products=i(30), checkpoint=file
        ),
        lambda i, file: spectral_density(
            A, probes=i(2), steps=i(9), seed=i(1), checkpoint=file
        ),
        lambda i, file: trace(A, probes=i(9), seed=i(1), checkpoint=file),
        lambda i, file: diagonal(A, probes=i(9), seed=i(1), checkpoint=file),
        lambda i, file: spectral_energy(
            A, 0.5, probes=i(2), largest=i(30), seed=i(1), dense=False, checkpoint=file
        ),
        lambda i, _: layer_spectra(
            GaussNewton(mlp((6, 4, 3)), cross_entropy, (torch.ones(9, 6), torch.arange(9) % 3)),
            i(2), seed=i(1),
        ),
        lambda i, _: eigenpairs_above(A, 5.0, largest=i(30), seed=i(1)),
        lambda i, file: solve_system(
            A, torch.ones(N).double(), damping=9.0, max_products=i(30), seed=i(1), checkpoint=file
        ),
    ],
)  # fmt: skip
def test_whole_numbers_of_numpy_are_taken_wherever_ints_are(call, tmp_path):
    """A resumed computation finds the same arguments in the file."""
    plain = call(int, tmp_path / "plain")
    given = call(np.int64, tmp_path / "given")
    call(np.int64, tmp_path / "plain")

    def numbers(result):
        return re.sub(r"[\d.]+ s[;,]|seconds=[\d.e-]+|\d+ products", "", repr(result))

    assert numbers(given) == numbers(plain)
