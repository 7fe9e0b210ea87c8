"""Rows as they are stored: slabs of a tier that grow with what is kept, read in pieces."""

from collections.abc import Iterator
from typing import Any

import torch
from curvlab_kernels import ops
from curvlab_kernels.formats import padded
from torch import Tensor

from curvlab.precision import working
from curvlab.rows.sizes import row_bytes
from curvlab.rows.tiers import Slab, Tier, pieces

Piece = tuple[int, Tensor, Tensor | None]  # index of the first row, rows, scales

# Most memory reserved at a time on a CPU, which takes it only where a row is written: a kernel does
# in one call what is in one piece. Elsewhere it is taken at once, and a slab is long enough for the
# call of a kernel to cost little beside reading it. No row is ever copied to grow.
SLAB_BYTES = 1 << 32
TAKEN = 64  # slabs that are taken at once are so many times smaller


class Store:
    """Up to ``capacity`` rows of ``width`` elements, stored as ``dtype``.

    Attributes:
        whole: Rows and scales in use, if they are one piece of memory on the device; else ``None``.
        working: The dtype in which rows are computed.
    """

    def __init__(
        self, width: int, capacity: int, dtype: torch.dtype, device: torch.device, tier: Tier
    ) -> None:
        self.width, self.capacity, self.dtype = width, capacity, dtype
        self.device, self.tier = device, tier
        self.ld = padded(width)
        self.working = working(dtype)
        self._slabs: list[tuple[int, Slab]] = []  # each with the index of its first row
        self.size = 0

    @property
    def allocated(self) -> int:
        """Rows for which there is memory."""
        if not self._slabs:
            return 0
        first, last = self._slabs[-1]
        return first + last.rows.shape[0]

    def pieces(self) -> Iterator[Piece]:
        """The rows in use, on the device: everything at once where it is resident."""
        for first, slab, used in self._in_use():
            for start, rows, scales in pieces(slab, used, self.device, self.tier.resident):
                yield first + start, rows, scales

    def stored(self) -> Iterator[Piece]:
        """The rows in use where they are kept, a row at a time."""
        for first, slab, used in self._in_use():
            for i in range(used):
                scales = None if slab.scales is None else slab.scales[i : i + 1]
                yield first + i, slab.rows[i : i + 1], scales

    @property
    def size(self) -> int:
        """Rows in use."""
        return self._size

    @size.setter
    def size(self, size: int) -> None:
        self._size = size
        # Kept, because a small model projects more often than it can afford to ask.
        self.whole: tuple[Tensor, Tensor | None] | None = None
        if self.tier.resident and size and size <= self._slabs[0][1].rows.shape[0]:
            slab = self._slabs[0][1]
            self.whole = slab.rows[:size], None if slab.scales is None else slab.scales[:size]

    def row(self, index: int, elements: int) -> Tensor:
        """The first ``elements`` of stored row ``index``, where it is; it need not be in use."""
        if self._slabs and index < self._slabs[0][1].rows.shape[0]:  # always so in a solver's steps
            return self._slabs[0][1].rows[index, :elements]
        self.make_room(index + 1)
        slab, where, _ = next(self._places(index, 1))
        return slab.rows[where.start, :elements]

    def values(self, start: int, stop: int) -> Tensor:
        """Rows ``start`` to ``stop`` as numbers ``(count, width)`` of the working dtype."""
        found = torch.zeros(stop - start, self.width, dtype=self.working, device=self.device)
        for slab, where, part in self._places(start, stop - start):
            scales = None if slab.scales is None else slab.scales[where]
            found[part] = ops.dequantise(slab.rows[where], scales, self.width)
        return found

    def write(self, values: Tensor) -> Tensor:
        """Store ``values`` ``(k, width)`` after the rows in use; returns them as stored.

        ``size`` is not changed: the rows count once the caller says so.
        """
        if self.dtype == values.dtype:
            self.make_room(self.size + len(values))
            for slab, where, part in self._places(self.size, len(values)):
                slab.rows[where, : self.width] = values[part]
            return values
        rows, scales = ops.quantise(values, self.dtype)
        self.write_rows(self.size, rows)
        if scales is not None:
            self.write_scales(self.size, scales)
        return ops.dequantise(rows, scales, self.width)

    def write_rows(self, first: int, rows: Tensor) -> None:
        """Copy stored rows ``(k, ld)`` to positions ``first`` and after."""
        self.make_room(first + rows.shape[0])
        for slab, where, part in self._places(first, rows.shape[0]):
            slab.rows[where].copy_(rows[part])

    def write_scales(self, first: int, scales: Tensor) -> None:
        """Copy the scales ``(k, ceil(ld / 64))`` of rows ``first`` and after."""
        for slab, where, part in self._places(first, scales.shape[0]):
            if slab.scales is not None:
                slab.scales[where].copy_(scales[part])

    def make_room(self, count: int) -> None:
        """Memory for ``count`` rows at least; what is there stays where it is."""
        before, row = self.allocated, row_bytes(self.width, self.dtype)
        if before >= count:
            return
        lazily = self.tier.resident and self.device.type == "cpu"
        sizes = [max(count - before, b // row) for b in (SLAB_BYTES, SLAB_BYTES // TAKEN)]
        large, small = (min(size, self.capacity - before) for size in sizes)
        try:
            self._allocate(large if lazily else small)
        except MemoryError:
            if not lazily:
                raise
            self._allocate(small)  # on a system that counts what is reserved as taken

    def make_whole(self, count: int) -> None:
        """Memory for ``count`` rows in one piece, to which the rows in use are copied."""
        if self._slabs and self._slabs[0][1].rows.shape[0] >= count:
            return
        held, self._slabs = self._slabs, []
        try:
            self._allocate(max(count, self.size))
        except BaseException:
            self._slabs = held
            raise
        whole = self._slabs[0][1]
        for first, slab in held:
            used = slice(first, min(first + slab.rows.shape[0], self.size))
            if used.start < used.stop:
                whole.rows[used] = slab.rows[: used.stop - first]
                if whole.scales is not None and slab.scales is not None:
                    whole.scales[used] = slab.scales[: used.stop - first]
        self.size = self._size

    def __getstate__(self) -> dict[str, Any]:
        """For a copy or a pickle: the rows in use, without what is reserved."""
        slabs = [(first, slab.head(used)) for first, slab, used in self._in_use()]
        return {**self.__dict__, "_slabs": slabs, "whole": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.size = self._size  # views of the new rows

    def _allocate(self, count: int) -> None:
        first = self.allocated
        slab = self.tier.allocate(count, self.ld, self.dtype, self.device)
        self._slabs.append((first, slab))

    def _places(self, first: int, count: int) -> Iterator[tuple[Slab, slice, slice]]:
        """The slabs that hold rows ``first`` and after: where in them, which of the ``count``."""
        for begin, slab in self._slabs:
            low, high = max(begin, first), min(begin + slab.rows.shape[0], first + count)
            if low < high:
                yield slab, slice(low - begin, high - begin), slice(low - first, high - first)

    def _in_use(self) -> Iterator[tuple[int, Slab, int]]:
        for first, slab in self._slabs:
            if first < self.size:
                yield first, slab, min(slab.rows.shape[0], self.size - first)
