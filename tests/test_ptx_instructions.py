"""The PTX interpreter, one instruction at a time, against exact arithmetic in Python's integers."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from curvlab_kernels.audit.ptx.instructions import TABLE
from curvlab_kernels.audit.ptx.memory import GlobalMemory
from curvlab_kernels.audit.ptx.program import UnknownInstruction, parse
from curvlab_kernels.audit.ptx.report import Fault
from curvlab_kernels.audit.ptx.scheduler import Executable

from tests.ptx_snippets import lanewise, program, run

LANES = 32


def integers(kind: str, seed: int) -> np.ndarray:
    """All corners of a type, and random numbers."""
    dtype = np.dtype(("i" if kind[0] == "s" else "u") + str(int(kind[1:]) // 8))
    limits = np.iinfo(dtype)
    corners = [0, 1, 2, 3, 31, limits.max, limits.max - 1, limits.min, limits.min + 1]
    rng = np.random.default_rng(seed)
    rest = rng.integers(limits.min, limits.max, LANES - len(corners), dtype, endpoint=True)
    return rng.permutation(np.concatenate([np.array(corners, dtype), rest]))


def floats(dtype, seed: int) -> np.ndarray:
    """Magnitudes from subnormal to large, signs, zeros."""
    rng = np.random.default_rng(seed)
    exponents = rng.integers(-12, 12, LANES)
    values = (rng.standard_normal(LANES) * 2.0**exponents).astype(dtype)
    values[:3] = 0.0, -0.0, np.finfo(dtype).smallest_subnormal
    return values


def nearest(exact: Fraction, dtype) -> float:
    """The float nearest to a fraction, ties to even."""
    guess = dtype(float(exact))
    around = [guess, np.nextafter(guess, dtype(np.inf)), np.nextafter(guess, dtype(-np.inf))]
    finite = [each for each in around if np.isfinite(each)]
    bits = f"u{np.dtype(dtype).itemsize}"
    return min(
        finite, key=lambda x: (abs(Fraction(float(x)) - exact), int(np.array(x).view(bits)) & 1)
    )


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


FLOAT_CASES = {
    "add": ("add.{1} {{0}}, {{1}}, {{2}};", 2, lambda a, b: a + b),
    "sub": ("sub.rn.{1} {{0}}, {{1}}, {{2}};", 2, lambda a, b: a - b),
    "mul": ("mul.{1} {{0}}, {{1}}, {{2}};", 2, lambda a, b: a * b),
    "fma": ("fma.rn.{1} {{0}}, {{1}}, {{2}}, {{3}};", 3, lambda a, b, c: a * b + c),
    "div": ("div.rn.{1} {{0}}, {{1}}, {{2}};", 2, lambda a, b: a / b),
}


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("name", FLOAT_CASES)
def test_a_float_instruction_is_rounded_once(name, bits):
    template, count, meaning = FLOAT_CASES[name]
    dtype = {32: np.float32, 64: np.float64}[bits]
    inputs = [floats(dtype, seed) for seed in range(count)]
    if name == "fma":  # most of the product cancels: two roundings would show
        inputs[2] = np.where(np.arange(LANES) % 2, -inputs[0] * inputs[1], inputs[2]).astype(dtype)
    if name == "div":
        inputs[1][:3] = 3.0
    text = template.format("", f"f{bits}")
    actual = lanewise(text, " ".join([f"f{bits}"] * (count + 1)), *inputs)
    for got, *values in zip(actual, *inputs, strict=True):
        exact = meaning(*(Fraction(float(value)) for value in values))
        assert got == nearest(exact, dtype), (values, got)


@pytest.mark.parametrize("kind", ["f32", "f64"])
def test_every_nan_has_the_same_bits_in_whatever_order_operands_come(kind):
    unsigned, real = {"f32": (np.uint32, np.float32), "f64": (np.uint64, np.float64)}[kind]
    b = np.full(LANES, np.nan, real)
    a = (b.view(unsigned) | unsigned(1)).view(real)
    kinds = f"{kind} {kind} {kind}"
    first = lanewise(f"add.{kind} {{0}}, {{1}}, {{2}};", kinds, a, b)
    second = lanewise(f"add.{kind} {{0}}, {{1}}, {{2}};", kinds, b, a)
    assert np.array_equal(first.view(unsigned), second.view(unsigned))


def test_infinities_and_nan_pass_through_a_fused_product():
    a = np.full(LANES, 1e300)
    a[0], a[1] = np.inf, np.nan
    b, c = np.full(LANES, 1e300), np.full(LANES, -1.0)
    result = lanewise("fma.rn.f64 {0}, {1}, {2}, {3};", "f64 f64 f64 f64", a, b, c)
    assert np.isinf(result[0])
    assert np.isnan(result[1])
    assert np.isinf(result[2:]).all()


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        ("sqrt.rn.f32 {0}, {1};", math.sqrt),
        ("sqrt.approx.f32 {0}, {1};", math.sqrt),
        ("rsqrt.approx.f32 {0}, {1};", lambda x: 1 / math.sqrt(x)),
        ("rcp.approx.f32 {0}, {1};", lambda x: 1 / x),
        ("ex2.approx.f32 {0}, {1};", lambda x: 2.0**x),
        ("lg2.approx.f32 {0}, {1};", math.log2),
        ("sin.approx.f32 {0}, {1};", math.sin),
        ("cos.approx.f32 {0}, {1};", math.cos),
    ],
)
def test_a_function_is_rounded_correctly(text, meaning):
    values = np.minimum(np.abs(floats(np.float32, 3)), 100) + np.float32(0.01)
    actual = lanewise(text, "f32 f32", values)
    expected = np.array([meaning(float(value)) for value in values]).astype(np.float32)
    assert np.abs(actual.view(np.int32) - expected.view(np.int32)).max() <= 1


def test_the_approximate_tanh_is_as_inexact_as_documented():
    values = np.minimum(np.abs(floats(np.float32, 3)), 100) + np.float32(0.01)
    actual = lanewise("tanh.approx.f32 {0}, {1};", "f32 f32", values)
    off = np.abs(actual / np.tanh(values.astype(np.float64)) - 1)
    assert 2**-13 < off.max() <= 2**-11


def test_flushing_makes_subnormal_results_zero():
    values = np.full(LANES, -130.0, np.float32)
    plain = lanewise("ex2.approx.f32 {0}, {1};", "f32 f32", values)
    flushed = lanewise("ex2.approx.ftz.f32 {0}, {1};", "f32 f32", values)
    assert (plain > 0).all()
    assert (flushed == 0).all()


def test_minimum_and_maximum_of_floats_pass_over_nan_unless_told():
    a = np.full(LANES, np.nan, np.float32)
    b = np.arange(LANES, dtype=np.float32)
    assert (lanewise("min.f32 {0}, {1}, {2};", "f32 f32 f32", a, b) == b).all()
    assert np.isnan(lanewise("max.NaN.f32 {0}, {1}, {2};", "f32 f32 f32", a, b)).all()


@pytest.mark.parametrize("kind", ["f32", "f16", "bf16"])
def test_of_two_zeros_the_positive_one_is_larger(kind):
    bits = 32 if kind == "f32" else 16
    minus = 1 << (bits - 1)
    a, b = (np.array(each * 8, f"u{bits // 8}") for each in ([0, 0, minus, minus], [0, minus] * 2))
    for name, signs in (("max", a & b), ("min", a | b), ("max.NaN", a & b)):
        text = f"{name}.{kind} {{0}}, {{1}}, {{2}};"
        assert np.array_equal(lanewise(text, f"u{bits} u{bits} u{bits}", a, b), signs), name


def bfloat16(values):
    return torch.from_numpy(values).bfloat16().view(torch.int16).numpy().view(np.uint16)


def widened(bits):
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def test_bfloat16_is_rounded_once_alone_and_in_pairs():
    a, b = (bfloat16(floats(np.float32, seed)) for seed in (0, 1))
    far = bfloat16(widened(a) * widened(b) * np.float32(2**-30))  # what two roundings would lose
    c = np.where(np.arange(LANES) % 2, bfloat16(floats(np.float32, 2)), far)
    a[0], b[0], c[0] = 0x3FC0, 0x3F81, 0x2F80  # 1.5 * 1.0078125 lies halfway; 2^-32 decides
    a[1], b[1], c[1] = 0x3FC0, 0x3F81, 0xAF80
    a[2], b[2], c[2] = 0x7F80, 0x3F80, 0x0000  # infinity
    for name, inputs, meaning in (
        ("add", (a, b), lambda x, y: x + y),
        ("sub", (a, b), lambda x, y: x - y),
        ("mul", (a, b), lambda x, y: x * y),
        ("fma.rn", (a, b, c), lambda x, y, z: x * y + z),
    ):
        operands = ", ".join(f"{{{i}}}" for i in range(len(inputs) + 1))
        kinds = " ".join(["u16"] * (len(inputs) + 1))
        single = lanewise(f"{name}.bf16 {operands};", kinds, *inputs)
        for lane, values in enumerate(zip(*map(widened, inputs), strict=True)):
            if not all(map(np.isfinite, values)):
                assert single[lane] & 0x7FFF == 0x7F80
                continue
            exact = meaning(*(Fraction(float(value)) for value in values))
            got = Fraction(float(widened(single[lane : lane + 1])[0]))
            beside = single[lane] + np.array([-1, 1]).astype(np.uint16)
            others = [Fraction(float(value)) for value in widened(beside)]
            assert all(abs(got - exact) <= abs(each - exact) for each in others), (name, lane)
            if any(abs(got - exact) == abs(each - exact) for each in others):
                assert single[lane] % 2 == 0
        pairs = [np.stack([x, x[::-1]], axis=1).reshape(-1).view(np.uint32) for x in inputs]
        both = lanewise(f"{name}.bf16x2 {operands};", kinds.replace("16", "32"), *pairs)
        halves = both.view(np.uint16).reshape(-1, 2)
        assert np.array_equal(halves[:, 0], single)
        assert np.array_equal(halves[::-1, 1], single)
    text = "setp.gt.bf16 %p1, {1}, {2}; selp.b32 {0}, 1, 0, %p1;"
    assert np.array_equal(lanewise(text, "u32 u16 u16", a, b) == 1, widened(a) > widened(b))


@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize("name", ["add", "sub", "fma"])
def test_sixteen_bits_and_a_float_are_added_with_one_rounding(name, kind):
    narrow = [floats(np.float16, seed) for seed in (0, 1)]
    values = [each.astype(np.float32) for each in narrow]
    if kind == "bf16":
        narrow = [bfloat16(each) for each in values]
        values = [widened(each) for each in narrow]
    count, (a, b), c = 2 if name == "fma" else 1, values, floats(np.float32, 2)
    c[::2] = (a if name == "sub" else -a * b if name == "fma" else -a)[::2] * np.float32(1 + 2**-20)
    texts = {1: "{0}, {1}, {2}", 2: "{0}, {1}, {2}, {3}"}
    kinds = " ".join(["f32", *["u16"] * count, "f32"])
    actual = lanewise(f"{name}.rn.f32.{kind} {texts[count]};", kinds, *narrow[:count], c)
    for got, *factors, last in zip(actual, *values[:count], c, strict=True):
        product = math.prod(Fraction(float(each)) for each in factors)
        exact = product + (-1 if name == "sub" else 1) * Fraction(float(last))
        assert got == nearest(exact, np.float32), (factors, last, got)
    for other in (f"add.rz.f32.{kind}", f"max.f32.{kind}", f"add.ftz.f32.{kind}"):
        with pytest.raises(UnknownInstruction):
            lanewise(f"{other} {texts[1]};", "f32 u16 f32", narrow[0], c)


@pytest.mark.parametrize("name", ["fma", "add"])
def test_sums_toward_zero_are_the_last_float_before_the_exact_one(name):
    a, b, c = (np.clip(floats(np.float32, seed), -1e9, 1e9) for seed in range(3))
    c[::2] = -(a * b)[::2]
    if name == "fma":
        actual = lanewise("fma.rz.f32 {0}, {1}, {2}, {3};", "f32 f32 f32 f32", a, b, c)
    else:
        actual, b = lanewise("add.rz.f32 {0}, {1}, {2};", "f32 f32 f32", a, c), np.ones_like(b)
    for got, *values in zip(actual, a, b, c, strict=True):
        x, y, z = (Fraction(float(value)) for value in values)
        exact = x * y + z
        beyond = np.nextafter(got, np.float32(np.inf if exact > 0 else -np.inf))
        assert abs(Fraction(float(got))) <= abs(exact)
        assert abs(Fraction(float(beyond))) > abs(exact)


@pytest.mark.parametrize(
    ("mode", "meaning"),
    [("rmi", np.floor), ("rpi", np.ceil), ("rzi", np.trunc), ("rni", np.rint)],
)
def test_floats_become_whole_floats(mode, meaning):
    values = floats(np.float32, 4)
    values[np.abs(values) < 1e-30] = 0.5
    values[0] = 1e-40  # of which ``ftz`` makes zero before it is rounded
    plain = lanewise(f"cvt.{mode}.f32.f32 {{0}}, {{1}};", "f32 f32", values)
    assert np.array_equal(plain, meaning(values))
    flushed = lanewise(f"cvt.{mode}.ftz.f32.f32 {{0}}, {{1}};", "f32 f32", values)
    assert flushed[0] == 0
    assert np.array_equal(flushed[1:], plain[1:])


@pytest.mark.parametrize(
    ("comparison", "with_nan"),
    [("lt", 0), ("ltu", 1), ("ne", 0), ("neu", 1), ("nan", 1), ("num", 0)],
)
def test_comparisons_with_nan_are_false_unless_unordered(comparison, with_nan):
    a, b = np.full(LANES, np.nan, np.float32), np.ones(LANES, np.float32)
    text = f"setp.{comparison}.f32 %p1, {{1}}, {{2}}; selp.b32 {{0}}, 1, 0, %p1;"
    assert (lanewise(text, "u32 f32 f32", a, b) == with_nan).all()


def test_packed_arithmetic_treats_both_halves():
    a, b, c = (floats(np.float32, seed) for seed in range(3))
    pairs = [np.stack([x, x[::-1]], axis=1).reshape(-1).view(np.uint64) for x in (a, b, c)]
    for name, count in (("add", 2), ("mul", 2), ("fma", 3)):
        rounding = ".rn" if name == "fma" else ""
        inputs = ", ".join(f"{{{i + 1}}}" for i in range(count))
        text = f"{name}{rounding}.f32x2 {{0}}, {inputs};"
        whole = lanewise(text, " ".join(["u64"] * (count + 1)), *pairs[:count])
        halves = whole.view(np.float32).reshape(-1, 2)
        single = f"{name}{rounding}.f32 {{0}}, {inputs};"
        one = lanewise(single, " ".join(["f32"] * (count + 1)), *(a, b, c)[:count])
        assert np.array_equal(halves[:, 0], one)
        assert np.array_equal(halves[::-1, 1], one)


def test_packed_halves_compare_and_take_the_smaller():
    a, b = floats(np.float16, 1), floats(np.float16, 2)
    a[4] = np.nan
    pairs = [np.stack([x, x[::-1]], axis=1).reshape(-1).view(np.uint32) for x in (a, b)]
    least = lanewise("min.f16x2 {0}, {1}, {2};", "u32 u32 u32", *pairs).view(np.float16)
    assert np.array_equal(least.reshape(-1, 2)[:, 0], np.fmin(a, b))
    flags = lanewise("set.nan.f16x2.f16x2 {0}, {1}, {2};", "u32 u32 u32", *pairs).view(np.float16)
    assert np.array_equal(flags.reshape(-1, 2)[:, 0] == 1, np.isnan(a) | np.isnan(b))


def test_a_minimum_of_magnitudes_may_have_the_sign_of_the_product():
    a, b = floats(np.float32, 1), floats(np.float32, 2)
    actual = lanewise("min.xorsign.abs.f32 {0}, {1}, {2};", "f32 f32 f32", a, b)
    least = np.minimum(np.abs(a), np.abs(b))
    wanted = np.where(np.signbit(a) != np.signbit(b), -least, least)
    assert np.array_equal(actual.view(np.uint32), wanted.view(np.uint32))


def test_packed_halves_set_two_predicates():
    a, b = floats(np.float16, 1), floats(np.float16, 2)
    a[4] = np.nan
    pairs = [np.stack([x, x[::-1]], axis=1).reshape(-1).view(np.uint32) for x in (a, b)]
    for pick in ("%p1", "%p2"):
        text = f"setp.lt.f16x2 %p1|%p2, {{1}}, {{2}}; selp.b32 {{0}}, 1, 0, {pick};"
        holds = lanewise(text, "u32 u32 u32", *pairs) == 1
        assert np.array_equal(holds if pick == "%p1" else holds[::-1], a < b)


def test_a_sign_is_copied_from_the_first_operand():
    a, b = floats(np.float32, 1), floats(np.float32, 2)
    actual = lanewise("copysign.f32 {0}, {1}, {2};", "f32 f32 f32", a, b)
    assert np.array_equal(actual.view(np.uint32), np.copysign(b, a).view(np.uint32))


def test_floats_convert_as_torch_converts_them():
    values = floats(np.float32, 5)
    tensor = torch.from_numpy(values)
    half = lanewise("cvt.rn.f16.f32 {0}, {1};", "f16 f32", values)
    assert np.array_equal(half, tensor.half().numpy())
    back = lanewise("cvt.f32.f16 {0}, {1};", "f32 f16", half)
    assert np.array_equal(back, tensor.half().float().numpy())
    brain = lanewise("cvt.rn.bf16.f32 {0}, {1};", "u16 f32", values)
    assert np.array_equal(brain, tensor.bfloat16().view(torch.int16).numpy().view(np.uint16))
    wide = lanewise("cvt.f32.bf16 {0}, {1};", "f32 u16", brain)
    assert np.array_equal(wide, tensor.bfloat16().float().numpy())
    assert np.array_equal(lanewise("cvt.f64.f32 {0}, {1};", "f64 f32", values), tensor.double())
    doubles = floats(np.float64, 6)
    assert np.array_equal(
        lanewise("cvt.rn.f32.f64 {0}, {1};", "f32 f64", doubles), doubles.astype(np.float32)
    )


@pytest.mark.parametrize(
    ("kind", "dtype"), [("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)]
)
def test_eight_bit_floats_convert_in_pairs_and_saturate(kind, dtype):
    high, low = floats(np.float32, 7) * 100, floats(np.float32, 8)
    high[5] = 1e6
    codes = lanewise(
        f"cvt.rn.satfinite.{kind}x2.f32 {{0}}, {{1}}, {{2}};", "u16 f32 f32", high, low
    )
    largest = torch.finfo(dtype).max
    for values, got in ((high, codes >> 8), (low, codes & 255)):
        wanted = torch.from_numpy(values).clamp(-largest, largest).to(dtype).view(torch.uint8)
        assert np.array_equal(got, wanted.numpy())
    halves = lanewise(f"cvt.rn.f16x2.{kind}x2 {{0}}, {{1}};", "u32 u16", codes).view(np.float16)
    wanted = torch.from_numpy((codes & 255).astype(np.uint8)).view(dtype).half().numpy()
    assert np.array_equal(halves.reshape(-1, 2)[:, 0], wanted)


def test_conversion_toward_zero_never_grows():
    values = floats(np.float32, 9)
    packed = lanewise("cvt.rz.f16x2.f32 {0}, {1}, {1};", "u32 f32", values).view(np.float16)
    cut = packed.reshape(-1, 2)[:, 0].astype(np.float64)
    assert (np.abs(cut) <= np.abs(values.astype(np.float64))).all()
    outward = np.copysign(np.inf, values).astype(np.float16)
    above = np.nextafter(cut.astype(np.float16), outward)
    assert (np.abs(above.astype(np.float64)) > np.abs(values))[3:].all()


@pytest.mark.parametrize("mode", ["rni", "rzi", "rmi", "rpi"])
def test_floats_become_integers_rounded_and_saturated(mode):
    values = floats(np.float32, 10) * 1000
    values[:4] = np.nan, np.inf, -np.inf, 2.5
    actual = lanewise(f"cvt.{mode}.s32.f32 {{0}}, {{1}};", "s32 f32", values)
    how = {"rni": round, "rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil}[mode]
    assert actual[:3].tolist() == [0, 2**31 - 1, -(2**31)]
    assert actual[3:].tolist() == [how(Fraction(float(value))) for value in values[3:]]


def test_integers_become_floats_rounded():
    values = integers("s64", 11)
    actual = lanewise("cvt.rn.f32.s64 {0}, {1};", "f32 s64", values)
    assert [float(x) for x in actual] == [
        float(nearest(Fraction(value), np.float32)) for value in values.tolist()
    ]
    assert np.array_equal(
        lanewise("cvt.rn.f64.s16 {0}, {1};", "f64 u16", integers("u16", 1)),
        integers("u16", 1).view(np.int16).astype(np.float64),
    )


def nearest_bfloat16(exact: Fraction) -> float:
    """The bfloat16 nearest to a fraction, ties to even."""
    guess = int(np.float32(float(exact)).view(np.uint32)) >> 16
    near = np.array([max(guess - 1, 0), guess, guess + 1, guess + 2], np.uint32) << 16
    around = [each for each in near.view(np.float32) if np.isfinite(each)]
    return min(
        around,
        key=lambda x: (abs(Fraction(float(x)) - exact), int(x.view(np.uint32)) >> 16 & 1),
    )


@pytest.mark.parametrize("kind", ["s16", "s32", "u32", "s64", "u64", "f64"])
def test_numbers_become_bfloat16_with_one_rounding(kind):
    """Halfway between two bfloat16 but for a last bit, which a step through float32 would lose."""
    if kind == "f64":
        values = floats(np.float64, 12)
        values[3:6] = 1 + 2**-8 + 2**-40, -1 - 2**-8 - 2**-40, 1 + 2**-8 - 2**-40
    else:
        values = integers(kind, 12)
        top = 2 ** (int(kind[1:]) - 2)
        values[:3] = top + top // 256 + 1, top + top // 256, top + top // 256 - 1
        if kind[0] == "s":
            values[3] = -(top + top // 256 + 1)
    given = values.view(np.uint16) if kind == "s16" else values
    read = kind.replace("s16", "u16")
    actual = lanewise(f"cvt.rn.bf16.{kind} {{0}}, {{1}};", f"u16 {read}", given)
    found = (actual.astype(np.uint32) << 16).view(np.float32)
    assert found.tolist() == [nearest_bfloat16(Fraction(each)) for each in values.tolist()]


def test_bfloat16_becomes_a_whole_number():
    values = torch.tensor([3.75, -3.75, 2.5, float("nan"), 1e30, -1e30, 0.0, 100.0] * 4).bfloat16()
    bits = values.view(torch.int16).numpy().view(np.uint16)
    actual = lanewise("cvt.rzi.s32.bf16 {0}, {1};", "s32 u16", bits)
    assert actual[:8].tolist() == [3, -3, 2, 0, 2**31 - 1, -(2**31), 0, 100]


def test_every_mnemonic_of_the_table_is_tested_here_or_with_the_memories():
    here = {text.split(".")[0].split()[0] for text, _, _ in INTEGER_CASES.values()}
    here |= {"setp", "selp", "cvt", "set", *FLOAT_CASES, "min", "max"}
    here |= {"copysign", "sqrt", "rsqrt", "rcp", "ex2", "lg2", "sin", "cos", "tanh"}
    memories = {
        "mov",
        "ld",
        "st",
        "ldmatrix",
        "stmatrix",
        "shfl",
        "bar",
        "redux",
        "trap",
        "atom",
        "red",
        "madc",
        "shf",
        "cp",
        "mma",
    }
    assert here | memories == set(TABLE)


@pytest.mark.parametrize(
    "text",
    [
        "wgmma.fence.sync.aligned;",
        "mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%d1, %d2}, {%d3}, {%d4}, {%d1, %d2};",
        "cp.async.bulk.commit_group;",
        "add.sat.s32 %r1, %r2, %r3;",
        "add.rm.f32 %r1, %r2, %r3;",
        "mul.rz.f32 %r1, %r2, %r3;",
        "fma.rz.f64 %d1, %d2, %d3, %d4;",
        "fma.rm.f32 %r1, %r2, %r3, %r4;",
        "mul.wide.s64 %d1, %d2, %d3;",
        "ld.const.b32 %r1, [%d1];",
        "mad.hi.cc.u32 %r1, %r2, %r3, %r4;",
        "madc.lo.u32 %r1, %r2, %r3, %r4;",
        "shf.l.clamp.b32 %r1, %r2, %r3, %r4;",
        "atom.global.max.noftz.bf16 %h1, [%a0], %h2;",
        "atom.local.add.u32 %r1, [%d1], %r2;",
        "ld.global.v3.b32 {%r1, %r2, %r3}, [%a0];",
        "setp.lt.s32 %p1|%p2, %r1, %r2;",
        "cvt.rna.tf32.f32 %r1, %r2;",
        "bar.sync 1, 64;",
        "bar.arrive 0, 64;",
        "shfl.down.b32 %r1, %r2, 1, 31;",
        "call foo;",
        ".local .b8 stack[16];",
    ],
)
def test_what_is_not_known_is_refused_and_never_skipped(text):
    with pytest.raises(UnknownInstruction):
        Executable(parse(program(text, 1)))


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


def test_a_conversion_with_ftz_takes_subnormals_for_zeros():
    values = np.zeros(LANES, np.float32)
    values[:3] = np.finfo(np.float32).smallest_subnormal, 0.25, -3.5
    up = lanewise("cvt.rpi.s32.f32 {0}, {1};", "s32 f32", values)
    flushed = lanewise("cvt.rpi.ftz.s32.f32 {0}, {1};", "s32 f32", values)
    assert up[:3].tolist() == [1, 1, -3]
    assert flushed[:3].tolist() == [0, 1, -3]


def test_a_kernel_that_does_not_end_is_an_error_with_its_place():
    forever = "LOOP: add.u32 %r1, %r1, 1; setp.ne.u32 %p1, %t, 5; @%p1 bra DONE; bra LOOP; DONE:"
    with pytest.raises(
        Fault, match=r"k does not end: thread 5 of block 0 has taken 1,00\d instr.*limit="
    ):
        run(forever, limit=1000)
    long = "mov.u32 %r1, 0; LOOP: add.u32 %r1, %r1, 1; setp.lt.u32 %p1, %r1, 400; @%p1 bra LOOP;"
    assert not run(long, limit=1300).findings
    with pytest.raises(Fault, match="does not end"):
        run(long, limit=1200)


def test_an_undeclared_register_and_a_missing_label_are_errors():
    with pytest.raises(ValueError, match="zz"):
        Executable(parse(program("add.s32 %r1, %zz, 1;", 1)))
    with pytest.raises(ValueError, match="no such label"):
        parse(program("bra NOWHERE;", 1))


def test_registers_of_an_inner_scope_hide_the_outer_ones():
    out = np.zeros(LANES, np.uint32)
    body = """
        mov.u32 %r1, 7;
        {
        .reg .b32 %r1, x<2>;
        mov.u32 %r1, 100; mov.u32 x1, 1; add.u32 x1, x1, %r1; mov.u32 %r2, x1;
        }
        add.u32 %r1, %r1, %r2;
        mad.wide.u32 %w0, %t, 4, %a0;
        st.global.b32 [%w0], %r1;
    """
    run(body, out)
    assert (out == 108).all()


def test_loops_run_as_often_as_each_lane_needs():
    out = np.zeros(64, np.uint32)
    body = """
        mov.u32 %r1, 0; mov.u32 %r2, 0;
        LOOP: setp.ge.u32 %p1, %r1, %t;
        @%p1 bra DONE;
        add.u32 %r2, %r2, %r1; add.u32 %r1, %r1, 1;
        bra.uni LOOP;
        DONE: mad.wide.u32 %w0, %t, 4, %a0;
        st.global.b32 [%w0], %r2;
    """
    report = run(body, out, threads=64)
    assert out.tolist() == [i * (i - 1) // 2 for i in range(64)]
    # A warp goes round until its last lane is done: 31 and 63 times.
    assert report.issued["bra.uni"] == 31 + 63


def test_a_program_without_an_end_is_an_error():
    text = program("mov.u32 %r1, 0;", 1).replace("ret;", "")
    with pytest.raises(Fault, match="past its last instruction"):
        Executable(parse(text)).run((1, 1, 1), [0], GlobalMemory([]))
