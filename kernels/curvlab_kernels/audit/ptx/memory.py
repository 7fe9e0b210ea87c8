"""Global and shared memory, with the checks of a sanitizer."""

import ctypes
from collections.abc import Iterable

import numpy as np

from curvlab_kernels.audit.ptx.numbers import Array
from curvlab_kernels.audit.ptx.program import Instruction
from curvlab_kernels.audit.ptx.report import Fault, Report

_LOWEST, _HIGHEST = 1 << 16, 1 << 47  # user addresses of a 64-bit process
# Elements to read and write memory with; complex128 is sixteen bytes that numpy moves at once.
_CONTAINER = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}
# An access is stamped with the block's barriers so far, its warp's, and its thread.
_BLOCK, _WARP = 32, 11  # bits to the right of the first two
ATOMIC = 1 << 10  # the thread of all atomics, which do not race among each other
_THREAD, _LANE = (1 << _WARP) - 1, 31
SHARED_BASE = 1024  # where shared memory begins, so that an address of zero is out of bounds


def _address_space(size: int) -> Array:
    """The whole address space as an array. Indexing it is safe only after a check of bounds."""
    pointer = ctypes.cast(_LOWEST, ctypes.POINTER(ctypes.c_uint8))
    whole = np.ctypeslib.as_array(pointer, shape=(_HIGHEST - _LOWEST,))
    return whole.view(_CONTAINER[size])


def stamped(blocks: Array, warps: Array, thread: Array) -> Array:
    """When and by whom: barriers of its block and of its warp before an access, and its thread."""
    return (blocks.astype(np.int64) << _BLOCK) | (warps.astype(np.int64) << _WARP) | thread


class GlobalMemory:
    """The allocations that a launch may touch.

    Args:
        allocations: First address and bytes of each. Those that overlap are taken as one.
    """

    def __init__(self, allocations: Iterable[tuple[int, int]]) -> None:
        merged: list[list[int]] = []
        for start, size in sorted(allocations):
            if merged and start < merged[-1][1]:
                merged[-1][1] = max(merged[-1][1], start + size)
            elif size:
                merged.append([start, start + size])
        self.starts = np.array([start for start, _ in merged], np.uint64)
        self.ends = np.array([end for _, end in merged], np.uint64)
        self._views = {size: _address_space(size) for size in _CONTAINER}

    def locate(self, addresses: Array, width: int, instruction: Instruction) -> Array:
        """The allocation of each address; raises where there is none, or it is not aligned."""
        owner = np.searchsorted(self.starts, addresses, "right") - 1
        known = owner >= 0
        if known.all() and len(self.starts):
            known = addresses + np.uint64(width) <= self.ends[owner]
        if not known.all():
            first = int(addresses[~known][0])
            raise Fault(
                f"global access out of bounds: {int((~known).sum())} threads, the first at "
                f"{self._describe(first)}: {instruction}"
            )
        crooked = addresses % np.uint64(width) != 0
        if crooked.any():
            raise Fault(
                f"global access of {width} bytes is not aligned: {int(crooked.sum())} threads, the "
                f"first at {int(addresses[crooked][0]):#x}: {instruction}"
            )
        return owner

    def bytes(self) -> list[Array]:
        """What every allocation holds."""
        return [self._views[1][each].copy() for each in self._places()]

    def restore(self, held: list[Array]) -> None:
        for place, each in zip(self._places(), held, strict=True):
            self._views[1][place] = each

    def _places(self) -> list[slice]:
        pairs = zip(self.starts.tolist(), self.ends.tolist(), strict=True)
        return [slice(start - _LOWEST, end - _LOWEST) for start, end in pairs]

    def _describe(self, address: int) -> str:
        """Where an address lies, seen from the nearest allocation."""
        places = []
        for start, end in zip(self.starts.tolist(), self.ends.tolist(), strict=True):
            if address < start:
                places.append((start - address, f"{start - address} bytes before the start"))
            else:
                past = address - end
                where = f"{past} bytes past the end" if past >= 0 else "across the end"
                places.append((max(past, 0), where))
        if not places:
            return f"{address:#x}, and no tensor was passed"
        return f"{address:#x}, {min(places)[1]} of a tensor"

    def load(self, addresses: Array, width: int) -> Array:
        """Elements of ``width`` bytes at checked addresses."""
        return self._views[width][self._index(addresses, width)]

    def store(self, addresses: Array, values: Array) -> None:
        width = values.dtype.itemsize
        self._views[width][self._index(addresses, width)] = values

    @staticmethod
    def _index(addresses: Array, width: int) -> Array:
        return ((addresses - np.uint64(_LOWEST)) // np.uint64(width)).astype(np.int64)


def _rounded_otherwise(first: Array, second: Array) -> Array:
    """Whether bits are those of floats that differ by a few roundings."""
    if first.itemsize < 4:
        return np.zeros(first.shape, bool)
    a, b = (each.view(f"f{first.itemsize}") for each in (first, second))
    limits = np.finfo(a.dtype)
    larger = np.maximum(np.abs(a), np.abs(b))
    near: Array = (larger >= limits.tiny) & (np.abs(a - b) <= 32 * limits.eps * larger)
    return near


class SharedMemory:
    """Shared memory of a batch of blocks, that knows who touched what since the last barrier.

    Accesses are stamped (:func:`stamped`). Two threads of which one writes race if no barrier of
    the block lies between, nor, in one warp, one of the warp; stamps of an older epoch mean
    nothing, so that a barrier costs one addition.

    Args:
        unit: Bytes per stamp: the narrowest access of the program.
    """

    def __init__(self, blocks: int, size: int, unit: int, report: Report) -> None:
        self.size = -(-size // 16) * 16
        self.unit = unit
        self.report = report
        self.bytes = np.full(blocks * self.size, 0xFF, np.uint8)  # NaN to whoever reads too early
        units = blocks * self.size // unit
        self.writer = np.full(units, -1, np.int64)
        # Two different readers are enough to know: a writer differs from one of them.
        self.reader = np.full(units, -1, np.int64)
        self.other = np.full(units, -1, np.int64)

    def place(self, addresses: Array, block: Array, width: int, instruction: Instruction) -> Array:
        """Positions in ``bytes`` of addresses as the program has them; raises if out of bounds."""
        offset = addresses - SHARED_BASE
        if ((offset < 0) | (offset + width > self.size)).any():
            worst = int(offset.max() if (offset + width > self.size).any() else offset.min())
            raise Fault(f"shared access out of bounds: byte {worst} of {self.size}: {instruction}")
        if (offset % width).any():
            raise Fault(f"shared access of {width} bytes is not aligned: {instruction}")
        positions: Array = offset + block * self.size
        return positions

    def load(self, at: Array, width: int, stamp: Array, instruction: Instruction) -> Array:
        """Elements of ``width`` bytes; ``stamp`` says who asks, and when."""
        self.report.bytes["shared read"] += at.size * width
        for units in self._units(at, width):
            writer = self.writer[units]
            if (writer < 0).any():
                self.report.found("shared memory is read before it is written", instruction)
            if self._races(writer, stamp).any():
                self.report.found("race in shared memory: read after write", instruction)
            self._note_reader(units, stamp)
        values: Array = self.bytes.view(_CONTAINER[width])[at // width]
        return values

    def store(self, at: Array, values: Array, stamp: Array, instruction: Instruction) -> None:
        width = values.dtype.itemsize
        self.report.bytes["shared written"] += at.size * width
        memory: Array = self.bytes.view(_CONTAINER[width])
        changes = memory[at // width] != values
        for units in self._units(at, width):
            # The same value from several threads is the same memory in any order.
            if (self._races(self.writer[units], stamp) & changes).any():
                self.report.found("race in shared memory: write after write", instruction)
            read = self._races(self.reader[units], stamp) | self._races(self.other[units], stamp)
            if read.any():
                self.report.found("race in shared memory: write after read", instruction)
            self.writer[units] = stamp
        memory[at // width] = values
        lost = memory[at // width] != values
        if lost.any():
            stays, last = memory[at[lost] // width], self.writer[at[lost] // self.unit]
            one_warp = ((last ^ stamp[lost]) & (_THREAD - _LANE)) == 0
            if (one_warp & _rounded_otherwise(stays, values[lost])).all():
                self.report.rounding[str(instruction)] += 1
            else:
                self.report.found("two threads store different values at one address", instruction)

    def _units(self, at: Array, width: int) -> list[Array]:
        first = at // self.unit
        return [first + i for i in range(width // self.unit)]

    @staticmethod
    def _ordered(theirs: Array, mine: Array) -> Array:
        """Whether a barrier lies between their access and mine: the block's, or of one warp."""
        differ = theirs ^ mine
        warp = ((differ & (_THREAD - _LANE)) == 0) & ((differ >> _WARP) & (2**21 - 1) != 0)
        between: Array = ((differ >> _BLOCK) != 0) | warp
        return between

    def _races(self, theirs: Array, mine: Array) -> Array:
        """Whether another's access is not ordered before this one."""
        raced: Array = ((theirs ^ mine) & _THREAD != 0) & ~self._ordered(theirs, mine)
        return raced

    def _note_reader(self, units: Array, stamp: Array) -> None:
        # A reader of this warp before its last barrier is replaced too: to other warps the new one
        # stands for it.
        stale = self._ordered(self.reader[units], stamp)
        self.reader[units[stale]] = stamp[stale]
        differs = self.reader[units] != stamp
        self.other[units[differs]] = stamp[differs]
