"""Instructions that move: between registers, and to and from memory."""

import re
from collections.abc import Callable

import numpy as np

from curvlab_kernels.audit.ptx.arithmetic import only
from curvlab_kernels.audit.ptx.machine import (
    Machine,
    Mask,
    Step,
    addresses,
    listed,
    reader,
    writer,
)
from curvlab_kernels.audit.ptx.memory import SharedMemory
from curvlab_kernels.audit.ptx.numbers import (
    TYPES,
    UNSIGNED,
    Array,
    bits_of,
    from_bfloat16,
    to_bfloat16,
)
from curvlab_kernels.audit.ptx.program import BITS, Instruction, Program

# Hints on caches and ordering that change no value in an execution without races.
_HINTS = {"nc", "ca", "cg", "cs", "lu", "cv", "wb", "wt", "volatile", "weak", "relaxed", "gpu"}
_HINTS |= {"sys", "cta", "L1", "L2", "no_allocate", "cache_hint", "128B", "256B", "64B"}
_HINTS |= {f"evict_{how}" for how in ("first", "last", "normal", "unchanged")}
_LARGEST = 16  # bytes of one global access in numpy; wider ones are taken in pieces


def move(program: Program, instruction: Instruction) -> Step:
    """``mov``: a register, a constant, or a vector packed into or out of one register."""
    kind = only(instruction, (), tuple(TYPES))
    target, source = instruction.operands
    if target.startswith("{"):
        return _unpack(program, target, source, kind)
    if source.startswith("{"):
        return _pack(program, target, source, kind)
    read, write = reader(program, source, kind), writer(program, target)
    return lambda machine, mask: write(machine, read(machine), mask)


def _unpack(program: Program, target: str, source: str, kind: str) -> Step:
    writes = [writer(program, name) for name in listed(target)]
    part = UNSIGNED[BITS[kind] // 8 // len(writes)]
    read = reader(program, source, kind)

    def run(machine: Machine, mask: Mask) -> None:
        parts = np.ascontiguousarray(read(machine)).view(part).reshape(-1, len(writes))
        for index, write in enumerate(writes):
            write(machine, np.ascontiguousarray(parts[:, index]), mask)

    return run


def _pack(program: Program, target: str, source: str, kind: str) -> Step:
    names = listed(source)
    bits = BITS[kind] // len(names)
    reads, write = [reader(program, name, f"b{bits}") for name in names], writer(program, target)
    whole = UNSIGNED[BITS[kind] // 8]

    def run(machine: Machine, mask: Mask) -> None:
        packed = np.zeros(1, whole)
        for index, read in enumerate(reads):
            packed = packed | (read(machine).astype(whole) << np.array(index * bits, whole))
        write(machine, packed, mask)

    return run


def _width(instruction: Instruction) -> tuple[int, int]:
    """Bytes of one element, and elements."""
    count = next((int(p[1:]) for p in instruction.parts if re.fullmatch(r"v[248]", p)), 1)
    return BITS[instruction.parts[-1]] // 8, count


def _check_hints(instruction: Instruction, space: str) -> None:
    allowed = _HINTS | {space, "v2", "v4", "v8"}
    if instruction.parts[-1] not in TYPES or not set(instruction.parts[1:-1]) <= allowed:
        raise instruction.unknown()


def policy(program: Program, instruction: Instruction) -> Step:
    """``createpolicy``: what a cache should keep. A hint to loads and stores; no bits matter."""
    parts, write = instruction.parts, writer(program, instruction.operands[0])
    hint = parts[3] if len(parts) == 5 else ""
    if parts[:3] != ("createpolicy", "fractional", "L2") or hint not in _HINTS or parts[4] != "b64":
        raise instruction.unknown()
    return lambda machine, mask: write(machine, np.zeros(1, np.uint64), mask)


def _space(instruction: Instruction, known: tuple[str, ...]) -> str:
    space = next((part for part in instruction.parts[1:] if part in known), None)
    if space is None:
        raise instruction.unknown("uses a memory that is not known")
    return space


def load(program: Program, instruction: Instruction) -> Step:
    """``ld`` from parameters, global, shared or a thread's own memory."""
    space = _space(instruction, ("param", "global", "shared", "local"))
    target, source = instruction.operands[:2]
    kind = instruction.parts[-1]
    if space == "param":
        return _load_parameter(program, instruction, kind)
    _check_hints(instruction, space)
    size, count = _width(instruction)
    writes, where = [writer(program, name) for name in listed(target)], addresses(program, source)
    if len(writes) != count:
        raise instruction.unknown("has another number of registers than its opcode says")

    def run(machine: Machine, mask: Mask) -> None:
        active = machine.active(mask)
        if not active.size:
            return
        at = machine.spread(where(machine))[active]
        if space == "global":
            parts = _from_global(machine, active, at, size * count, instruction)
        else:
            memory, place = _placed(machine, space, active, at, size * count, instruction)
            parts = memory.load(place, size * count, machine.stamp(active), instruction)
        parts = parts.view(UNSIGNED[size]).reshape(-1, count)
        for index, write in enumerate(writes):
            values = np.ascontiguousarray(parts[:, index]).view(TYPES[kind])
            if mask is not None:
                whole = np.empty(machine.lanes, values.dtype)
                whole[active] = values
                values = whole
            write(machine, values, mask)

    return run


def _load_parameter(program: Program, instruction: Instruction, kind: str) -> Step:
    name, _, offset = instruction.operands[1].strip("[] ").partition("+")
    if int(offset or 0) or name not in (names := [name for name, _ in program.parameters]):
        raise instruction.unknown("reads a parameter that is not known")
    index, write = names.index(name), writer(program, instruction.operands[0])
    wanted = TYPES[kind]

    def run(machine: Machine, mask: Mask) -> None:
        value = machine.arguments[index]
        narrowed = value.astype(UNSIGNED[wanted.itemsize])
        write(machine, narrowed.view(wanted), mask)

    return run


def _from_global(
    machine: Machine, active: Array, at: Array, width: int, instruction: Instruction
) -> Array:
    owner = machine.memory.locate(at, width, instruction)
    machine.listed(active, owner, at, width)
    if width <= _LARGEST:
        return machine.memory.load(at, width)
    step = np.uint64(_LARGEST)
    parts = [machine.memory.load(at + step * np.uint64(i), _LARGEST) for i in range(width // 16)]
    return np.stack(parts, axis=1).reshape(-1)


def _placed(
    machine: Machine, space: str, active: Array, at: Array, width: int, instruction: Instruction
) -> tuple[SharedMemory, Array]:
    """Shared memory of the lanes' blocks, or the lanes' own, and the positions in it."""
    if space == "local":
        return machine.local, machine.local.place(at, active, width, instruction)
    return machine.shared, machine.shared.place(at, machine.block[active], width, instruction)


def store(program: Program, instruction: Instruction) -> Step:
    """``st`` to global, shared or a thread's own memory."""
    space = _space(instruction, ("global", "shared", "local"))
    _check_hints(instruction, space)
    size, count = _width(instruction)
    target, source = instruction.operands[:2]
    reads = [reader(program, name, f"b{8 * size}") for name in listed(source)]
    where = addresses(program, target)
    if len(reads) != count:
        raise instruction.unknown("has another number of registers than its opcode says")

    def run(machine: Machine, mask: Mask) -> None:
        active = machine.active(mask)
        if not active.size:
            return
        at = machine.spread(where(machine))[active]
        values = [machine.spread(read(machine))[active] for read in reads]
        if space == "global":
            owner = machine.memory.locate(at, size * count, instruction)
            for index, each in enumerate(values):
                piece = at + np.uint64(index * size)
                machine.listed(active, owner, piece, size, each)
                machine.memory.store(piece, each)
        else:
            memory, place = _placed(machine, space, active, at, size * count, instruction)
            for index, each in enumerate(values):
                memory.store(place + index * size, each, machine.stamp(active), instruction)

    return run


def copy(program: Program, instruction: Instruction) -> Step:
    """``cp.async``: from global to shared memory; until its thread has waited, NaN is there."""
    parts, operands = instruction.parts, instruction.operands
    if parts == ("cp", "async", "commit_group"):
        return lambda machine, mask: machine.commit(machine.active(mask))
    if parts in (("cp", "async", "wait_group"), ("cp", "async", "wait_all")):
        most = int(operands[0], 0) if operands else -1  # groups that may still be under way
        return lambda machine, mask: machine.wait(machine.active(mask), most, instruction)
    if not set(parts[2:]) <= _HINTS | {"shared", "global"} or not 3 <= len(operands) <= 4:
        raise instruction.unknown()
    to, source, width = (
        addresses(program, operands[0]),
        addresses(program, operands[1]),
        int(operands[2], 0),
    )
    taken = reader(program, operands[-1], "u32")  # fewer bytes are followed by zeros

    def run(machine: Machine, mask: Mask) -> None:
        active = machine.active(mask)
        if not active.size:
            return
        size = machine.spread(taken(machine))[active]
        if not np.isin(size, (0, width)).all():
            raise instruction.unknown("copies a part of its bytes")
        place = machine.shared.place(
            machine.spread(to(machine))[active], machine.block[active], width, instruction
        )
        bits = np.zeros((active.size, width // 4), np.uint32)
        some = np.flatnonzero(size)
        if some.size:
            at = machine.spread(source(machine))[active[some]]
            found = _from_global(machine, active[some], at, width, instruction)
            bits[some] = found.view(np.uint32).reshape(-1, width // 4)
        for piece in range(width // 4):
            spot, stamp = place + 4 * piece, machine.stamp(active)
            machine.shared.store(
                spot, np.full(active.size, 2**32 - 1, np.uint32), stamp, instruction
            )
            machine.under_way.append((active, machine.group[active], spot, bits[:, piece]))

    return run


_ATOMIC: dict[str, Callable[[Array, Array], Array]] = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "exch": lambda _, new: new,
}


def _add_bfloat16(first: Array, second: Array) -> Array:
    return to_bfloat16(from_bfloat16(first) + from_bfloat16(second))


def looked_at(program: Program, instruction: Instruction) -> bool:
    """Whether an instruction reads the register that this atomic puts the old value in."""
    return instruction.parts[0] == "atom" and instruction.operands[0] in program.read


def order_counts(program: Program) -> bool:
    """Whether results may depend on the order of atomics, more than by rounding."""
    found = [each for each in program.instructions if each.parts[0] in ("atom", "red")]
    operations = {part for each in found for part in each.parts if part in (*_ATOMIC, "cas")}
    single = len(operations) <= 1 and not operations & {"exch", "cas"}
    return not single or any(looked_at(program, each) for each in found)


def atomic(program: Program, instruction: Instruction) -> Step:
    """``atom`` and ``red``, one lane after the other at each address."""
    parts = instruction.parts
    operation = next((part for part in parts if part in (*_ATOMIC, "cas")), "")
    space = _space(instruction, ("global", "shared"))
    hints = _HINTS | {space, "acq_rel", "acquire", "release", "noftz", operation}
    kind = only(instruction, hints, tuple(TYPES))
    if not operation or (kind == "bf16" and operation != "add"):
        raise instruction.unknown()
    function = _add_bfloat16 if kind == "bf16" else _ATOMIC.get(operation)
    returns = parts[0] == "atom"
    target = writer(program, instruction.operands[0]) if returns else None
    where = addresses(program, instruction.operands[1 if returns else 0])
    texts = instruction.operands[2 if returns else 1 :]
    if len(texts) != (2 if operation == "cas" else 1):
        raise instruction.unknown("has another number of operands than expected")
    reads = [reader(program, text, kind) for text in texts]
    width = TYPES[kind].itemsize
    noticed = {
        "releases": bool({"release", "acq_rel"} & set(parts)) and "cta" not in parts,
        "acquires": bool({"acquire", "acq_rel"} & set(parts))
        and "cta" not in parts
        and looked_at(program, instruction),
    }

    def run(machine: Machine, mask: Mask) -> None:
        active = machine.active(mask)
        if not active.size:
            return
        active = machine.turns(active)
        at = machine.spread(where(machine))[active]
        values = [machine.spread(read(machine))[active] for read in reads]
        if space == "global":
            owner = machine.memory.locate(at, width, instruction)
            bits = bits_of(values[-1])
            machine.listed(active, owner, at, width, bits, atomic=True, **noticed)
        else:
            at = machine.shared.place(at, machine.block[active], width, instruction)
        stamp = machine.stamp(active, atomic=True)
        old = np.empty(active.size, TYPES[kind])
        waiting = np.arange(active.size)
        while waiting.size:  # each turn takes one lane of every address
            _, first = np.unique(at[waiting], return_index=True)
            turn = waiting[first]
            if space == "global":
                found = machine.memory.load(at[turn], width)
            else:
                found = machine.shared.load(at[turn], width, stamp[turn], instruction)
            before = found.view(TYPES[kind])
            if function is None:  # compare and swap
                new = np.where(before == values[0][turn], values[1][turn], before)
            else:
                new = function(before, values[0][turn])
            if space == "global":
                machine.memory.store(at[turn], bits_of(new))
            else:
                machine.shared.store(at[turn], bits_of(new), stamp[turn], instruction)
            old[turn] = before
            waiting = np.delete(waiting, first)
        if target is not None:
            whole = np.zeros(machine.lanes, TYPES[kind])
            whole[active] = old
            target(machine, whole, mask)

    return run
