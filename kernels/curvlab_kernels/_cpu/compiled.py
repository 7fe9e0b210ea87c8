"""The loops that numba compiles: each goes over columns of stored rows and one vector, in a thread.

Torch converts float16, bfloat16 and int8 rows to float32 in memory first, which costs more than it
saves; here a row crosses the memory bus once, in its stored width, and is decoded on the way. For
float32 rows the loops are no faster than torch on an idle machine, but sum in float64 across tiles
without a parallel region per chunk: on a busy machine each of those waits for its slowest thread.

Two things make the loops run at the speed of memory: a slice per row (the compiler then knows that
the stride is one), and eight rows at a time (as many streams as the processor prefetches, and the
vector is loaded once for eight products). Where fewer rows are left, the last one stands in for
the missing: it is in the cache, and what it adds is left out.

A loop that threads share takes ``(rows, scales, weights, vector, sums, start, stop)``: it reads the
columns ``start`` to ``stop`` of the rows, changes ``vector[start:stop]`` and adds to ``sums``,
float64. What a loop has no use for is ``None``. Those called ``..._alone`` do
a whole operation: for a small model calls cost more than arithmetic. They release the interpreter
lock and are started by :mod:`.path`; numba's own thread pool is not used, because two Python
threads in it at once abort the process.

What is ``inlined`` is copied into each loop before anything is compiled, so that a loop is one
piece of machine code. Were it linked from several, the piece that runs, and with it the order of
its sums, would depend on what else the process had compiled before. All is in one file because
numba compiles a cached loop anew only when the file it stands in changes.
"""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar, cast

import numba
import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic

TILE = 8192  # columns summed in the vector's dtype
READ = 1 << 15  # bytes of a row that are read in order before the next rows' turn
BLOCK = 64  # columns that share a scale
# Sums may be reassociated (they have to be, to use vector units); NaN and infinity stay as they
# are, because a diverged gradient must show.
FASTMATH = {"reassoc", "contract", "nsz"}
RESIDENT = 1 << 17  # elements of the basis that stay in the second-level cache

Function = TypeVar("Function", bound=Callable[..., Any])
logger = logging.getLogger(__name__)


def inlined(function: Function) -> Function:
    return cast(Function, numba.njit(function, inline="always"))


def compiled(function: Function, how: Callable[..., Any] | None = None) -> Any:
    """``function`` compiled by numba, which keeps the machine code in a folder if it finds one."""
    options = {"error_model": "numpy", "fastmath": FASTMATH}
    how = partial(numba.njit, nogil=True) if how is None else how
    try:
        return how(cache=True, **options)(function)
    except RuntimeError as error:  # no folder in which numba may keep its cache
        logger.info("%s is compiled anew in every process: %s", function.__name__, error)
        return how(cache=False, **options)(function)


def _value(_context: Any, code: Any) -> Any:
    """The number behind a stored code: int16 carries float16 bits, uint16 bfloat16 bits."""

    def float16(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        half = builder.bitcast(arguments[0], ir.HalfType())
        return builder.fpext(half, ir.FloatType())

    def bfloat16(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        # A bfloat16 is the upper half of a float32.
        wide = builder.zext(arguments[0], ir.IntType(32))
        wide = builder.shl(wide, ir.Constant(ir.IntType(32), 16))
        return builder.bitcast(wide, ir.FloatType())

    def int8(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.sitofp(arguments[0], ir.FloatType())

    def itself(_context: Any, _builder: Any, _signature: Any, arguments: Any) -> Any:
        return arguments[0]

    if code == types.float64:
        return types.float64(code), itself
    generate = {
        types.int16: float16,
        types.uint16: bfloat16,
        types.int8: int8,
        types.float32: itself,
    }[code]
    return types.float32(code), generate


value: Any = intrinsic(_value)


@inlined
def _eight(rows: Any, i: int, where: Any) -> Any:
    """``where`` of rows ``i`` to ``i + 7``; the last row stands in for those that are missing."""
    last = rows.shape[0] - 1
    return (
        rows[i, where], rows[min(i + 1, last), where], rows[min(i + 2, last), where],
        rows[min(i + 3, last), where], rows[min(i + 4, last), where], rows[min(i + 5, last), where],
        rows[min(i + 6, last), where], rows[min(i + 7, last), where],
    )  # fmt: skip


@inlined
def _width(rows: Any) -> int:
    """Columns of a vector that all rows pass by, eight at a time: a multiple of tiles."""
    return max(int(READ // rows.itemsize), TILE)


@inlined
def _accumulate(rows: Any, scales: Any, span: Any, sums: Any, start: int) -> None:
    """``sums[:m] += M[:, start : start + s] @ span``, ``span`` ``(s,)`` of a vector.

    ``scales`` is ``None`` where the dtype has none. Sums have the vector's dtype within a tile, or
    a block that shares a scale, and are float64 across tiles.
    """
    m, found, zero = rows.shape[0], np.zeros(8, np.float64), span.dtype.type(0)
    for i in range(0, m, 8):
        for low in range(0, span.shape[0], TILE):
            high = min(low + TILE, span.shape[0])
            sum0, sum1, sum2, sum3 = zero, zero, zero, zero
            sum4, sum5, sum6, sum7 = zero, zero, zero, zero
            # A tile is one piece, or, with scales, cut where the basis' blocks of columns end.
            begin = low
            while begin < high:
                end = high
                if scales is not None:
                    end = min(begin + BLOCK - (start + begin) % BLOCK, end)
                part0, part1, part2, part3 = zero, zero, zero, zero
                part4, part5, part6, part7 = zero, zero, zero, zero
                # A slice of each for the block: with an offset in the index it does not vectorise.
                line = span[begin:end]
                line0, line1, line2, line3, line4, line5, line6, line7 = _eight(
                    rows, i, slice(start + begin, start + end)
                )
                for j in range(line.shape[0]):
                    element = line[j]
                    part0 += value(line0[j]) * element
                    part1 += value(line1[j]) * element
                    part2 += value(line2[j]) * element
                    part3 += value(line3[j]) * element
                    part4 += value(line4[j]) * element
                    part5 += value(line5[j]) * element
                    part6 += value(line6[j]) * element
                    part7 += value(line7[j]) * element
                if scales is None:
                    sum0, sum1, sum2, sum3 = part0, part1, part2, part3
                    sum4, sum5, sum6, sum7 = part4, part5, part6, part7
                else:
                    s0, s1, s2, s3, s4, s5, s6, s7 = _eight(scales, i, (start + begin) // BLOCK)
                    sum0 += part0 * s0
                    sum1 += part1 * s1
                    sum2 += part2 * s2
                    sum3 += part3 * s3
                    sum4 += part4 * s4
                    sum5 += part5 * s5
                    sum6 += part6 * s6
                    sum7 += part7 * s7
                begin = end
            found[0], found[1], found[2], found[3] = sum0, sum1, sum2, sum3
            found[4], found[5], found[6], found[7] = sum4, sum5, sum6, sum7
            for k in range(min(8, m - i)):
                sums[i + k] += found[k]


@inlined
def _subtract(rows: Any, scales: Any, weights: Any, span: Any, start: int) -> None:
    """``span -= weights @ M[:, start : start + s]``, ``span`` ``(s,)`` of a vector.

    ``weights`` ``(m,)`` are rounded to the vector's dtype.
    """
    m, w = rows.shape[0], np.zeros(8, span.dtype)
    for i in range(0, m, 8):
        for k in range(8):
            w[k] = weights[i + k] if i + k < m else 0.0
        for low in range(0, span.shape[0], TILE):
            high = min(low + TILE, span.shape[0])
            begin = low
            while begin < high:
                end = high
                w0, w1, w2, w3 = w[0], w[1], w[2], w[3]
                w4, w5, w6, w7 = w[4], w[5], w[6], w[7]
                if scales is not None:
                    end = min(begin + BLOCK - (start + begin) % BLOCK, end)
                    s0, s1, s2, s3, s4, s5, s6, s7 = _eight(scales, i, (start + begin) // BLOCK)
                    w0, w1, w2, w3 = w0 * s0, w1 * s1, w2 * s2, w3 * s3
                    w4, w5, w6, w7 = w4 * s4, w5 * s5, w6 * s6, w7 * s7
                line = span[begin:end]
                line0, line1, line2, line3, line4, line5, line6, line7 = _eight(
                    rows, i, slice(start + begin, start + end)
                )
                for j in range(line.shape[0]):
                    upper = (value(line0[j]) * w0 + value(line1[j]) * w1) + (
                        value(line2[j]) * w2 + value(line3[j]) * w3
                    )
                    lower = (value(line4[j]) * w4 + value(line5[j]) * w5) + (
                        value(line6[j]) * w6 + value(line7[j]) * w7
                    )
                    line[j] -= upper + lower
                begin = end


@inlined
def _subtract_all(rows: Any, scales: Any, weights: Any, vector: Any, start: int, stop: int) -> None:
    """``vector[start:stop] -= weights @ M[:, start:stop]``."""
    width = _width(rows)
    # Backwards: what was read last for the products is still in a cache.
    for low in range(start + (stop - start - 1) // width * width, start - 1, -width):
        _subtract(rows, scales, weights, vector[low : min(low + width, stop)], low)


@inlined
def _square(vector: Any, start: int, stop: int) -> Any:
    """The sum of squares of ``vector[start:stop]``, every product and sum in float64."""
    part = vector[start:stop]
    found = 0.0
    for j in range(part.shape[0]):
        element = np.float64(part[j])
        found += element * element
    return found


@inlined
def _add_tile_squares(span: Any, sums: Any, at: int) -> None:
    """``sums[at] +=`` the sum of squares, within a tile in the vector's dtype."""
    for low in range(0, span.shape[0], TILE):
        part, found = span[low : min(low + TILE, span.shape[0])], span.dtype.type(0)
        for j in range(part.shape[0]):
            found += part[j] * part[j]
        sums[at] += found


@compiled
def accumulate(
    rows: Any, scales: Any, _w: Any, vector: Any, sums: Any, start: int, stop: int
) -> None:
    """``sums[:m] += M g``, ``sums[m] += ||g||^2``."""
    width = _width(rows)
    for low in range(start, stop, width):
        span = vector[low : min(low + width, stop)]
        _accumulate(rows, scales, span, sums, low)
        _add_tile_squares(span, sums, rows.shape[0])  # while it is in a cache


@compiled
def subtract(
    rows: Any, scales: Any, weights: Any, vector: Any, _s: Any, start: int, stop: int
) -> None:
    """``g -= M' c``."""
    _subtract_all(rows, scales, weights, vector, start, stop)


@compiled
def subtract_and_accumulate(
    rows: Any, scales: Any, weights: Any, vector: Any, sums: Any, start: int, stop: int
) -> None:
    """``g -= M' c``, then ``sums[:m] += M g``: the second finds the rows in the cache."""
    width = max(RESIDENT // rows.shape[0], 1024)
    for low in range(start, stop, width):
        span = vector[low : min(low + width, stop)]
        _subtract(rows, scales, weights, span, low)
        _accumulate(rows, scales, span, sums, low)


@compiled
def subtract_and_square(
    rows: Any, scales: Any, weights: Any, vector: Any, sums: Any, start: int, stop: int
) -> None:
    """``g -= M' c``, then ``sums[0] += ||g||^2``, a tile after the other."""
    for low in range(start, stop, TILE):
        high = min(low + TILE, stop)
        _subtract(rows, scales, weights, vector[low:high], low)
        sums[0] += _square(vector, low, high)


@compiled
def squares(_r: Any, _c: Any, _w: Any, vector: Any, sums: Any, start: int, stop: int) -> None:
    """``sums[0] += ||g||^2``."""
    sums[0] += _square(vector, start, stop)


@compiled
def scale(_r: Any, _c: Any, weights: Any, vector: Any, _s: Any, start: int, stop: int) -> None:
    """``g *= weights[0]``, float64 and not rounded to the vector's dtype before."""
    part = vector[start:stop]
    factor = weights[0]
    for j in range(part.shape[0]):
        part[j] = np.float64(part[j]) * factor


@inlined
def _along(rows: Any, vector: Any, sums: Any, start: int, stop: int) -> None:
    part, other = vector[start:stop], rows[rows.shape[0] - 1, start:stop]
    square, along = 0.0, 0.0
    for j in range(part.shape[0]):
        element = np.float64(part[j])
        square += element * element
        along += np.float64(other[j]) * element
    sums[0] += square
    sums[1] += along


@compiled
def along_last(rows: Any, _c: Any, _w: Any, vector: Any, sums: Any, start: int, stop: int) -> None:
    """``sums += (||g||^2, rows[-1] . g)``, every product and sum in float64."""
    _along(rows, vector, sums, start, stop)


@inlined
def _recur(rows: Any, weights: Any, vector: Any, sums: Any, start: int, stop: int) -> None:
    m = rows.shape[0]
    beta, alpha = weights[0], weights[1]
    for low in range(start, stop, TILE):
        high = min(low + TILE, stop)
        part, one, other = vector[low:high], rows[m - 2, low:high], rows[m - 1, low:high]
        for j in range(part.shape[0]):
            part[j] -= beta * one[j] + alpha * other[j]
        sums[m] += _square(vector, low, high)
        _accumulate(rows, None, part, sums, low)


@compiled
def recur_and_accumulate(
    rows: Any, _c: Any, weights: Any, vector: Any, sums: Any, start: int, stop: int
) -> None:
    """``g -= beta rows[-2] + alpha rows[-1]``, then ``sums += (M g, ||g||^2)``.

    ``weights`` are beta and alpha in the vector's dtype. A tile after the other, so that the
    products find the vector in the cache.
    """
    _recur(rows, weights, vector, sums, start, stop)


@compiled
def lanczos_step_alone(rows: Any, weights: Any, vector: Any, sums: Any, tolerance: float) -> None:
    """A whole step on one thread: the recurrence, the second pass, the norm.

    The vector is left as it is, and not normalised, where the second pass took much of it or left
    no more than ``tolerance`` of what it was before the first: such a step takes more care.

    ``weights`` ``(2,)`` are beta and room for alpha, in the vector's dtype. ``sums`` ``(m + 5,)``
    gets the second pass's coefficients, then ``||vector||^2`` after the recurrence, that before
    it, the last row's coefficient, ``||vector||^2`` at the end, and 1 if the vector was normalised.
    """
    m, n = rows.shape[0], vector.shape[0]
    _along(rows, vector, sums[m + 1 :], 0, n)
    weights[1] = sums[m + 2]
    sums[m + 2] = weights[1]  # as the vector's dtype has it
    _recur(rows, weights, vector, sums, 0, n)
    _subtract_all(rows, None, sums, vector, 0, n)
    sums[m + 3] = _square(vector, 0, n)
    passed, before, after = sums[m], sums[m + 1], sums[m + 3]
    if after >= 0.5 * passed and after > tolerance * tolerance * before:
        factor = 1.0 / np.sqrt(after)
        for j in range(n):
            vector[j] = np.float64(vector[j]) * factor
        sums[m + 4] = 1.0
