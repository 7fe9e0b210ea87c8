"""Orthonormalising a block of vectors: Cholesky QR around any projection.

Shared by every back end and by bases that are stored rounded: they differ in the projection only.
Everything happens in the block's own memory, a chunk of columns at a time.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from curvlab_kernels.algebra import (
    inverse,
    needs_another_pass,
    ordered_mixing,
    rank_tolerance,
    require_finite,
    shift_if_needed,
)
from curvlab_kernels.formats import CHUNK

TINY = 1e-140  # a norm below which squares of elements may be too small for all digits of a float64
LEAST = torch.finfo(torch.float64).tiny
CONVERTED = 1 << 19  # elements taken to float64 at a time


def orthonormalise_with_(
    project: Callable[[Tensor], object],
    block: Tensor,
    m: int,
    least: float = 0.0,
    total: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Make ``block`` ``(b, n)`` orthonormal, and orthogonal to what ``project`` removes, in place.

    A pass against the rows, Cholesky QR with a float64 Gram matrix, a second pass, a second
    Cholesky QR (CholeskyQR2). When the block is so ill-conditioned that the first Gram matrix
    cannot be trusted, a shifted Cholesky QR goes before (CholeskyQR3). The result is that of
    Gram-Schmidt in the given order, and so is the rank rule: a vector whose norm, after the
    projection and the removal of the kept vectors before it, is at most ``rank_tolerance`` times
    its norm before is dropped and set to zero. In float64 a Gram matrix sees norms down to about
    1e-12 only; what is smaller is dropped as well.

    Args:
        project: Projects a block ``(b, n)`` in place; called two or three times.
        m: How many vectors ``project`` removes.
        least: A larger tolerance of the rank rule, for rows that are stored rounded.
        total: Sums float64 tensors over the processes that hold the other columns of the block;
            ``None`` if the columns are all here.

    Returns:
        Which vectors were kept: bool ``(b,)``.
    """
    tolerance = max(rank_tolerance(block.dtype, m + block.shape[0]), least)

    def lengths() -> Tensor:
        return norm(block) if total is None else total(norm(block).square()).sqrt()

    def inner() -> Tensor:
        return gram(block) if total is None else total(gram(block))

    scale_(block, require_finite(lengths()))
    project(block)
    remaining = lengths()  # relative to the norm before
    scale_(block, torch.where(remaining > tolerance, remaining, 0.0))
    kept = (remaining > tolerance).nonzero().flatten()
    products = inner()[kept][:, kept]
    lower = shift_if_needed(products)
    if lower is not None:
        _mix_(block, inverse(lower), kept, kept)
        products = inner()[kept][:, kept]
    mixing, independent = ordered_mixing(products, lower, remaining[kept], tolerance)
    kept, sources = kept[independent], kept
    _mix_(block, mixing, kept, sources)
    # A vector of which almost all was removed may have been rounding of that. What the pass after
    # shortens by more than the rank rule allows, or the last one by half, was: it is dropped too.
    for before, least in ((remaining, tolerance), (torch.ones_like(remaining), 0.5)):
        project(block)
        products = inner()[kept][:, kept]
        if not needs_another_pass(products):
            _mix_(block, inverse(torch.linalg.cholesky(products)), kept, kept)
            break
        mixing, independent = ordered_mixing(products, None, before[kept], least)
        kept, sources = kept[independent], kept
        _mix_(block, mixing, kept, sources)
    mask = torch.zeros(block.shape[0], dtype=torch.bool, device=block.device)
    mask[kept] = True
    return mask


def norm(vector: Tensor) -> Tensor:
    """Euclidean norm of ``(n,)`` or of every row of ``(b, n)``, accumulated in float64."""
    return in_range(_norm, vector)


def in_range(norm: Callable[[Tensor], Tensor], vector: Tensor) -> Tensor:
    """``norm(vector)``, on a CPU also where squares of float64 elements are not float64.

    Such vectors, and those of zeros, are read three times more. A GPU's host would wait to see
    whether that is needed: there norms are infinite above 1e154, and lose digits below 1e-146.
    """
    norms = norm(vector)
    if vector.dtype != torch.float64 or not vector.numel() or vector.device.type != "cpu":
        return norms
    found: list[float] = [float(norms)] if vector.dim() == 1 else norms.tolist()
    if all(TINY < each < torch.inf for each in found):
        return norms
    largest = torch.linalg.vector_norm(vector, torch.inf, dim=-1)
    # By powers of two, which round nothing; ldexp's own power has to be a float64 as well.
    exponents = torch.frexp(largest).exponent.clamp(-1000, 1000)
    near = torch.ldexp(vector, -exponents.unsqueeze(-1))
    far = (norms <= TINY) | (norms == torch.inf)  # and not NaN
    return torch.where(far, torch.ldexp(norm(near), exponents), norms)


def _norm(vector: Tensor) -> Tensor:
    norms = [torch.linalg.vector_norm(values, dim=-1) for _, values in _converted(vector)]
    if not norms:
        return vector.new_zeros(vector.shape[:-1], dtype=torch.float64)
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms), dim=0)
    return norms[0] if len(norms) == 1 else total


def normalise_(vector: Tensor, before: Tensor, m: int) -> Tensor:
    """Scale to unit norm, or zero a dependent vector; returns the norm, 0 for a dependent one.

    Args:
        before: The norm ``()`` that the vector had before it was projected against ``m`` rows.
    """
    length = length_after(before, norm(vector), m, vector.dtype)
    scale_(vector, length)
    return length


def length_after(before: Tensor, after: Tensor, m: int, dtype: torch.dtype) -> Tensor:
    """The norm ``after`` projecting against ``m`` rows; 0 if what is left is rounding."""
    independent = (after > rank_tolerance(dtype, m) * before) & (after >= LEAST)
    # A NaN is not hidden as a dependent vector: it stays NaN.
    return torch.where(after.isfinite() & ~independent, torch.zeros_like(after), after)


def scale_(vectors: Tensor, norms: Tensor) -> None:
    """Divide every row by its norm in place; a row whose norm is zero, or subnormal, is zeroed."""
    nothing = norms < LEAST  # and its reciprocal not finite
    factors = torch.where(nothing, 0.0, 1.0 / torch.where(nothing, 1.0, norms))
    for columns, values in _converted(vectors):
        columns.copy_(values.mul_(factors.unsqueeze(-1)))


def gram(rows: Tensor) -> Tensor:
    """``M M'``, shape ``(m, m)``, for float rows ``(m, n)``; products and sums in float64."""
    total = rows.new_zeros(rows.shape[0], rows.shape[0], dtype=torch.float64)
    for _, values in _converted(rows):
        total.addmm_(values, values.T)
    return total


def _mix_(block: Tensor, mixing: Tensor, targets: Tensor, sources: Tensor) -> None:
    """Rows ``targets`` become ``mixing`` times rows ``sources``, all others zero, in place."""
    whole = mixing.new_zeros(block.shape[0], block.shape[0])
    whole[targets.unsqueeze(1), sources] = mixing
    room: Tensor | None = None
    for columns, values in _converted(block):
        room = torch.zeros_like(values) if room is None else room[:, : columns.shape[1]]
        columns.copy_(torch.mm(whole, values, out=room))


def _converted(rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Pieces of rows ``(m, n)`` or of a vector ``(n,)``, some columns each, and their values.

    The float64 values of all pieces take turns in one room of a few MB: an allocator that is given
    such rooms back does not always use them again, and then holds as much as all of them.
    """
    m = rows.shape[0] if rows.dim() == 2 else 1
    width = min(max(min(CHUNK, CONVERTED // max(m, 1)), 1024), rows.shape[-1])
    if not width:
        return
    room = rows.new_zeros(m * width, dtype=torch.float64)
    for columns in torch.split(rows, width, -1):
        yield columns, room[: columns.numel()].view(columns.shape).copy_(columns)
