"""Store vectors as one-byte codes with a scale per 64 columns, and back.

Codes are rounded in float32 arithmetic to values that the stored dtype holds exactly, ties to
even. So the final conversion never rounds, and does not depend on how a GPU would.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from curvlab_kernels import formats
from curvlab_kernels._triton.launch import launch
from curvlab_kernels._triton.tiles import load_codes, load_scales, row_stride
from curvlab_kernels.formats import LEVELS, padded

BLOCKS = 16  # of 64 columns in a tile

# Of the one-byte floats: significant bits, and the spacing of the subnormals.
_FLOAT8 = {torch.float8_e4m3fn: (4, 2.0**-9), torch.float8_e5m2: (3, 2.0**-16)}


def quantise(vectors: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Vectors ``(m, n)`` as rows ``(m, ld)`` of ``dtype``, with scales ``(m, ceil(ld / 64))``.

    Symmetric, the largest magnitude of a block on the largest code. Other dtypes have no scales
    and are a plain conversion.
    """
    if dtype not in LEVELS:
        return formats.quantise(vectors, dtype)
    m, n = vectors.shape
    ld = padded(n)
    rows = torch.empty(m, ld, dtype=dtype, device=vectors.device)
    scales = torch.empty(m, -(-ld // 64), dtype=torch.float32, device=vectors.device)
    bits, spacing = _FLOAT8.get(dtype, (0, 0.0))
    tiles = -(-ld // (64 * BLOCKS))
    stride, unit = row_stride(vectors)
    if m:
        launch(
            quantise_kernel,
            m * tiles,
            vectors,
            rows,
            scales,
            n,
            stride,
            ld // 16,
            scales.shape[1],
            tiles,
            fp_fusion=False,  # the rounding below relies on every operation being rounded
            BLOCKS=BLOCKS,
            UNIT=unit,
            LEVEL=LEVELS[dtype],
            BITS=bits,
            SPACING=spacing,
        )
    return rows, scales


def dequantise(rows: Tensor, scales: Tensor | None, n: int) -> Tensor:
    """The values of stored rows: ``(m, n)``, float32 (float64 for float64 rows)."""
    if scales is None:
        return formats.dequantise(rows, scales, n)
    m, ld = rows.shape
    values = torch.empty(m, n, dtype=torch.float32, device=rows.device)
    tiles = -(-n // 2048)
    if m and n:
        launch(
            dequantise_kernel,
            m * tiles,
            rows,
            scales,
            values,
            n,
            ld // 16,
            scales.shape[1],
            tiles,
            BLOCK=2048,
        )
    return values


@triton.jit
def round_to_float8(x, BITS: tl.constexpr, SPACING: tl.constexpr):
    """The nearest number of ``BITS`` significant bits, or multiple of ``SPACING``; ties to even."""
    split = x * (2.0 ** (24 - BITS) + 1.0)  # Veltkamp: the high part is x rounded to BITS bits
    normal = split - (split - x)
    # Adding a number whose last bit is SPACING leaves no smaller bit.
    magic = SPACING * 12582912.0
    subnormal = (x + magic) - magic
    smallest = SPACING * 2.0 ** (BITS - 1)
    return tl.where(tl.abs(x) < smallest, subnormal, normal)


@triton.jit(do_not_specialize=["n", "vector_ld", "ld16", "scale_ld", "tiles"])
def quantise_kernel(
    vectors,
    rows,
    scales,
    n: tl.int64,
    vector_ld: tl.int64,
    ld16: tl.int64,
    scale_ld: tl.int64,
    tiles,
    BLOCKS: tl.constexpr,
    UNIT: tl.constexpr,
    LEVEL: tl.constexpr,
    BITS: tl.constexpr,
    SPACING: tl.constexpr,
):
    program = tl.program_id(0)
    row = (program // tiles).to(tl.int64)
    block = (program % tiles).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    column = block[:, None] * 64 + tl.arange(0, 64)[None, :]
    at = vectors + row * vector_ld * UNIT + column
    if (program % tiles + 1).to(tl.int64) * (64 * BLOCKS) <= n:
        value = tl.load(at).to(tl.float32)
    else:
        value = tl.load(at, mask=column < n, other=0.0).to(tl.float32)
    scale = tl.div_rn(tl.max(tl.abs(value), axis=1), LEVEL)
    divisor = tl.where(scale > 0.0, scale, 1.0)[:, None]
    code = tl.div_rn(value, tl.broadcast_to(divisor, [BLOCKS, 64]))
    code = tl.minimum(tl.maximum(code, -LEVEL), LEVEL)
    if BITS == 0:
        code = (code + 12582912.0) - 12582912.0  # to the nearest integer, ties to even
    else:
        code = round_to_float8(code, BITS, SPACING)
    ld = ld16 * 16
    tl.store(rows + row * ld + column, code.to(rows.dtype.element_ty), mask=column < ld)
    tl.store(scales + row * scale_ld + block, scale, mask=block < scale_ld)


@triton.jit(do_not_specialize=["n", "ld16", "scale_ld", "tiles"])
def dequantise_kernel(
    rows,
    scales,
    values,
    n: tl.int64,
    ld16: tl.int64,
    scale_ld: tl.int64,
    tiles,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    row = (program // tiles).to(tl.int64) + tl.zeros([1], tl.int64)
    start = (program % tiles).to(tl.int64) * BLOCK
    ld = ld16 * 16
    present = row >= 0
    column = start + tl.arange(0, BLOCK)
    out = values + row[:, None] * n + column[None, :]
    if start + BLOCK <= n:
        codes = load_codes(rows, row, present, ld, start, n, BLOCK, False, tl.float32)
    else:
        codes = load_codes(rows, row, present, ld, start, n, BLOCK, True, tl.float32)
    scale = load_scales(scales, row, present, scale_ld, start, BLOCK, tl.float32)
    value = tl.reshape(tl.reshape(codes, [1, BLOCK // 64, 64]) * scale[:, :, None], [1, BLOCK])
    tl.store(out, value, mask=(column < n)[None, :])
