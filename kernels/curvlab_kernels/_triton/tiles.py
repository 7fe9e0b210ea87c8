"""What the kernels have in common: tiles of the basis, of vectors, and their shapes.

A kernel walks over columns in tiles of ``BLOCK``. Full tiles are loaded without a column mask;
the one tile that ``n`` cuts is loaded under a mask that ends at ``ld``, a multiple of 16. So every
load of the basis is 128 bits wide for every ``n``. Padding is masked after loading: whatever it
holds, it never reaches a sum.

A row's offset, ``row * ld + column``, is computed in int64. Only the lane within a tile is 32 bits.
"""

import torch
import triton
import triton.language as tl

from curvlab_kernels.checks import STORAGE
from curvlab_kernels.formats import LEAST_CAPABILITY

VECTORS = 4  # of a block that a program takes at once


def storage_dtypes(device: torch.device) -> tuple[torch.dtype, ...]:
    """The dtypes of bases that the kernels can read on a CUDA ``device``."""
    capability = torch.cuda.get_device_capability(device)
    return tuple(d for d in STORAGE if capability >= LEAST_CAPABILITY.get(d, (8, 0)))


def work_dtype(vectors: torch.Tensor, rows: torch.Tensor) -> tl.dtype:
    """float64 as soon as one of the two is, else float32."""
    return tl.float64 if torch.float64 in (vectors.dtype, rows.dtype) else tl.float32


def row_stride(vectors: torch.Tensor) -> tuple[int, int]:
    """Elements from one vector of a block to the next, in units of 16 where they divide it, or 1.

    The unit is known when a kernel is compiled: then it loads 128 bits at a time.
    """
    stride = vectors.stride(0) if vectors.ndim == 2 and len(vectors) > 1 else 0
    return (stride // 16, 16) if stride % 16 == 0 else (stride, 1)


@triton.jit
def widened(codes, WORK: tl.constexpr):
    """Stored codes as WORK; through float32, because no GPU converts float8 to float64 at once."""
    if codes.dtype == tl.int8:
        # The byte becomes the last one of 2^23 + 128 + code. GPUs convert integers at a fraction
        # of the rate of the two instructions that this takes.
        byte = codes.to(tl.uint8, bitcast=True).to(tl.int32)
        return ((byte ^ 0x4B000080).to(tl.float32, bitcast=True) - 8388736.0).to(WORK)
    if codes.dtype.primitive_bitwidth < 32:
        codes = codes.to(tl.float32)
    return codes.to(WORK)


@triton.jit
def load_codes(
    rows,
    row,
    present,
    ld,
    start,
    n,
    BLOCK: tl.constexpr,
    MASKED: tl.constexpr,
    WORK: tl.constexpr,
):
    """What is stored ``(ROWS, BLOCK)`` of the rows ``row`` (int64), from column ``start``.

    As WORK; zero where a row is not ``present`` and, with MASKED, from column ``n`` on.
    """
    lane = tl.arange(0, BLOCK)
    pointers = rows + (row * ld + start)[:, None] + lane[None, :]
    if MASKED:
        inside = present[:, None] & (start + lane < ld)[None, :]
        codes = widened(tl.load(pointers, mask=inside, other=0.0), WORK)
        return tl.where((start + lane < n)[None, :], codes, 0.0)
    return widened(tl.load(pointers, mask=present[:, None], other=0.0), WORK)


@triton.jit
def load_scales(scales, row, present, scale_ld, start, BLOCK: tl.constexpr, WORK: tl.constexpr):
    """Scales ``(ROWS, BLOCK // 64)`` of the same tile. They multiply sums, not every code."""
    block = start // 64 + tl.arange(0, BLOCK // 64)
    at = scales + (row * scale_ld)[:, None] + block[None, :]
    inside = present[:, None] & (block < scale_ld)[None, :]
    return tl.load(at, mask=inside, other=0.0).to(WORK)


@triton.jit
def load_piece(
    vectors,
    vector,
    vector_ld,
    start,
    n,
    BLOCK: tl.constexpr,
    VECTORS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Columns ``(BLOCK,)`` from ``start`` of the vector number ``vector`` (int64)."""
    column = start + tl.arange(0, BLOCK)
    at = vectors + column if VECTORS == 1 else vectors + vector * vector_ld + column
    if MASKED:
        return tl.load(at, mask=column < n, other=0.0)
    return tl.load(at)
