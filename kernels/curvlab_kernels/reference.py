"""Every kernel in plain PyTorch: the truth that the fast ones are compared with.

A basis is ``rows`` of shape ``(m, ld)``: one contiguous row per vector, ``ld`` a multiple of 16,
columns ``n..ld`` zero. Its dtype is float64, float32, float16, bfloat16, or a dtype with one float32
scale per block of 64 columns (int8, float8): value = code * scale. ``vectors`` are ``(n,)`` or rows
``(b, n)``, float32 or float64. ``factor`` is the lower Cholesky factor ``(m, m)``, float64, of the
Gram matrix ``G`` of the stored rows; ``None`` says the rows are orthonormal.

Columns are taken in chunks and every chunk is computed in float64, so that the only rounding is
that of the result; a fast kernel works in float32 within a chunk and sums chunks in float64.
Nothing here checks arguments: ``ops`` does, once.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

CHUNK = 65536  # columns; a multiple of BLOCK, and few enough for float32 sums to keep 7 digits
BLOCK = 64  # columns that share a scale
PADDING = 16  # row lengths are multiples of this, so that 128-bit loads stay aligned

# Largest code of each dtype that is stored with scales.
LEVELS = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


def coefficients(rows: Tensor, vectors: Tensor, scales: Tensor | None = None) -> Tensor:
    """``c = M g``: inner products of the rows with each vector, float64.

    Returns:
        Shape ``(m,)`` for ``vectors`` ``(n,)``; ``(b, m)`` for ``(b, n)``.
    """
    total = vectors.new_zeros((*vectors.shape[:-1], rows.shape[0]), dtype=torch.float64)
    for columns in _chunks(vectors.shape[-1]):
        total += vectors[..., columns].double() @ _values(rows, scales, columns).T
    return total


def apply_(
    rows: Tensor, coefficients: Tensor, vectors: Tensor, scales: Tensor | None = None
) -> None:
    """``g -= M' c`` in place. ``coefficients`` are ``(m,)`` or ``(b, m)``, float64."""
    for columns in _chunks(vectors.shape[-1]):
        piece = vectors[..., columns]
        piece.copy_(piece.double() - coefficients @ _values(rows, scales, columns))


def project_(
    rows: Tensor, vectors: Tensor, factor: Tensor | None = None, scales: Tensor | None = None
) -> Tensor:
    """``g -= M' G^-1 M g`` in place; returns what was subtracted, ``G^-1 M g``, float64."""
    removed = solve(factor, coefficients(rows, vectors, scales))
    apply_(rows, removed, vectors, scales)
    return removed


def project_list_(
    rows: Tensor,
    tensors: Sequence[Tensor],
    factor: Tensor | None = None,
    scales: Tensor | None = None,
) -> Tensor:
    """:func:`project_` on tensors of any shapes, seen as one vector in their order, in place."""
    flat = _flat(tensors)
    removed = project_(rows, flat, factor, scales)
    _scatter(flat, tensors)
    return removed


def sgd_step_(
    rows: Tensor,
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    momenta: Sequence[Tensor],
    lr: float,
    weight_decay: float = 0.0,
    momentum: float = 0.0,
    factor: Tensor | None = None,
    scales: Tensor | None = None,
) -> Tensor:
    """One projected SGD step: ``d = P(g + wd p)``, ``buf = momentum buf + d``, ``p -= lr buf``.

    The decay is added before the projection, so that it too leaves the protected directions alone.
    ``parameters`` and ``momenta`` change in place, ``gradients`` do not.

    Args:
        parameters: Tensors of any shapes, together ``n`` elements.
        gradients: One per parameter, of its shape.
        momenta: One per parameter, zeros before the first step; an empty list for none, and then
            ``momentum`` must be 0.

    Returns:
        The coefficients removed from ``g + wd p``: shape ``(m,)``, float64.
    """
    step = _flat(gradients).double() + weight_decay * _flat(parameters).double()
    removed = solve(factor, coefficients(rows, step, scales))
    apply_(rows, removed, step, scales)
    if momenta:
        step += momentum * _flat(momenta).double()
        _scatter(step, momenta)
    _scatter(_flat(parameters).double() - lr * step, parameters)
    return removed


def orthonormalise_(rows: Tensor, vector: Tensor) -> tuple[Tensor, Tensor]:
    """Make ``vector`` ``(n,)`` orthogonal to orthonormal ``rows`` and of unit norm, in place.

    Two passes of classical Gram-Schmidt (twice is enough: Kahan, Parlett). A vector whose norm
    after them is at most :func:`rank_tolerance` times its norm before is dependent: what is left
    is rounding. It is set to zero and its norm is reported as zero.

    Returns:
        The coefficients removed by both passes ``(m,)``, and the norm after them, before
        normalising ``()``; both float64.
    """
    before = norm(vector)
    removed = project_(rows, vector)
    removed += project_(rows, vector)
    return removed, normalise_(vector, before, rows.shape[0])


def lanczos_step_(
    rows: Tensor, vector: Tensor, previous_beta: float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Turn ``w = A v`` into the next Lanczos vector, in place, where ``v`` is the last row.

    With ``previous_beta`` the three-term recurrence goes first, ``w -= previous_beta rows[-2]``
    then ``w -= alpha rows[-1]``, and is the first pass of the reorthogonalisation: the other rows
    have only rounding to give. Without it (the first step, and the first after a thick restart,
    where ``w`` meets every row) the first pass is against all rows. A pass against all rows
    follows, and one more if that one took away more than rounding: more than half of the square
    of the norm. So ``rows`` may hold deflated vectors as well.

    Args:
        rows: ``(m, ld)``, orthonormal, float32 or float64, ``m >= 1``; at least 2 with
            ``previous_beta``.
        vector: ``w``, shape ``(n,)``. On return the next vector, or zeros if the space is
            exhausted (the rank rule of :func:`orthonormalise_`).
        previous_beta: The last step's ``beta``.

    Returns:
        ``alpha`` ``()``, ``beta`` ``()`` (0 when exhausted) and every coefficient removed
        ``(m,)``, of which ``alpha`` is the last; float64.
    """
    before = norm(vector)
    if previous_beta is None:
        removed = project_(rows, vector)
    else:
        removed = vector.new_zeros(rows.shape[0], dtype=torch.float64)
        removed[-2] = previous_beta
        apply_(rows[-2:-1], removed[-2:-1], vector)
        removed[-1:] = project_(rows[-1:], vector)
    passed = norm(vector)
    removed += project_(rows, vector)
    if float(norm(vector)) ** 2 < 0.5 * float(passed) ** 2:
        removed += project_(rows, vector)
    beta = normalise_(vector, before, rows.shape[0])
    return removed[-1], beta, removed


def orthonormalise_block_(rows: Tensor, block: Tensor) -> Tensor:
    """Make ``block`` ``(b, n)`` orthonormal, and orthogonal to orthonormal ``rows``, in place.

    A pass against the rows, Cholesky QR with a float64 Gram matrix, a second pass, a second
    Cholesky QR (CholeskyQR2). When the block is so ill-conditioned that the first Gram matrix
    cannot be trusted, a shifted Cholesky QR goes before (CholeskyQR3). The result is that of
    Gram-Schmidt in the given order, and so is the rank rule: a vector whose norm, after removal of
    ``rows`` and of the kept vectors before it, is at most :func:`rank_tolerance` times its norm
    before is dropped and set to zero.

    Returns:
        Which vectors were kept: bool ``(b,)``.
    """
    tolerance = rank_tolerance(block.dtype, rows.shape[0] + block.shape[0])
    before = require_finite(norm(block))
    _scale_(block, before)
    project_(rows, block)
    remaining = norm(block)  # relative to the norm before
    kept = (remaining > tolerance).nonzero().flatten()
    work = block[kept]
    remaining = remaining[kept]
    _scale_(work, remaining)
    mixing, remaining = shift_if_needed(gram(work), remaining)
    if mixing is not None:
        work = _mix(mixing, work)
    mixing, independent = cholesky_mixing(gram(work), remaining, tolerance)
    work = _mix(mixing, work[independent])
    project_(rows, work)
    mixing, _ = cholesky_mixing(gram(work), torch.ones_like(remaining[independent]), 0.0)
    kept = kept[independent]
    block.zero_()
    block[kept] = _mix(mixing, work)
    mask = torch.zeros(block.shape[0], dtype=torch.bool, device=block.device)
    mask[kept] = True
    return mask


def quantise(vectors: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Store ``vectors`` ``(m, n)`` as rows ``(m, ld)`` of ``dtype``, with scales where it has them.

    Returns:
        The rows, and float32 scales ``(m, ceil(ld / 64))`` for int8 and float8, else ``None``.
        Symmetric, largest magnitude of a block on the largest code; a block of zeros has scale 0.
    """
    m, n = vectors.shape
    ld = padded(n)
    rows = torch.zeros(m, ld, dtype=dtype, device=vectors.device)
    if dtype not in LEVELS:
        rows[:, :n] = vectors
        return rows, None
    blocks = -(-ld // BLOCK)
    whole = vectors.new_zeros(m, blocks * BLOCK, dtype=torch.float32)
    whole[:, :n] = vectors
    whole = whole.view(m, blocks, BLOCK)
    scales = whole.abs().amax(-1) / LEVELS[dtype]
    codes = whole / torch.where(scales > 0, scales, 1.0).unsqueeze(-1)
    codes = codes.clamp(-LEVELS[dtype], LEVELS[dtype])
    if dtype == torch.int8:
        codes = codes.round()
    rows.copy_(codes.view(m, -1)[:, :ld])
    return rows, scales


def dequantise(rows: Tensor, scales: Tensor | None, n: int) -> Tensor:
    """The values of stored rows: ``(m, n)``, float32 (float64 for float64 rows)."""
    dtype = torch.float64 if rows.dtype == torch.float64 else torch.float32
    values = rows[:, :n].to(dtype)
    return values if scales is None else values * expand_scales(scales, slice(0, n))


def norm(vector: Tensor) -> Tensor:
    """Euclidean norm of ``(n,)`` or of every row of ``(b, n)``, accumulated in float64."""
    return torch.linalg.vector_norm(vector, dim=-1, dtype=torch.float64)


def padded(n: int) -> int:
    """The row length ``ld`` that holds ``n`` elements."""
    return -(-n // PADDING) * PADDING


def rank_tolerance(dtype: torch.dtype, m: int) -> float:
    """Relative norm at or below which a vector projected against ``m`` others is only rounding."""
    return float(torch.finfo(dtype).eps) * max(8.0, m**0.5)


def solve(factor: Tensor | None, right: Tensor) -> Tensor:
    """``G^-1 c`` for ``c`` ``(m,)`` or rows ``(b, m)``, given the lower Cholesky factor of ``G``."""
    if factor is None:
        return right
    columns = right.reshape(-1, right.shape[-1]).T
    return torch.cholesky_solve(columns, factor).T.reshape(right.shape)


def require_finite(norms: Tensor) -> Tensor:
    """The norms ``(b,)`` unchanged; raises if a vector holds NaN or infinity."""
    if not bool(norms.isfinite().all()):
        wrong = (~norms.isfinite()).nonzero().flatten().tolist()
        raise ValueError(f"vectors {wrong} of the block hold NaN or infinity; nothing was changed")
    return norms


def normalise_(vector: Tensor, before: Tensor, m: int) -> Tensor:
    """Scale to unit norm, or zero a dependent vector; returns the norm, 0 for a dependent one.

    Args:
        before: The norm ``()`` that the vector had before it was projected against ``m`` rows.
    """
    after = norm(vector)
    independent = after > rank_tolerance(vector.dtype, m) * before
    # A NaN is not hidden as a dependent vector: it stays NaN.
    after = torch.where(after.isfinite() & ~independent, torch.zeros_like(after), after)
    _scale_(vector, after)
    return after


def gram(rows: Tensor) -> Tensor:
    """``M M'`` in float64, shape ``(m, m)``, for rows of a float dtype ``(m, n)``."""
    return (
        coefficients(rows, rows) if rows.dtype.itemsize >= 4 else coefficients(rows, rows.float())
    )


def shift_if_needed(products: Tensor, remaining: Tensor) -> tuple[Tensor | None, Tensor]:
    """The first stage of shifted CholeskyQR3, for a Gram matrix ``(b, b)`` with unit diagonal.

    Returns:
        The matrix that mixes the rows, or ``None`` when the Gram matrix can be trusted as it is;
        and ``remaining`` ``(b,)``, the norms left by Gram-Schmidt so far, brought up to date.
    """
    _, pivots, _ = _ordered_cholesky(products, torch.zeros_like(remaining))
    if pivots.numel() == 0 or float(pivots.min()) > 1e-8:
        return None, remaining
    # Large enough for the factorisation never to break down on rounding, small enough for the
    # second stage to see what the rank rule needs: norms down to eps of the block's dtype.
    shift = 1e-13 * max(1, products.shape[0])
    lower = torch.linalg.cholesky(products + shift * torch.eye(*products.shape).to(products))
    return _inverse(lower), remaining * lower.diagonal()


def cholesky_mixing(products: Tensor, remaining: Tensor, tolerance: float) -> tuple[Tensor, Tensor]:
    """Cholesky QR in the given order, with the rank rule.

    Args:
        products: Gram matrix ``(b, b)``, float64.
        remaining: Norms ``(b,)`` left by earlier stages, which a pivot multiplies.
        tolerance: Norms at or below it are dependent.

    Returns:
        The matrix ``(k, k)`` that mixes the kept rows into orthonormal ones, and the indices
        ``(k,)`` of the kept rows.
    """
    lower, _, kept = _ordered_cholesky(products, tolerance / remaining)
    return _inverse(lower[kept][:, kept]), kept


def expand_scales(scales: Tensor, columns: slice) -> Tensor:
    """One scale per column for ``columns``, which start at a multiple of 64: ``(m, count)``."""
    blocks = scales[:, columns.start // BLOCK : -(-columns.stop // BLOCK)]
    return blocks.repeat_interleave(BLOCK, dim=1)[:, : columns.stop - columns.start]


def _ordered_cholesky(products: Tensor, floor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Lower factor, pivots and kept indices; a row whose ``sqrt(pivot) <= floor`` is skipped."""
    rest = products.cpu().clone()
    lower = torch.zeros_like(rest)
    pivots = torch.zeros(rest.shape[0], dtype=torch.float64)
    kept = []
    for row, least in enumerate(floor.cpu().tolist()):
        pivot = float(rest[row, row])
        pivots[row] = pivot
        if pivot <= max(least, 0.0) ** 2:
            continue
        kept.append(row)
        lower[row:, row] = rest[row:, row] / pivot**0.5
        rest[row:, row:] -= torch.outer(lower[row:, row], lower[row:, row])
    to = products.device
    return lower.to(to), pivots.to(to), torch.tensor(kept, dtype=torch.int64).to(to)


def _inverse(lower: Tensor) -> Tensor:
    identity = torch.eye(*lower.shape).to(lower)
    return torch.linalg.solve_triangular(lower, identity, upper=False)


def _mix(mixing: Tensor, rows: Tensor) -> Tensor:
    mixed = torch.zeros_like(rows)
    for columns in _chunks(rows.shape[-1]):
        mixed[:, columns] = mixing @ rows[:, columns].double()
    return mixed


def _scale_(vectors: Tensor, norms: Tensor) -> None:
    """Divide every row by its norm in place; a row whose norm is zero becomes zero."""
    factors = torch.where(norms == 0, 0.0, 1.0 / torch.where(norms == 0, 1.0, norms))
    vectors.copy_(vectors.double() * factors.unsqueeze(-1))


def _chunks(n: int) -> Iterator[slice]:
    return (slice(start, min(start + CHUNK, n)) for start in range(0, n, CHUNK))


def _values(rows: Tensor, scales: Tensor | None, columns: slice) -> Tensor:
    values = rows[:, columns].double()
    return values if scales is None else values * expand_scales(scales, columns)


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _scatter(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    for piece, tensor in zip(flat.split([t.numel() for t in tensors]), tensors, strict=True):
        tensor.copy_(piece.view(tensor.shape))
