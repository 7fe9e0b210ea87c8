"""Room for runs side by side: a run has the same bits alone or among others.

Matrix libraries round by what they are given: by the address (modulo 64 bytes), by the number of
products in a batch and by the threads that share one. So every run's part of a tensor begins where
an allocation of its own could begin. Then:

- a small product is made on one thread, and at most as many threads as runs share a batch of them:
  measured on 17,000 random shapes (MKL), each then has the bits of one alone if it is a matrix of a
  multiple of 16 bytes;
- every other result gets room that is no single block, and PyTorch multiplies into such room one
  run after the other, each exactly as alone.

More threads than runs would not pay: those that share a small product mostly wait for each other.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import prod

import torch
from torch import Tensor

Call = Callable[[], object]

ALIGNMENT = 64  # bytes at which PyTorch's own allocations begin
PACKED = 16  # bytes; results of such sizes may follow each other without a gap
# Multiplications from which one product is worth several threads.
LARGE = 1 << 20
# PyTorch sums batched products below this many multiplications in loops of its own.
LOOPS = 400
# Elements from which PyTorch shares a sum or an elementwise operation among threads.
GRAIN = 32768


def rooms(runs: int, *shape: int, like: Tensor) -> Tensor:
    """Zeros ``(runs, *shape)``, of the dtype and on the device of ``like``; never one block."""
    count, unit = prod(shape), ALIGNMENT // like.element_size()
    flat = like.new_zeros(runs, (count // unit + 1) * unit)  # always more than it holds
    return flat[:, :count].view(runs, *shape)


def results(runs: int, rows: int, columns: int, *, small: bool, like: Tensor) -> Tensor:
    """Zeros ``(runs, rows, columns)`` for the result of a :func:`product`.

    Args:
        small: Whether the product will be made inside :func:`few_threads`.
    """
    packs = rows * columns * like.element_size() % PACKED == 0 and min(rows, columns) > 1
    if small and packs:
        return like.new_zeros(runs, rows, columns)
    return rooms(runs, rows, columns, like=like)


def aligned(tensor: Tensor) -> Tensor:
    """``tensor`` ``(runs, ...)`` if its parts lie as in :func:`rooms`, else a copy that does."""
    runs, *shape = tensor.shape
    step = tensor.stride(0) * tensor.element_size()
    apart = runs == 1 or (step % ALIGNMENT == 0 and tensor.stride(0) > prod(shape))
    if apart and tensor.data_ptr() % ALIGNMENT == 0 and tensor[0].is_contiguous():
        return tensor
    return rooms(runs, *shape, like=tensor).copy_(tensor)


def product(left: Tensor, right: Tensor, out: Tensor, shift: Tensor | None = None) -> Call:
    """A call that writes ``left @ right (+ shift)`` into ``out``; all are bound, none is copied.

    Args:
        left: ``(runs, m, k)``, of :func:`rooms` or :func:`results`, or transposed.
        right: ``(runs, k, n)``, the same.
        out: ``(runs, m, n)``, of :func:`results`.
        shift: ``(runs, 1, n)``.
    """
    runs, m, k = left.shape
    # several runs are multiplied by mm one after the other, so one run is as well
    if runs == 1 and m * k * right.shape[2] >= LOOPS:
        a, b, c = left[0], right[0], out[0]
        if shift is None:
            return lambda: torch.mm(a, b, out=c)
        row = shift[0]
        return lambda: torch.addmm(row, a, b, out=c)
    if shift is None:
        return lambda: torch.bmm(left, right, out=out)
    return lambda: torch.baddbmm(shift, left, right, out=out)


def workers(outs: Sequence[Tensor], summed: Sequence[Tensor]) -> int:
    """Threads that may share small products into ``outs``, of :func:`results`.

    Args:
        outs: All of them.
        summed: Tensors of which columns are summed beside them.
    """
    packed = all(out.is_contiguous() for out in outs)
    return len(outs[0]) if packed and all(s.numel() < GRAIN for s in summed) else 1


@contextmanager
def few_threads(most: int | None) -> Iterator[None]:
    """Limit PyTorch to ``most`` threads; a second Python thread that trains is refused."""
    threads = torch.get_num_threads()
    if most is None or threads <= most:
        yield
        return
    with one_at_a_time():
        torch.set_num_threads(most)
        try:
            yield
        finally:
            torch.set_num_threads(threads)


_training = threading.RLock()
_who = ""


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Refuse what another thread of Python begins inside, unless PyTorch has one thread anyway.

    The number of PyTorch's threads is the whole process's, and the bits of a run depend on it.
    """
    global _who
    if torch.get_num_threads() == 1:
        yield
        return
    if not _training.acquire(blocking=False):
        raise RuntimeError(
            f"thread {_who!r} of this process is training, so thread "
            f"{threading.current_thread().name!r} cannot: PyTorch's number of threads belongs to "
            "the whole process, and a run's bits depend on it. Train in another process, or call "
            "torch.set_num_threads(1) before both"
        )
    try:
        _who = threading.current_thread().name
        yield
    finally:
        _training.release()
