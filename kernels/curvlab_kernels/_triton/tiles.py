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

SCALE_BLOCK = 64  # columns that share a scale
THREADS = 128  # of a program with four warps
VECTORS = 4  # of a block that a program takes at once


def storage_dtypes(device: torch.device) -> tuple[torch.dtype, ...]:
    """The dtypes of bases that the kernels can read on a CUDA ``device``."""
    capability = torch.cuda.get_device_capability(device)
    return tuple(d for d in STORAGE if capability >= LEAST_CAPABILITY.get(d, (8, 0)))


def work_dtype(vectors: torch.Tensor, rows: torch.Tensor) -> tl.dtype:
    """float64 as soon as one of the two is, else float32."""
    return tl.float64 if torch.float64 in (vectors.dtype, rows.dtype) else tl.float32


def dot_shape(dtype: torch.dtype, m: int, vectors: int, work: tl.dtype) -> tuple[int, int]:
    """Rows and columns of a tile for inner products.

    Chosen from the compiler's output: a thread has 16 to 64 sums in registers, one per element of
    the tile and vector, and nothing is exchanged between threads until the chunk is done. A piece
    of the vector is loaded once for all rows of the tile.
    """
    if work == tl.float64:
        return (16, 128) if vectors == 1 else (8, 128)
    if vectors > 1:
        return (16, 128) if dtype.itemsize > 1 else (8, 256)
    if m <= 8:
        return (8, 512)
    return (32, 128) if dtype.itemsize > 1 else (32, 256)


def combination_shape(dtype: torch.dtype, vectors: int, work: tl.dtype) -> tuple[int, int]:
    """Rows and columns of a tile for ``M' c``: 16 bytes of a row per thread.

    All rows of a tile are then summed within a thread.
    """
    columns = THREADS * 16 // dtype.itemsize
    if work == tl.float64 or vectors > 1:
        return (max(1, 8 * 256 // columns), columns)
    return (4 if dtype.itemsize == 1 else 8, columns)


@triton.jit
def widened(codes, WORK: tl.constexpr):
    """Stored codes as WORK; through float32, because no GPU converts float8 to float64 at once."""
    if codes.dtype.primitive_bitwidth < 32:
        codes = codes.to(tl.float32)
    return codes.to(WORK)


@triton.jit
def load_rows(
    rows,
    scales,
    row,
    present,
    ld,
    scale_ld,
    start,
    n,
    BLOCK: tl.constexpr,
    SCALED: tl.constexpr,
    MASKED: tl.constexpr,
    WORK: tl.constexpr,
):
    """Values ``(ROWS, BLOCK)`` of the rows ``row`` (int64), from column ``start``, as WORK."""
    lane = tl.arange(0, BLOCK)
    pointers = rows + (row * ld + start)[:, None] + lane[None, :]
    if MASKED:
        inside = present[:, None] & (start + lane < ld)[None, :]
        tile = widened(tl.load(pointers, mask=inside, other=0.0), WORK)
        tile = tl.where((start + lane < n)[None, :], tile, 0.0)
    else:
        tile = widened(tl.load(pointers, mask=present[:, None], other=0.0), WORK)
    if SCALED:
        BLOCKS: tl.constexpr = BLOCK // 64
        ROWS: tl.constexpr = row.shape[0]
        block = start // 64 + tl.arange(0, BLOCKS)
        at = scales + (row * scale_ld)[:, None] + block[None, :]
        scale = tl.load(at, mask=present[:, None] & (block < scale_ld)[None, :], other=0.0)
        tile = tl.reshape(tile, [ROWS, BLOCKS, 64]) * scale.to(WORK)[:, :, None]
        tile = tl.reshape(tile, [ROWS, BLOCK])
    return tile


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
    # Of a single vector no stride enters the address: loads stay wide where it is aligned.
    at = vectors + column if VECTORS == 1 else vectors + vector * vector_ld + column
    if MASKED:
        return tl.load(at, mask=column < n, other=0.0)
    return tl.load(at)
