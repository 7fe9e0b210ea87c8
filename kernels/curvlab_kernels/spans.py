"""Which memory tensors occupy. Exact answers that ranges alone cannot give mark every byte."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import cycle
from operator import add, le

import torch
from torch import Tensor


def span(tensor: Tensor) -> tuple[int, int]:
    """The address of a tensor's first byte, and the one past its last."""
    begin = tensor.data_ptr()
    if tensor.is_contiguous():
        return begin, begin + tensor.nbytes
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return begin, begin + (1 + sum((size - 1) * stride for size, stride in steps)) * tensor.itemsize


def ranges_differ(rows: Tensor, tensors: Sequence[Tensor], sizes: tuple[int, ...]) -> bool:
    """Whether contiguous tensors of one dtype lie apart from each other and from the rows.

    Args:
        tensors: Parallel lists, one after the other.
        sizes: Elements of the tensors of one list.
    """
    if not tensors:
        return True
    begins = tuple(map(Tensor.data_ptr, tensors))
    rows_bytes = rows.numel() * rows.itemsize  # nbytes takes twice as long
    return _differ(rows.data_ptr(), rows_bytes, begins, sizes, tensors[0].itemsize)


# Depends on nothing but its arguments, so an answer is never stale. In a training parameters stay
# where they are and gradients mostly do: then the addresses of the last steps are looked up.
@lru_cache(maxsize=16)
def _differ(
    rows: int, rows_bytes: int, begins: tuple[int, ...], sizes: tuple[int, ...], itemsize: int
) -> bool:
    lengths = cycle([size * itemsize for size in sizes])
    starts, ends = sorted([rows, *begins]), sorted([rows + rows_bytes, *map(add, begins, lengths)])
    # They lie apart if, where a range begins, as many have ended as have begun before it.
    return all(map(le, ends, starts[1:]))


def meet(first: Tensor, second: Tensor) -> bool:
    """Whether some byte belongs to both. Columns of one matrix lie in one range and do not meet."""
    (begin, end), (other, last) = span(first), span(second)
    if max(begin, other) >= min(end, last):
        return False
    if first.is_contiguous() and second.is_contiguous():
        return True
    lowest = min(begin, other)
    marks = torch.zeros(max(end, last) - lowest, dtype=torch.bool, device="cpu")
    _bytes(first, marks, lowest).fill_(True)
    return bool(_bytes(second, marks, lowest).any())


def repeats(tensor: Tensor) -> bool:
    """Whether two elements are one place in memory, as in what ``expand`` returns."""
    if tensor.is_contiguous():
        return False
    reach = 1  # elements up to the last one of the axes so far
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride < reach:
            break
        reach += stride * (size - 1)
    else:
        return False
    begin, end = span(tensor)
    marks = torch.zeros(end - begin, dtype=torch.bool, device="cpu")
    _bytes(tensor, marks, begin).fill_(True)
    return int(marks.sum()) < tensor.nbytes


def _bytes(tensor: Tensor, marks: Tensor, lowest: int) -> Tensor:
    """The marks of a tensor's bytes; ``marks`` begin at the address ``lowest``."""
    size = tensor.itemsize
    strides = [stride * size for stride in tensor.stride()]
    return marks.as_strided((*tensor.shape, size), (*strides, 1), tensor.data_ptr() - lowest)
