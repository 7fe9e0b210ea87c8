"""The arithmetic of a plan: rows, products, bytes and messages, from sizes alone."""

import math
from dataclasses import dataclass

import torch

from curvlab.basis import basis_bytes, largest_basis
from curvlab.eigen.room import Room, divided

STORED = (torch.float32, torch.float16, torch.int8)
USUAL = Room()
LATENCY = 2e-5  # seconds of each of the log2(R) hops of a message; switched networks take this


def products_needed(k: int, tol: float, effort: float = 1.0) -> int:
    """Products of Lanczos for ``k`` pairs to a relative residual, certification included.

    A fit to the three networks of the paper, trained (0.5 to 0.7 of it, a small ViT 1.9 times)
    and fresh (0.8 to 1.4 times): how many it takes is a matter of the spectrum. Where that could
    be looked at, ``effort`` says how far it is from the average.
    """
    digits = max(1.0, -math.log10(max(tol, 1e-12)))
    return max(k + 4, round(effort * (8 + 4.2 * k + 2.0 * digits)))


def held_rows(k: int, products: int, n: int, vector: int, room: Room = USUAL) -> int:
    """Rows of a solve that are in memory at its end, and not in a file.

    Args:
        n: Elements of a vector.
        vector: Bytes of one, on each rank.
        room: As the solver is given it.
    """
    rows = divided(n, k, vector, room).total
    return 0 if room.file is not None else max(0, min(rows, products + 2, n))


def mean_rows(k: int, products: int, n: int, vector: int, room: Room = USUAL) -> float:
    """Rows against which a product's image is made orthogonal, on average, wherever they are.

    They fill up once; a full basis is compressed to about half of the rows beyond the pairs, again
    and again, so that it is four fifths full from then on.
    """
    full = min(products, n, divided(n, k, vector, room).search)
    return full * (0.5 * full + 0.8 * (products - full)) / products


@dataclass(frozen=True, slots=True)
class Memory:
    """What a memory M of some rows takes, by storage."""

    dtype: str
    bytes: int
    fits: bool
    rows_that_fit: int


def memories(n: int, rows: int, available: int, ranks: int = 1) -> list[Memory]:
    """A rank's part of M in each storage dtype, against its ``available`` bytes."""
    held = -(-n // ranks)
    return [
        Memory(
            str(dtype).removeprefix("torch."),
            basis_bytes(held, rows, dtype),
            basis_bytes(held, rows, dtype) <= available,
            min(n, largest_basis(held, available, dtype)),
        )
        for dtype in STORED
    ]


@dataclass(frozen=True, slots=True)
class Communication:
    """What one rank sends, in bytes, for a product, a Lanczos step's sums, an SGD-dagger step."""

    product: float
    orthogonalise: float
    step: float
    messages: int


def talking_seconds(sent: float, messages: int, ranks: int, bandwidth: float) -> float:
    """Seconds in which a rank sends so many bytes in so many messages."""
    return sent / bandwidth + messages * LATENCY * math.log2(ranks)


def communication(n: int, rows: int, ranks: int, element: int, blocks: int = 0) -> Communication:
    """Bytes that each of ``ranks`` sends, for vectors and bases that are split along ``n``.

    As :mod:`curvlab.distributed` sends them, in rings: a product gathers the vector on every rank
    and scatters the sum of the images, ``(R-1)/R n`` elements each way. A Lanczos step and a
    projection send only coefficients, float64. A step of SGD-dagger from each rank's own gradients
    is a gradient's all-reduce and the coefficients.

    Args:
        rows: How many rows the basis has that is orthogonalised against, or projected out.
        blocks: How many blocks a model in shards has. The parameters of each are gathered three
            times in a product whose graph is not kept, its part of the vector once, and its sums go
            to their owners.
    """
    if ranks == 1:
        return Communication(0.0, 0.0, 0.0, 0)
    share = (ranks - 1) / ranks
    return Communication(
        product=(5 + 1 / ranks if blocks else 2) * share * n * element,
        orthogonalise=16 * share * (rows + 4),
        step=2 * share * n * element + 16 * share * rows,
        messages=5 * blocks + 3 if blocks else 5,  # of a product, and three of the step after it
    )
