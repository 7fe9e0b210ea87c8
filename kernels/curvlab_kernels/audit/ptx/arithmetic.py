"""Instructions that compute numbers.

Approximate functions (``ex2.approx`` and the like) are rounded correctly here; a GPU may differ by
an ulp or two, ``sin`` and ``cos`` by 2^-20.5. ``tanh.approx`` is as inexact as its documentation
allows: cut to twelve bits, off by less than 2^-11 of its value.
"""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import numpy as np

from curvlab_kernels.audit.ptx.machine import Machine, Mask, Step, reader, writer
from curvlab_kernels.audit.ptx.numbers import (
    FLOATS,
    TYPES,
    UNSIGNED,
    Array,
    from_bfloat16,
    fused,
    fused_to_odd,
    fused_toward_zero,
    larger,
    smaller,
    to_bfloat16,
)
from curvlab_kernels.audit.ptx.program import BITS, CARRY, Instruction, Program

Build = Callable[[Program, Instruction], Step]
_PACKED: dict[str, tuple[str, np.dtype[Any]]] = {
    "f32x2": ("b64", np.dtype(np.float32)),
    "f16x2": ("b32", np.dtype(np.float16)),
    "bf16x2": ("b32", np.dtype(np.uint16)),
}
INTEGERS = tuple(kind + bits for kind in "su" for bits in ("16", "32", "64"))
BITS_ONLY = ("b16", "b32", "b64")


def elementwise(
    program: Program, instruction: Instruction, function: Callable[..., Array], kinds: Sequence[str]
) -> Step:
    """``function`` of the operands after the first, read as ``kinds``."""
    if len(kinds) != len(instruction.operands) - 1:
        raise instruction.unknown("has another number of operands than expected")
    sources = [
        reader(program, text, kind)
        for text, kind in zip(instruction.operands[1:], kinds, strict=True)
    ]
    write = writer(program, instruction.operands[0])

    def run(machine: Machine, mask: Mask) -> None:
        write(machine, function(*[read(machine) for read in sources]), mask)

    return run


def only(instruction: Instruction, modifiers: Collection[str], kinds: Collection[str]) -> str:
    """The instruction's type, after a check that nothing in its opcode is unknown."""
    kind = instruction.parts[-1]
    if kind not in kinds or not set(instruction.parts[1:-1]) <= set(modifiers):
        raise instruction.unknown()
    return kind


def _arithmetic(
    on_numbers: Callable[..., Array],
    *,
    integers: bool = True,
    widened: Callable[..., Array] | None = None,
) -> Build:
    """An operation that means the same for every type; packed pairs included.

    Args:
        widened: Of float32, for what is rounded to bfloat16 afterwards: sums and products may be
            rounded twice, with 24 bits between (Figueroa, 1995).
    """

    def build(program: Program, instruction: Instruction) -> Step:
        if instruction.parts in (("add", "rz", "f32"), ("add", "rz", "ftz", "f32")):
            return _toward_zero(program, instruction, lambda a, b: (a, np.ones(1, a.dtype), b))
        if instruction.parts[0] in ("add", "sub", "fma") and instruction.parts[-2:-1] == ("f32",):
            return _mixed(program, instruction, on_numbers)
        allowed = (*FLOATS, "bf16", *_PACKED, *(INTEGERS if integers else ()))
        kind = only(instruction, ("rn", *(("ftz",) if "f32" in instruction.parts else ())), allowed)
        count = len(instruction.operands) - 1
        function = on_numbers if kind in INTEGERS else _one_nan(on_numbers)
        if kind.startswith("bf16"):
            function = _on_bfloat16(widened or on_numbers)
        if kind in _PACKED:
            whole, part = _PACKED[kind]
            return elementwise(program, instruction, pairs(function, part), [whole] * count)
        return elementwise(program, instruction, _flushing(function, instruction), [kind] * count)

    return build


def _mixed(program: Program, instruction: Instruction, function: Callable[..., Array]) -> Step:
    """``add.rn.f32.bf16`` and the like: 16-bit numbers and, last, a float32; rounded once."""
    kind = instruction.parts[-1]
    if kind not in ("f16", "bf16") or not set(instruction.parts[1:-2]) <= {"rn"}:
        raise instruction.unknown()
    kinds = [kind] * (len(instruction.operands) - 2) + ["f32"]

    def widened(values: Array) -> Array:
        return from_bfloat16(values) if kind == "bf16" else values.astype(np.float32)

    on_floats = _one_nan(lambda *values: function(*map(widened, values[:-1]), values[-1]))
    return elementwise(program, instruction, on_floats, kinds)


def _one_nan(function: Callable[..., Array]) -> Callable[..., Array]:
    """Every NaN becomes the same bits, as on a GPU: a CPU's depend on the order of operands."""

    def run(*values: Array) -> Array:
        result = function(*values)
        if np.isfinite(np.add.reduce(result, axis=None)):  # quicker than to look at each
            return result
        return np.where(np.isnan(result), result.dtype.type(np.nan), result)

    return run


def _on_bfloat16(function: Callable[..., Array]) -> Callable[..., Array]:
    return lambda *bits: to_bfloat16(function(*map(from_bfloat16, bits)))


def pairs(function: Callable[..., Array], part: np.dtype[Any]) -> Callable[..., Array]:
    def on_pairs(*values: Array) -> Array:
        split = [np.ascontiguousarray(each).view(part).reshape(-1, 2) for each in values]
        result = np.ascontiguousarray(function(*split).astype(part))
        return result.view(UNSIGNED[2 * part.itemsize]).reshape(-1)

    return on_pairs


def _multiply(program: Program, instruction: Instruction) -> Step:
    """``mul`` and ``mad`` of integers: low, high or whole products; ``mul`` of floats."""
    parts, adds = instruction.parts, instruction.parts[0] == "mad"
    if "cc" in parts:
        return _carrying(program, instruction)
    if parts[-1] in (*FLOATS, "bf16", *_PACKED) and not adds:
        return _arithmetic(np.multiply)(program, instruction)
    kind = only(instruction, ("lo", "hi", "wide"), INTEGERS)
    if len(parts) != 3:
        raise instruction.unknown()
    how, bits = parts[1], BITS[kind]
    if how == "wide" and bits == 64:
        raise instruction.unknown()
    wide = f"{kind[0]}{2 * bits}"
    added = wide if how == "wide" else kind

    def product(a: Array, b: Array) -> Array:
        if how == "lo":
            return np.multiply(a, b)
        if bits == 64:
            return _high(a, b)
        whole: Array = np.multiply(a.astype(TYPES[wide]), b.astype(TYPES[wide]))
        high: Array = np.right_shift(whole, np.array(bits, whole.dtype)).astype(a.dtype)
        return whole if how == "wide" else high

    if not adds:
        return elementwise(program, instruction, product, [kind, kind])
    return elementwise(program, instruction, lambda a, b, c: product(a, b) + c, [kind, kind, added])


def _high(a: Array, b: Array) -> Array:
    """The upper half of the product of 64-bit integers, from products of their halves."""
    half, low = np.uint64(32), np.uint64(2**32 - 1)
    x, y = a.view(np.uint64), b.view(np.uint64)
    first = (x >> half) * (y & low) + ((x & low) * (y & low) >> half)
    second = (x & low) * (y >> half) + (first & low)
    high = (x >> half) * (y >> half) + (first >> half) + (second >> half)
    # A negative number is read as 2^64 more than it is.
    signed: Array = (high - y * (a < 0) - x * (b < 0)).view(a.dtype)
    return signed


def _carrying(program: Program, instruction: Instruction) -> Step:
    """``mad.lo.cc`` and ``madc.hi``: a product of 64 bits in two halves, with the carry between."""
    first = instruction.parts == ("mad", "lo", "cc", "u32")
    if not first and instruction.parts != ("madc", "hi", "u32"):
        raise instruction.unknown()
    sources = [reader(program, text, "u32") for text in instruction.operands[1:]]
    write, carry = writer(program, instruction.operands[0]), reader(program, CARRY, "pred")
    carries = writer(program, CARRY)

    def run(machine: Machine, mask: Mask) -> None:
        a, b, c = (read(machine).astype(np.uint64) for read in sources)
        product = a * b
        if first:
            total = (product & np.uint64(2**32 - 1)) + c
            carries(machine, total > np.uint64(2**32 - 1), mask)
        else:
            total = (product >> np.uint64(32)) + c + carry(machine)
        write(machine, total.astype(np.uint32), mask)

    return run


def _toward_zero(
    program: Program, instruction: Instruction, factors: Callable[..., tuple[Array, ...]]
) -> Step:
    """``a * b + c`` of float32 without rounding up; ``factors`` makes those three."""
    function = _one_nan(lambda *values: fused_toward_zero(*factors(*values)))
    kinds = ["f32"] * (len(instruction.operands) - 1)
    return elementwise(program, instruction, _flushing(function, instruction), kinds)


def _fma(program: Program, instruction: Instruction) -> Step:
    parts = instruction.parts
    if parts in (("fma", "rz", "f32"), ("fma", "rz", "ftz", "f32")):
        return _toward_zero(program, instruction, lambda *factors: factors)
    if "rn" not in parts:
        raise instruction.unknown("rounds in a way that is not known")
    return _arithmetic(fused, integers=False, widened=fused_to_odd)(program, instruction)


def _divide(program: Program, instruction: Instruction) -> Step:
    kind = only(instruction, ("rn", "full", "approx", "ftz"), ("f32", "f64", *INTEGERS))
    function = np.divide if kind in FLOATS else _quotient
    return elementwise(program, instruction, _flushing(function, instruction), [kind, kind])


def _quotient(a: Array, b: Array) -> Array:
    """Rounded toward zero; a division by zero has no defined result, here zero."""
    whole = np.floor_divide(a, np.where(b == 0, np.array(1, b.dtype), b))
    inexact = whole * b != a
    return np.where(b == 0, 0, whole + (inexact & ((a < 0) != (b < 0)))).astype(a.dtype)


def _remainder(program: Program, instruction: Instruction) -> Step:
    kind = only(instruction, (), INTEGERS)
    return elementwise(program, instruction, lambda a, b: a - _quotient(a, b) * b, [kind, kind])


def _signed_as_product(of_magnitudes: Callable[..., Array]) -> Callable[..., Array]:
    def run(a: Array, b: Array) -> Array:
        signs = np.where(np.signbit(a) != np.signbit(b), a.dtype.type(-1), a.dtype.type(1))
        signed: Array = np.copysign(of_magnitudes(np.abs(a), np.abs(b)), signs)
        return signed

    return run


def _extreme(function: Callable[..., Array]) -> Build:
    """``min`` and ``max`` of two or three; NaN loses unless the opcode says ``NaN``."""

    def build(program: Program, instruction: Instruction) -> Step:
        two: Callable[..., Array] = partial(function, keep="NaN" in instruction.parts)
        parts = tuple(part for part in instruction.parts if part != "NaN")
        if parts[1:3] == ("xorsign", "abs") and parts[-1] == "f32":
            parts, two = (parts[0], *parts[3:]), _signed_as_product(two)
        plain = Instruction(parts, instruction.operands, None, instruction.text, instruction.source)
        if len(instruction.operands) == 4:
            return _arithmetic(lambda a, b, c: two(two(a, b), c))(program, plain)
        return _arithmetic(two)(program, plain)

    return build


def _function(function: Callable[[Array], Array], modifiers: Collection[str]) -> Build:
    def build(program: Program, instruction: Instruction) -> Step:
        kind = only(instruction, modifiers, ("f32", "f64"))
        dtype = TYPES[kind]

        def run(values: Array) -> Array:
            return function(values.astype(np.float64)).astype(dtype)

        return elementwise(program, instruction, _flushing(run, instruction), [kind])

    return build


def _flushing(function: Callable[..., Array], instruction: Instruction) -> Callable[..., Array]:
    """With ``ftz`` numbers too small for a full mantissa are zeros, coming in and going out."""
    if "ftz" not in instruction.parts:
        return function
    return lambda *values: flushed(function(*map(flushed, values)))


def flushed(values: Array) -> Array:
    tiny = np.abs(values) < np.finfo(values.dtype).tiny
    return np.where(tiny, np.copysign(values.dtype.type(0), values), values)


def _coarse_tanh(values: Array) -> Array:
    bits = np.tanh(values).view(np.uint64)
    return (bits & ~np.uint64(2**41 - 1)).view(np.float64)


_APPROXIMATE = ("approx", "ftz")
TABLE: dict[str, Build] = {
    "add": _arithmetic(np.add),
    "sub": _arithmetic(np.subtract),
    "mul": _multiply,
    "mad": _multiply,
    "madc": _carrying,
    "fma": _fma,
    "div": _divide,
    "rem": _remainder,
    "min": _extreme(smaller),
    "max": _extreme(larger),
    "abs": _arithmetic(np.abs),
    "neg": _arithmetic(np.negative),
    "copysign": lambda program, instruction: elementwise(
        program,
        instruction,
        lambda sign, of: np.copysign(of, sign),
        [only(instruction, (), ("f32", "f64"))] * 2,
    ),
    "sqrt": _function(np.sqrt, ("rn", *_APPROXIMATE)),
    "rsqrt": _function(lambda x: 1 / np.sqrt(x), _APPROXIMATE),
    "rcp": _function(np.reciprocal, ("rn", *_APPROXIMATE)),
    "ex2": _function(np.exp2, _APPROXIMATE),
    "lg2": _function(np.log2, _APPROXIMATE),
    "sin": _function(np.sin, _APPROXIMATE),
    "cos": _function(np.cos, _APPROXIMATE),
    "tanh": _function(_coarse_tanh, ("approx",)),
}
