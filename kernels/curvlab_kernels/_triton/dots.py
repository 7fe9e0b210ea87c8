"""``c = M g``: inner products of the rows with one vector or a block, in two stages.

Stage one: a program takes a group of rows, up to four vectors and a chunk of at most 64k columns,
and walks over them in tiles. Every element of a tile has its own float32 sum, of at most 512
products; they are added in float64. Of one-byte codes 16 that share a scale, all in one thread, are
summed before it is multiplied, so one multiplication and one sum serve them. Stage two adds the
chunks
(:mod:`curvlab_kernels._triton.sums`). The basis is read once (for a block once per four vectors,
but the first time only from memory: the programs are neighbours and share the L2 cache), a vector
once per group of rows.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from curvlab_kernels._triton.launch import launch
from curvlab_kernels._triton.shapes import SHORT, Tile, shapes, tile
from curvlab_kernels._triton.sums import sum_chunks
from curvlab_kernels._triton.tiles import (
    VECTORS,
    load_codes,
    load_piece,
    load_scales,
    row_stride,
    work_dtype,
)

FEW = 64  # chunks that a consumer can add up by itself, without a launch of stage two
LONGEST = 65536  # columns of a chunk


class Unless(NamedTuple):
    """A condition that the GPU looks at, so that the host need not wait for it.

    Where of every vector at least ``share`` of ``before`` is left in ``after``, both ``(b,)``
    float64, a kernel returns at once: nothing is read and nothing written. Kernels take a share
    of 0 for "in any case".
    """

    before: Tensor
    after: Tensor
    share: float


def undecided(b: int, share: float, device: torch.device) -> Unless:
    """A condition on ``b`` vectors for a kernel to fill in."""
    # On multiples of 16 bytes: kernels are compiled once for all addresses that are.
    left = torch.empty(2, b + b % 2, dtype=torch.float64, device=device)
    return Unless(left[0], left[1], share)


def coefficients(rows: Tensor, vectors: Tensor, scales: Tensor | None = None) -> Tensor:
    """``c = M g``, float64: ``(m,)`` for vectors ``(n,)``, ``(b, m)`` for ``(b, n)``."""
    m = rows.shape[0]
    if m == 0 or vectors.numel() == 0:
        return vectors.new_zeros((*vectors.shape[:-1], m), dtype=torch.float64)
    partials = partial_coefficients(rows, vectors, scales, work_dtype(vectors, rows))
    return sum_chunks(partials.view(partials.shape[0], -1)).view(*vectors.shape[:-1], m)


def chunking(
    n: int, columns: int, groups: int, warps: int, device: torch.device
) -> tuple[int, int]:
    """How many chunks, of how many tiles each, where ``groups`` programs of ``warps`` share one."""
    tiles = -(-n // columns)
    if n <= SHORT:
        per_chunk = -(-tiles // FEW)
    else:
        chosen = shapes(device)
        per_chunk = max(-(-tiles * groups * warps // chosen.warps), chosen.least)
        per_chunk = min(per_chunk, LONGEST // columns)
    return -(-tiles // per_chunk), per_chunk


def dot_tile(rows: Tensor, n: int, name: str, work: tl.dtype) -> Tile:
    """The tile for inner products ``name``; a small one where there is little to do."""
    few = rows.shape[0] <= 8 or n <= SHORT
    return tile("dot short" if few and name != "dots" else name, rows, work)


def partial_coefficients(
    rows: Tensor,
    vectors: Tensor,
    scales: Tensor | None,
    work: tl.dtype,
    squares: bool = False,
    unless: Unless | None = None,
    summed: bool = True,
) -> Tensor:
    """Stage one: ``(chunks, b, m)`` float64, for ``m >= 1`` and ``b >= 1``.

    With ``squares`` ``(chunks, b, m + 1)``, where the last is the sum of a vector's squares. With
    ``unless`` the sums are zero where nothing is read, if somebody is to look at them there.

    Args:
        summed: Whether another launch adds them up even if they are few.
    """
    m, ld = rows.shape
    b, n = vectors.shape if vectors.ndim == 2 else (1, vectors.shape[0])
    tile_vectors = 1 if b == 1 else VECTORS
    chosen = dot_tile(rows, n, "dot" if b == 1 else "dots", work)
    groups = -(-m // chosen.rows)
    vector_groups = -(-b // tile_vectors)
    chunks, tiles = chunking(n, chosen.columns, groups * vector_groups, chosen.warps, rows.device)
    width = m + 1 if squares else m
    stride, unit = row_stride(vectors)
    looked_at = unless is not None and (summed or chunks > FEW)
    empty = torch.zeros if looked_at else torch.empty
    partials = empty(chunks, b, width, dtype=torch.float64, device=rows.device)
    launch(
        partials_kernel,
        chunks * groups * vector_groups,
        rows,
        rows if scales is None else scales,
        vectors,
        partials,
        partials if unless is None else unless.before,
        partials if unless is None else unless.after,
        0.0 if unless is None else unless.share,
        m,
        b,
        n,
        ld // 16,
        0 if scales is None else scales.shape[1],
        stride,
        width,
        groups,
        vector_groups,
        -(-m // groups),
        tiles,
        tile=chosen,
        ROWS=chosen.rows,
        BLOCK=chosen.columns,
        VECTORS=tile_vectors,
        UNIT=unit,
        SCALED=scales is not None,
        SQUARES=squares,
        WORK=work,
    )
    return partials


@triton.jit
def mostly_left(before, after, share, v0, count, VECTORS: tl.constexpr):
    """Whether a pass left at least ``share`` of the squares of all vectors; NaN counts as left."""
    lost = tl.load(after + v0) < share * tl.load(before + v0)
    for more in tl.static_range(1, VECTORS):
        vector = tl.minimum(v0 + more, count - 1)
        lost |= tl.load(after + vector) < share * tl.load(before + vector)
    return lost == 0


@triton.jit(
    do_not_specialize=[
        "share",
        "m",
        "count",
        "n",
        "ld16",
        "scale_ld",
        "vector_ld",
        "width",
        "groups",
        "vector_groups",
        "group_rows",
        "tiles",
    ]
)
def partials_kernel(
    rows,
    scales,
    vectors,
    partials,
    before,
    after,
    share: tl.float64,
    m,
    count,
    n: tl.int64,
    ld16: tl.int64,
    scale_ld: tl.int64,
    vector_ld: tl.int64,
    width,
    groups,
    vector_groups,
    group_rows,
    tiles,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTORS: tl.constexpr,
    UNIT: tl.constexpr,
    SCALED: tl.constexpr,
    SQUARES: tl.constexpr,
    WORK: tl.constexpr,
):
    # Programs that share a piece of the basis or of the vectors are neighbours: they meet in L2.
    program = tl.program_id(0)
    v0 = (program % vector_groups).to(tl.int64) * VECTORS
    if share > 0:
        if mostly_left(before, after, share, v0, count, VECTORS):
            return
    group = program // vector_groups % groups
    chunk = (program // vector_groups // groups).to(tl.int64)
    local = tl.arange(0, ROWS)
    row = (group * group_rows + local).to(tl.int64)
    present = (local < group_rows) & (row < m)
    # Beyond the last vector the last one is taken again, and its result not stored.
    v1 = tl.minimum(v0 + 1, count - 1)
    v2 = tl.minimum(v0 + 2, count - 1)
    v3 = tl.minimum(v0 + 3, count - 1)
    ld = ld16 * 16  # so that the compiler knows it divisible
    vector_ld *= UNIT

    SUMS: tl.constexpr = BLOCK // 16 if SCALED else BLOCK
    c0 = tl.zeros([ROWS, SUMS], WORK)
    c1 = tl.zeros([ROWS, SUMS], WORK)
    c2 = tl.zeros([ROWS, SUMS], WORK)
    c3 = tl.zeros([ROWS, SUMS], WORK)
    s0 = tl.zeros([BLOCK], tl.float64)
    s1 = tl.zeros([BLOCK], tl.float64)
    s2 = tl.zeros([BLOCK], tl.float64)
    s3 = tl.zeros([BLOCK], tl.float64)
    full = n // BLOCK
    first = chunk * tiles
    # fmt: off
    for tile_index in range(first, tl.minimum(first + tiles, full)):
        c0, c1, c2, c3, s0, s1, s2, s3 = add_tile(
            c0, c1, c2, c3, s0, s1, s2, s3, rows, scales, vectors, row, present, v0, v1, v2, v3,
            ld, scale_ld, vector_ld, tile_index * BLOCK, n, BLOCK, VECTORS, SCALED, SQUARES, False,
            WORK)
    if (first + tiles > full) & (full * BLOCK < n):
        c0, c1, c2, c3, s0, s1, s2, s3 = add_tile(
            c0, c1, c2, c3, s0, s1, s2, s3, rows, scales, vectors, row, present, v0, v1, v2, v3,
            ld, scale_ld, vector_ld, full * BLOCK, n, BLOCK, VECTORS, SCALED, SQUARES, True, WORK)
    # fmt: on
    out = partials + (chunk * count + v0) * width
    store_sums(out, c0, s0, row, present, m, group, SQUARES)
    if VECTORS > 1:
        if v0 + 1 < count:
            store_sums(out + width, c1, s1, row, present, m, group, SQUARES)
        if v0 + 2 < count:
            store_sums(out + 2 * width, c2, s2, row, present, m, group, SQUARES)
        if v0 + 3 < count:
            store_sums(out + 3 * width, c3, s3, row, present, m, group, SQUARES)


@triton.jit
def store_sums(out, sums, squares, row, present, m, group, SQUARES: tl.constexpr):
    """Store a chunk's inner products with one vector; the first group of rows, its squares."""
    tl.store(out + row, tl.sum(sums.to(tl.float64), axis=1), mask=present)
    if SQUARES:
        if group == 0:
            tl.store(out + m, tl.sum(squares, axis=0))


@triton.jit
def add_squares(total, piece, SQUARES: tl.constexpr):
    """The squares of a piece of a vector, in float64, where they are wanted."""
    if SQUARES:
        exact = piece.to(tl.float64)
        total += exact * exact
    return total


@triton.jit
def products(codes, scale, piece, SCALED: tl.constexpr):
    """Products of a tile with a piece of a vector: of every column, or with SCALED of every 16."""
    each = codes * piece.to(codes.dtype)[None, :]
    if SCALED:
        ROWS: tl.constexpr = codes.shape[0]
        BLOCK: tl.constexpr = codes.shape[1]
        sums = tl.sum(tl.reshape(each, [ROWS, BLOCK // 64, 4, 16]), axis=3)
        each = tl.reshape(sums * scale[:, :, None], [ROWS, BLOCK // 16])
    return each


@triton.jit
def add_tile(
    c0,
    c1,
    c2,
    c3,
    s0,
    s1,
    s2,
    s3,
    rows,
    scales,
    vectors,
    row,
    present,
    v0,
    v1,
    v2,
    v3,
    ld,
    scale_ld,
    vector_ld,
    start,
    n,
    BLOCK: tl.constexpr,
    VECTORS: tl.constexpr,
    SCALED: tl.constexpr,
    SQUARES: tl.constexpr,
    MASKED: tl.constexpr,
    WORK: tl.constexpr,
):
    """Add the products of one tile with one or four vectors, element by element."""
    tile = load_codes(rows, row, present, ld, start, n, BLOCK, MASKED, WORK)
    scale = tile
    if SCALED:
        scale = load_scales(scales, row, present, scale_ld, start, BLOCK, WORK)
    piece = load_piece(vectors, v0, vector_ld, start, n, BLOCK, VECTORS, MASKED)
    c0 += products(tile, scale, piece, SCALED)
    s0 = add_squares(s0, piece, SQUARES)
    if VECTORS > 1:
        piece = load_piece(vectors, v1, vector_ld, start, n, BLOCK, VECTORS, MASKED)
        c1 += products(tile, scale, piece, SCALED)
        s1 = add_squares(s1, piece, SQUARES)
        piece = load_piece(vectors, v2, vector_ld, start, n, BLOCK, VECTORS, MASKED)
        c2 += products(tile, scale, piece, SCALED)
        s2 = add_squares(s2, piece, SQUARES)
        piece = load_piece(vectors, v3, vector_ld, start, n, BLOCK, VECTORS, MASKED)
        c3 += products(tile, scale, piece, SCALED)
        s3 = add_squares(s3, piece, SQUARES)
    return c0, c1, c2, c3, s0, s1, s2, s3
