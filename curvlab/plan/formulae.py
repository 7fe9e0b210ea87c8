"""The arithmetic of a plan: rows, products, bytes and messages, from sizes alone."""

import math
from dataclasses import dataclass

import torch

from curvlab.basis import basis_bytes, largest_basis

STORED = (torch.float32, torch.float16, torch.int8)
CHAIN = 12  # products that certify that no copy is missing
PROBE = 4


def products_needed(k: int, tol: float) -> int:
    """Products of Lanczos for ``k`` pairs to a relative residual, certification included.

    Fitted to the three networks of the paper, trained and not (``python -m benchmarks.planner``):
    spectra with outliers, which is what networks have. A cluster at the edge takes more.
    """
    digits = max(1.0, -math.log10(max(tol, 1e-12)))
    return round(12 + 1.45 * k + 4.0 * digits + CHAIN)


def solver_rows(k: int, products: int, n: int) -> int:
    """Rows of ``n`` elements that a solve holds at its end: basis, result and its copy."""
    working = min(max(2 * k + 32, 3 * k + 12) + 2, products + 2, n)
    return working + 2 * k


@dataclass(frozen=True, slots=True)
class Memory:
    """What a memory M of some rows takes, by storage."""

    dtype: str
    bytes: int
    fits: bool
    rows_that_fit: int


def memories(n: int, rows: int, available: int) -> list[Memory]:
    """M in each storage dtype, against ``available`` bytes."""
    return [
        Memory(
            str(dtype).removeprefix("torch."),
            basis_bytes(n, rows, dtype),
            basis_bytes(n, rows, dtype) <= available,
            largest_basis(n, available, dtype),
        )
        for dtype in STORED
    ]


@dataclass(frozen=True, slots=True)
class Communication:
    """What one rank sends in one product, one orthogonalisation, one SGD-dagger step."""

    product: float
    orthogonalise: float
    step: float
    messages: int


def communication(n: int, rows: int, ranks: int, element: int) -> Communication:
    """Bytes that each of ``ranks`` sends, for vectors and bases that are split along ``n``.

    A product gathers the vector on every rank and scatters the sum of the images: ``(R-1)/R n``
    elements each way, as a ring does it (an all-reduce of a replicated vector sends the same). An
    orthogonalisation and a projection send only coefficients, float64, two passes of them.
    """
    if ranks == 1:
        return Communication(0.0, 0.0, 0.0, 0)
    share = (ranks - 1) / ranks
    return Communication(
        product=2 * share * n * element,
        orthogonalise=2 * 2 * share * rows * 8,
        step=2 * share * n * element + 2 * share * rows * 8,
        messages=2 * (ranks - 1) + 2 * 2 * (ranks - 1),
    )
