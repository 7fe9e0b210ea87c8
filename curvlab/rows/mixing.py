"""Linear combinations of stored rows, in float64 and rounded once; in place for a thick restart."""

from typing import TYPE_CHECKING

import torch
from curvlab_kernels import ops
from torch import Tensor

if TYPE_CHECKING:
    from curvlab.rows.orthonormal import Rows

CHUNK = 1 << 12  # columns taken to float64 at a time: they stay in the cache


def mix(rows: "Rows", weights: Tensor, first: int = 0) -> None:
    """See :meth:`Rows.mix`."""
    m, p = weights.shape
    end, kept, whole = first + m, first + p, rows.whole
    if p > m or end > rows.size:
        raise ValueError(f"{m} of {rows.size - first} rows cannot become {p}")
    if whole is not None:
        given = weights.T.to(rows.device).contiguous()
        ops.mix_(whole[0][first:end], given, whole[0][first:kept])
    else:
        weights = torch.cat([weights.new_zeros(first, p), weights])
        for index, row in enumerate(combine(rows, weights, rows.store.working), first):
            rows.put(index, row)
    behind = rows.size - end
    for index in range(behind):  # in this order: a row may move onto one already moved
        rows.put(kept + index, rows.row(end + index))
    rows.store.size = kept + behind


def combine(rows: "Rows", weights: Tensor, dtype: torch.dtype) -> Tensor:
    """See :meth:`Rows.combine`."""
    m, p = weights.shape
    given, whole = weights.T.to(rows.device).contiguous(), rows.whole
    if whole is not None and dtype == rows.dtype:
        found = torch.empty(p, rows.width, dtype=dtype, device=rows.device)
        ops.mix_(whole[0][:m], given, found)
        return found
    if whole is not None and rows.factor is None:
        total = torch.empty(p, rows.width, dtype=torch.float64, device=rows.device)
        for start in range(0, rows.width, CHUNK):
            columns = slice(start, min(start + CHUNK, rows.width))
            torch.mm(given, whole[0][:m, columns].double(), out=total[:, columns])
        return total.to(dtype)
    total = torch.zeros(p, rows.width, dtype=torch.float64, device=rows.device)
    for index in range(m):  # a row at a time: they are not all at hand
        total.addr_(given[:, index], rows.rows(index, index + 1)[0].double())
    return total.to(dtype)
