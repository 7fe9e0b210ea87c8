"""Runs the compiled loops: which ones, on which columns, on how many threads.

A list of pieces is one long vector to the threads: the loops are started twice per projection,
however many tensors a model has.
"""

import functools
import importlib
import logging
from collections.abc import Callable, Sequence
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from curvlab_kernels._cpu import threads

Piece = tuple[int, Tensor]  # the column at which it begins, and vectors (n,) or (b, n)

SHORT = 1 << 19  # products up to which one call of torch costs less than starting the loops
TINY = 1 << 11  # elements of a vector for which torch costs less than the call of a loop
KEPT = 1 << 18  # elements of eight rows, most of which a cache keeps over one pass through them
RESIDENT = 1 << 17  # elements of the basis that stay in the second-level cache

logger = logging.getLogger(__name__)


def choose(rows: Tensor, pieces: Sequence[Piece]) -> ModuleType | None:
    """The compiled loops for these rows; ``None`` where torch is the better or the only way."""
    # A block of vectors reuses every converted element b times: a matrix product wins there.
    if any(piece.dim() > 1 or not piece.is_contiguous() for _, piece in pieces):
        return None
    if rows.dtype == torch.int8:
        return _compiled("compiled_blocks")
    if rows.dtype in (torch.float16, torch.bfloat16):
        return _compiled("compiled")
    columns = pieces[-1][0] - pieces[0][0] + pieces[-1][1].shape[0]
    # Torch sums a whole chunk in float32, in an order of the library's choosing: on some
    # processors the small terms of a long row are lost. The loops sum tiles.
    if rows.dtype == torch.float32 and columns > TINY:
        return _compiled("compiled")
    return None


def choose_once(rows: Tensor, vector: Tensor) -> ModuleType | None:
    """The compiled loops for float32 rows of which eight stay in the cache, on one thread."""
    if rows.dtype != torch.float32 or vector.dtype != torch.float32 or vector.dim() > 1:
        return None
    work = rows.shape[0] * vector.shape[0]
    alone = work < threads.ENOUGH or torch.get_num_threads() == 1
    return _compiled("compiled") if alone and work and 8 * vector.shape[0] <= KEPT else None


def choose_alone(rows: Tensor, vector: Tensor) -> ModuleType | None:
    """The compiled loops where one thread does it all: one call costs less than several."""
    alone = len(threads.spans(vector.shape[0], rows.shape[0] + 1)) == 1
    return choose(rows, [(0, vector)]) if alone else None


def choose_vector(vector: Tensor) -> ModuleType | None:
    """The compiled loops for a vector alone; ``None`` where torch is the better or only way."""
    if vector.dim() > 1 or not vector.is_contiguous() or vector.numel() < TINY:
        return None
    return _compiled("compiled")


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


def accumulate(
    loops: ModuleType,
    rows: Tensor,
    scales: Tensor | None,
    pieces: Sequence[Piece],
    total: Tensor,
) -> None:
    """``total += M g`` for the vector made of ``pieces``."""
    stored = _arrays(rows, scales)
    zero = np.float64(0) if pieces[0][1].dtype == torch.float64 else np.float32(0)

    def run(numbers: np.ndarray, sums: np.ndarray, first: int, start: int, stop: int) -> None:
        loops.accumulate(*stored, numbers, sums, zero, first, start, stop)

    _spread(run, rows.shape[0], pieces, total)


def subtract(
    loops: ModuleType,
    rows: Tensor,
    scales: Tensor | None,
    weights: Tensor,
    pieces: Sequence[Piece],
) -> None:
    """``g -= M' c`` in place; ``weights`` ``(m,)`` in the vector's dtype."""
    stored, factors = _arrays(rows, scales), weights.numpy()

    def run(numbers: np.ndarray, _sums: np.ndarray, first: int, start: int, stop: int) -> None:
        loops.subtract(*stored, factors, numbers, first, start, stop)

    _spread(run, rows.shape[0], pieces, None)


def project(loops: ModuleType, rows: Tensor, vector: Tensor) -> Tensor:
    """``g -= M' M g`` for orthonormal rows, each read once; returns ``M g``, float64."""
    removed = np.zeros(rows.shape[0])
    loops.project(rows.numpy(), vector.detach().numpy(), removed, np.float32(0))
    return torch.from_numpy(removed)


def subtract_and_accumulate(
    loops: ModuleType, rows: Tensor, weights: Tensor, vector: Tensor, total: Tensor
) -> None:
    """``g -= M' c``, then ``total += M g``, in one reading of float32 rows."""
    stored, factors = rows.numpy(), weights.numpy()
    zero = np.float64(0) if vector.dtype == torch.float64 else np.float32(0)
    width = max(RESIDENT // rows.shape[0], 1024)

    def run(numbers: np.ndarray, sums: np.ndarray, _first: int, start: int, stop: int) -> None:
        loops.subtract_and_accumulate(stored, factors, numbers, sums, zero, width, start, stop)

    _spread(run, rows.shape[0], [(0, vector)], total)


def squares(loops: ModuleType, vector: Tensor) -> Tensor:
    """``||g||^2`` of a contiguous ``(n,)``, summed in float64: ``()``."""

    def run(numbers: np.ndarray, sums: np.ndarray, _first: int, start: int, stop: int) -> None:
        loops.squares(numbers, sums, start, stop)

    return _summed(run, 1, vector)[0]


def subtract_and_square(loops: ModuleType, rows: Tensor, weights: Tensor, vector: Tensor) -> Tensor:
    """``g -= M' c`` for float32 rows, and ``||g||^2`` after it, ``()`` float64."""
    stored, factors = rows.numpy(), weights.numpy()

    def run(numbers: np.ndarray, sums: np.ndarray, _first: int, start: int, stop: int) -> None:
        loops.subtract_and_square(stored, factors, numbers, sums, start, stop)

    return _summed(run, 1, vector, rows.shape[0])[0]


def recurrence(loops: ModuleType, last: Tensor, vector: Tensor) -> Tensor:
    """``||g||^2`` and the product of a float32 row with ``g``: ``(2,)`` float64."""
    other = last.numpy()

    def run(numbers: np.ndarray, sums: np.ndarray, _first: int, start: int, stop: int) -> None:
        loops.recurrence(other, numbers, sums, start, stop)

    return _summed(run, 2, vector)


def recur_and_accumulate(
    loops: ModuleType, rows: Tensor, beta: float, alpha: float, vector: Tensor
) -> Tensor:
    """``g -= beta m + alpha l`` with the last two rows ``m, l``, in one reading of float32 rows.

    Returns:
        The products of all rows with ``g`` after it, and then its ``||g||^2``: ``(m + 1,)``.
    """
    stored = rows.numpy()
    zero = np.float64(0) if vector.dtype == torch.float64 else np.float32(0)
    kind = type(zero)
    factors = kind(beta), kind(alpha)

    def run(numbers: np.ndarray, sums: np.ndarray, _first: int, start: int, stop: int) -> None:
        loops.recur_and_accumulate(stored, *factors, numbers, sums, zero, start, stop)

    return _summed(run, rows.shape[0] + 1, vector)


def lanczos_step(
    loops: ModuleType, rows: Tensor, beta: float, vector: Tensor, tolerance: float
) -> tuple[Tensor, float, float, float, float, bool]:
    """A step up to the norm in one call; see :func:`curvlab_kernels._cpu.compiled._lanczos_step`.

    Returns:
        The second pass's coefficients ``(m,)`` float64; the norms between the passes and before
        the first; the last row's coefficient in the first; the norm at the end; and whether the
        vector was normalised, which it is not where a step takes more care.
    """
    m, numbers = rows.shape[0], vector.numpy()
    total, weights = np.zeros(m + 5), np.zeros(m, numbers.dtype)
    kind = numbers.dtype.type
    loops.lanczos_step(rows.numpy(), kind(beta), numbers, weights, total, tolerance, kind(0))
    passed, before, along, after, done = total[m:].tolist()
    return torch.from_numpy(total[:m]), passed**0.5, before**0.5, along, after**0.5, done == 1.0


def scale(loops: ModuleType, vector: Tensor, factor: float) -> None:
    """``g *= factor``, a float64 number."""

    def run(numbers: np.ndarray, _sums: np.ndarray, _first: int, start: int, stop: int) -> None:
        loops.scale(numbers, factor, start, stop)

    _spread(run, 1, [(0, vector)], None)


def _summed(
    run: Callable[[np.ndarray, np.ndarray, int, int, int], None],
    sums: int,
    vector: Tensor,
    rows: int = 1,
) -> Tensor:
    """``sums`` float64 numbers over the whole of a vector, while ``rows`` rows are read."""
    total = torch.zeros(max(sums, rows), dtype=torch.float64)
    _spread(run, len(total), [(0, vector)], total)
    return total[:sums]


def _spread(
    run: Callable[[np.ndarray, np.ndarray, int, int, int], None],
    m: int,
    pieces: Sequence[Piece],
    total: Tensor | None,
) -> None:
    """``run`` on spans of the pieces, one per thread; sums are added in the order of the spans."""
    base = pieces[0][0]
    items = [(first, piece.detach().numpy()) for first, piece in pieces]
    columns = items[-1][0] + items[-1][1].shape[0] - base
    parts = threads.spans(columns, m)
    sums = np.zeros((len(parts), m))

    def work(index: int, start: int, stop: int) -> None:
        for first, numbers in items:
            low, high = max(start + base - first, 0), min(stop + base - first, numbers.shape[0])
            if low < high:
                run(numbers, sums[index], first, low, high)

    threads.run(work, parts)
    if total is not None:
        total += torch.from_numpy(sums).sum(0)


def _arrays(rows: Tensor, scales: Tensor | None) -> tuple[np.ndarray, ...]:
    """What the compiled loops read: the codes, by a type that says how to decode them."""
    if scales is not None:
        return rows.numpy(), scales.numpy()
    if rows.dtype == torch.float32:
        return (rows.numpy(),)
    return (rows.view(torch.int16 if rows.dtype == torch.float16 else torch.uint16).numpy(),)
