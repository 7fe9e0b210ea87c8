"""Loops that decode rows as they read them, compiled by numba.

Torch converts float16, bfloat16 and int8 rows to float32 in memory first, which costs more than it
saves; here a row crosses the memory bus once, in its stored width. For float32 rows the loops are
no faster than torch on an idle machine, but sum in float64 across tiles without a parallel region
per chunk: on a busy machine every such region waits for its slowest thread.

Two things make the loops run at the speed of memory: a slice per row (the compiler then knows that
the stride is one), and eight rows at a time (as many streams as the processor prefetches, and the
vector is loaded once for eight products). Where fewer rows are left, the last one stands in for
the missing: it is in the cache, and what it adds is left out.

The loops release the interpreter lock and are started on column spans by :mod:`.threads`; numba's
own thread pool is not used, because two Python threads in it at once abort the process.
Only this file imports numba.
"""

import logging
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic

TILE = 8192  # columns: the vector's tile stays in the first-level cache while the rows pass by
BLOCK = 64  # columns that share a scale

Function = TypeVar("Function", bound=Callable[..., Any])
logger = logging.getLogger(__name__)


def compiled(function: Function) -> Function:
    def compile_with(cache: bool) -> Function:
        # Sums may be reassociated (they have to be, to use vector units); NaN and infinity stay
        # as they are, because a diverged gradient must show.
        dispatcher: Any = numba.njit(
            function,
            cache=cache,
            nogil=True,
            error_model="numpy",
            fastmath={"reassoc", "contract", "nsz"},
        )
        return cast(Function, dispatcher)

    try:
        return compile_with(cache=True)
    except RuntimeError as error:  # no folder in which numba may keep its cache
        logger.info("%s is compiled anew in every process: %s", function.__name__, error)
        return compile_with(cache=False)


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

    def itself(_context: Any, _builder: Any, _signature: Any, arguments: Any) -> Any:
        return arguments[0]

    generate = {types.int16: float16, types.uint16: bfloat16, types.float32: itself}[code]
    return types.float32(code), generate


value: Any = intrinsic(_value)


def _accumulate(
    rows: Any, vector: Any, total: Any, zero: Any, first: int, start: int, stop: int
) -> None:
    """``total += rows[:, first + start : first + stop] @ vector[start:stop]``.

    ``zero`` has the dtype of the sums within a tile; those across tiles are float64.
    """
    m = rows.shape[0]
    last = m - 1
    sums = np.zeros(8, np.float64)
    for low in range(start, stop, TILE):
        high = min(low + TILE, stop)
        part, left, right = vector[low:high], first + low, first + high
        for i in range(0, m, 8):
            row0 = rows[i, left:right]
            row1 = rows[min(i + 1, last), left:right]
            row2 = rows[min(i + 2, last), left:right]
            row3 = rows[min(i + 3, last), left:right]
            row4 = rows[min(i + 4, last), left:right]
            row5 = rows[min(i + 5, last), left:right]
            row6 = rows[min(i + 6, last), left:right]
            row7 = rows[min(i + 7, last), left:right]
            sum0, sum1, sum2, sum3 = zero, zero, zero, zero
            sum4, sum5, sum6, sum7 = zero, zero, zero, zero
            for j in range(part.shape[0]):
                element = part[j]
                sum0 += value(row0[j]) * element
                sum1 += value(row1[j]) * element
                sum2 += value(row2[j]) * element
                sum3 += value(row3[j]) * element
                sum4 += value(row4[j]) * element
                sum5 += value(row5[j]) * element
                sum6 += value(row6[j]) * element
                sum7 += value(row7[j]) * element
            sums[0], sums[1], sums[2], sums[3] = sum0, sum1, sum2, sum3
            sums[4], sums[5], sums[6], sums[7] = sum4, sum5, sum6, sum7
            for k in range(min(8, m - i)):
                total[i + k] += sums[k]


def _subtract(rows: Any, weights: Any, vector: Any, first: int, start: int, stop: int) -> None:
    """``vector[start:stop] -= weights @ rows[:, first + start : first + stop]``."""
    m = rows.shape[0]
    last = m - 1
    w = np.zeros(8, weights.dtype)
    for low in range(start, stop, TILE):
        high = min(low + TILE, stop)
        part, left, right = vector[low:high], first + low, first + high
        for i in range(0, m, 8):
            for k in range(8):
                w[k] = weights[i + k] if i + k < m else 0.0
            row0 = rows[i, left:right]
            row1 = rows[min(i + 1, last), left:right]
            row2 = rows[min(i + 2, last), left:right]
            row3 = rows[min(i + 3, last), left:right]
            row4 = rows[min(i + 4, last), left:right]
            row5 = rows[min(i + 5, last), left:right]
            row6 = rows[min(i + 6, last), left:right]
            row7 = rows[min(i + 7, last), left:right]
            w0, w1, w2, w3 = w[0], w[1], w[2], w[3]
            w4, w5, w6, w7 = w[4], w[5], w[6], w[7]
            for j in range(part.shape[0]):
                upper = (value(row0[j]) * w0 + value(row1[j]) * w1) + (
                    value(row2[j]) * w2 + value(row3[j]) * w3
                )
                lower = (value(row4[j]) * w4 + value(row5[j]) * w5) + (
                    value(row6[j]) * w6 + value(row7[j]) * w7
                )
                part[j] -= upper + lower


accumulate = compiled(_accumulate)
subtract = compiled(_subtract)


def _subtract_and_accumulate(
    rows: Any,
    weights: Any,
    vector: Any,
    total: Any,
    zero: Any,
    width: int,
    start: int,
    stop: int,
) -> None:
    """Both, ``width`` columns after the other: the second finds the rows in the cache."""
    for low in range(start, stop, width):
        high = min(low + width, stop)
        subtract(rows, weights, vector, 0, low, high)
        accumulate(rows, vector, total, zero, 0, low, high)


subtract_and_accumulate = compiled(_subtract_and_accumulate)


def _project(rows: Any, vector: Any, removed: Any, zero: Any) -> None:
    """``vector -= M' M vector``, eight orthonormal rows after the other; ``removed += M vector``.

    Eight short rows stay in the cache between the two products: each is read from memory once.
    """
    m, n = rows.shape[0], vector.shape[0]
    weights = np.zeros(8, vector.dtype)
    for i in range(0, m, 8):
        some, found = rows[i : i + 8], removed[i : i + 8]
        accumulate(some, vector, found, zero, 0, 0, n)
        for k in range(found.shape[0]):
            weights[k] = found[k]
        subtract(some, weights, vector, 0, 0, n)


project = compiled(_project)


def _squares(vector: Any, total: Any, start: int, stop: int) -> None:
    """``total[0] += sum(vector[start:stop] ** 2)``, every product and sum in float64."""
    part = vector[start:stop]
    found = 0.0
    for j in range(part.shape[0]):
        element = np.float64(part[j])
        found += element * element
    total[0] += found


squares = compiled(_squares)


def _subtract_and_square(
    rows: Any, weights: Any, vector: Any, total: Any, start: int, stop: int
) -> None:
    """``vector -= weights @ rows``, then ``total[0] += ||vector||^2``, a tile after the other."""
    for low in range(start, stop, TILE):
        high = min(low + TILE, stop)
        subtract(rows, weights, vector, 0, low, high)
        squares(vector, total, low, high)


subtract_and_square = compiled(_subtract_and_square)


def _recurrence(last: Any, vector: Any, total: Any, start: int, stop: int) -> None:
    """``total += (||vector||^2, last . vector)``, every product and sum in float64."""
    part, other = vector[start:stop], last[start:stop]
    square, along = 0.0, 0.0
    for j in range(part.shape[0]):
        element = np.float64(part[j])
        square += element * element
        along += np.float64(other[j]) * element
    total[0] += square
    total[1] += along


recurrence = compiled(_recurrence)


def _recur_and_accumulate(
    rows: Any,
    beta: Any,
    alpha: Any,
    vector: Any,
    total: Any,
    zero: Any,
    start: int,
    stop: int,
) -> None:
    """``vector -= beta rows[-2] + alpha rows[-1]``, its products with all rows, and its square.

    ``total`` has ``m + 1`` elements, the last for the square; ``beta`` and ``alpha`` have the
    vector's dtype. A tile after the other, so that the products find the vector in the cache.
    """
    m = rows.shape[0]
    sums, square = total[:m], total[m:]
    for low in range(start, stop, TILE):
        high = min(low + TILE, stop)
        part, one, other = vector[low:high], rows[m - 2, low:high], rows[m - 1, low:high]
        for j in range(part.shape[0]):
            part[j] -= beta * one[j] + alpha * other[j]
        squares(vector, square, low, high)
        accumulate(rows, vector, sums, zero, 0, low, high)


recur_and_accumulate = compiled(_recur_and_accumulate)


def _scale(vector: Any, factor: float, start: int, stop: int) -> None:
    """``vector *= factor``, the factor not rounded to the vector's dtype before."""
    part = vector[start:stop]
    for j in range(part.shape[0]):
        part[j] = np.float64(part[j]) * factor


scale = compiled(_scale)


def _lanczos_step(
    rows: Any, beta: Any, vector: Any, weights: Any, total: Any, tolerance: float, zero: Any
) -> None:
    """A whole step on one thread: the recurrence, the second pass, the norm.

    The vector is left as it is, and not normalised, where the second pass took much of it or left
    no more than ``tolerance`` of what it was before the first: such a step takes more care.

    ``weights`` ``(m,)`` has the vector's dtype. ``total`` ``(m + 5,)`` gets the second pass's
    coefficients, then ``||vector||^2`` after the recurrence, that before it, the last row's
    coefficient, ``||vector||^2`` at the end, and 1 if the vector was normalised.
    """
    m, n = rows.shape[0], vector.shape[0]
    recurrence(rows[m - 1], vector, total[m + 1 :], 0, n)
    weights[0] = total[m + 2]
    alpha = weights[0]  # rounded to the vector's dtype
    total[m + 2] = alpha
    recur_and_accumulate(rows, beta, alpha, vector, total[: m + 1], zero, 0, n)
    for k in range(m):
        weights[k] = total[k]
    subtract_and_square(rows, weights, vector, total[m + 3 :], 0, n)
    passed, before, after = total[m], total[m + 1], total[m + 3]
    if after >= 0.5 * passed and after > tolerance * tolerance * before:
        scale(vector, 1.0 / np.sqrt(after), 0, n)
        total[m + 4] = 1.0


lanczos_step = compiled(_lanczos_step)
