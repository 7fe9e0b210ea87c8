"""Checks of the Gram-Schmidt kernels: the reference's results, and what must hold of any result."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from curvlab_kernels import _triton, reference
from curvlab_kernels._triton.orthonormalise import coefficients_and_squares
from curvlab_kernels.audit.agreement import ORTHOGONALITY, Check, basis, close, random


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
    if m:  # by which a dependent vector is told
        _, squares = coefficients_and_squares(rows.to(device), actual)
        close(squares.sqrt(), reference.norm(expected).view(1), length, dtype, "norm before")
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
    actual = expected.to(device, copy=True)
    _triton.lanczos_step_(rows.to(device), actual, 0.1)
    error = orthogonality(rows, actual.unsqueeze(0))
    assert error <= ORTHOGONALITY[torch.float32], f"not orthonormal: {error:.1e}"


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
        expected = reference.norm(vector)
        actual = _triton.norm(vector.to(device)).cpu()
        assert actual.shape == expected.shape, f"shape {actual.shape} for a vector {shape}"
        error = float(((actual - expected) / expected).abs().max())
        assert error <= 1e-14, f"norm of {shape}: relative error {error:.1e}"
