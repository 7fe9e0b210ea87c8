"""Rows as they are stored: slabs of a tier, written once, read in pieces."""

from collections.abc import Iterator

import torch
from curvlab_kernels import ops
from curvlab_kernels.formats import padded
from torch import Tensor

from curvlab.basis.tiers import Slab, Tier, pieces

Piece = tuple[int, Tensor, Tensor | None]  # index of the first row, rows, scales


class Store:
    """Up to ``capacity`` rows of ``n`` elements, stored as ``dtype``.

    Args:
        slab: Rows allocated at a time; ``None`` for all of them now.

    Attributes:
        whole: Rows and scales in use, if they are one piece of memory on the device; else ``None``.
        working: The dtype in which rows are computed.
    """

    def __init__(
        self,
        n: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
        tier: Tier,
        slab: int | None,
    ) -> None:
        self.n, self.capacity, self.dtype, self.device, self.tier = n, capacity, dtype, device, tier
        self.working = torch.float64 if dtype == torch.float64 else torch.float32
        self._slab = max(capacity, 1) if slab is None else slab
        self._slabs: list[Slab] = []
        if slab is None and capacity:
            self._reserve(capacity)
        self.size = 0

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
        if self.tier.resident and 0 < size <= self._slabs[0].rows.shape[0]:
            slab = self._slabs[0]
            self.whole = slab.rows[:size], None if slab.scales is None else slab.scales[:size]

    def values(self, start: int, stop: int) -> Tensor:
        """Rows ``start`` to ``stop`` as numbers ``(count, n)`` of the working dtype."""
        found = torch.zeros(stop - start, self.n, dtype=self.working, device=self.device)
        for first, slab, used in self._in_use():
            low, high = max(first, start), min(first + used, stop)
            if low < high:
                part = slice(low - first, high - first)
                scales = None if slab.scales is None else slab.scales[part]
                found[low - start : high - start] = ops.dequantise(slab.rows[part], scales, self.n)
        return found

    def write(self, values: Tensor) -> Tensor:
        """Store ``values`` ``(k, n)`` after the rows in use; returns them as stored.

        ``size`` is not changed: the rows count once the caller says so.
        """
        rows, scales = ops.quantise(values, self.dtype)
        self.write_rows(self.size, rows)
        if scales is not None:
            self.write_scales(self.size, scales)
        return values if self.dtype == values.dtype else ops.dequantise(rows, scales, self.n)

    def write_rows(self, first: int, rows: Tensor) -> None:
        """Copy stored rows ``(k, ld)`` to positions ``first`` and after."""
        self._reserve(first + rows.shape[0])
        for slab, where, part in self._places(first, rows.shape[0]):
            slab.rows[where].copy_(rows[part])

    def write_scales(self, first: int, scales: Tensor) -> None:
        """Copy the scales ``(k, ceil(ld / 64))`` of rows ``first`` and after."""
        for slab, where, part in self._places(first, scales.shape[0]):
            if slab.scales is not None:
                slab.scales[where].copy_(scales[part])

    def _places(self, first: int, count: int) -> Iterator[tuple[Slab, slice, slice]]:
        """The slabs that hold rows ``first`` and after: where in them, which of the ``count``."""
        done = 0
        while done < count:
            slab = self._slabs[(first + done) // self._slab]
            start = (first + done) % self._slab
            fits = min(slab.rows.shape[0] - start, count - done)
            yield slab, slice(start, start + fits), slice(done, done + fits)
            done += fits

    def _in_use(self) -> Iterator[tuple[int, Slab, int]]:
        for index, slab in enumerate(self._slabs):
            first = index * self._slab
            if first < self.size:
                yield first, slab, min(slab.rows.shape[0], self.size - first)

    def _reserve(self, count: int) -> None:
        while len(self._slabs) * self._slab < count:
            room = min(self._slab, self.capacity - len(self._slabs) * self._slab)
            self._slabs.append(self.tier.allocate(room, padded(self.n), self.dtype, self.device))
