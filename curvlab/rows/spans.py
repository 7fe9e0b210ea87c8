"""Spans of stored rows: Gram matrices, their factors, and the angles between two spans."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from curvlab_kernels import block
from torch import Tensor

if TYPE_CHECKING:
    from curvlab.rows.orthonormal import Rows

BLOCK_BYTES = 1 << 28  # of rows held as numbers at a time


def whitened(factor: Tensor | None, coefficients: Tensor) -> Tensor:
    """``L^-1 c``: coefficients ``(m,)`` or ``(b, m)`` in the orthonormal basis ``L^-1 M``."""
    if factor is None or coefficients.numel() == 0:
        return coefficients
    # Solved, not multiplied by an inverse: rows of int8 may be close to dependent.
    columns = coefficients.reshape(-1, coefficients.shape[-1]).T
    solved: Tensor = torch.linalg.solve_triangular(factor, columns, upper=False)
    return solved.T.reshape(coefficients.shape)


def bordered_factor(factor: Tensor, across: Tensor, corner: Tensor) -> Tensor:
    """The Cholesky factor of a Gram matrix with ``k`` more rows.

    Args:
        factor: The factor of the ``m`` old rows ``(m, m)``, lower.
        across: Products of the new with the old rows ``(k, m)``.
        corner: Products of the new rows with each other ``(k, k)``.
    """
    m, k = factor.shape[0], corner.shape[0]
    lower = whitened(factor, across)
    rest, failed = torch.linalg.cholesky_ex(corner - lower @ lower.T)
    if int(failed) != 0:
        raise ValueError(
            "rounding to the storage dtype made the new vectors dependent. Nothing was added; use "
            "a wider dtype"
        )
    whole = factor.new_zeros(m + k, m + k)
    whole[:m, :m] = factor
    whole[m:, :m] = lower
    whole[m:, m:] = rest
    return whole


def border(gram: Tensor, across: Tensor, corner: Tensor) -> Tensor:
    """``gram`` ``(m, m)`` with ``k`` more rows: ``across`` ``(k, m)``, ``corner`` ``(k, k)``."""
    return torch.cat([torch.cat([gram, across.T], 1), torch.cat([across, corner], 1)])


def bordered(rows: "Rows", gram: Tensor) -> Tensor:
    """The Gram matrix of all rows in use, of which ``gram`` has the first."""
    for start, stop in _blocks(rows, len(gram)):
        values = rows.rows(start, stop)
        across = rows.coefficients(values)[:, :start]
        gram = border(gram, across, rows.space.total(block.gram(values)))
    return gram


def cross(first: "Rows", second: "Rows") -> Tensor:
    """Products of the rows of ``second`` with those of ``first``: ``(second.size, first.size)``.

    In float64 throughout: this is what certificates are made of.
    """
    found = first.gram.new_zeros(second.size, first.size)
    for start, stop in _blocks(second):
        found[start:stop] = first.coefficients(_rows_for(first, second, start, stop).double())
    return found


def principal_angles(first: "Rows", second: "Rows") -> Tensor:
    """Angles between two spans, radians, ascending: ``(min(first.size, second.size),)``.

    From cosines where angles are large and from sines where they are small, because either alone
    loses half the digits at its own end. Right to about 1e-8 for float64 rows, 1e-6 for float32.
    """
    if first.n != second.n:
        raise ValueError(f"bases of {first.n} and {second.n} elements have no angles between them")
    if first.size < second.size:
        first, second = second, first
    if second.size == 0:
        return first.gram.new_zeros(0)
    cosines = whitened(second.factor, whitened(first.factor, cross(first, second)).T)
    cosines = torch.linalg.svdvals(cosines).clamp(max=1.0)
    outside = first.gram.new_zeros(second.size, second.size)
    for i, row_block in _outside(first, second):
        for j, other_block in _outside(first, second):
            if j <= i:
                part = first.space.total(row_block.double() @ other_block.double().T)
                outside[i : i + len(row_block), j : j + len(other_block)] = part
                outside[j : j + len(other_block), i : i + len(row_block)] = part.T
    # Squared sines: half the digits of a float64 suffice for the 1e-8 that is promised.
    outside = whitened(second.factor, whitened(second.factor, outside).T)
    squares = torch.linalg.eigvalsh((outside + outside.T) / 2)
    sines = squares.clamp(0.0, 1.0).sqrt()
    return torch.where(cosines > 0.5**0.5, sines.asin(), cosines.acos())


def _outside(first: "Rows", second: "Rows") -> Iterator[tuple[int, Tensor]]:
    """Rows of ``second`` without their parts in ``first``, a block at a time."""
    for start, stop in _blocks(second):
        block = _rows_for(first, second, start, stop)
        first.project_out_(block)
        yield start, block


def _rows_for(first: "Rows", second: "Rows", start: int, stop: int) -> Tensor:
    rows = second.rows(start, stop).to(first.device)
    return rows.double() if first.dtype == torch.float64 else rows


def _blocks(rows: "Rows", first: int = 0) -> Iterator[tuple[int, int]]:
    at_once = max(1, BLOCK_BYTES // (8 * rows.width))
    for start in range(first, rows.size, at_once):
        yield start, min(start + at_once, rows.size)
