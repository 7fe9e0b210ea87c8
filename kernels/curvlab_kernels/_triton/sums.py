"""Stage two of every reduction: partial sums of chunks, added in float64 in a fixed order.

No atomics: the result does not depend on which program finished first, nor on the GPU.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from curvlab_kernels._triton.launch import launch


def sum_chunks(partials: Tensor) -> Tensor:
    """Sum over the first dimension: ``(chunks, width)`` float64 to ``(width,)`` float64."""
    chunks, width = partials.shape
    sums = torch.empty(width, dtype=torch.float64, device=partials.device)
    # Many chunks at once: a step of the loop waits for memory, and there are few programs.
    step, columns = (2048, 1) if width == 1 else (512, 4)
    launch(
        sum_kernel,
        -(-width // columns),
        partials,
        sums,
        chunks,
        width,
        CHUNKS=step,
        WIDTH=columns,
    )
    return sums


@triton.jit(do_not_specialize=["chunks", "width"])
def sum_kernel(
    partials,
    sums,
    chunks: tl.int64,
    width: tl.int64,
    CHUNKS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    column = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    chunk = tl.arange(0, CHUNKS)
    total = tl.zeros([CHUNKS, WIDTH], tl.float64)
    for first in range(0, chunks, CHUNKS):
        at = (first + chunk).to(tl.int64)
        mask = (at < chunks)[:, None] & (column < width)[None, :]
        total += tl.load(partials + at[:, None] * width + column[None, :], mask=mask, other=0.0)
    tl.store(sums + column, tl.sum(total, axis=0), mask=column < width)
