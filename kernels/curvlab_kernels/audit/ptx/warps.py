"""Instructions that the lanes of a warp execute together: shuffles, barriers, reductions."""

from collections.abc import Callable
from functools import partial, reduce as reduce_columns

import numpy as np

from curvlab_kernels.audit.ptx.machine import (
    WARP,
    Machine,
    Mask,
    Step,
    reader,
    writer,
)
from curvlab_kernels.audit.ptx.numbers import Array, larger, smaller
from curvlab_kernels.audit.ptx.program import Instruction, Program
from curvlab_kernels.audit.ptx.report import Fault


def shuffle(program: Program, instruction: Instruction) -> Step:
    """``shfl.sync``: a register of another lane of the warp."""
    parts = instruction.parts
    if parts[:2] != ("shfl", "sync") or parts[3:] != ("b32",):
        raise instruction.unknown()
    mode = parts[2]
    if mode not in ("up", "down", "bfly", "idx"):
        raise instruction.unknown()
    target, _, flag = instruction.operands[0].partition("|")
    write = writer(program, target)
    write_flag = writer(program, flag) if flag else None
    kinds = ("b32", "u32", "u32", "u32")
    reads = [
        reader(program, text, kind)
        for text, kind in zip(instruction.operands[1:], kinds, strict=True)
    ]

    def run(machine: Machine, mask: Mask) -> None:
        values, by, clamp, members = (read(machine) for read in reads)
        _check_members(machine, mask, members, instruction)
        if by.size != clamp.size:
            by, clamp = machine.spread(by), machine.spread(clamp)
        segment = (clamp.astype(np.int64) >> 8) & 31
        # One warp stands for all where they shuffle alike.
        lane, step = machine.lane[: WARP if by.size == 1 else None], by.astype(np.int64) & 31
        last = (lane & segment) | (clamp.astype(np.int64) & 31 & ~segment)
        if mode == "up":
            source = lane - step
            inside = source >= last
        else:
            others = {"down": lane + step, "bfly": lane ^ step}
            source = others.get(mode, (lane & segment) | (step & ~segment))
            inside = source <= last
        source = np.where(inside, source, lane).reshape(-1, WARP)
        origin = (np.arange(0, machine.lanes, WARP)[:, None] + source).reshape(-1)
        if mask is not None and not mask[origin[mask]].all():
            raise Fault(f"a lane that does not take part is read by {instruction}")
        write(machine, machine.spread(values)[origin], mask)
        if write_flag is not None:
            write_flag(machine, np.resize(inside, machine.lanes), mask)

    return run


def _check_members(machine: Machine, mask: Mask, members: Array, instruction: Instruction) -> None:
    """The lanes that execute a warp's instruction must be those that its mask names."""
    if mask is None and members.size == 1 and int(members[0]) == 2**WARP - 1:
        return
    active = np.ones(machine.lanes, bool) if mask is None else mask
    here = active.reshape(-1, WARP)
    present = (here.astype(np.uint64) << np.arange(WARP, dtype=np.uint64)).sum(1)
    named = machine.spread(members).reshape(-1, WARP).astype(np.uint64)
    wrong = here & (named != present[:, None])
    if wrong.any():
        warp = int(np.flatnonzero(wrong.any(1))[0])
        raise Fault(
            f"lanes {int(present[warp]):#010x} of a warp execute an instruction for lanes "
            f"{int(named[warp][here[warp]][0]):#010x}: {instruction}"
        )


def warp_barrier(program: Program, instruction: Instruction) -> Step:
    """``bar.warp.sync``: orders the lanes of a warp, if it names all of them."""
    if instruction.parts != ("bar", "warp", "sync"):
        raise instruction.unknown()
    read = reader(program, instruction.operands[0], "u32")

    def run(machine: Machine, mask: Mask) -> None:
        named = machine.spread(read(machine))
        _check_members(machine, mask, named, instruction)
        active = machine.active(mask)
        machine.warp_epoch[active[named[active] == np.uint32(0xFFFFFFFF)]] += 1

    return run


_REDUCE: dict[str, Callable[[Array, Array], Array]] = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


_REDUCE_FLOATS: dict[tuple[str, ...], Callable[[Array, Array], Array]] = {
    (name, *nan): partial(function, keep=bool(nan))
    for name, function in (("min", smaller), ("max", larger))
    for nan in ((), ("NaN",))
}


def reduce(program: Program, instruction: Instruction) -> Step:
    """``redux.sync``: one result for all lanes of a warp."""
    _, *operation, kind = instruction.parts[1:]
    if kind == "f32":
        found = _REDUCE_FLOATS.get(tuple(operation))
    else:
        known = len(operation) == 1 and kind in ("s32", "u32", "b32")
        found = _REDUCE.get(operation[0]) if known else None
    if instruction.parts[1] != "sync" or found is None:
        raise instruction.unknown()
    function = found
    write = writer(program, instruction.operands[0])
    read = reader(program, instruction.operands[1], kind)
    named = reader(program, instruction.operands[2], "u32")

    def run(machine: Machine, mask: Mask) -> None:
        machine.whole_warps(mask, instruction)  # a part of a warp would need its own total
        _check_members(machine, mask, named(machine), instruction)
        values = machine.spread(read(machine)).reshape(-1, WARP)
        totals = reduce_columns(function, values.T)
        write(machine, np.repeat(totals, WARP), mask)

    return run


def trap(_program: Program, instruction: Instruction) -> Step:
    """Ends the execution, if any lane gets here."""

    def run(machine: Machine, mask: Mask) -> None:
        if machine.active(mask).size:
            raise Fault(f"trap reached at {instruction}")

    return run
