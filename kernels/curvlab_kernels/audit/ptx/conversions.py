"""``cvt``: between integers and floats of every width, one by one or packed in pairs."""

import numpy as np

from curvlab_kernels.audit.ptx.arithmetic import elementwise, flushed
from curvlab_kernels.audit.ptx.machine import Step
from curvlab_kernels.audit.ptx.numbers import (
    FLOATS,
    ROUNDING,
    TYPES,
    Array,
    bits_of,
    from_bfloat16,
    from_float8,
    to_bfloat16,
    to_float8,
    to_integer,
    to_odd,
    toward_zero,
    whole_to_odd,
)
from curvlab_kernels.audit.ptx.program import Instruction, Program

_HALVES = ("f16x2", "bf16x2")
_EIGHTHS = ("e4m3x2", "e5m2x2")


def convert(program: Program, instruction: Instruction) -> Step:
    """Any ``cvt`` that is known."""
    *modifiers, to, source = instruction.parts[1:]
    if to in (*_HALVES, *_EIGHTHS):
        return _packed(program, instruction, modifiers, to, source)
    floating = (*FLOATS, "bf16")
    if to not in (*TYPES, "bf16") or source not in TYPES or "pred" in (to, source):
        raise instruction.unknown()
    if to in floating and source in floating:
        return _between_floats(program, instruction, modifiers, to, source)
    if to in floating:
        if modifiers != ["rn"]:
            raise instruction.unknown()
        if to == "bf16":
            rounded = lambda x: to_bfloat16(to_odd(whole_to_odd(x)))  # noqa: E731
            return elementwise(program, instruction, rounded, [source])
        return elementwise(program, instruction, lambda x: x.astype(TYPES[to]), [source])
    if source in floating:
        mode, *flush = modifiers or [""]
        if mode not in ROUNDING or flush not in ([], ["ftz"]):
            raise instruction.unknown()
        before = from_bfloat16 if source == "bf16" else flushed if flush else np.asarray
        return elementwise(
            program, instruction, lambda x: to_integer(before(x), to, mode), [source]
        )
    return _between_integers(program, instruction, modifiers, to, source)


def _between_integers(
    program: Program, instruction: Instruction, modifiers: list[str], to: str, source: str
) -> Step:
    target = TYPES[to]
    if modifiers == ["sat"]:
        limits = np.iinfo(target)

        def saturated(values: Array) -> Array:
            have = np.iinfo(values.dtype)
            low, high = max(limits.min, have.min), min(limits.max, have.max)
            return np.clip(values, low, high).astype(target)

        return elementwise(program, instruction, saturated, [source])
    if modifiers:
        raise instruction.unknown()
    return elementwise(program, instruction, lambda x: x.astype(target), [source])


def _between_floats(
    program: Program, instruction: Instruction, modifiers: list[str], to: str, source: str
) -> Step:
    if to == source:
        mode, *flush = modifiers or [""]
        if mode not in ROUNDING or flush not in ([], ["ftz"]) or to == "bf16":
            raise instruction.unknown()
        before = flushed if flush else np.asarray
        return elementwise(program, instruction, lambda x: ROUNDING[mode](before(x)), [source])
    if modifiers not in ([], ["rn"], ["rz"]):
        raise instruction.unknown()
    zero = modifiers == ["rz"]
    if source == "bf16":
        return elementwise(
            program, instruction, lambda x: from_bfloat16(x).astype(TYPES[to]), [source]
        )
    if to == "bf16":
        if zero:
            raise instruction.unknown()
        narrow = lambda x: to_bfloat16(to_odd(x) if source == "f64" else x)  # noqa: E731
        return elementwise(program, instruction, narrow, [source])

    def converted(values: Array) -> Array:
        rounded = values.astype(TYPES[to])
        return toward_zero(values, rounded) if zero else rounded

    return elementwise(program, instruction, converted, [source])


def _packed(
    program: Program, instruction: Instruction, modifiers: list[str], to: str, source: str
) -> Step:
    """Two numbers in one register: the first operand is the upper one."""
    if source == "f32" and to in _HALVES and modifiers in (["rn"], ["rz"]):
        zero = modifiers == ["rz"]
        if zero and to == "bf16x2":
            raise instruction.unknown()

        def halves(high: Array, low: Array) -> Array:
            parts = [_half(each, to, zero).astype(np.uint32) for each in (high, low)]
            return (parts[0] << np.uint32(16)) | parts[1]

        return elementwise(program, instruction, halves, ["f32", "f32"])
    if source == "f32" and to in _EIGHTHS and modifiers == ["rn", "satfinite"]:

        def eighths(high: Array, low: Array) -> Array:
            parts = [to_float8(each, to[:4]).astype(np.uint16) for each in (high, low)]
            return (parts[0] << np.uint16(8)) | parts[1]

        return elementwise(program, instruction, eighths, ["f32", "f32"])
    if source in _EIGHTHS and to == "f16x2" and modifiers == ["rn"]:

        def widened(codes: Array) -> Array:
            high, low = codes >> np.uint16(8), codes & np.uint16(255)
            parts = [bits_of(from_float8(each, source[:4])) for each in (high, low)]
            return (parts[0].astype(np.uint32) << np.uint32(16)) | parts[1]

        return elementwise(program, instruction, widened, ["b16"])
    raise instruction.unknown()


def _half(values: Array, kind: str, zero: bool) -> Array:
    if kind == "bf16x2":
        return to_bfloat16(values)
    rounded = values.astype(np.float16)
    return bits_of(toward_zero(values, rounded) if zero else rounded)
