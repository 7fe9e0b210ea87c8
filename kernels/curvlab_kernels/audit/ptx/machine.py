"""A batch of blocks while they run: registers, memories, who is where.

Everything is vectorised over the lanes, that is all threads of all blocks of the batch, block by
block. A register is an array with one element per lane, or with a single one where all lanes agree
(parameters, constants and what is computed from them): numpy broadcasts it.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from curvlab_kernels.audit.ptx.memory import (
    ATOMIC,
    SHARED_BASE,
    GlobalMemory,
    SharedMemory,
    stamped,
)
from curvlab_kernels.audit.ptx.numbers import TYPES, UNSIGNED, Array, bits_of
from curvlab_kernels.audit.ptx.program import BITS, Instruction, Program
from curvlab_kernels.audit.ptx.races import Access, AccessLog
from curvlab_kernels.audit.ptx.report import Fault, Report

_PLACES = ("tid", "ntid", "ctaid", "nctaid")
Mask = Array | None  # which lanes take part; None for all
WARP = 32
_SPECIAL = {"%laneid"} | {f"%{name}.{axis}" for name in _PLACES for axis in "xyz"}


class Machine:
    """The state that instructions read and change.

    Args:
        programs: The numbers of the blocks in this batch.
        arguments: The kernel's parameters, as bits or numbers.
        log: Where global accesses are listed; None leaves races in global memory unchecked.
        turns: Puts the lanes of an atomic in the order in which it takes them.
    """

    def __init__(
        self,
        program: Program,
        grid: tuple[int, int, int],
        programs: Array,
        arguments: Sequence[int | float],
        dynamic_shared: int,
        memory: GlobalMemory,
        log: AccessLog | None,
        report: Report,
        turns: Callable[[Array], Array],
    ) -> None:
        threads, blocks = program.threads, len(programs)
        self.threads, self.blocks, self.lanes = threads, blocks, threads * blocks
        self.registers: list[Array | None] = [None] * len(program.registers)
        self.memory, self.log, self.report = memory, log, report
        self.tid = np.tile(np.arange(threads, dtype=np.uint32), blocks)
        self.lane = self.tid.astype(np.int64) % WARP
        self.block = np.repeat(np.arange(blocks), threads)
        self.number = np.repeat(programs, threads)  # of the block in the grid
        self.thread = self.number * threads + self.tid
        self.epoch = np.zeros(self.lanes, np.int32)  # barriers of the block so far
        self.warp_epoch = np.zeros(self.lanes, np.int32)  # and of the warp
        self.turns = turns
        self.group = np.zeros(self.lanes, np.int64)  # of asynchronous copies
        # Lanes, their groups, places in shared memory, what is to come there.
        self.under_way: list[tuple[Array, Array, Array, Array]] = []
        self.current = 0  # index of the instruction under way
        size = program.static_shared + dynamic_shared
        narrowest = _narrowest(program)
        self.shared = SharedMemory(blocks, size, narrowest, report)
        # What a thread has for itself, with the same checks: a block of its own.
        self.local = SharedMemory(self.lanes, program.local, narrowest, report)
        self.special = self._special(grid)
        self.arguments = [
            np.array([value]).astype(TYPES[kind]).view(UNSIGNED[BITS[kind] // 8])
            for value, (_, kind) in zip(arguments, program.parameters, strict=True)
        ]

    def _special(self, grid: tuple[int, int, int]) -> dict[str, Array]:
        x, y, _ = grid
        one, zero = np.ones(1, np.uint32), np.zeros(1, np.uint32)
        found = {
            "%laneid": self.lane.astype(np.uint32),
            "%tid.x": self.tid,
            "%tid.y": zero,
            "%tid.z": zero,
            "%ntid.x": one * np.uint32(self.threads),
            "%ntid.y": one,
            "%ntid.z": one,
            "%ctaid.x": (self.number % x).astype(np.uint32),
            "%ctaid.y": (self.number // x % y).astype(np.uint32),
            "%ctaid.z": (self.number // x // y).astype(np.uint32),
        }
        return found | {f"%nctaid.{axis}": one * np.uint32(grid[i]) for i, axis in enumerate("xyz")}

    def spread(self, values: Array) -> Array:
        """One element per lane."""
        return values if values.size == self.lanes else np.broadcast_to(values, (self.lanes,))

    def active(self, mask: Mask) -> Array:
        """Indices of the lanes that take part."""
        return np.arange(self.lanes) if mask is None else np.flatnonzero(mask)

    def stamp(self, active: Array, atomic: bool = False) -> Array:
        """Who accesses shared memory, and when."""
        thread = np.full(active.size, ATOMIC) if atomic else self.tid[active]
        return stamped(self.epoch[active], self.warp_epoch[active], thread)

    def arrive(self, blocks: Array) -> None:
        """All threads of these blocks have met at a barrier."""
        self.epoch.reshape(self.blocks, -1)[blocks] += 1
        self.report.barriers += len(blocks)

    def commit(self, active: Array) -> None:
        """Asynchronous copies since the last group are a group."""
        self.group[active] += 1

    def wait(self, active: Array, most: int, instruction: Instruction) -> None:
        """Let copies arrive, except for those of the ``most`` groups that came last."""
        waits = np.zeros(self.lanes, bool)
        waits[active] = True
        left = []
        for lanes, group, spot, bits in self.under_way:
            now = waits[lanes] & (group < self.group[lanes] - most)
            self.shared.store(spot[now], bits[now], self.stamp(lanes[now]), instruction)
            if not now.all():
                left.append((lanes[~now], group[~now], spot[~now], bits[~now]))
        self.under_way = left

    def listed(
        self,
        active: Array,
        owner: Array,
        addresses: Array,
        width: int,
        values: Array | None = None,
        atomic: bool = False,
        releases: bool = False,
        acquires: bool = False,
    ) -> None:
        """Note a global access for the search for races (see ``Access``), and its bytes."""
        kind = "global read" if values is None else "global written"
        self.report.bytes[kind] += addresses.size * width
        if self.log is not None:
            who = self.number[active], self.thread[active], self.epoch[active]
            how = atomic, releases, acquires
            when = self.current, len(self.log)
            self.log.add(Access(*when, owner, addresses, width, *who, values, *how))

    def whole_warps(self, mask: Mask, instruction: Instruction) -> Array:
        """The lanes of the warps that take part; raises if part of a warp does."""
        if mask is None:
            return np.arange(self.lanes)
        warps = mask.reshape(-1, WARP)
        if (warps.any(1) != warps.all(1)).any():
            raise Fault(f"only a part of a warp arrives at {instruction}")
        return np.flatnonzero(mask)


def _narrowest(program: Program) -> int:
    """Bytes of the narrowest access of shared and local memory."""
    narrowest = 4
    for instruction in program.instructions:
        parts = instruction.parts
        if {"shared", "local"} & set(parts) and parts[0] in ("ld", "st", "atom"):
            narrowest = min(narrowest, BITS[parts[-1]] // 8)
        elif parts[0] in ("ldmatrix", "stmatrix") and "trans" in parts:
            narrowest = min(narrowest, 2)
    return narrowest


# Operands. Each function is called once per instruction and returns what to call at every
# execution.

Reader = Callable[[Machine], Array]
Writer = Callable[[Machine, Array, Mask], None]
Step = Callable[[Machine, Mask], None]  # one instruction, ready to run


def reader(program: Program, text: str, kind: str) -> Reader:
    """Operand ``text`` as an array of PTX type ``kind``; of a wider register the low bits."""
    wanted = TYPES[kind]
    if text in program.registers:
        number, declared = program.register(text)
        have = TYPES[declared].itemsize
        if have < wanted.itemsize or (declared == "pred") != (kind == "pred"):
            raise ValueError(f"register {text} is {declared}, read as {kind}")
        narrow = UNSIGNED[wanted.itemsize] if have > wanted.itemsize else None

        def read(machine: Machine) -> Array:
            values = machine.registers[number]
            if values is None:  # never written: anything may be there, NaN shows it best
                values = _poison(declared)
            return (values if narrow is None else values.astype(narrow)).view(wanted)

        return read
    if text in _SPECIAL:
        return lambda machine: machine.special[text].view(wanted)
    if text in program.arrays:
        constant = np.array([SHARED_BASE + program.arrays[text]]).astype(wanted)
    elif text in program.tables:
        constant = np.array([program.tables[text].ctypes.data]).astype(wanted)
    elif re.match(r"-?\d", text):
        constant = _constant(text, wanted)
    else:
        raise ValueError(f"{text} is no register, symbol or number that is known")
    return lambda _: constant


def _poison(kind: str) -> Array:
    return np.full(1, -1).astype(TYPES[kind]) if kind != "pred" else np.zeros(1, bool)


def _constant(text: str, dtype: np.dtype[Any]) -> Array:
    if dtype.kind == "b":
        return np.array([bool(int(text, 0))])
    if text[:2].lower() in ("0f", "0d") and len(text) in (10, 18):
        bits = int(text[2:], 16)
        size = 4 if len(text) == 10 else 8
        if size != dtype.itemsize:
            raise ValueError(f"{text} has {size} bytes, the instruction {dtype.itemsize}")
    elif dtype.kind == "f" and "." in text:
        return np.array([float(text)], dtype)
    else:
        bits = int(text.rstrip("U"), 0)
    mask = (1 << (8 * dtype.itemsize)) - 1
    return np.array([bits & mask], UNSIGNED[dtype.itemsize]).view(dtype)


def writer(program: Program, name: str) -> Writer:
    """Set register ``name``; narrower values are extended by their sign, wider ones cut."""
    if name == "_":
        return lambda _machine, _values, _mask: None
    number, declared = program.register(name)
    dtype = TYPES[declared]

    def write(machine: Machine, values: Array, mask: Mask) -> None:
        if values.dtype.itemsize != dtype.itemsize:
            values = values.astype(dtype)
        values = bits_of(values)
        if mask is not None:
            old = machine.registers[number]
            values = np.where(mask, values, _poison(declared) if old is None else old)
        machine.registers[number] = values

    return write


def addresses(program: Program, text: str) -> Reader:
    """The address in brackets: a register or a shared array, and an offset."""
    words = text.strip("[] ").replace(" ", "").partition("+")
    base, offset = words[0], int(words[2] or "0", 0)
    wide = base in program.registers and program.register(base)[1].endswith("64")
    read = reader(program, base, "u64" if wide else "u32")
    # 64-bit addresses wrap as on the GPU, so a negative offset is added as its complement.
    added = np.array([offset]).astype(np.uint64 if wide else np.int64)
    if wide:
        return lambda machine: read(machine) + added
    return lambda machine: read(machine).astype(np.int64) + added


def listed(text: str) -> list[str]:
    """The registers of a vector operand, or the one register."""
    return [each.strip() for each in text.strip("{} ").split(",")]
