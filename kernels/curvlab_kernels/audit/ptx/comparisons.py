"""Instructions that compare numbers, and choose by the result."""

from collections.abc import Callable

import numpy as np

from curvlab_kernels.audit.ptx.arithmetic import (
    BITS_ONLY,
    INTEGERS,
    Build,
    elementwise,
    only,
    pairs,
)
from curvlab_kernels.audit.ptx.machine import Machine, Mask, Step, reader, writer
from curvlab_kernels.audit.ptx.numbers import FLOATS, Array, from_bfloat16
from curvlab_kernels.audit.ptx.program import Instruction, Program

_COMPARE: dict[str, Callable[..., Array]] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}


_JOIN: dict[str, Callable[..., Array]] = {
    "and": np.logical_and,
    "or": np.logical_or,
    "xor": np.logical_xor,
}


def _comparison(instruction: Instruction, name: str, kind: str) -> Callable[..., Array]:
    """Comparisons of floats are false with a NaN; those that end in ``u`` are true."""
    floating = kind in FLOATS
    if name in ("num", "nan") and floating:
        return lambda a, b: (np.isnan(a) | np.isnan(b)) == (name == "nan")
    if name in _COMPARE:
        compare = _COMPARE[name]
        if not (floating and name == "ne"):
            return compare
        return lambda a, b: (a != b) & ~np.isnan(a) & ~np.isnan(b)
    if floating and name[:-1] in _COMPARE and name.endswith("u"):
        compare = _COMPARE[name[:-1]]
        return lambda a, b: compare(a, b) | np.isnan(a) | np.isnan(b)
    if not floating and name in ("lo", "ls", "hi", "hs") and kind[0] == "u":
        return _COMPARE[{"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}[name]]
    raise instruction.unknown()


def _set_predicate(program: Program, instruction: Instruction) -> Step:
    parts = instruction.parts
    kind = parts[-1]
    if kind == "f16x2" and len(parts) == 3:
        return _set_both(program, instruction)
    if kind not in (*FLOATS, "bf16", *INTEGERS, *BITS_ONLY) or "|" in instruction.operands[0]:
        raise instruction.unknown()
    compare = _comparison(instruction, parts[1], "f32" if kind == "bf16" else kind)
    if kind == "bf16":
        on_floats = compare
        compare = lambda a, b: on_floats(from_bfloat16(a), from_bfloat16(b))  # noqa: E731
    if len(parts) == 3:
        return elementwise(program, instruction, compare, [kind, kind])
    if len(parts) != 4 or parts[2] not in _JOIN:
        raise instruction.unknown()
    join = _JOIN[parts[2]]
    return elementwise(
        program, instruction, lambda a, b, p: join(compare(a, b), p), [kind, kind, "pred"]
    )


def _set_both(program: Program, instruction: Instruction) -> Step:
    """``setp`` of packed halves: a predicate for the lower one, and one for the upper."""
    compare = _comparison(instruction, instruction.parts[1], "f16")
    low, _, high = instruction.operands[0].partition("|")
    writes = [writer(program, name) for name in (low, high)]
    reads = [reader(program, text, "b32") for text in instruction.operands[1:]]

    def run(machine: Machine, mask: Mask) -> None:
        halves = [
            np.ascontiguousarray(read(machine)).view(np.float16).reshape(-1, 2) for read in reads
        ]
        for write, holds in zip(writes, compare(*halves).T, strict=True):
            write(machine, holds, mask)

    return run


def _set_packed(program: Program, instruction: Instruction) -> Step:
    """``set`` of packed halves: one where the comparison holds."""
    parts = instruction.parts
    if len(parts) != 4 or parts[2:] != ("f16x2", "f16x2"):
        raise instruction.unknown()
    compare = _comparison(instruction, parts[1], "f16")
    return elementwise(program, instruction, pairs(compare, np.dtype(np.float16)), ["b32", "b32"])


def _select(program: Program, instruction: Instruction) -> Step:
    kind = only(instruction, (), (*FLOATS, *INTEGERS, *BITS_ONLY))

    def chosen(a: Array, b: Array, first: Array) -> Array:
        return np.where(first, a, b)

    return elementwise(program, instruction, chosen, [kind, kind, "pred"])


TABLE: dict[str, Build] = {"setp": _set_predicate, "set": _set_packed, "selp": _select}
