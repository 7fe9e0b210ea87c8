"""How many bytes a basis takes, and how many vectors fit."""

import math

import torch
from curvlab_kernels.formats import BLOCK, LEVELS, padded


def row_bytes(n: int, dtype: torch.dtype) -> int:
    """Bytes of one stored vector of ``n`` elements: padded, with its scales."""
    ld = padded(n)
    scales = 4 * -(-ld // BLOCK) if dtype in LEVELS else 0
    return ld * dtype.itemsize + scales


def basis_bytes(n: int, capacity: int, dtype: torch.dtype = torch.float32) -> int:
    """Bytes of ``capacity`` vectors of ``n`` elements, with their Gram matrix and its factor.

    >>> basis_bytes(1024, 10, torch.float32)
    42560
    >>> basis_bytes(1024, 10, torch.int8)
    12480
    """
    return capacity * row_bytes(n, dtype) + 2 * 8 * capacity**2


def largest_basis(n: int, available: int, dtype: torch.dtype = torch.float32) -> int:
    """The most vectors of ``n`` elements whose basis takes at most ``available`` bytes."""
    row = row_bytes(n, dtype)
    # The root of 16 c^2 + row c = available, rounded down.
    return (math.isqrt(row**2 + 64 * available) - row) // 32
