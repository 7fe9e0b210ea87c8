"""Races in global memory: every access of a launch is listed, and conflicts are looked for.

Two threads conflict at an address if one writes and nothing orders them. Blocks of one launch
are never ordered; threads of one block are by a barrier between. Without conflicts the result does
not depend on the order in which blocks or warps run.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from curvlab_kernels.audit.ptx.numbers import Array
from curvlab_kernels.audit.ptx.program import Instruction
from curvlab_kernels.audit.ptx.report import Report


@dataclass(frozen=True, slots=True)
class _Access:
    instruction: int
    owner: Array  # allocation of each address
    addresses: Array
    width: int
    block: Array
    thread: Array  # number in the whole launch
    epoch: Array
    values: Array | None  # of a write
    atomic: bool


@dataclass(slots=True)
class _Table:
    """Accesses unit by unit: parallel arrays."""

    unit: Array
    block: Array
    thread: Array
    epoch: Array
    instruction: Array
    value: Array
    atomic: Array

    def at(self, index: Array | slice) -> "_Table":
        return _Table(*(getattr(self, name)[index] for name in self.__slots__))


class AccessLog:
    """The global accesses of one launch."""

    def __init__(self) -> None:
        self.reads: list[_Access] = []
        self.writes: list[_Access] = []

    def add(self, access: _Access) -> None:
        (self.reads if access.values is None else self.writes).append(access)

    def report(self, report: Report, instructions: Sequence[Instruction]) -> None:
        """Add what conflicts to the findings."""
        if not self.writes:
            return
        written = np.unique(np.concatenate([np.unique(w.owner) for w in self.writes]))
        reads = [r for r in self.reads if np.isin(r.owner, written).any()]
        unit = min(access.width for access in self.writes + reads)
        writes = _tabulate(self.writes, unit)
        order = np.lexsort((writes.thread, writes.epoch, writes.block, writes.unit))
        writes = writes.at(order)
        _writes_against_writes(writes, report, instructions)
        if reads:
            _reads_against_writes(_tabulate(reads, unit), writes, report, instructions)


def access(
    instruction: int,
    owner: Array,
    addresses: Array,
    width: int,
    who: tuple[Array, Array, Array],
    values: Array | None = None,
    atomic: bool = False,
) -> _Access:
    """One executed load or store; ``who`` is block, thread and epoch of each address."""
    return _Access(instruction, owner, addresses, width, *who, values, atomic)


def _tabulate(accesses: Sequence[_Access], unit: int) -> _Table:
    columns: list[list[Array]] = [[] for _ in _Table.__slots__]
    for each in accesses:
        count = each.addresses.size
        pieces = None if each.values is None else _pieces(each.values, unit)
        for piece in range(each.width // unit):
            row = (
                each.addresses // np.uint64(unit) + np.uint64(piece),
                each.block,
                each.thread,
                each.epoch,
                np.full(count, each.instruction),
                np.zeros(count, np.uint64) if pieces is None else pieces[:, piece],
                np.full(count, each.atomic),
            )
            for column, values in zip(columns, row, strict=True):
                column.append(values)
    return _Table(*(np.concatenate(column) for column in columns))


def _pieces(values: Array, unit: int) -> Array:
    """Values, whole or in pieces of ``unit`` bytes, as numbers to compare."""
    narrow = np.ascontiguousarray(values).view(f"u{unit}")
    return narrow.reshape(values.size, -1).astype(np.uint64)


def _unordered(a: _Table, b: _Table) -> Array:
    ordered = (a.block == b.block) & (a.epoch != b.epoch)
    conflict: Array = (a.thread != b.thread) & ~ordered
    return conflict


def _harmless(writes: _Table, *same: str) -> Array:
    """Whether writes, sorted and grouped by what is the ``same``, leave one memory in any order.

    All of a group are atomic, or none is and their values are equal: an atomic addition before or
    after a plain store is not the same.
    """
    keys = [getattr(writes, name) for name in same]
    new = np.any([key[1:] != key[:-1] for key in keys], axis=0)
    starts = np.concatenate([[0], np.flatnonzero(new) + 1])
    group = np.cumsum(np.concatenate([[0], new.astype(np.int64)]))
    every, some = (f.reduceat(writes.atomic, starts) for f in (np.logical_and, np.logical_or))
    low, high = (f.reduceat(writes.value, starts) for f in (np.minimum, np.maximum))
    harmless: Array = (every | (~some & (low == high)))[group]
    return harmless


def _writes_against_writes(
    writes: _Table, report: Report, instructions: Sequence[Instruction]
) -> None:
    before, after = writes.at(slice(None, -1)), writes.at(slice(1, None))
    clash = (before.unit == after.unit) & _unordered(before, after)
    # Neighbours stand for all writes of their address: two blocks that write it are neighbours
    # somewhere, and so are two threads of a block between two barriers.
    by_epoch = _harmless(writes, "unit", "block", "epoch")[1:]
    clash &= ~np.where(before.block == after.block, by_epoch, _harmless(writes, "unit")[1:])
    for instruction in np.unique(after.instruction[clash]):
        count = int((after.instruction[clash] == instruction).sum())
        what = "race in global memory: two threads write one address"
        report.found(what, instructions[instruction], count)


def _reads_against_writes(
    reads: _Table, writes: _Table, report: Report, instructions: Sequence[Instruction]
) -> None:
    units, first, count = np.unique(writes.unit, return_index=True, return_counts=True)
    slot = np.minimum(np.searchsorted(units, reads.unit), len(units) - 1)
    hit = units[slot] == reads.unit
    reads, slot = reads.at(hit), slot[hit]
    for turn in range(int(count.max())):
        here = turn < count[slot]
        some, write = reads.at(here), writes.at(first[slot[here]] + turn)
        clash = _unordered(some, write)
        pairs = np.stack([some.instruction[clash], write.instruction[clash]], axis=1)
        for (read, wrote), number in zip(
            *np.unique(pairs, axis=0, return_counts=True), strict=True
        ):
            what = f"race in global memory with {instructions[wrote]}"
            report.found(what, instructions[read], int(number))
