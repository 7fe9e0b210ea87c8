"""The GPU's numbers in numpy: PTX types, and arithmetic that numpy does not round as a GPU does."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Array = NDArray[Any]

UNSIGNED: dict[int, np.dtype[Any]] = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}
# Registers hold bits; an instruction's type says how to read them. bf16 is arithmetic on bits.
TYPES: dict[str, np.dtype[Any]] = {
    "pred": np.dtype(bool),
    "bf16": np.dtype(np.uint16),
    "f16": np.dtype(np.float16),
    "f32": np.dtype(np.float32),
    "f64": np.dtype(np.float64),
} | {
    f"{kind}{8 * size}": np.dtype(f"{'i' if kind == 's' else 'u'}{size}")
    for kind in "bsu"
    for size in (1, 2, 4, 8)
}
FLOATS = ("f16", "f32", "f64")
_FLOAT8 = {"e4m3": (torch.float8_e4m3fn, 448.0), "e5m2": (torch.float8_e5m2, 57344.0)}


# Float to whole number: nearest, toward zero, down, up.
ROUNDING: dict[str, np.ufunc] = {
    "rni": np.rint,
    "rzi": np.trunc,
    "rmi": np.floor,
    "rpi": np.ceil,
}


def bits_of(values: Array) -> Array:
    """The same bits as unsigned integers; predicates stay."""
    return values if values.dtype == bool else values.view(UNSIGNED[values.dtype.itemsize])


def fused(a: Array, b: Array, c: Array) -> Array:
    """``a * b + c`` with one rounding, for float16, float32 and float64 arrays."""
    return _fused_double(a, b, c) if a.dtype == np.float64 else _wide(a, b, c).astype(a.dtype)


def fused_toward_zero(a: Array, b: Array, c: Array) -> Array:
    """The same for float16 and float32, rounded toward zero."""
    wide = _wide(a, b, c)
    return toward_zero(wide, wide.astype(a.dtype))


def fused_to_odd(a: Array, b: Array, c: Array) -> Array:
    """The same for float32, rounded to odd: for who rounds once more, to fewer bits."""
    return to_odd(_wide(a, b, c))


def to_odd(wide: Array) -> Array:
    """float32 of float64 values, rounded to odd."""
    near = toward_zero(wide, wide.astype(np.float32))
    odd = bits_of(near) | (near != wide).astype(np.uint32)
    return np.where(np.isfinite(near), odd, bits_of(near)).view(np.float32)


def _wide(a: Array, b: Array, c: Array) -> Array:
    # The product is exact in float64; the sum is rounded to odd there, so that the second rounding
    # is the only one that counts (Boldo and Melquiond, 2008).
    product = a.astype(np.float64) * b.astype(np.float64)
    return _sum_to_odd(product, c.astype(np.float64))


def larger(a: Array, b: Array, keep: bool) -> Array:
    """The larger one; of two zeros the positive one. NaN wins if it is to ``keep``, else loses."""
    most = (np.maximum if keep else np.fmax)(a, b)
    return np.where((a == 0) & (b == 0), a + b, most) if a.dtype.kind == "f" else most


def smaller(a: Array, b: Array, keep: bool) -> Array:
    return -larger(-a, -b, keep) if a.dtype.kind == "f" else np.minimum(a, b)


def _two_sum(a: Array, b: Array) -> tuple[Array, Array]:
    """``a + b`` rounded, and the rounding error exactly."""
    total = a + b
    virtual = total - a
    return total, (a - (total - virtual)) + (b - virtual)


def _sum_to_odd(a: Array, b: Array) -> Array:
    """``a + b`` rounded to odd: where inexact, the neighbour whose last bit is one."""
    total, error = _two_sum(a, b)
    bits = total.view(np.int64)
    even = (error != 0) & np.isfinite(error) & ((bits & 1) == 0)
    step = np.where((error > 0) == (total > 0), 1, -1)
    moved: Array = np.where(even, bits + step, bits).view(np.float64)
    return moved


def _fused_double(a: Array, b: Array, c: Array) -> Array:
    product, error = _two_product(a, b)
    high, low = _two_sum(c, error)
    total, rest = _two_sum(product, high)
    exact = total + _sum_to_odd(rest, low)
    plain = product + c
    # Splitting overflows long before the product does; infinities and NaN need no correction.
    return np.where(np.isfinite(exact) & np.isfinite(error), exact, plain)


def _two_product(a: Array, b: Array) -> tuple[Array, Array]:
    product = a * b
    (ah, al), (bh, bl) = _split(a), _split(b)
    return product, ((ah * bh - product) + ah * bl + al * bh) + al * bl


def _split(x: Array) -> tuple[Array, Array]:
    scaled = x * 134217729.0  # 2^27 + 1
    high = scaled - (scaled - x)
    return high, x - high


def toward_zero(values: Array, rounded: Array) -> Array:
    """``rounded``, one step nearer to zero where rounding went away from it."""
    away = np.abs(rounded.astype(np.float64)) > np.abs(values.astype(np.float64))
    bits = bits_of(rounded)
    return np.where(away, bits - np.array(1, bits.dtype), bits).view(rounded.dtype)


def from_bfloat16(bits: Array) -> Array:
    """float32 values of bfloat16 bits."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_bfloat16(values: Array) -> Array:
    """bfloat16 bits of float32 values, rounded to nearest even; NaN becomes the usual one."""
    bits = values.astype(np.float32).view(np.uint32)
    last = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = ((bits + np.uint32(0x7FFF) + last) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FFF), rounded)


def whole_to_odd(values: Array) -> Array:
    """float64 of whole numbers, rounded to odd where they have more than 53 bits."""
    if values.dtype.itemsize < 8:
        return values.astype(np.float64)
    one, rest = (np.array(each, values.dtype) for each in (1 << 11, (1 << 11) - 1))
    long = np.abs(values.astype(np.float64)) >= 2.0**53
    odd = (values & ~rest) | np.where(values & rest, one, 0 * one)
    return np.where(long, odd, values).astype(np.float64)


def from_float8(codes: Array, kind: str) -> Array:
    """float16 values of 8-bit codes."""
    tensor = torch.from_numpy(codes.astype(np.uint8)).view(_FLOAT8[kind][0])
    values: Array = tensor.to(torch.float16).numpy()
    return values


def to_float8(values: Array, kind: str) -> Array:
    """8-bit codes of float32 values, saturating at the largest finite one."""
    dtype, largest = _FLOAT8[kind]
    kept = np.where(np.isnan(values), values, np.clip(values, -largest, largest))
    tensor = torch.from_numpy(np.ascontiguousarray(kept)).to(dtype)
    codes: Array = tensor.view(torch.uint8).numpy()
    return codes


def to_integer(values: Array, kind: str, mode: str) -> Array:
    """Float to integer as ``cvt`` does it: rounded and saturating.

    NaN becomes zero, or, from float64 or to 64 bits, the number of which only the top bit is set.
    """
    target = TYPES[kind]
    limits = np.iinfo(target)
    wide = 8 in (values.dtype.itemsize, target.itemsize)
    nothing = np.array(1 << 8 * target.itemsize - 1 if wide else 0, UNSIGNED[target.itemsize])
    whole = ROUNDING[mode](values.astype(np.float64))
    # The largest 64-bit integer is no float64: what reaches it is set, not converted.
    top = whole >= float(limits.max)
    inside = np.where(np.isnan(whole) | top, 0.0, np.maximum(whole, float(limits.min)))
    found = np.where(top, limits.max, inside.astype(target)).astype(target)
    return np.where(np.isnan(whole), nothing.view(target), found)
