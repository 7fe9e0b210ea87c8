"""The PTX interpreter's whole numbers, one instruction at a time, against Python's integers."""

import numpy as np
import pytest

from tests.ptx_snippets import integers, lanewise


def wrapped(value: int, kind: str) -> int:
    bits = int(kind[1:])
    value %= 1 << bits
    return value - (1 << bits) if kind[0] == "s" and value >> (bits - 1) else value


def toward_zero(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def raised(value: int, by: int) -> int:
    return value << by if by < 64 else 0


INTEGER_CASES = {
    # instruction, types of result and inputs, what it is in integers
    "add": ("add.s32 {0}, {1}, {2};", "s32 s32 s32", lambda a, b: a + b),
    "add 64": ("add.s64 {0}, {1}, {2};", "s64 s64 s64", lambda a, b: a + b),
    "sub": ("sub.s64 {0}, {1}, {2};", "s64 s64 s64", lambda a, b: a - b),
    "mul": ("mul.lo.s32 {0}, {1}, {2};", "s32 s32 s32", lambda a, b: a * b),
    "mul 64": ("mul.lo.s64 {0}, {1}, {2};", "s64 s64 s64", lambda a, b: a * b),
    "mul high": ("mul.hi.u32 {0}, {1}, {2};", "u32 u32 u32", lambda a, b: a * b >> 32),
    "mul high signed": ("mul.hi.s32 {0}, {1}, {2};", "s32 s32 s32", lambda a, b: a * b >> 32),
    "mul high 64": ("mul.hi.u64 {0}, {1}, {2};", "u64 u64 u64", lambda a, b: a * b >> 64),
    "mul high 64 signed": ("mul.hi.s64 {0}, {1}, {2};", "s64 s64 s64", lambda a, b: a * b >> 64),
    "mad high 64": (
        "mad.hi.s64 {0}, {1}, {2}, {3};",
        "s64 s64 s64 s64",
        lambda a, b, c: (a * b >> 64) + c,
    ),
    "mul wide": ("mul.wide.s32 {0}, {1}, {2};", "s64 s32 s32", lambda a, b: a * b),
    "mul wide unsigned": ("mul.wide.u32 {0}, {1}, {2};", "u64 u32 u32", lambda a, b: a * b),
    "mad": ("mad.lo.s64 {0}, {1}, {2}, {3};", "s64 s64 s64 s64", lambda a, b, c: a * b + c),
    "mad wide": ("mad.wide.s32 {0}, {1}, {2}, {3};", "s64 s32 s32 s64", lambda a, b, c: a * b + c),
    "div": ("div.s32 {0}, {1}, {2};", "s32 s32 s32", lambda a, b: toward_zero(a, b) if b else 0),
    "div 64": ("div.u64 {0}, {1}, {2};", "u64 u64 u64", lambda a, b: a // b if b else 0),
    "rem": (
        "rem.s32 {0}, {1}, {2};",
        "s32 s32 s32",
        lambda a, b: a - toward_zero(a, b) * b if b else a,
    ),
    "min": ("min.s64 {0}, {1}, {2};", "s64 s64 s64", min),
    "max": ("max.u32 {0}, {1}, {2};", "u32 u32 u32", max),
    "abs": ("abs.s32 {0}, {1};", "s32 s32", abs),
    "neg": ("neg.s32 {0}, {1};", "s32 s32", lambda a: -a),
    "and": ("and.b32 {0}, {1}, {2};", "u32 u32 u32", lambda a, b: a & b),
    "or": ("or.b64 {0}, {1}, {2};", "u64 u64 u64", lambda a, b: a | b),
    "xor": ("xor.b32 {0}, {1}, {2};", "u32 u32 u32", lambda a, b: a ^ b),
    "not": ("not.b32 {0}, {1};", "u32 u32", lambda a: ~a),
    "not 16": ("not.b16 {0}, {1};", "u16 u16", lambda a: ~a),
    "shl": ("shl.b32 {0}, {1}, {2};", "u32 u32 u32", raised),
    "shr": ("shr.u64 {0}, {1}, {2};", "u64 u64 u32", lambda a, b: a >> b),
    "shr signed": ("shr.s64 {0}, {1}, {2};", "s64 s64 u32", lambda a, b: a >> b),
    "lop3": (
        "lop3.b32 {0}, {1}, {2}, {3}, 0xCA;",
        "u32 u32 u32 u32",
        lambda a, b, c: a & b | ~a & c,
    ),
    "bfe": ("bfe.u32 {0}, {1}, 5, 9;", "u32 u32", lambda a: a >> 5 & 511),
    "bfe signed": (
        "bfe.s64 {0}, {1}, 7, 32;",
        "s64 s64",
        lambda a: wrapped(a >> 7, "s32"),
    ),
    "prmt": (
        "prmt.b32 {0}, {1}, {2}, 0x7450;",
        "u32 u32 u32",
        lambda a, b: (
            (a & 255) | (a >> 8 & 0) | (b >> 8 & 255) << 8 | (b & 255) << 16 | (b >> 24) << 24
        ),
    ),
    "prmt sign": (
        "prmt.b32 {0}, {1}, 0, 0x8888;",
        "u32 u32",
        lambda a: 0xFFFFFFFF if a >> 7 & 1 else 0,
    ),
    "popc": ("popc.b64 {0}, {1};", "u32 u64", lambda a: a.bit_count()),
    "clz": ("clz.b32 {0}, {1};", "u32 u32", lambda a: 32 - a.bit_length()),
    "selp": (
        "setp.lt.s32 %p1, {1}, {2}; selp.b32 {0}, {1}, {2}, %p1;",
        "s32 s32 s32",
        min,
    ),
    "setp with and": (
        "setp.ge.s32 %p1, {1}, 0; setp.gt.and.s32 %p2, {2}, {1}, %p1; selp.b32 {0}, 1, 0, %p2;",
        "s32 s32 s32",
        lambda a, b: int(a >= 0 and b > a),
    ),
    "predicates": (
        "setp.ne.b32 %p1, {1}, 0; setp.eq.s64 %p2, {2}, 0; or.pred %p3, %p1, %p2; "
        "not.pred %p4, %p3; selp.b32 {0}, 1, 0, %p4;",
        "s32 s32 s64",
        lambda a, b: int(not (a != 0 or b == 0)),
    ),
    "guards": (
        "setp.lt.s32 %p1, {1}, 0; mov.b32 {0}, 5; @%p1 add.s32 {0}, {1}, 1; "
        "@!%p1 neg.s32 {0}, {1};",
        "s32 s32",
        lambda a: a + 1 if a < 0 else -a,
    ),
    "mov vector": ("mov.b64 {0}, {{{1}, {2}}};", "u64 u32 u32", lambda a, b: a | b << 32),
    "mov from vector": ("mov.b64 {{_, {0}}}, {1};", "u32 u64", lambda a: a >> 32),
    "cvt signed": ("cvt.s64.s32 {0}, {1};", "s64 s32", lambda a: a),
    "cvt unsigned": ("cvt.u64.u32 {0}, {1};", "u64 u32", lambda a: a),
    "cvt narrow": ("cvt.u32.u64 {0}, {1};", "u32 u64", lambda a: a),
    "cvt byte": ("cvt.s8.s32 {0}, {1};", "s32 s32", lambda a: wrapped(a, "s8")),
    "cvt saturated": (
        "cvt.sat.s8.s32 {0}, {1};",
        "s32 s32",
        lambda a: max(-128, min(127, a)),
    ),
}


@pytest.mark.parametrize("name", INTEGER_CASES)
def test_an_integer_instruction_is_exact(name):
    text, kinds, meaning = INTEGER_CASES[name]
    result, *sources = kinds.split()
    inputs = [integers(kind, seed) for seed, kind in enumerate(sources)]
    actual = lanewise(text, kinds, *inputs)
    expected = [
        wrapped(meaning(*values), result)
        for values in zip(*(each.tolist() for each in inputs), strict=True)
    ]
    assert actual.tolist() == expected


def test_a_product_of_64_bits_in_halves_carries():
    a, b, c = (integers("u32", seed) for seed in (1, 2, 3))
    d = np.roll(c, 5)
    halves = "mad.lo.cc.u32 %r9, {1}, {2}, {3}; madc.hi.u32 %r8, {1}, {2}, {4}; "
    halves += "mov.b64 {0}, {{%r9, %r8}};"
    found = lanewise(halves, "u64 u32 u32 u32 u32", a, b, c, d)
    for x, y, z, w, result in zip(*(each.tolist() for each in (a, b, c, d, found)), strict=True):
        assert result == (x * y + z + (w << 32)) % 2**64


def test_a_funnel_shift_takes_bits_of_both_registers():
    low, high, by = (integers("u32", seed) for seed in (1, 2, 3))
    left = lanewise("shf.l.wrap.b32 {0}, {1}, {2}, {3};", "u32 u32 u32 u32", low, high, by)
    right = lanewise("shf.r.wrap.b32 {0}, {1}, {2}, {3};", "u32 u32 u32 u32", low, high, by)
    for a, b, n, up, down in zip(
        *(each.tolist() for each in (low, high, by, left, right)), strict=True
    ):
        pair = (b << 32) | a
        assert up == (pair << n % 32) >> 32 & 0xFFFFFFFF
        assert down == pair >> n % 32 & 0xFFFFFFFF
