"""Compiled loops on as many threads as torch uses, over spans of columns.

Spans depend only on the number of threads, and partial sums are added in their order: the result
does not depend on scheduling.
"""

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

ENOUGH = 1 << 23  # products below which waking a second thread costs more than it brings
ALIGNMENT = 8192  # spans end where tiles do, so that tiles are the same for any number of threads

_lock = threading.Lock()
_pools: dict[int, ThreadPoolExecutor] = {}


def spans(columns: int, rows: int, threads: int) -> list[tuple[int, int]]:
    """Cut ``columns`` into one span per thread; a single span when the work is small."""
    if threads == 1 or columns * rows < ENOUGH:
        return [(0, columns)]
    width = -(-columns // (threads * ALIGNMENT)) * ALIGNMENT
    return [(start, min(start + width, columns)) for start in range(0, columns, width)]


def run(work: Callable[[int, int, int], None], parts: list[tuple[int, int]]) -> None:
    """``work(index, start, stop)`` for every part; the caller's thread takes the last one."""
    others = []
    if len(parts) > 1:
        pool = _pool(len(parts) - 1)
        others = [pool.submit(work, i, start, stop) for i, (start, stop) in enumerate(parts[:-1])]
    try:
        work(len(parts) - 1, *parts[-1])
    finally:
        for other in others:
            other.result()


def _pool(workers: int) -> ThreadPoolExecutor:
    with _lock:
        if workers not in _pools:
            _pools[workers] = ThreadPoolExecutor(workers, thread_name_prefix="curvlab-kernels")
        return _pools[workers]


def _forget() -> None:
    # A forked child has the objects but not their threads, and work given to them would never run.
    global _lock
    _lock = threading.Lock()
    _pools.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
