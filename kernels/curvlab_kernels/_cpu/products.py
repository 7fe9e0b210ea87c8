"""The two products everything is made of, on any range of columns of a stored basis.

``accumulate``: ``total += M[:, first : first + n] g``; ``subtract``: ``g -= M[:, first : ...]' c``.
Three ways: compiled loops for one vector, if numba is there; torch as it is when rows and vectors
share a dtype; otherwise torch, converting a chunk of columns at a time. Sums run in the vectors'
dtype within a chunk (at most 64k columns) and in float64 across chunks.
"""

import functools
import importlib
import logging
from collections.abc import Iterator
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from curvlab_kernels._cpu import threads
from curvlab_kernels.formats import BLOCK, CHUNK, expand_scales

CONVERTED = 1 << 18  # elements converted at a time: one megabyte of float32 stays in the cache

RESIDENT = 1 << 18  # elements of the basis that stay in the second-level cache

logger = logging.getLogger(__name__)


def accumulate(
    rows: Tensor, scales: Tensor | None, first: int, vectors: Tensor, total: Tensor
) -> None:
    """``total += M[:, first : first + n] g`` for ``vectors`` ``(n,)`` or ``(b, n)``.

    Args:
        first: The column at which the vectors begin.
        total: Float64, ``(m,)`` or ``(b, m)``.
    """
    if _nothing(rows, vectors):
        return
    loops = _loops(rows, vectors)
    if loops is not None:
        _accumulate_compiled(loops, rows, scales, first, vectors, total)
    elif rows.dtype == vectors.dtype:
        columns = rows[:, first : first + vectors.shape[-1]]
        if vectors.shape[-1] <= CHUNK:
            total += vectors @ columns.T
            return
        pairs = zip(torch.split(columns, CHUNK, 1), torch.split(vectors, CHUNK, -1), strict=True)
        parts = [piece @ part.T for part, piece in pairs]
        total += torch.stack(parts).sum(0, dtype=torch.float64)
    else:
        for columns, where in _converted(rows, scales, first, vectors):
            total += vectors[..., where] @ columns.T


def subtract(
    rows: Tensor, scales: Tensor | None, first: int, coefficients: Tensor, vectors: Tensor
) -> None:
    """``g -= M[:, first : first + n]' c`` in place; ``coefficients`` ``(m,)`` or ``(b, m)``."""
    if _nothing(rows, vectors):
        return
    weights = coefficients.to(vectors.dtype)
    loops = _loops(rows, vectors)
    if loops is not None:
        _subtract_compiled(loops, rows, scales, first, weights, vectors)
    elif rows.dtype == vectors.dtype:
        columns = rows[:, first : first + vectors.shape[-1]]
        if vectors.dim() == 1:
            vectors.addmv_(columns.T, weights, alpha=-1)
        else:
            vectors.addmm_(weights, columns, alpha=-1)
    else:
        for columns, where in _converted(rows, scales, first, vectors):
            vectors[..., where] -= weights @ columns


def subtract_and_accumulate(rows: Tensor, coefficients: Tensor, vector: Tensor) -> Tensor:
    """``g -= M' c`` and then ``M g``, in one reading of rows of the vector's dtype.

    A range of columns is small enough to stay in the cache between the two.
    """
    total = torch.zeros_like(coefficients)
    if _nothing(rows, vector):
        return total
    width = max(RESIDENT // rows.shape[0], 1024)
    loops = _loops(rows, vector)
    if loops is None:
        for first in range(0, vector.shape[0], width):
            piece = vector[first : first + width]
            subtract(rows, None, first, coefficients, piece)
            accumulate(rows, None, first, piece, total)
        return total
    numbers, weights = vector.detach().numpy(), coefficients.to(vector.dtype).numpy()
    stored, zero = rows.numpy(), numbers.dtype.type(0)
    parts = threads.spans(vector.shape[0], rows.shape[0])
    sums = np.zeros((len(parts), rows.shape[0]))

    def work(index: int, start: int, stop: int) -> None:
        loops.subtract_and_accumulate(
            stored, weights, numbers, sums[index], zero, width, start, stop
        )

    threads.run(work, parts)
    total += torch.from_numpy(sums).sum(0)
    return total


def _nothing(rows: Tensor, vectors: Tensor) -> bool:
    return rows.shape[0] == 0 or vectors.numel() == 0


def _loops(rows: Tensor, vectors: Tensor) -> ModuleType | None:
    """The compiled loops for these rows; ``None`` where torch is the better or the only way."""
    # A block of vectors reuses every converted element b times: a matrix product wins there.
    if vectors.dim() > 1 or not vectors.is_contiguous():
        return None
    if rows.dtype == torch.int8:
        return _compiled("compiled_blocks")
    if rows.dtype in (torch.float16, torch.bfloat16):
        return _compiled("compiled")
    # One chunk is one call of torch, which no loop beats.
    if rows.dtype == torch.float32 and vectors.shape[0] > CHUNK:
        return _compiled("compiled")
    return None


@functools.cache
def _compiled(name: str) -> ModuleType | None:
    try:
        importlib.import_module("numba")
    except ImportError:
        logger.info(
            "numba is not installed: float16, bfloat16 and int8 bases are converted to float32 "
            "chunk by chunk, to the same accuracy but slower; pip install 'curvlab[fast]'"
        )
        return None
    return importlib.import_module(f"curvlab_kernels._cpu.{name}")


def _accumulate_compiled(
    loops: ModuleType,
    rows: Tensor,
    scales: Tensor | None,
    first: int,
    vector: Tensor,
    total: Tensor,
) -> None:
    stored, numbers = _arrays(rows, scales), vector.detach().numpy()
    zero = numbers.dtype.type(0)
    parts = threads.spans(vector.shape[0], rows.shape[0])
    if len(parts) == 1:
        loops.accumulate(*stored, numbers, total.numpy(), zero, first, *parts[0])
        return
    sums = np.zeros((len(parts), rows.shape[0]))

    def work(index: int, start: int, stop: int) -> None:
        loops.accumulate(*stored, numbers, sums[index], zero, first, start, stop)

    threads.run(work, parts)
    total += torch.from_numpy(sums).sum(0)


def _subtract_compiled(
    loops: ModuleType,
    rows: Tensor,
    scales: Tensor | None,
    first: int,
    weights: Tensor,
    vector: Tensor,
) -> None:
    stored, numbers, factors = _arrays(rows, scales), vector.detach().numpy(), weights.numpy()

    parts = threads.spans(vector.shape[0], rows.shape[0])
    if len(parts) == 1:
        loops.subtract(*stored, factors, numbers, first, *parts[0])
        return

    def work(_index: int, start: int, stop: int) -> None:
        loops.subtract(*stored, factors, numbers, first, start, stop)

    threads.run(work, parts)


def _arrays(rows: Tensor, scales: Tensor | None) -> tuple[np.ndarray, ...]:
    """What the compiled loops read: the codes, by a type that says how to decode them."""
    if scales is not None:
        return rows.numpy(), scales.numpy()
    if rows.dtype == torch.float32:
        return (rows.numpy(),)
    return (rows.view(torch.int16 if rows.dtype == torch.float16 else torch.uint16).numpy(),)


def _converted(
    rows: Tensor, scales: Tensor | None, first: int, vectors: Tensor
) -> Iterator[tuple[Tensor, slice]]:
    """Values of the rows in the vectors' dtype, a chunk of columns at a time, and which."""
    n = vectors.shape[-1]
    width = min(max(CONVERTED // rows.shape[0] // BLOCK, 1) * BLOCK, CHUNK)
    for start in range(0, n, width):
        where = slice(start, min(start + width, n))
        columns = slice(first + where.start, first + where.stop)
        values = rows[:, columns].to(vectors.dtype)
        if scales is not None:
            values *= expand_scales(scales, columns)
        yield values, where
