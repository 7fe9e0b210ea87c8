"""A list of tensors seen as one vector, without flattening: one launch for the whole list.

The alternative, one launch per tensor at its column offset, costs a launch for each of a model's
100 to 200 tensors, and gives the basis an offset that is no multiple of 16 elements, where loads
cannot be 128 bits wide. Here the tiles are those of the *basis*, always aligned; a program gathers
its piece of the vector from whichever tensors meet its columns, most often one. So the basis is
read exactly once per pass, as for a flat vector, and only the vectors' own loads, a small part of
the bytes, are narrow.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

WINDOW = 128  # columns per entry of the index; tiles are multiples of it


@dataclass(frozen=True, slots=True)
class Segments:
    """Where a list of tensors, or several parallel lists, lie.

    Attributes:
        table: ``(tensors, 2 + lists)`` int64: first column, length, address in every list.
        index: ``(windows + 1,)`` int32: the tensor that holds the first column of each window.
        n: Columns in all.
        tensors: What the table's addresses point to.
    """

    table: Tensor
    index: Tensor
    n: int
    tensors: tuple[Tensor, ...]


def segments(*lists: Sequence[Tensor]) -> Segments:
    """Describe parallel lists of contiguous tensors of one dtype on one device."""
    full = [tensors for tensors in zip(*lists, strict=True) if tensors[0].numel()]
    sizes = tuple(tensors[0].numel() for tensors in full)
    addresses = tuple(tuple(tensor.data_ptr() for tensor in tensors) for tensors in full)
    device = lists[0][0].device
    tensors = tuple(tensor for group in full for tensor in group)
    return Segments(_table(sizes, addresses, device), _index(sizes, device), sum(sizes), tensors)


@contextmanager
def contiguous(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """The tensors to work on: copies of those that are not contiguous, copied back at the end."""
    dense = [tensor.contiguous() for tensor in tensors]
    yield dense
    for tensor, copy in zip(tensors, dense, strict=True):
        if copy is not tensor:
            tensor.copy_(copy)


# Both depend on nothing but their arguments, so an entry is never stale. Parameters stay where they
# are and gradients mostly do, so a training step finds its tables on the device.
@lru_cache(maxsize=64)
def _table(
    sizes: tuple[int, ...], addresses: tuple[tuple[int, ...], ...], device: torch.device
) -> Tensor:
    rows, start = [], 0
    for size, pointers in zip(sizes, addresses, strict=True):
        rows.append([start, size, *pointers])
        start += size
    return torch.tensor(rows, dtype=torch.int64).to(device)


@lru_cache(maxsize=64)
def _index(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    ends = torch.tensor(sizes, dtype=torch.int64).cumsum(0)
    columns = torch.arange(0, int(ends[-1]) + WINDOW, WINDOW)
    holder = torch.searchsorted(ends, columns, right=True)
    return holder.clamp_max(len(sizes) - 1).to(torch.int32).to(device)


@triton.jit
def meeting(index, start, n, BLOCK: tl.constexpr, WINDOW: tl.constexpr):
    """First and last tensor that meet the columns from ``start`` to ``start + BLOCK``."""
    window = start // WINDOW
    last = tl.minimum(window + BLOCK // WINDOW, (n + WINDOW - 1) // WINDOW)
    return tl.load(index + window), tl.load(index + last)


@triton.jit
def segment(table, number, start, BLOCK: tl.constexpr, LISTS: tl.constexpr):
    """Tensor ``number`` as seen from column ``start``: where it lies in a tile, and its addresses.

    Returns the offset of the tile's first column in the tensor (int64), the lanes ``(BLOCK,)``
    that meet it, and its row of addresses. Lanes are compared in 32 bits: each of them is.
    """
    at = table + number * (2 + LISTS)
    offset = start - tl.load(at)
    left = tl.load(at + 1) - offset
    lane = tl.arange(0, BLOCK)
    inside = (lane >= tl.maximum(-offset, 0).to(tl.int32)) & (
        lane < tl.minimum(left, BLOCK).to(tl.int32)
    )
    return offset, inside, at + 2


@triton.jit
def elements(address, offset, BLOCK: tl.constexpr, ELEMENT: tl.constexpr):
    """Pointers ``(BLOCK,)`` from ``offset`` on into the tensor whose address is stored."""
    return tl.load(address).to(tl.pointer_type(ELEMENT)) + offset + tl.arange(0, BLOCK)


@triton.jit
def gather(
    table,
    index,
    weight_decay,
    start,
    n,
    BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
    LISTS: tl.constexpr,
    DECAY: tl.constexpr,
    ELEMENT: tl.constexpr,
):
    """The columns from ``start`` of the first list; with DECAY plus that times the second."""
    first, last = meeting(index, start, n, BLOCK, WINDOW)
    total = tl.zeros([BLOCK], ELEMENT)
    for number in range(first, last + 1):
        offset, inside, address = segment(table, number, start, BLOCK, LISTS)
        piece = tl.load(elements(address, offset, BLOCK, ELEMENT), mask=inside, other=0.0)
        if DECAY:
            decayed = elements(address + 1, offset, BLOCK, ELEMENT)
            piece += tl.full([], weight_decay, ELEMENT) * tl.load(decayed, mask=inside, other=0.0)
        total += piece
    return total
