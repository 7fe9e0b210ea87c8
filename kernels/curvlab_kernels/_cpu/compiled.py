"""Loops that decode float16, bfloat16 and int8 rows as they read them, compiled by numba.

Torch converts such rows to float32 in memory first, which costs more than it saves; here a row
crosses the memory bus once, in its stored width. Two things make the loops run at the speed of
memory: a slice per row (the compiler then knows that the stride is one), and four rows at a time
(the vector is loaded once for four products).

The loops release the interpreter lock and are started on column spans by :mod:`.threads`; numba's
own thread pool is not used, because two Python threads in it at once abort the process.
Only this file imports numba.
"""

import logging
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
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

    generate = {types.int16: float16, types.uint16: bfloat16}[code]
    return types.float32(code), generate


value: Any = intrinsic(_value)


def _accumulate(
    rows: Any, vector: Any, total: Any, zero: Any, first: int, start: int, stop: int
) -> None:
    """``total += rows[:, first + start : first + stop] @ vector[start:stop]``.

    ``zero`` has the dtype of the sums within a tile; those across tiles are float64.
    """
    m = rows.shape[0]
    for low in range(start, stop, TILE):
        high = min(low + TILE, stop)
        part = vector[low:high]
        i = 0
        while i + 4 <= m:
            row0 = rows[i, first + low : first + high]
            row1 = rows[i + 1, first + low : first + high]
            row2 = rows[i + 2, first + low : first + high]
            row3 = rows[i + 3, first + low : first + high]
            sum0, sum1, sum2, sum3 = zero, zero, zero, zero
            for j in range(part.shape[0]):
                element = part[j]
                sum0 += value(row0[j]) * element
                sum1 += value(row1[j]) * element
                sum2 += value(row2[j]) * element
                sum3 += value(row3[j]) * element
            total[i] += sum0
            total[i + 1] += sum1
            total[i + 2] += sum2
            total[i + 3] += sum3
            i += 4
        while i < m:
            row0 = rows[i, first + low : first + high]
            sum0 = zero
            for j in range(part.shape[0]):
                sum0 += value(row0[j]) * part[j]
            total[i] += sum0
            i += 1


def _subtract(rows: Any, weights: Any, vector: Any, first: int, start: int, stop: int) -> None:
    """``vector[start:stop] -= weights @ rows[:, first + start : first + stop]``."""
    m = rows.shape[0]
    for low in range(start, stop, TILE):
        high = min(low + TILE, stop)
        part = vector[low:high]
        i = 0
        while i + 4 <= m:
            row0 = rows[i, first + low : first + high]
            row1 = rows[i + 1, first + low : first + high]
            row2 = rows[i + 2, first + low : first + high]
            row3 = rows[i + 3, first + low : first + high]
            w0, w1, w2, w3 = weights[i], weights[i + 1], weights[i + 2], weights[i + 3]
            for j in range(part.shape[0]):
                part[j] -= (value(row0[j]) * w0 + value(row1[j]) * w1) + (
                    value(row2[j]) * w2 + value(row3[j]) * w3
                )
            i += 4
        while i < m:
            row0 = rows[i, first + low : first + high]
            w0 = weights[i]
            for j in range(part.shape[0]):
                part[j] -= value(row0[j]) * w0
            i += 1


accumulate = compiled(_accumulate)
subtract = compiled(_subtract)
