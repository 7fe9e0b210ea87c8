"""Checks of the Gram-Schmidt kernels: the reference's results, and what must hold of any result."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from curvlab_kernels import _triton, reference
from curvlab_kernels._triton.apply import subtract_into
from curvlab_kernels._triton.dots import Unless
from curvlab_kernels._triton.lanczos_step import third_pass, two_passes
from curvlab_kernels._triton.orthonormalise import coefficients_and_squares, subtract_and_dot
from curvlab_kernels.audit.agreement import (
    ORTHOGONALITY,
    Check,
    basis,
    close,
    random,
)
from curvlab_kernels.audit.agreement_exact import same_squares


def orthogonal_checks() -> Iterator[Check]:
    """Orthonormalisation, Lanczos steps, blocks and norms."""
    for dtype in (torch.float32, torch.float64):
        name = str(dtype).removeprefix("torch.")
        for m in (0, 1, 5, 40, 130):
            yield Check(f"orthonormalise-{name}-{m}", partial(orthonormalise, m, 1023, dtype))
        for beta in (None, 0.7):
            yield Check(f"lanczos-{name}-beta-{beta}", partial(lanczos, 17, 1025, dtype, beta))
        yield Check(f"block-{name}", partial(block, 5, 300, dtype))
        yield Check(f"norm-{name}", partial(norms, dtype))
        yield Check(f"mix-{name}", partial(mixed, 1, 3, 33, dtype))
    yield Check("mix-in-place", partial(mixed, 5, 7, 1025, torch.float32))
    yield Check("orthonormalise-more-rows-than-a-tile", partial(orthonormalise, 300, 400))
    yield Check("orthonormalise-dependent", dependent)
    yield Check("orthonormalise-nan", not_a_number)
    yield Check("lanczos-deflated", deflated)
    yield Check("lanczos-exhausted", exhausted)
    yield Check("block-without-basis", partial(block, 0, 300, torch.float32))
    yield Check("block-ill-conditioned", ill_conditioned)
    yield Check("block-dependent", dependent_block)


def orthogonality(rows: Tensor, vectors: Tensor) -> float:
    """Largest element of ``Q Q' - I`` over the vectors and their products with the rows."""
    vectors = vectors.cpu().double()
    rows = rows[:, : vectors.shape[1]].cpu().double()
    within = vectors @ vectors.T - torch.eye(vectors.shape[0], dtype=torch.float64)
    return max(float(part.abs().max()) for part in (within, vectors @ rows.T) if part.numel())


def passes(rows: Tensor, vector: Tensor, start: int) -> None:
    """What each pass of a step leaves: the sums by which rank and a further pass are decided.

    Args:
        start: The first row of the first pass; ``m >= 1``.
    """
    vector, length = vector.clone(), float(reference.norm(vector.cpu()))
    removed = torch.zeros(len(rows), dtype=torch.float64, device=rows.device)
    removed[start:], before = coefficients_and_squares(rows[start:], vector)
    same_squares(before, vector, "before")
    values = rows[:, : len(vector)].cpu().double()
    first = values[start:] @ vector.cpu().double()
    close(removed[start:], first, length, vector.dtype, "first coefficients")
    more, passed, rest = subtract_and_dot(rows, removed, start, vector)
    same_squares(passed, rest, "after the first pass")
    exact = vector.cpu().double() - removed.cpu() @ values
    close(rest, exact, float(vector.abs().max()), vector.dtype, "rest")
    close(more, values @ rest.cpu().double(), length, vector.dtype, "second coefficients")
    after = subtract_into(rows, more, rest, vector)
    same_squares(after, vector, "after the second pass")


def orthonormalise(m: int, n: int, *arguments: torch.dtype | torch.device) -> None:
    """``orthonormalise_`` of a random vector; float32 unless a dtype comes before the device."""
    *given, device = arguments
    dtype = given[0] if given else torch.float32
    assert isinstance(dtype, torch.dtype)
    assert isinstance(device, torch.device)
    rows, _ = basis(m, n, dtype)
    expected = random(n, seed=2, dtype=dtype)
    actual = expected.to(device, copy=True)
    length = float(reference.norm(expected))
    if m:
        passes(rows.to(device), actual, 0)
    removed, after = _triton.orthonormalise_(rows.to(device), actual)
    wanted, wanted_after = reference.orthonormalise_(rows, expected)
    close(removed, wanted, length, dtype, "coefficients")
    close(after, wanted_after, length, dtype, "norm")
    close(actual, expected, 1.0, dtype, "vector")
    error = orthogonality(rows, actual.unsqueeze(0))
    assert error <= ORTHOGONALITY[dtype], f"not orthonormal: {error:.1e}"


def dependent(device: torch.device) -> None:
    """A combination of the rows leaves nothing but rounding, and becomes zero."""
    rows, _ = basis(5, 1023, torch.float32)
    vector = (random(5, seed=2) @ rows[:, :1023].double()).float().to(device)
    _, after = _triton.orthonormalise_(rows.to(device), vector)
    assert float(after) == 0.0, f"norm {float(after)}"
    assert not vector.any(), "the vector is not zero"


def not_a_number(device: torch.device) -> None:
    rows, _ = basis(5, 1023, torch.float32)
    vector = random(1023, seed=2, dtype=torch.float32)
    vector[500] = float("nan")
    vector = vector.to(device)
    _, after = _triton.orthonormalise_(rows.to(device), vector)
    assert bool(after.isnan()), "a NaN was hidden in the norm"
    assert bool(vector.isnan().all()), "a NaN was hidden in the vector"


def lanczos(m: int, n: int, dtype: torch.dtype, beta: float | None, device: torch.device) -> None:
    """``lanczos_step_`` on a vector as a symmetric operator makes it, or on any."""
    rows, _ = basis(m, n, dtype)
    expected = random(n, seed=2, dtype=dtype) / 30
    if beta is not None:  # orthogonal to all rows but the last two, up to rounding
        reference.project_(rows, expected)
        expected += (beta * rows[-2, :n] + 0.3 * rows[-1, :n]).to(dtype)
    actual = expected.to(device, copy=True)
    length = float(reference.norm(expected))
    passes(rows.to(device), actual, 0 if beta is None else m - 2)
    alpha, after, removed = _triton.lanczos_step_(rows.to(device), actual, beta)
    wanted = reference.lanczos_step_(rows, expected, beta)
    close(alpha, wanted[0], length, dtype, "alpha")
    close(after, wanted[1], length, dtype, "beta")
    close(removed, wanted[2], length, dtype, "coefficients")
    close(actual, expected, 1.0, dtype, "vector")
    error = orthogonality(rows, actual.unsqueeze(0))
    assert error <= ORTHOGONALITY[dtype], f"not orthonormal: {error:.1e}"


def deflated(device: torch.device) -> None:
    """A pass that takes away most of the vector is followed by another."""
    n = 1023
    rows, _ = basis(9, n, torch.float32)
    expected = (random(n, seed=2) * 1e-6 + 5.0 * rows[0, :n]).float()
    passes(rows.to(device), expected.to(device), 7)
    decided_pass(rows.to(device), random(n, seed=3, dtype=torch.float32).to(device))
    actual = expected.to(device, copy=True)
    removed, _, passed, after = two_passes(rows.to(device), actual, 0.1)
    removed, after = third_pass(rows.to(device), actual, removed, passed, after)
    same_squares(after, actual, "after the third pass")
    rest = expected.double() - removed.cpu() @ rows[:, :n].double()
    close(actual, rest, 5.0, torch.float32, "vector")
    actual = expected.to(device, copy=True)
    _, beta, _ = _triton.lanczos_step_(rows.to(device), actual, 0.1)
    assert torch.equal(beta, after.sqrt().view(())), f"norm {float(beta)} is not that of the passes"
    error = orthogonality(rows, actual.unsqueeze(0))
    assert error <= ORTHOGONALITY[torch.float32], f"not orthonormal: {error:.1e}"


def decided_pass(rows: Tensor, vector: Tensor) -> None:
    """A pass that the GPU decides on, of a vector that it changes by more than rounding."""
    values, length = rows[:, : len(vector)].cpu().double(), float(reference.norm(vector.cpu()))
    # Where sums over the rows leave it: kernels are compiled by alignment.
    ones = torch.ones(len(rows) + 1, dtype=torch.float64, device=rows.device)[-1:]
    more, squares = coefficients_and_squares(rows, vector, Unless(ones, 0 * ones, 0.5))
    close(more, values @ vector.cpu().double(), length, vector.dtype, "coefficients")
    same_squares(squares, vector, "before a pass that was decided on")
    exact = vector.cpu().double() - more.cpu() @ values
    removed, after = third_pass(rows, vector, 0 * more, ones, 0 * ones)
    close(removed, more, length, vector.dtype, "what a pass that was decided on removed")
    close(vector, exact, float(vector.abs().max()), vector.dtype, "vector")
    same_squares(after, vector, "after it")
    kept = vector.clone()
    removed, after = third_pass(rows, vector, 0 * more, ones, ones)
    assert torch.equal(vector, kept), "a pass that was not needed changed the vector"
    assert not removed.any(), "a pass that was not needed removed something"
    assert torch.equal(after, ones), "a pass that was not needed changed the squares"


def exhausted(device: torch.device) -> None:
    rows, _ = basis(3, 257, torch.float32)
    vector = (2.0 * rows[-1, :257] + 0.5 * rows[-2, :257]).to(device)
    alpha, beta, _ = _triton.lanczos_step_(rows.to(device), vector, 0.5)
    assert abs(float(alpha) - 2.0) < 1e-6, f"alpha {float(alpha)}"
    assert float(beta) == 0.0, f"beta {float(beta)}"
    assert not vector.any(), "the vector is not zero"


def block(m: int, n: int, dtype: torch.dtype, device: torch.device) -> None:
    """``orthonormalise_block_`` of independent vectors."""
    rows, _ = basis(m, n, dtype)
    expected = random(6, n, seed=2, dtype=dtype)
    actual = expected.to(device, copy=True)
    same_norms(actual)
    kept = _triton.orthonormalise_block_(rows.to(device), actual)
    wanted = reference.orthonormalise_block_(rows, expected)
    assert torch.equal(kept.cpu(), wanted), f"kept {kept.tolist()}, not {wanted.tolist()}"
    close(actual, expected, 1.0, dtype, "block")
    error = orthogonality(rows, actual)
    assert error <= ORTHOGONALITY[dtype], f"not orthonormal: {error:.1e}"


def ill_conditioned(device: torch.device) -> None:
    """Condition 1e6: CholeskyQR2 needs the Gram matrix in float64."""
    n, b = 300, 6
    rows, _ = basis(5, n, torch.float32)
    left, right = (torch.linalg.qr(random(k, b, seed=8)).Q for k in (b, n))
    vectors = (left * torch.logspace(0, -6, b, dtype=torch.float64)) @ right.T
    actual = vectors.float().to(device)
    kept = _triton.orthonormalise_block_(rows.to(device), actual)
    assert bool(kept.all()), f"kept {kept.tolist()}"
    error = orthogonality(rows, actual)
    assert error <= ORTHOGONALITY[torch.float32], f"not orthonormal: {error:.1e}"


def dependent_block(device: torch.device) -> None:
    """Zeros, duplicates and members of the basis are dropped; the rest is orthonormal."""
    n = 300
    rows, _ = basis(5, n, torch.float32)
    vectors = random(7, n, seed=2, dtype=torch.float32)
    vectors[1] = 0.0
    vectors[3] = vectors[0] * 2.0
    vectors[5] = rows[2, :n]
    actual = vectors.to(device)
    kept = _triton.orthonormalise_block_(rows.to(device), actual)
    wanted = [True, False, True, False, True, False, True]
    assert kept.tolist() == wanted, f"kept {kept.tolist()}"
    assert not actual[~kept].any(), "a dropped vector is not zero"
    error = orthogonality(rows, actual[kept])
    assert error <= ORTHOGONALITY[torch.float32], f"not orthonormal: {error:.1e}"


def mixed(k: int, m: int, n: int, dtype: torch.dtype, device: torch.device) -> None:
    """``mix_`` into other memory, and over its own sources."""
    rows, _ = basis(m, n, dtype)
    mixing = random(k, m, seed=2)
    expected = torch.empty(k, n, dtype=dtype)
    reference.mix_(rows, mixing, expected)
    moved = rows.to(device, copy=True)
    actual = torch.full((k, n), torch.nan, dtype=dtype, device=device)
    _triton.mix_(moved, mixing.to(device), actual)
    close(actual, expected, 1.0, dtype, "mixed rows")
    _triton.mix_(moved, mixing.to(device), moved[:k])
    close(moved[:k, :n], expected, 1.0, dtype, "rows mixed in place")


def norms(dtype: torch.dtype, device: torch.device) -> None:
    for empty in ((0,), (0, 7)):
        assert _triton.norm(torch.zeros(empty, dtype=dtype, device=device)).shape == empty[:-1]
    for shape in ((1,), (1023,), (4999,), (3, 1025)):
        vector = random(*shape, seed=2, dtype=dtype) * 1e30  # whose squares float32 cannot hold
        same_norms(vector.to(device))


def same_norms(vectors: Tensor) -> None:
    expected, actual = reference.norm(vectors.cpu()), _triton.norm(vectors).cpu()
    assert actual.shape == expected.shape, f"norms {actual.shape} of {tuple(vectors.shape)}"
    error = float(((actual - expected) / expected).abs().max())
    assert error <= 1e-14, f"norm of {tuple(vectors.shape)}: relative error {error:.1e}"
