"""Races in global memory: every access of a launch is listed, and conflicts are looked for.

Two threads conflict at an address if one writes and nothing orders them. Blocks of one launch
are ordered only by an atomic with release in one whose effect an atomic with acquire in the other
finds (a counter that tells the last block so); threads of one block by a barrier between. Without
conflicts the result does not depend on the order in which blocks or warps run, unless by what
atomics return: :func:`launching.execute` tries another order for that.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from curvlab_kernels.audit.ptx.numbers import Array
from curvlab_kernels.audit.ptx.program import Instruction
from curvlab_kernels.audit.ptx.report import Report


@dataclass(frozen=True, slots=True)
class Access:
    """One executed load, store or atomic: what each lane does."""

    instruction: int
    tick: int  # accesses before it
    owner: Array  # allocation of each address
    addresses: Array
    width: int
    block: Array
    thread: Array  # number in the whole launch
    epoch: Array
    values: Array | None  # of a write
    atomic: bool = False
    releases: bool = False
    acquires: bool = False  # and somebody looks at what it returns


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
    order: Array  # of execution

    def at(self, index: Array | slice) -> "_Table":
        return _Table(*(getattr(self, name)[index] for name in self.__slots__))


class AccessLog:
    """The global accesses of one launch."""

    def __init__(self) -> None:
        self.reads: list[Access] = []
        self.writes: list[Access] = []

    def __len__(self) -> int:
        return len(self.reads) + len(self.writes)

    def add(self, access: Access) -> None:
        (self.reads if access.values is None else self.writes).append(access)

    def report(self, report: Report, instructions: Sequence[Instruction]) -> None:
        """Add what conflicts to the findings."""
        if not self.writes:
            return
        written = np.unique(np.concatenate([np.unique(w.owner) for w in self.writes]))
        reads = [r for r in self.reads if np.isin(r.owner, written).any()]
        unit = min(access.width for access in self.writes + reads)
        writes = _tabulate(self.writes, unit)
        writes = writes.at(np.lexsort((writes.thread, writes.epoch, writes.block, writes.unit)))
        handed_on = _HandedOn(self.writes, unit)
        clash = _clashing_writes(writes)
        found = Counter(writes.instruction[clash].tolist())
        if found and handed_on.acquires:  # then pairs have to be looked at, up to the first
            suspects = writes.at(np.isin(writes.unit, writes.unit[clash]))
            plain = suspects.at(~suspects.atomic)
            pair = next(_clashes(plain, suspects, handed_on, equal=True), None)
            found = Counter({pair[1]: pair[2]} if pair else {})
        for instruction, number in found.items():
            what = "race in global memory: two threads write one address"
            report.found(what, instructions[instruction], number)
        if reads:
            for read, wrote, number in _clashes(_tabulate(reads, unit), writes, handed_on):
                what = f"race in global memory with {instructions[wrote]}"
                report.found(what, instructions[read], number)


def _tabulate(accesses: Sequence[Access], unit: int) -> _Table:
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
                (each.tick << 32) + np.arange(count),
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


def _clashing_writes(writes: _Table) -> Array:
    """Which sorted writes conflict with their neighbour, as far as barriers tell.

    Neighbours stand for all writes of their address: two blocks that write it are neighbours
    somewhere, and so are two threads of a block between two barriers.
    """
    before, after = writes.at(slice(None, -1)), writes.at(slice(1, None))
    by_epoch = _harmless(writes, "unit", "block", "epoch")[1:]
    harmless = np.where(before.block == after.block, by_epoch, _harmless(writes, "unit")[1:])
    clash = (before.unit == after.unit) & _unordered(before, after) & ~harmless
    return np.concatenate([[False], clash])


def _turns(keys: Array, wanted: Array) -> Iterator[tuple[Array, Array]]:
    """Where each of ``wanted`` is in sorted ``keys``, one place of each per turn: both indices."""
    first, last = (np.searchsorted(keys, wanted, side) for side in ("left", "right"))
    for turn in range(int((last - first).max(initial=0))):
        here = np.flatnonzero(first + turn < last)
        yield here, first[here] + turn


def _clashes(
    some: _Table, writes: _Table, handed_on: "_HandedOn", equal: bool = False
) -> Iterator[tuple[int, int, int]]:
    """Pairs of instructions, of ``some`` and of sorted ``writes``, that conflict; how often.

    Args:
        equal: Whether ``some`` are writes, which do not conflict with those of the same value.
    """
    for here, place in _turns(writes.unit, some.unit):
        mine, other = some.at(here), writes.at(place)
        clash = _unordered(mine, other)
        if equal:
            clash &= other.atomic | (mine.value != other.value)
        mine, other = mine.at(clash), other.at(clash)
        left = ~(handed_on.before(mine, other) | handed_on.before(other, mine))
        pairs = np.stack([mine.instruction[left], other.instruction[left]], axis=1)
        for (first, second), number in zip(
            *np.unique(pairs, axis=0, return_counts=True), strict=True
        ):
            yield int(first), int(second), int(number)


class _HandedOn:
    """What one block wrote and another may read, because an atomic told it so.

    A block hands on what it did before an atomic with release (by the same thread, or before a
    barrier); one that comes later at the same address, with acquire, takes it over.
    """

    def __init__(self, writes: Sequence[Access], unit: int) -> None:
        self.acquires = _by_address([each for each in writes if each.acquires], unit)
        releases = [each for each in writes if each.releases and self.acquires]
        self.releases = _by_address(releases, unit)

    def before(self, first: _Table, second: _Table) -> Array:
        """Whether ``first`` is ordered before ``second``, pair by pair."""
        ordered = np.zeros(first.unit.size, bool)
        for unit in self.acquires.keys() & self.releases.keys() if ordered.size else ():
            released = _nearest(self.releases[unit], first, 1)
            ordered |= released < _nearest(self.acquires[unit], second, -1)
        return ordered


def _nearest(events: _Table, accesses: _Table, sign: int) -> Array:
    """When, for each access, its block's next event after it is (or, -1, the last one before)."""
    found = np.full(accesses.unit.size, np.iinfo(np.int64).max if sign > 0 else -1)
    for here, place in _turns(events.block, accesses.block):
        event, mine = events.at(place), accesses.at(here)
        same = event.thread == mine.thread  # and perhaps the access is the event
        reached = np.where(same, mine.order <= event.order, mine.epoch < event.epoch)
        if sign < 0:
            reached = np.where(same, mine.order >= event.order, mine.epoch > event.epoch)
        here, when = here[reached], event.order[reached]
        found[here] = (np.minimum if sign > 0 else np.maximum)(found[here], when)
    return found


def _by_address(accesses: Sequence[Access], unit: int) -> dict[int, _Table]:
    """Accesses of each address, sorted by block."""
    if not accesses:
        return {}
    table = _tabulate(accesses, unit)
    table = table.at(np.lexsort((table.block, table.unit)))
    units, first = np.unique(table.unit, return_index=True)
    ends = [*first[1:].tolist(), None]
    parts = [table.at(slice(*each)) for each in zip(first.tolist(), ends, strict=True)]
    return dict(zip(units.tolist(), parts, strict=True))
