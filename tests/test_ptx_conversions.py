"""The PTX interpreter's conversions between numbers of every width, against exact fractions."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from tests.ptx_snippets import LANES, floats, integers, lanewise, nearest


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


@pytest.mark.parametrize(
    ("source", "to", "nothing"),
    [
        ("f32", "s32", 0),
        ("f32", "u32", 0),
        ("f32", "s64", -(2**63)),
        ("f32", "u64", 2**63),
        ("f64", "s32", -(2**31)),
        ("f64", "u32", 2**31),
        ("f64", "s64", -(2**63)),
    ],
)
def test_nan_becomes_what_the_manual_says(source, to, nothing):
    values = np.full(LANES, np.nan, np.float32 if source == "f32" else np.float64)
    values[1::2] = 3.75
    actual = lanewise(f"cvt.rzi.{to}.{source} {{0}}, {{1}};", f"{to} {source}", values)
    assert actual[:2].tolist() == [nothing, 3]


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


def test_a_conversion_with_ftz_takes_subnormals_for_zeros():
    values = np.zeros(LANES, np.float32)
    values[:3] = np.finfo(np.float32).smallest_subnormal, 0.25, -3.5
    up = lanewise("cvt.rpi.s32.f32 {0}, {1};", "s32 f32", values)
    flushed = lanewise("cvt.rpi.ftz.s32.f32 {0}, {1};", "s32 f32", values)
    assert up[:3].tolist() == [1, 1, -3]
    assert flushed[:3].tolist() == [0, 1, -3]
