"""A whole projection, or a whole projected SGD step, in one call, by a team of torch's threads.

The team is torch's own (OpenMP's): its threads wait for work between two operations of torch, so
that sharing costs a microsecond, and no second pool fights with it over the cores. Each thread
keeps to its columns; the team meets once per pass, where the products are summed. Without OpenMP,
and in a forked child (which has the runtime but not its threads), the team is one thread.

Sums are made of parts, added in their order. Where a part is one tile, the bits are the same for
any number of threads.
"""

import ctypes
import functools
import hashlib
import os
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from llvmlite import ir  # type: ignore[import-untyped]
from numba import carray, cfunc, types  # type: ignore[attr-defined]
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

from curvlab_kernels._cpu import compiled as loops
from curvlab_kernels._cpu.compiled import (
    BLOCK,
    _accumulate,
    _add_tile_squares,
    _subtract,
    _width,
    compiled,
    inlined,
)
from curvlab_kernels.algebra import INSIDE, PASSES

STORED = {
    torch.float16: np.int16,  # the codes, by a type that says how to decode them
    torch.bfloat16: np.uint16,
    torch.int8: np.int8,
    torch.float32: np.float32,
    torch.float64: np.float64,
}
OPENMP = ("GOMP_parallel", "omp_get_num_threads", "omp_get_thread_num", "GOMP_barrier")
ALONE = (0, 0, 0, 0)
# numba compiles a cached function anew when its own file changes, and most of ours is elsewhere
STAMP = hashlib.sha256(Path(loops.__file__).read_bytes()).hexdigest()


@functools.cache
def openmp() -> tuple[int, int, int, int]:
    """Addresses of what :data:`OPENMP` names in the runtime that torch uses, or zeros."""
    try:
        process = ctypes.CDLL(None)
        found = [ctypes.cast(getattr(process, name), ctypes.c_void_p).value for name in OPENMP]
    except (AttributeError, OSError, TypeError):  # a build of torch without it, or of another kind
        return ALONE
    start, size, number, meet = (address or 0 for address in found)
    return start, size, number, meet


def _forked() -> None:
    global openmp
    openmp = functools.cache(lambda: ALONE)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


def run(
    path: Any,
    rows: Tensor,
    scales: Tensor | None,
    factor: Tensor | None,
    vectors: Sequence[Tensor],
    update: tuple[Sequence[Tensor], Sequence[Tensor], float, float, float] | None = None,
) -> Tensor:
    """``g -= M' G^-1 M g``, twice where little is left; returns what was removed, float64.

    Args:
        vectors: Contiguous tensors that are one vector in their order, where they are: nothing is
            copied but what is left of a tensor beside another one's beginning.
        path: Of :func:`.path.choose`. Orthonormal rows may be taken some at once: few short ones
            stay in the cache between the two products, and each is read from memory once.
        update: Parameters and momenta (or none), each as the vectors, lr, weight decay and
            momentum: ``g + wd p`` is projected, elsewhere, and the step is taken; the vectors stay
            as they are.
    """
    m, ld = rows.shape
    removed = torch.empty(m, dtype=torch.float64)
    factor = None if factor is None else factor.contiguous()
    values, momenta, *hyper = ((), (), 0.0, 0.0, 0.0) if update is None else update
    n, table = vectors[0].numel(), None
    if len(vectors) > 1:
        starts = [0, *accumulate(vector.numel() for vector in vectors)]
        places = [
            [t.data_ptr() for t in one] or [0] * len(vectors) for one in (vectors, values, momenta)
        ]
        n, table = starts[-1], np.array([starts, *([*one, 0] for one in places)])
    # 1 for an empty tensor, which has no address
    given = [one[0].data_ptr() or 1 if one else 0 for one in (values, momenta)]
    start(
        *openmp(), _region(rows.dtype, vectors[0].dtype).address, rows.data_ptr(),
        0 if scales is None else scales.data_ptr(), 0 if factor is None else factor.data_ptr(),
        removed.data_ptr(), 0 if table is None else table.ctypes.data, len(vectors),
        vectors[0].data_ptr(), *given, m, ld, n, path.threads,
        path.at_once if factor is None else m, path.width, *hyper,
    )  # fmt: skip
    return removed


@functools.cache
def _region(stored: torch.dtype, working: torch.dtype) -> Any:
    return _compile(STORED[stored], STORED[working], STAMP)


@compiled
def start(
    parallel: int, size: int, number: int, meet: int, region: int, rows: int, scales: int,
    factor: int, removed: int, table: int, count: int, vector: int, parameters: int, momenta: int,
    m: int, ld: int, n: int, threads: int, at_once: int, width: int,
    lr: float, weight_decay: float, momentum: float,
) -> int:  # fmt: skip
    """Hand the arguments to every thread of the team, in the order of :func:`_work`."""
    sums, hyper = np.zeros((-(-n // width), m + 1)), np.array([lr, weight_decay, momentum])
    step = np.empty(n if parameters else 0)  # room for either dtype
    alone = np.array([0, n, vector, 0, parameters, 0, momenta, 0])  # the table of one tensor each
    words = np.array([
        size, number, meet, rows, scales, factor, table, count, removed, 0, momenta,
        m, ld, n, at_once, width, 0, 0, parallel * (threads > 1),
    ])  # fmt: skip
    if not table:
        words[6] = alone.ctypes.data
    if parameters:
        words[9] = step.ctypes.data
    words[16], words[17] = sums.ctypes.data, hyper.ctypes.data
    if words[18]:
        _call(parallel, (region, words.ctypes.data, threads, 0))
    else:
        _call(region, (words.ctypes.data,))
    return sums.size + hyper.size + step.size + alone.size + words.size  # alive up to here


def _compile(stored: Any, working: Any, stamp: str) -> Any:
    """The work of one thread of a team, for rows and vectors of these types."""

    def plain(given: Any) -> None:
        stamp  # noqa: B018 (in the closure, which is part of what cached code is known by)
        words = carray(given, (19,), np.int64)
        rows = carray(_pointer(words[3]), (words[11], words[12]), stored)
        _work(words, rows, None, carray(_pointer(words[9]), (words[13],), working))

    def scaled(given: Any) -> None:
        stamp  # noqa: B018
        words = carray(given, (19,), np.int64)
        m, ld = words[11], words[12]
        rows = carray(_pointer(words[3]), (m, ld), stored)
        scales = carray(_pointer(words[4]), (m, -(-ld // BLOCK)), np.float32)
        _work(words, rows, scales, carray(_pointer(words[9]), (words[13],), working))

    how = functools.partial(cfunc, types.void(types.voidptr))
    return compiled(scaled if stored is np.int8 else plain, how)


@inlined
def _piece(table: Any, which: int, t: int, low: int, high: int, room: Any) -> Any:
    """Columns ``low`` to ``high``, which tensor ``t`` of list ``which`` has."""
    address = table[which, t] + (low - table[0, t]) * room.itemsize
    return carray(_pointer(address), (high - low,), room.dtype)


@inlined
def _exchange(table: Any, low: int, high: int, room: Any, back: bool) -> Any:
    """Columns of the first list: where they lie, or in ``room`` if several tensors have them.

    With ``back`` they are copied from there to where they lie.
    """
    t, beyond = 0, table.shape[1] - 1
    while beyond - t > 1:
        middle = (t + beyond) // 2
        if table[0, middle] <= low:
            t = middle
        else:
            beyond = middle
    found = room[: high - low]
    if table[0, t + 1] >= high:
        found = _piece(table, 1, t, low, high, room)
    else:
        at = low
        while at < high:
            stop = min(table[0, t + 1], high)
            if stop > at:
                piece, part = _piece(table, 1, t, at, stop, room), room[at - low : stop - low]
                if back:
                    piece[:] = part
                else:
                    part[:] = piece
                at = stop
            t += 1
    return found


@inlined
def _work(words: Any, rows: Any, scales: Any, step: Any) -> None:
    (m, n), at_once, width = (rows.shape[0], words[13]), words[14], words[15]
    team, me = 1, 0
    if words[18]:
        team, me = _call(words[0], ()), _call(words[1], ())
    parts = -(-n // width)
    # The fewer parts go to the other threads: the vector was written by the first.
    first, last = (team - 1 - me) * parts // team, (team - me) * parts // team
    low, high = first * width, min(last * width, n)
    factor = carray(_pointer(words[5]), (m, m), np.float64)
    removed = carray(_pointer(words[8]), (m,), np.float64)
    sums = carray(_pointer(words[16]), (parts, m + 1), np.float64)
    hyper = carray(_pointer(words[17]), (3,), np.float64)
    tensors, number = words[7], step.dtype.type
    lists = carray(_pointer(words[6]), (4, tensors + 1), np.int64)  # starts, three lists' addresses
    table, reach = lists, _width(rows)
    if words[9]:
        table = np.zeros((4, 2), np.int64)
        table[0, 1], table[1, 0] = n, words[9]
        decay = number(hyper[1])
        for t in range(tensors):
            begin, end = max(low, lists[0, t]), min(high, lists[0, t + 1])
            if begin < end:
                part, slopes = step[begin:end], _piece(lists, 1, t, begin, end, step)
                weights = _piece(lists, 2, t, begin, end, step)
                for j in range(part.shape[0]):
                    part[j] = slopes[j] + decay * weights[j]
    room = np.empty(0 if table.shape[1] == 2 else reach, step.dtype)
    found = np.zeros(m + 1)
    for turn in range(PASSES):
        found[:] = 0.0
        left = 0.0
        for i in range(0, m, at_once):
            j = min(i + at_once, m)
            some, shares = rows[i:j], None if scales is None else scales[i:j]
            for p in range(first, last):
                end = min((p + 1) * width, n)
                for at in range(p * width, end, reach):
                    span = _exchange(table, at, min(at + reach, end), room, False)
                    _accumulate(some, shares, span, sums[p, i:j], at)
                    if i == 0:  # while it is in a cache
                        _add_tile_squares(span, sums[p], m)
            if words[18]:
                _call(words[2], ())
            for p in range(parts):
                for k in range(i, j):
                    found[k] += sums[p, k]
                if i == 0:
                    found[m] += sums[p, m]
                    left = found[m]
            products = found[i:j].copy()
            if words[5]:
                _solve(factor, found[i:j])
            # Backwards: what was read last for the products is still in a cache.
            for at in range(low + (high - low - 1) // reach * reach, low - 1, -reach):
                stop = min(at + reach, high)
                span = _exchange(table, at, stop, room, False)
                _subtract(some, shares, found[i:j], span, at)
                if span.ctypes.data == room.ctypes.data:
                    _exchange(table, at, stop, room, True)
            for k in range(j - i):
                left -= products[k] * found[i + k]
                if me == 0:
                    removed[i + k] = found[i + k] + (removed[i + k] if turn else 0.0)
        # Again where little of the vector is left: rounding then has a large share of it.
        if left >= INSIDE * found[m]:
            break
        if words[18]:
            _call(words[2], ())  # everyone has read the sums
        sums[first:last] = 0.0
    if words[9]:
        lr, momentum = number(hyper[0]), number(hyper[2])
        for t in range(tensors):
            begin, end = max(low, lists[0, t]), min(high, lists[0, t + 1])
            if begin < end:
                part, weights = step[begin:end], _piece(lists, 2, t, begin, end, step)
                if words[10]:
                    buffer = _piece(lists, 3, t, begin, end, step)
                    # two loops, so that the product is rounded as in two operations of torch
                    for j in range(part.shape[0]):
                        buffer[j] *= momentum
                    for j in range(part.shape[0]):
                        buffer[j] += part[j]
                        part[j] = buffer[j]
                for j in range(part.shape[0]):
                    weights[j] -= lr * part[j]


@inlined
def _solve(factor: Any, found: Any) -> None:
    """``found = G^-1 found`` with the lower Cholesky factor of G."""
    m = found.shape[0]
    for i in range(m):
        rest = found[i]
        for k in range(i):
            rest -= factor[i, k] * found[k]
        found[i] = rest / factor[i, i]
    for i in range(m - 1, -1, -1):  # along rows again: columns lie a row apart in memory
        found[i] /= factor[i, i]
        for k in range(i):
            found[k] -= factor[i, k] * found[i]


def _pointer_to(_context: Any, _address: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), generate


def _call_at(_context: Any, _address: Any, given: Any) -> Any:
    """``int function(*given)`` for numbers and addresses; of one that returns nothing, anything."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        word = ir.IntType(64)
        values = cgutils.unpack_tuple(builder, arguments[1])  # type: ignore[no-untyped-call]
        kind = ir.FunctionType(ir.IntType(32), [word] * len(values)).as_pointer()
        return builder.sext(builder.call(builder.inttoptr(arguments[0], kind), values), word)

    return types.int64(types.int64, given), generate


_pointer: Any = intrinsic(_pointer_to)
_call: Any = intrinsic(_call_at)
