"""The two products everything is made of, on any range of columns of a stored basis.

``accumulate``: ``total += M[:, first : first + n] g``; ``subtract``: ``g -= M[:, first : ...]' c``.
Three ways, by dtype: torch in place when rows and vectors share one; compiled loops for narrow
rows; otherwise torch, converting a chunk of columns at a time. Sums run in the vectors' dtype
within a chunk and in float64 across chunks.
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
    if rows.dtype == vectors.dtype:
        columns = rows[:, first : first + vectors.shape[-1]]
        if vectors.shape[-1] <= CHUNK:
            total += vectors @ columns.T
            return
        pairs = zip(torch.split(columns, CHUNK, 1), torch.split(vectors, CHUNK, -1), strict=True)
        parts = [piece @ part.T for part, piece in pairs]
        total += torch.stack(parts).sum(0, dtype=torch.float64)
    elif (loops := _loops(rows, vectors)) is not None:
        _accumulate_compiled(loops, rows, scales, first, vectors, total)
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
    if rows.dtype == vectors.dtype:
        columns = rows[:, first : first + vectors.shape[-1]]
        if vectors.dim() == 1:
            vectors.addmv_(columns.T, weights, alpha=-1)
        else:
            vectors.addmm_(weights, columns, alpha=-1)
    elif (loops := _loops(rows, vectors)) is not None:
        _subtract_compiled(loops, rows, scales, first, weights, vectors)
    else:
        for columns, where in _converted(rows, scales, first, vectors):
            vectors[..., where] -= weights @ columns


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
    return None


@functools.cache
def _compiled(name: str) -> ModuleType | None:
    try:
        importlib.import_module("numba")
    except ImportError:
        logger.info(
            "numba is not installed: float16, bfloat16 and int8 bases are converted to float32 "
            "chunk by chunk, to the same result but slower; pip install 'curvlab[fast]'"
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
