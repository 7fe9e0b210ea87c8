"""``M g``, ``g -= M' c`` and the projection, for a vector, a block, or a list of tensors.

Sums run in the vectors' dtype within a tile (8k columns) and in float64 across tiles.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from curvlab_kernels._cpu.lists import flat, gathered, groups, scatter
from curvlab_kernels._cpu.path import Piece, arrays, choose, length, spread
from curvlab_kernels.algebra import mostly_removed, solve
from curvlab_kernels.formats import BLOCK, CHUNK, expand_scales

SUMMED = 1 << 13  # columns that torch sums in the rows' dtype: not all libraries sum in pairs
CONVERTED = 1 << 18  # elements converted at a time: one megabyte of float32 stays in the cache


def coefficients(rows: Tensor, vectors: Tensor, scales: Tensor | None = None) -> Tensor:
    """See :func:`curvlab_kernels.reference.coefficients`."""
    return _accumulate(rows, scales, [(0, vectors)])[..., :-1]


def apply_(
    rows: Tensor, coefficients: Tensor, vectors: Tensor, scales: Tensor | None = None
) -> None:
    """See :func:`curvlab_kernels.reference.apply_`."""
    subtract(rows, scales, coefficients, [(0, vectors)])


def project_(
    rows: Tensor, vectors: Tensor, factor: Tensor | None = None, scales: Tensor | None = None
) -> Tensor:
    """See :func:`curvlab_kernels.reference.project_`."""
    path = choose(rows, vectors)
    if path.team is None:
        return project_pieces_(rows, [(0, vectors)], factor, scales)
    removed: Tensor = path.team.run(path, rows, scales, factor, vectors)
    return removed


def project_pieces_(
    rows: Tensor, pieces: Sequence[Piece], factor: Tensor | None, scales: Tensor | None
) -> Tensor:
    """:func:`project_` of a vector that is given as pieces, each with its first column."""
    removed, again = project_once_(rows, pieces, factor, scales)
    if again:
        removed = removed + project_once_(rows, pieces, factor, scales)[0]
    return removed


def project_once_(
    rows: Tensor, pieces: Sequence[Piece], factor: Tensor | None, scales: Tensor | None
) -> tuple[Tensor, bool]:
    """One pass: what was removed, and whether so much that another should follow."""
    found = _accumulate(rows, scales, pieces)
    products, squares = found[..., :-1], found[..., -1]
    removed = solve(factor, products)
    subtract(rows, scales, removed, pieces)
    return removed, mostly_removed(squares, products, removed)


def mix_(rows: Tensor, mixing: Tensor, into: Tensor) -> None:
    """See :func:`curvlab_kernels.reference.mix_`."""
    (k, m), n = mixing.shape, into.shape[1]
    width = min(max(CONVERTED // max(m, 1), 1024), n)
    # Allocated once: new memory for every chunk costs more than the arithmetic.
    wide, mixed = mixing.new_empty(m * width), mixing.new_empty(k * width)
    for start in range(0, n, max(width, 1)):
        columns = slice(start, min(start + width, n))
        count = columns.stop - start
        given, found = wide[: m * count].view(m, count), mixed[: k * count].view(k, count)
        given.copy_(rows[:, columns])
        torch.mm(mixing, given, out=found)
        into[:, columns].copy_(found)


def project_list_(
    rows: Tensor,
    tensors: Sequence[Tensor],
    factor: Tensor | None = None,
    scales: Tensor | None = None,
) -> Tensor:
    """See :func:`curvlab_kernels.reference.project_list_`."""
    if sum([tensor.numel() for tensor in tensors]) <= CHUNK:
        vector = gathered(tensors, rows)
        removed = project_(rows, vector, factor, scales)
        scatter(vector, tensors)
        return removed
    plan = groups(tensors)
    pieces = [(group.first, flat(group, tensors)) for group in plan]
    removed = project_pieces_(rows, pieces, factor, scales)
    for group, (_, piece) in zip(plan, pieces, strict=True):
        scatter(piece, tensors[group.members])
    return removed


def _accumulate(rows: Tensor, scales: Tensor | None, pieces: Sequence[Piece]) -> Tensor:
    """``M g`` and then ``||g||^2``: ``(m + 1,)`` or ``(b, m + 1)``, float64."""
    example, m = pieces[0][1], rows.shape[0]
    path = choose(rows, example, length(pieces))
    if path.loops is not None:
        return spread(path.loops.accumulate, arrays(rows, scales), None, pieces, m + 1)
    total = example.new_zeros((*example.shape[:-1], m + 1), dtype=torch.float64)
    for first, vectors in pieces:
        total[..., -1] += torch.linalg.vector_norm(vectors, dim=-1).double().square()
        if rows.dtype != vectors.dtype:
            for columns, where in _converted(rows, scales, first, vectors):
                total[..., :-1] += vectors[..., where] @ columns.T
            continue
        columns = rows[:, first : first + vectors.shape[-1]]
        if vectors.shape[-1] <= SUMMED:
            total[..., :-1] += vectors @ columns.T
        else:
            chunks = torch.split(columns, SUMMED, 1), torch.split(vectors, SUMMED, -1)
            parts = [vector @ part.T for part, vector in zip(*chunks, strict=True)]
            total[..., :-1] += torch.stack(parts).sum(0, dtype=torch.float64)
    return total


def subtract(
    rows: Tensor, scales: Tensor | None, coefficients: Tensor, pieces: Sequence[Piece]
) -> None:
    """``g -= M' c`` in place; ``coefficients`` ``(m,)`` or ``(b, m)``, float64."""
    path = choose(rows, pieces[0][1], length(pieces))
    if path.loops is not None:
        spread(path.loops.subtract, arrays(rows, scales), coefficients.numpy(), pieces)
        return
    weights = coefficients.to(pieces[0][1].dtype)
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


def _converted(
    rows: Tensor, scales: Tensor | None, first: int, vectors: Tensor
) -> Iterator[tuple[Tensor, slice]]:
    """Values of the rows in the vectors' dtype, a chunk of columns at a time, and which."""
    m, n = rows.shape[0], vectors.shape[-1]
    width = min(max(CONVERTED // max(m, 1) // BLOCK, 1) * BLOCK, SUMMED)
    for start in range(0, n, width):
        where = slice(start, min(start + width, n))
        columns = slice(first + where.start, first + where.stop)
        values = rows[:, columns].to(vectors.dtype)
        if scales is not None:
            values *= expand_scales(scales, columns)
        yield values, where
