"""Instructions on bits: logic, shifts, fields, bytes."""

from collections.abc import Callable

import numpy as np

from curvlab_kernels.audit.ptx.arithmetic import BITS_ONLY, INTEGERS, Build, elementwise, only
from curvlab_kernels.audit.ptx.machine import Step
from curvlab_kernels.audit.ptx.numbers import TYPES, UNSIGNED, Array
from curvlab_kernels.audit.ptx.program import BITS, Instruction, Program


def _logic(function: Callable[..., Array]) -> Build:
    def build(program: Program, instruction: Instruction) -> Step:
        kind = only(instruction, (), (*BITS_ONLY, "pred"))
        count = len(instruction.operands) - 1
        return elementwise(program, instruction, function, [kind] * count)

    return build


def _shift(program: Program, instruction: Instruction) -> Step:
    """Shifts by as much as the width or more leave zeros, or the sign."""
    right = instruction.parts[0] == "shr"
    kind = only(instruction, (), (*INTEGERS, *BITS_ONLY))
    most = BITS[kind] - 1

    def shifted(values: Array, by: Array) -> Array:
        within = np.minimum(by, np.uint32(most)).astype(values.dtype)
        result: Array = values >> within if right else values << within
        if right and values.dtype.kind == "i":
            return result
        return np.where(by > most, np.array(0, values.dtype), result)

    return elementwise(program, instruction, shifted, [kind, "u32"])


def _funnel(program: Program, instruction: Instruction) -> Step:
    """``shf``: 32 of the 64 bits of two registers, shifted by at most 31."""
    if instruction.parts not in (("shf", "l", "wrap", "b32"), ("shf", "r", "wrap", "b32")):
        raise instruction.unknown()
    left = instruction.parts[1] == "l"

    def shifted(low: Array, high: Array, by: Array) -> Array:
        pair = (high.astype(np.uint64) << np.uint64(32)) | low
        by = by.astype(np.uint64) & np.uint64(31)
        whole = (pair << by) >> np.uint64(32) if left else pair >> by
        return whole.astype(np.uint32)

    return elementwise(program, instruction, shifted, ["b32", "b32", "u32"])


def _lop3(program: Program, instruction: Instruction) -> Step:
    only(instruction, (), ("b32",))
    table = int(instruction.operands[4], 0)

    def looked_up(a: Array, b: Array, c: Array, _table: Array) -> Array:
        result = np.zeros(1, np.uint32)
        for entry in range(8):
            if table >> entry & 1:
                term = (a if entry & 4 else ~a) & (b if entry & 2 else ~b)
                result = result | (term & (c if entry & 1 else ~c))
        return result

    return elementwise(program, instruction, looked_up, ["b32"] * 4)


def _bit_field(program: Program, instruction: Instruction) -> Step:
    """``bfe``: bits from a position on, extended by zeros or by the field's last bit."""
    kind = only(instruction, (), ("u32", "s32", "u64", "s64"))
    bits, signed = BITS[kind], TYPES[kind]
    plain = UNSIGNED[bits // 8]

    def field(values: Array, position: Array, length: Array) -> Array:
        position, length = position & np.uint32(255), length & np.uint32(255)
        begin = np.minimum(position, np.uint32(bits)).astype(np.int64)
        end = np.minimum(begin + length.astype(np.int64), bits)
        # Up, so that the field's last bit is the sign, and down again; twice half a shift, because
        # a shift by the whole width is not defined.
        up, down = bits - end, bits - (end - begin)
        raised = _left(values.view(plain), up).view(signed)
        return np.where(length == 0, np.array(0, signed), _right(raised, down))

    return elementwise(program, instruction, field, [kind, "u32", "u32"])


def _left(values: Array, by: Array) -> Array:
    half = (by // 2).astype(values.dtype)
    result: Array = (values << half) << (by.astype(values.dtype) - half)
    return result


def _right(values: Array, by: Array) -> Array:
    half = (by // 2).astype(values.dtype)
    result: Array = (values >> half) >> (by.astype(values.dtype) - half)
    return result


def _permute(program: Program, instruction: Instruction) -> Step:
    """``prmt``: four of eight bytes, or their signs."""
    only(instruction, (), ("b32",))

    def chosen(a: Array, b: Array, selector: Array) -> Array:
        if selector.size == 1 and not int(selector[0]) & 0x8888:
            picks = [int(selector[0]) >> 4 * place & 7 for place in range(4)]
            pairs = np.stack(np.broadcast_arrays(a, b), axis=1)
            return np.ascontiguousarray(pairs.view(np.uint8)[:, picks]).view(np.uint32)[:, 0]
        both = a.astype(np.uint64) | (b.astype(np.uint64) << np.uint64(32))
        result = np.zeros(1, np.uint32)
        for place in range(4):
            select = (selector >> np.uint32(4 * place)) & np.uint32(15)
            shift = (select & np.uint32(7)).astype(np.uint64) * np.uint64(8)
            byte = ((both >> shift) & np.uint64(255)).astype(np.uint32)
            sign = np.where(byte & np.uint32(128), np.uint32(255), np.uint32(0))
            byte = np.where(select & np.uint32(8), sign, byte)
            result = result | (byte << np.uint32(8 * place))
        return result

    return elementwise(program, instruction, chosen, ["b32"] * 3)


def _count(function: Callable[[Array], Array]) -> Build:
    def build(program: Program, instruction: Instruction) -> Step:
        kind = only(instruction, (), ("b32", "b64"))
        return elementwise(program, instruction, lambda a: function(a).astype(np.uint32), [kind])

    return build


def _leading_zeros(values: Array) -> Array:
    count = np.zeros(values.shape, np.uint32)
    rest = values.copy()
    while rest.any():
        count += rest != 0
        rest >>= np.array(1, rest.dtype)
    return np.uint32(8 * values.dtype.itemsize) - count


TABLE: dict[str, Build] = {
    "and": _logic(np.bitwise_and),
    "or": _logic(np.bitwise_or),
    "xor": _logic(np.bitwise_xor),
    "not": _logic(np.invert),
    "shl": _shift,
    "shr": _shift,
    "shf": _funnel,
    "lop3": _lop3,
    "bfe": _bit_field,
    "prmt": _permute,
    "popc": _count(np.bitwise_count),
    "clz": _count(_leading_zeros),
}
