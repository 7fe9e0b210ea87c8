"""How a basis is stored: one padded row per vector, with scales for the one-byte dtypes."""

import torch
from torch import Tensor

CHUNK = 65536  # columns; a multiple of BLOCK, and few enough for float32 sums to keep 7 digits
BLOCK = 64  # columns that share a scale
PADDING = 16  # row lengths are multiples of this, so that 128-bit loads stay aligned

# Largest code of each dtype that is stored with scales.
LEVELS = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}

# CUDA compute capability with which a GPU begins to convert a dtype, where that is not 8.0.
LEAST_CAPABILITY = {torch.float8_e4m3fn: (8, 9)}

# Four times the norm that rounding to a dtype takes from, or adds to, a vector of norm one: what is
# left of a vector after removal of its own rounded copy is smaller than this.
ROUNDING = {
    torch.float16: 1e-3,
    torch.bfloat16: 8e-3,
    torch.int8: 3e-2,
    torch.float8_e4m3fn: 0.12,
    torch.float8_e5m2: 0.25,
}


def padded(n: int) -> int:
    """The row length ``ld`` that holds ``n`` elements."""
    return -(-n // PADDING) * PADDING


def quantise(vectors: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Store ``vectors`` ``(m, n)`` as rows ``(m, ld)`` of ``dtype``, with scales where it has them.

    Returns:
        The rows, and float32 scales ``(m, ceil(ld / 64))`` for int8 and float8, else ``None``.
        Symmetric, largest magnitude of a block on the largest code; a block of zeros has scale 0.
    """
    m, n = vectors.shape
    ld = padded(n)
    rows = torch.zeros(m, ld, dtype=dtype, device=vectors.device)
    if dtype not in LEVELS:
        rows[:, :n] = vectors
        return rows, None
    blocks = -(-ld // BLOCK)
    whole = vectors.new_zeros(m, blocks * BLOCK, dtype=torch.float32)
    whole[:, :n] = vectors
    whole = whole.view(m, blocks, BLOCK)
    scales = whole.abs().amax(-1) / LEVELS[dtype]
    codes = whole / torch.where(scales > 0, scales, 1.0).unsqueeze(-1)
    codes = codes.clamp(-LEVELS[dtype], LEVELS[dtype])
    if dtype == torch.int8:
        codes = codes.round()
    rows.copy_(codes.view(m, blocks * BLOCK)[:, :ld])
    return rows, scales


def dequantise(rows: Tensor, scales: Tensor | None, n: int) -> Tensor:
    """The values of stored rows: ``(m, n)``, float32 (float64 for float64 rows)."""
    dtype = torch.float64 if rows.dtype == torch.float64 else torch.float32
    values = rows[:, :n].to(dtype)
    return values if scales is None else values * expand_scales(scales, slice(0, n))


def expand_scales(scales: Tensor, columns: slice) -> Tensor:
    """One scale per column of the range ``columns``: ``(m, count)``."""
    low = columns.start // BLOCK
    spread = scales[:, low : -(-columns.stop // BLOCK)].repeat_interleave(BLOCK, dim=1)
    return spread[:, columns.start - low * BLOCK : columns.stop - low * BLOCK]
