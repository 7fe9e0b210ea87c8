"""The compiled loops for int8 rows, in which 64 columns share a scale.

A tile is cut into blocks of 64 columns, counted from the row's first column; a vector that starts
within a block (one tensor of a list) begins and ends with a part of one.
"""

from typing import Any

import numpy as np

from curvlab_kernels._cpu.compiled import BLOCK, TILE, compiled


def _dot(row: Any, vector: Any, zero: Any) -> Any:
    total = zero
    for j in range(vector.shape[0]):
        total += np.float32(row[j]) * vector[j]
    return total


def _add(row: Any, weight: Any, vector: Any) -> None:
    for j in range(vector.shape[0]):
        vector[j] -= np.float32(row[j]) * weight


_dot_part = compiled(_dot)
_add_part = compiled(_add)


def _accumulate(
    rows: Any, scales: Any, vector: Any, total: Any, zero: Any, first: int, start: int, stop: int
) -> None:
    """``total += (rows * scales)[:, first + start : first + stop] @ vector[start:stop]``."""
    m = rows.shape[0]
    for low in range(start, stop, TILE):
        high = min(low + TILE, stop)
        head = min(low + (-(first + low)) % BLOCK, high)  # columns before the first whole block
        blocks = (high - head) // BLOCK
        tail = head + blocks * BLOCK
        whole = vector[head:tail]
        column, block = first + head, (first + head) // BLOCK
        for i in range(m):  # the parts of blocks at both ends
            if low < head:
                part = _dot_part(rows[i, first + low : column], vector[low:head], zero)
                total[i] += part * scales[i, (first + low) // BLOCK]
            if tail < high:
                part = _dot_part(rows[i, first + tail : first + high], vector[tail:high], zero)
                total[i] += part * scales[i, (first + tail) // BLOCK]
        i = 0
        while i + 4 <= m:
            row0, scale0 = rows[i, column:], scales[i, block:]
            row1, scale1 = rows[i + 1, column:], scales[i + 1, block:]
            row2, scale2 = rows[i + 2, column:], scales[i + 2, block:]
            row3, scale3 = rows[i + 3, column:], scales[i + 3, block:]
            sum0, sum1, sum2, sum3 = zero, zero, zero, zero
            for b in range(blocks):
                part0, part1, part2, part3 = zero, zero, zero, zero
                for j in range(b * BLOCK, b * BLOCK + BLOCK):
                    element = whole[j]
                    part0 += np.float32(row0[j]) * element
                    part1 += np.float32(row1[j]) * element
                    part2 += np.float32(row2[j]) * element
                    part3 += np.float32(row3[j]) * element
                sum0 += part0 * scale0[b]
                sum1 += part1 * scale1[b]
                sum2 += part2 * scale2[b]
                sum3 += part3 * scale3[b]
            total[i] += sum0
            total[i + 1] += sum1
            total[i + 2] += sum2
            total[i + 3] += sum3
            i += 4
        while i < m:
            row0, scale0 = rows[i, column:], scales[i, block:]
            sum0 = zero
            for b in range(blocks):
                part0 = zero
                for j in range(b * BLOCK, b * BLOCK + BLOCK):
                    part0 += np.float32(row0[j]) * whole[j]
                sum0 += part0 * scale0[b]
            total[i] += sum0
            i += 1


def _subtract(
    rows: Any, scales: Any, weights: Any, vector: Any, first: int, start: int, stop: int
) -> None:
    """``vector[start:stop] -= weights @ (rows * scales)[:, first + start : first + stop]``."""
    m = rows.shape[0]
    for low in range(start, stop, TILE):
        high = min(low + TILE, stop)
        head = min(low + (-(first + low)) % BLOCK, high)
        blocks = (high - head) // BLOCK
        tail = head + blocks * BLOCK
        whole = vector[head:tail]
        column, block = first + head, (first + head) // BLOCK
        for i in range(m):
            if low < head:
                weight = weights[i] * scales[i, (first + low) // BLOCK]
                _add_part(rows[i, first + low : column], weight, vector[low:head])
            if tail < high:
                weight = weights[i] * scales[i, (first + tail) // BLOCK]
                _add_part(rows[i, first + tail : first + high], weight, vector[tail:high])
        i = 0
        while i + 4 <= m:
            row0, scale0 = rows[i, column:], scales[i, block:]
            row1, scale1 = rows[i + 1, column:], scales[i + 1, block:]
            row2, scale2 = rows[i + 2, column:], scales[i + 2, block:]
            row3, scale3 = rows[i + 3, column:], scales[i + 3, block:]
            for b in range(blocks):
                w0, w1 = weights[i] * scale0[b], weights[i + 1] * scale1[b]
                w2, w3 = weights[i + 2] * scale2[b], weights[i + 3] * scale3[b]
                for j in range(b * BLOCK, b * BLOCK + BLOCK):
                    whole[j] -= (np.float32(row0[j]) * w0 + np.float32(row1[j]) * w1) + (
                        np.float32(row2[j]) * w2 + np.float32(row3[j]) * w3
                    )
            i += 4
        while i < m:
            row0, scale0 = rows[i, column:], scales[i, block:]
            for b in range(blocks):
                w0 = weights[i] * scale0[b]
                for j in range(b * BLOCK, b * BLOCK + BLOCK):
                    whole[j] -= np.float32(row0[j]) * w0
            i += 1


accumulate = compiled(_accumulate)
subtract = compiled(_subtract)
