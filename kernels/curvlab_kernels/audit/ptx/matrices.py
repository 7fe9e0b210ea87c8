"""Matrices that the lanes of a warp hold together: loaded, stored, multiplied."""

import re
from collections.abc import Callable

import numpy as np

from curvlab_kernels.audit.ptx.arithmetic import only
from curvlab_kernels.audit.ptx.machine import (
    WARP,
    Machine,
    Mask,
    Reader,
    Step,
    addresses,
    listed,
    reader,
    writer,
)
from curvlab_kernels.audit.ptx.numbers import TYPES, UNSIGNED, Array, from_bfloat16, from_float8
from curvlab_kernels.audit.ptx.program import Instruction, Program


def matrix(program: Program, instruction: Instruction) -> Step:
    """``ldmatrix`` and ``stmatrix``: 8x8 matrices of 16-bit elements, one row's address per lane.

    Lane ``l`` holds elements ``2 (l % 4)`` and the next of row ``l / 4``, of the transpose with
    ``trans``.
    """
    parts, loads = instruction.parts, instruction.parts[0] == "ldmatrix"
    known = {"sync", "aligned", "m8n8", "x1", "x2", "x4", "trans", "shared", "cta"}
    only(instruction, known, ("b16",))
    registers, address = instruction.operands if loads else instruction.operands[::-1]
    names = listed(registers)
    if f"x{len(names)}" not in parts:
        raise instruction.unknown("has another number of registers than its opcode says")
    where = addresses(program, address)
    crossed = "trans" in parts
    lane = np.arange(WARP)
    puts = [writer(program, name) for name in names] if loads else []
    gets = [] if loads else [reader(program, name, "b32") for name in names]

    def run(machine: Machine, mask: Mask) -> None:
        active = machine.whole_warps(mask, instruction)
        at = machine.spread(where(machine)).reshape(-1, WARP)
        shared, block, stamp = machine.shared, machine.block[active], machine.stamp(active)
        for index in range(len(names)):
            rows = at[:, 8 * index : 8 * index + 8]
            if crossed:
                places = [rows[:, 2 * (lane % 4) + e] + 2 * (lane // 4) for e in (0, 1)]
            else:
                places = [rows[:, lane // 4] + 4 * (lane % 4)]
            width = 4 // len(places)
            spots = [
                shared.place(each.reshape(-1)[active], block, width, instruction) for each in places
            ]
            if loads:
                found = [shared.load(spot, width, stamp, instruction) for spot in spots]
                pairs = np.stack(found, axis=1).reshape(-1).view(np.uint32)
                whole = np.zeros(machine.lanes, np.uint32)
                whole[active] = pairs
                puts[index](machine, whole, mask)
            else:
                values = machine.spread(gets[index](machine))[active]
                halves = np.ascontiguousarray(values).view(UNSIGNED[width])
                for e, spot in enumerate(spots):
                    shared.store(spot, halves[e :: len(spots)], stamp, instruction)

    return run


# Factors in a 32-bit register, by type: how many, and what they are.
_FACTORS: dict[str, tuple[int, Callable[[Array], Array]]] = {
    "f16": (2, lambda bits: bits.view(np.float16)),
    "bf16": (2, lambda bits: from_bfloat16(bits.view(np.uint16))),
    "tf32": (1, lambda bits: (bits & np.uint32(0xFFFFE000)).view(np.float32)),
    "s8": (4, lambda bits: bits.view(np.int8)),
    "u8": (4, lambda bits: bits.view(np.uint8)),
    "e4m3": (4, lambda bits: from_float8(bits.view(np.uint8), "e4m3")),
    "e5m2": (4, lambda bits: from_float8(bits.view(np.uint8), "e5m2")),
}


def multiply(program: Program, instruction: Instruction) -> Step:
    """``mma.sync``: ``d = a b + c`` with ``a`` (16, k), ``b`` (k, 8).

    Lane ``l`` holds row ``l / 4`` of ``a`` and ``c`` and the eighth after it, and column ``l / 4``
    of ``b``. Along k four lanes hold ``4 e`` numbers in a row, ``e`` in a register. Sums are exact
    here and rounded once; a GPU rounds or cuts them on the way. With ``satfinite`` whole numbers
    beyond the largest become that.
    """
    parts = instruction.parts
    saturates = parts[6:7] == ("satfinite",) and parts[-1] == "s32"
    if saturates:
        parts = parts[:6] + parts[7:]
    shape = re.fullmatch(r"m16n8k(\d+)", parts[3] if len(parts) == 10 else "")
    result, left, right, added = parts[-4:]
    fits = parts[:3] == ("mma", "sync", "aligned") and parts[4:6] == ("row", "col")
    sums = ("s32",) if left in ("s8", "u8") else ("f32", "f16")
    if not (shape and fits and left in _FACTORS and right in _FACTORS and result in sums):
        raise instruction.unknown()
    e, from_left = _FACTORS[left]
    steps, rest = divmod(int(shape[1]), 4 * e)
    d, a, b, c = (listed(text) for text in instruction.operands)
    halves = 2 if result == "f16" else 1  # of sums in a register
    sizes = 4 // halves, 2 * steps, steps, 4 // halves
    if rest or added != result or e != _FACTORS[right][0] or sizes != tuple(map(len, (d, a, b, c))):
        raise instruction.unknown()
    reads = [[reader(program, name, "b32") for name in names] for names in (a, b, c)]
    writes, from_right, kind = (
        [writer(program, name) for name in d],
        _FACTORS[right][1],
        TYPES[result],
    )

    def run(machine: Machine, mask: Mask) -> None:
        machine.whole_warps(mask, instruction)
        # registers, warps, eight groups of four lanes, numbers of a register
        held = [np.stack([_grouped(machine, read) for read in group]) for group in reads]
        first = from_left(held[0]).astype(np.float64).reshape(steps, 2, -1, 8, 4 * e)
        second = from_right(held[1]).astype(np.float64).reshape(steps, -1, 8, 4 * e)
        # registers are (row half, column parity); packed ones hold both columns
        start = held[2].view(kind).astype(np.float64).reshape(2, 2 // halves, -1, 8, 4, halves)
        total = (
            first.transpose(2, 1, 3, 0, 4).reshape(-1, 16, 4 * e * steps)
            @ second.transpose(1, 0, 3, 2).reshape(-1, 4 * e * steps, 8)
        ) + start.transpose(2, 0, 3, 4, 1, 5).reshape(-1, 16, 8)
        if saturates:
            total = total.clip(np.iinfo(kind).min, np.iinfo(kind).max)
        whole = total.astype(np.int64).astype(np.int32) if kind.kind == "i" else total.astype(kind)
        out = whole.reshape(-1, 2, 8, 4, 2 // halves, halves).transpose(1, 4, 0, 2, 3, 5)
        for write, values in zip(writes, out.reshape(len(writes), -1), strict=True):
            write(machine, np.ascontiguousarray(values).view(np.uint32), mask)

    return run


def _grouped(machine: Machine, read: Reader) -> Array:
    return np.ascontiguousarray(machine.spread(read(machine))).reshape(-1, 8, 4)
