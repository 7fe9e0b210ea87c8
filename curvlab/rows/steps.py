"""Projection and Gram-Schmidt against rows in several pieces of memory, or in shards over ranks.

The kernels do the same for rows in one piece and in one process; see
:mod:`curvlab_kernels.reference` for what is promised. What crosses between ranks is coefficients
and squared norms: one sum a pass.
"""

from typing import TYPE_CHECKING

import torch
from curvlab_kernels import ops
from curvlab_kernels.algebra import mostly_removed, passes, solve
from curvlab_kernels.block import length_after, scale_
from torch import Tensor

if TYPE_CHECKING:
    from curvlab.rows.projector import Projector

# Binary exponent of a number whose squares, summed, may not be a float64; or of one of which a
# float32 may not hold all digits.
FAR = {torch.float64: 400, torch.float32: 60}


def brought_near(rows: "Projector", vectors: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy of ``vectors`` ``(k, width)`` in ``dtype``; float64 ones out of range near one."""
    copy = vectors.to(dtype, copy=True).contiguous()
    if vectors.dtype != torch.float64 or not vectors.numel():
        return copy
    exponents = torch.frexp(rows.space.largest(vectors.abs().amax(1))).exponent.clamp(-1000, 1000)
    far = exponents.abs() > FAR[dtype]
    if bool(far.any()):  # by powers of two, which round nothing
        copy[far] = torch.ldexp(vectors[far], -exponents[far].unsqueeze(1)).to(dtype)
    return copy


def coefficients(rows: "Projector", vectors: Tensor) -> Tensor:
    """``M g`` over the elements held here: ``(size,)`` or ``(b, size)``, float64."""
    parts = [ops.coefficients(piece, vectors, scales) for _, piece, scales in rows.store.pieces()]
    if len(parts) == 1:
        return parts[0]
    empty = vectors.new_zeros((*vectors.shape[:-1], 0), dtype=torch.float64)
    return torch.cat([empty, *parts], -1)


def project_out_(rows: "Projector", vectors: Tensor) -> Tensor:
    """See :meth:`Projector.project_out_`."""
    if rows.size == 0:
        return vectors.new_zeros((*vectors.shape[:-1], 0), dtype=torch.float64)
    return passes(lambda: _project_once_(rows, vectors))


def _project_once_(rows: "Projector", vectors: Tensor) -> tuple[Tensor, bool]:
    """One pass: what was removed, and whether so much that another should follow."""
    square = ops.norm(vectors).square().unsqueeze(-1)
    if rows.factor is None and not rows.space.sharded:
        # Orthonormal pieces can be removed one after the other: each is fetched once.
        parts = list[Tensor]()
        for _, piece, _ in rows.store.pieces():
            parts.append(ops.coefficients(piece, vectors))
            ops.apply_(piece, parts[-1], vectors)
        removed = torch.cat(parts, -1)
        return removed, mostly_removed(square[..., 0], removed, removed)
    both = rows.space.total(torch.cat([coefficients(rows, vectors), square], -1))
    found, square = both[..., :-1].contiguous(), both[..., -1]
    removed = solve(rows.factor, found)
    rows.subtract_(removed, vectors)
    return removed, mostly_removed(square, found, removed)


def orthonormalise_(rows: "Projector", vector: Tensor) -> tuple[Tensor, Tensor]:
    """Two passes and the norm; see :meth:`Projector.orthonormalise_`."""
    removed, before = _pass_(rows, vector)
    again, _ = _pass_(rows, vector)
    return removed + again, _normalise_(rows, vector, before)


def lanczos_step_(
    rows: "Projector", vector: Tensor, previous_beta: float | Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The three-term recurrence or a full pass, then a pass over all rows."""
    if previous_beta is None:
        removed, before = _pass_(rows, vector)
    else:
        removed = vector.new_zeros(rows.size, dtype=torch.float64)
        removed[-2] = previous_beta
        square = ops.norm(vector).square().reshape(1)
        ops.apply_(_stored(rows, rows.size - 2), removed[-2:-1], vector)
        last = _stored(rows, rows.size - 1)
        both = rows.space.total(torch.cat([ops.coefficients(last, vector), square]))
        removed[-1], before = both[0], both[1].sqrt()
        ops.apply_(last, removed[-1:], vector)
    again, passed = _pass_(rows, vector)
    removed += again
    # what the pass left, by Pythagoras: only asked whether it is most of the vector
    if float(passed**2 - again.square().sum()) < 0.5 * float(passed) ** 2:
        removed += _pass_(rows, vector)[0]
    return removed[-1], _normalise_(rows, vector, before), removed


def _stored(rows: "Projector", index: int) -> Tensor:
    """Float row ``index`` as the kernels take it, ``(1, ld)``."""
    return rows.store.row(index, rows.store.ld).unsqueeze(0).to(rows.device)


def _pass_(rows: "Projector", vector: Tensor) -> tuple[Tensor, Tensor]:
    """Remove ``rows`` from ``vector``; the coefficients, and the norm before. One sum."""
    square = ops.norm(vector).square().reshape(1)
    both = rows.space.total(torch.cat([coefficients(rows, vector), square]))
    removed = both[:-1].contiguous()
    rows.subtract_(removed, vector)
    return removed, both[-1].sqrt()


def _normalise_(rows: "Projector", vector: Tensor, before: Tensor) -> Tensor:
    """Scale to unit norm; a vector that is only rounding becomes zero, and so its norm."""
    length = length_after(before, rows.space.norm(vector), rows.size, vector.dtype)
    scale_(vector, length)
    return length
