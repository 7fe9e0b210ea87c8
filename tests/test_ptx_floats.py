"""The PTX interpreter's floats, one instruction at a time, against exact fractions."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from curvlab_kernels.audit.ptx import UnknownInstruction

from tests.ptx_snippets import LANES, floats, lanewise, nearest

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
