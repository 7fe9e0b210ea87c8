"""``M g``, ``g -= M' c`` and the projection, for a vector, a block, or a list of tensors.

Sums run in the vectors' dtype within a tile (8k columns) and in float64 across tiles.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from curvlab_kernels._cpu.path import arrays, choose, spread
from curvlab_kernels.algebra import mostly_removed, passes, solve
from curvlab_kernels.formats import BLOCK, expand_scales
from curvlab_kernels.lists import all_contiguous, flat, parts

SUMMED = 1 << 13  # columns that torch sums in the rows' dtype: not all libraries sum in pairs
CONVERTED = 1 << 18  # elements converted at a time: one megabyte of float32 stays in the cache


def coefficients(rows: Tensor, vectors: Tensor, scales: Tensor | None = None) -> Tensor:
    """See :func:`curvlab_kernels.reference.coefficients`."""
    return _accumulate(rows, scales, vectors)[..., :-1]


def apply_(
    rows: Tensor, coefficients: Tensor, vectors: Tensor, scales: Tensor | None = None
) -> None:
    """See :func:`curvlab_kernels.reference.apply_`."""
    subtract(rows, scales, coefficients, vectors)


def project_(
    rows: Tensor, vectors: Tensor, factor: Tensor | None = None, scales: Tensor | None = None
) -> Tensor:
    """See :func:`curvlab_kernels.reference.project_`."""
    path = choose(rows, vectors, team=True)
    if path.team is not None:
        team: Tensor = path.team.run(path, rows, scales, factor, (vectors,))
        return team
    return passes(lambda: project_once_(rows, vectors, factor, scales))


def project_once_(
    rows: Tensor, vectors: Tensor, factor: Tensor | None = None, scales: Tensor | None = None
) -> tuple[Tensor, bool]:
    """One pass: what was removed, and whether so much that another should follow."""
    found = _accumulate(rows, scales, vectors)
    products, squares = found[..., :-1], found[..., -1]
    removed = solve(factor, products)
    subtract(rows, scales, removed, vectors)
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
    if not tensors:
        return torch.zeros(rows.shape[0], dtype=torch.float64)
    path = choose(rows, tensors, team=True)
    if path.team is not None and all_contiguous(tensors):
        team: Tensor = path.team.run(path, rows, scales, factor, tensors)
        return team
    vector = flat(tensors)
    removed = project_(rows, vector, factor, scales)
    torch._foreach_copy_(list(tensors), parts(vector, tensors))
    return removed


def _accumulate(rows: Tensor, scales: Tensor | None, vectors: Tensor) -> Tensor:
    """``M g`` and then ``||g||^2``: ``(m + 1,)`` or ``(b, m + 1)``, float64."""
    (m, n), path = (rows.shape[0], vectors.shape[-1]), choose(rows, vectors)
    if path.loops is not None:
        return spread(path.loops.accumulate, arrays(rows, scales), None, vectors, m + 1)
    total = vectors.new_zeros((*vectors.shape[:-1], m + 1), dtype=torch.float64)
    total[..., -1] = torch.linalg.vector_norm(vectors, dim=-1).double().square()
    if rows.dtype != vectors.dtype:
        for columns, where in _converted(rows, scales, vectors):
            total[..., :-1] += vectors[..., where] @ columns.T
    elif n <= SUMMED:
        total[..., :-1] += vectors @ rows[:, :n].T
    else:
        chunks = torch.split(rows[:, :n], SUMMED, 1), torch.split(vectors, SUMMED, -1)
        parts = [vector @ part.T for part, vector in zip(*chunks, strict=True)]
        total[..., :-1] += torch.stack(parts).sum(0, dtype=torch.float64)
    return total


def subtract(rows: Tensor, scales: Tensor | None, coefficients: Tensor, vectors: Tensor) -> None:
    """``g -= M' c`` in place; ``coefficients`` ``(m,)`` or ``(b, m)``, float64."""
    path = choose(rows, vectors)
    if path.loops is not None:
        spread(path.loops.subtract, arrays(rows, scales), coefficients.numpy(), vectors)
        return
    weights, columns = coefficients.to(vectors.dtype), rows[:, : vectors.shape[-1]]
    if rows.dtype != vectors.dtype:
        for values, where in _converted(rows, scales, vectors):
            vectors[..., where] -= weights @ values
    elif vectors.dim() == 1:
        vectors.addmv_(columns.T, weights, alpha=-1)
    else:
        vectors.addmm_(weights, columns, alpha=-1)


def _converted(
    rows: Tensor, scales: Tensor | None, vectors: Tensor
) -> Iterator[tuple[Tensor, slice]]:
    """Values of the rows in the vectors' dtype, a chunk of columns at a time, and which."""
    m, n = rows.shape[0], vectors.shape[-1]
    width = min(max(CONVERTED // max(m, 1) // BLOCK, 1) * BLOCK, SUMMED)
    for start in range(0, n, width):
        where = slice(start, min(start + width, n))
        values = rows[:, where].to(vectors.dtype)
        if scales is not None:
            values *= expand_scales(scales, where)
        yield values, where
