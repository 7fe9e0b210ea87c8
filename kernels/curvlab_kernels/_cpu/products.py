"""The two products everything is made of, on any columns of a stored basis.

``accumulate``: ``total += M g``; ``subtract``: ``g -= M' c``; for a vector or a block given as
pieces, each with the column at which it begins. Three ways: compiled loops for one vector, if numba
is there; torch as it is when rows and vectors share a dtype; otherwise torch, converting a chunk of
columns at a time. Sums run in the vectors' dtype within a tile (8k columns) and in float64 across
tiles.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from curvlab_kernels._cpu import loops
from curvlab_kernels._cpu.loops import RESIDENT, Piece
from curvlab_kernels.formats import BLOCK, expand_scales

SUMMED = 1 << 13  # columns that torch sums in the rows' dtype: not all libraries sum in pairs
CONVERTED = 1 << 18  # elements converted at a time: one megabyte of float32 stays in the cache


def accumulate(rows: Tensor, scales: Tensor | None, pieces: Sequence[Piece], total: Tensor) -> None:
    """``total += M g``; ``total`` float64, ``(m,)`` or ``(b, m)``."""
    pieces = _present(rows, pieces)
    if not pieces:
        return
    fast = loops.choose(rows, pieces)
    if fast is not None:
        loops.accumulate(fast, rows, scales, pieces, total)
        return
    for first, vectors in pieces:
        if rows.dtype != vectors.dtype:
            for columns, where in _converted(rows, scales, first, vectors):
                total += vectors[..., where] @ columns.T
            continue
        columns = rows[:, first : first + vectors.shape[-1]]
        if vectors.shape[-1] <= SUMMED:
            total += vectors @ columns.T
        else:
            chunks = torch.split(columns, SUMMED, 1), torch.split(vectors, SUMMED, -1)
            parts = [vector @ part.T for part, vector in zip(*chunks, strict=True)]
            total += torch.stack(parts).sum(0, dtype=torch.float64)


def subtract(
    rows: Tensor, scales: Tensor | None, coefficients: Tensor, pieces: Sequence[Piece]
) -> None:
    """``g -= M' c`` in place; ``coefficients`` ``(m,)`` or ``(b, m)``."""
    pieces = _present(rows, pieces)
    if not pieces:
        return
    weights = coefficients.to(pieces[0][1].dtype)
    fast = loops.choose(rows, pieces)
    if fast is not None:
        loops.subtract(fast, rows, scales, weights, pieces)
        return
    for first, vectors in pieces:
        if rows.dtype != vectors.dtype:
            for columns, where in _converted(rows, scales, first, vectors):
                vectors[..., where] -= weights @ columns
            continue
        columns = rows[:, first : first + vectors.shape[-1]]
        if vectors.dim() == 1:
            vectors.addmv_(columns.T, weights, alpha=-1)
        else:
            vectors.addmm_(weights, columns, alpha=-1)


def subtract_and_accumulate(rows: Tensor, coefficients: Tensor, vector: Tensor) -> Tensor:
    """``g -= M' c`` and then ``M g``, in one reading of rows of the vector's dtype.

    A range of columns is small enough to stay in the cache between the two.
    """
    total = torch.zeros_like(coefficients)
    if not _present(rows, [(0, vector)]):
        return total
    fast = loops.choose(rows, [(0, vector)])
    if fast is not None:
        weights = coefficients.to(vector.dtype)
        loops.subtract_and_accumulate(fast, rows, weights, vector, total)
        return total
    width = max(RESIDENT // rows.shape[0], 1024)
    for first in range(0, vector.shape[0], width):
        piece = [(first, vector[first : first + width])]
        subtract(rows, None, coefficients, piece)
        accumulate(rows, None, piece, total)
    return total


def _present(rows: Tensor, pieces: Sequence[Piece]) -> list[Piece]:
    """The pieces that are not empty; none if there are no rows."""
    if rows.shape[0] == 0:
        return []
    return [piece for piece in pieces if piece[1].numel()]


def _converted(
    rows: Tensor, scales: Tensor | None, first: int, vectors: Tensor
) -> Iterator[tuple[Tensor, slice]]:
    """Values of the rows in the vectors' dtype, a chunk of columns at a time, and which."""
    n = vectors.shape[-1]
    width = min(max(CONVERTED // rows.shape[0] // BLOCK, 1) * BLOCK, SUMMED)
    for start in range(0, n, width):
        where = slice(start, min(start + width, n))
        columns = slice(first + where.start, first + where.stop)
        values = rows[:, columns].to(vectors.dtype)
        if scales is not None:
            values *= expand_scales(scales, columns)
        yield values, where
