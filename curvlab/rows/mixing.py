"""Linear combinations of stored rows, in float64 and rounded once; in place for a thick restart."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from curvlab.rows.orthonormal import Rows

CHUNK = 16384  # columns taken to float64 at a time on a CPU: they stay in the cache
ROOM_BYTES = 1 << 28  # of float64 on other devices, where every chunk is three launches


def mix(rows: "Rows", weights: Tensor) -> None:
    """See :meth:`Rows.mix`."""
    m, p = weights.shape
    if p > m or m > rows.size:
        raise ValueError(f"{m} of {rows.size} rows cannot become {p}")
    behind = rows.size - m
    whole = rows.whole
    if whole is not None and rows.factor is None:
        into(whole[0][:m], weights, whole[0][:p])
    else:
        for index, row in enumerate(combine(rows, weights, rows.store.working)):
            rows.put(index, row)
    for index in range(behind):  # in this order: a row may move onto one already moved
        rows.put(p + index, rows.row(m + index))
    rows.store.size = p + behind


def combine(rows: "Rows", weights: Tensor, dtype: torch.dtype) -> Tensor:
    """See :meth:`Rows.combine`."""
    m, p = weights.shape
    found = torch.zeros(p, rows.width, dtype=dtype, device=rows.device)
    whole = rows.whole
    if whole is not None and rows.factor is None:
        into(whole[0][:m, : rows.width], weights, found)
        return found
    total = torch.zeros(p, rows.width, dtype=torch.float64, device=rows.device)
    given = weights.to(rows.device)
    for index in range(m):  # a row at a time: they are not all at hand
        total.addr_(given[index], rows.rows(index, index + 1)[0].double())
    return found.copy_(total)


def into(rows: Tensor, weights: Tensor, target: Tensor) -> None:
    """``target[i] = sum_j weights[j, i] rows[j]`` in float64, rounded once; may be in place.

    Args:
        rows: Shape ``(m, n)``.
        weights: Shape ``(m, p)``, float64.
        target: Shape ``(p, n)``; may be the first ``p`` of ``rows``.
    """
    (m, p), n = weights.shape, rows.shape[1]
    if m == 0 or p == 0:
        target.zero_()
        return
    transposed = weights.T.to(rows.device).contiguous()
    at_once = CHUNK if rows.device.type == "cpu" else max(CHUNK, ROOM_BYTES // (8 * (m + p)))
    # Allocated once: new memory for every chunk costs more than the arithmetic.
    wide = transposed.new_empty(m * min(at_once, n))
    mixed = transposed.new_empty(p * min(at_once, n))
    for start in range(0, n, at_once):
        width = min(at_once, n - start)
        columns = slice(start, start + width)
        given, found = wide[: m * width].view(m, width), mixed[: p * width].view(p, width)
        given.copy_(rows[:, columns])
        torch.mm(transposed, given, out=found)
        target[:, columns].copy_(found)
