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
    last = m - 1
    sums = np.zeros(8, np.float64)
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
        for i in range(0, m, 8):
            row0, scale0 = rows[i, column:], scales[i, block:]
            row1, scale1 = rows[min(i + 1, last), column:], scales[min(i + 1, last), block:]
            row2, scale2 = rows[min(i + 2, last), column:], scales[min(i + 2, last), block:]
            row3, scale3 = rows[min(i + 3, last), column:], scales[min(i + 3, last), block:]
            row4, scale4 = rows[min(i + 4, last), column:], scales[min(i + 4, last), block:]
            row5, scale5 = rows[min(i + 5, last), column:], scales[min(i + 5, last), block:]
            row6, scale6 = rows[min(i + 6, last), column:], scales[min(i + 6, last), block:]
            row7, scale7 = rows[min(i + 7, last), column:], scales[min(i + 7, last), block:]
            sum0, sum1, sum2, sum3 = zero, zero, zero, zero
            sum4, sum5, sum6, sum7 = zero, zero, zero, zero
            for b in range(blocks):
                part0, part1, part2, part3 = zero, zero, zero, zero
                part4, part5, part6, part7 = zero, zero, zero, zero
                for j in range(b * BLOCK, b * BLOCK + BLOCK):
                    element = whole[j]
                    part0 += np.float32(row0[j]) * element
                    part1 += np.float32(row1[j]) * element
                    part2 += np.float32(row2[j]) * element
                    part3 += np.float32(row3[j]) * element
                    part4 += np.float32(row4[j]) * element
                    part5 += np.float32(row5[j]) * element
                    part6 += np.float32(row6[j]) * element
                    part7 += np.float32(row7[j]) * element
                sum0 += part0 * scale0[b]
                sum1 += part1 * scale1[b]
                sum2 += part2 * scale2[b]
                sum3 += part3 * scale3[b]
                sum4 += part4 * scale4[b]
                sum5 += part5 * scale5[b]
                sum6 += part6 * scale6[b]
                sum7 += part7 * scale7[b]
            sums[0], sums[1], sums[2], sums[3] = sum0, sum1, sum2, sum3
            sums[4], sums[5], sums[6], sums[7] = sum4, sum5, sum6, sum7
            for k in range(min(8, m - i)):
                total[i + k] += sums[k]


def _subtract(
    rows: Any, scales: Any, weights: Any, vector: Any, first: int, start: int, stop: int
) -> None:
    """``vector[start:stop] -= weights @ (rows * scales)[:, first + start : first + stop]``."""
    m = rows.shape[0]
    last = m - 1
    w = np.zeros(8, weights.dtype)
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
        for i in range(0, m, 8):
            for k in range(8):
                w[k] = weights[i + k] if i + k < m else 0.0
            row0, scale0 = rows[i, column:], scales[i, block:]
            row1, scale1 = rows[min(i + 1, last), column:], scales[min(i + 1, last), block:]
            row2, scale2 = rows[min(i + 2, last), column:], scales[min(i + 2, last), block:]
            row3, scale3 = rows[min(i + 3, last), column:], scales[min(i + 3, last), block:]
            row4, scale4 = rows[min(i + 4, last), column:], scales[min(i + 4, last), block:]
            row5, scale5 = rows[min(i + 5, last), column:], scales[min(i + 5, last), block:]
            row6, scale6 = rows[min(i + 6, last), column:], scales[min(i + 6, last), block:]
            row7, scale7 = rows[min(i + 7, last), column:], scales[min(i + 7, last), block:]
            for b in range(blocks):
                w0, w1 = w[0] * scale0[b], w[1] * scale1[b]
                w2, w3 = w[2] * scale2[b], w[3] * scale3[b]
                w4, w5 = w[4] * scale4[b], w[5] * scale5[b]
                w6, w7 = w[6] * scale6[b], w[7] * scale7[b]
                for j in range(b * BLOCK, b * BLOCK + BLOCK):
                    upper = (np.float32(row0[j]) * w0 + np.float32(row1[j]) * w1) + (
                        np.float32(row2[j]) * w2 + np.float32(row3[j]) * w3
                    )
                    lower = (np.float32(row4[j]) * w4 + np.float32(row5[j]) * w5) + (
                        np.float32(row6[j]) * w6 + np.float32(row7[j]) * w7
                    )
                    whole[j] -= upper + lower


accumulate = compiled(_accumulate)
subtract = compiled(_subtract)
