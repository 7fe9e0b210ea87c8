"""Memory of a solve: how many rows it may keep, where, and what that takes.

The same arithmetic serves the solver, which refuses before it allocates, and ``curvlab plan``. A
solve holds the rows of its search, a reserve for the chain that looks for hidden copies, the ``k``
vectors that it returns and a few vectors in the making. All checks are made before the result is,
so that a product never meets the ``k`` vectors in memory.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from curvlab.checks import whole
from curvlab.eigen.products import Products
from curvlab.operators.products.free import free_bytes
from curvlab.rows import MappedFile, Rows, Tier
from curvlab.rows.sizes import row_bytes

SMALL = 6  # times the usual rows a space without restarts may have
WHOLE = 300  # dimensions up to which it has none in any case
RESERVE = 32  # rows for a chain that looks for hidden copies
LEAST_RESERVE = 8  # the same when memory is short
PASSING = 4  # vectors in the making: one set aside, what is multiplied, its product, a copy
ASIDE = 1  # of them there is still when the result is made


@dataclass(frozen=True, slots=True)
class Room:
    """What the working rows may take.

    Args:
        rows: Of the basis, certification included (default ``2 k + 64``, from 20 pairs on
            ``3 k + 44``). A full basis is compressed, at the price of more products.
        bytes: In place of ``rows``: all long vectors of the solve together, the result included.
        file: Keep the rows in a file of this one's folder, mapped into memory, instead of in
            memory: slower, and as many as the disk holds. It has no name and is gone when the solve
            ends, however it ends; what ``file`` itself holds is left as it is.
    """

    rows: int | None = None
    bytes: int | None = None
    file: str | Path | None = None

    def __post_init__(self) -> None:
        if self.rows is not None and self.bytes is not None:
            raise ValueError("give Room(rows=) or Room(bytes=), not both")
        if self.rows is not None:
            object.__setattr__(self, "rows", *whole(rows=self.rows))
        if self.bytes is not None:
            object.__setattr__(self, "bytes", *whole(bytes=self.bytes))
        if not isinstance(self.file, str | Path | None):
            raise TypeError(f"Room(file=) is a path; got {type(self.file).__name__}")


@dataclass(frozen=True, slots=True)
class Quota:
    """How many rows there are, how many a search may fill, and how many a chain after it gets.

    Where memory is short they are the same rows: a search that has converged is compressed to make
    room for the chain, and what a chain has found is compressed when the search goes on.
    """

    search: int
    reserve: int
    total: int
    file: Path | None = None


def usual_rows(k: int, n: int, block: int = 1) -> int:
    """Rows of the search when nothing else is said.

    In a small space they are as many as it has directions, so that there are never more products
    than that: a search that restarts could make them.
    """
    usual = max(2 * k + 32, 3 * k + 12) + 2 * (block - 1)
    return n + block if n <= max(WHOLE, SMALL * usual) else usual


def solve_bytes(rows: int, k: int, vector: int) -> int:
    """Bytes of a solve's long vectors.

    Args:
        rows: Of the search and the reserve together.
        k: Vectors of the result, :func:`result_vectors` of them.
        vector: Bytes of one working vector, as far as it is held here.
    """
    return (rows + k + PASSING) * vector


def result_vectors(k: int, element: int) -> int:
    """What a result of ``k`` takes while it is made, in working vectors.

    Working vectors have 4 bytes an element or 8. For an operator whose elements take less the
    result is rounded, and there are both at once.
    """
    return k if element >= 4 else k + -(-k * element // 4)


def quota(products: Products, k: int, block: int, room: Room, copies: bool) -> Quota:
    """How many rows a solve gets; raises if what it needs is more than it may take."""
    vector = row_bytes(products.width, products.dtype)
    made = result_vectors(k, products.operator.dtype.itemsize)
    given = divided(products.room, k, vector, room, made=made, block=block, copies=copies)
    _require_memory(products, given, made, least_rows(products.room, k, block, copies))
    return given


def least_rows(n: int, k: int, block: int = 1, copies: bool = True) -> int:
    """Rows without which ``k`` pairs of ``n`` directions cannot be found.

    A search holds the pairs, two rows more and the frontier; a chain the pairs, the frontier that
    was set aside and its own rows; both no more than the whole space, one of them twice.
    """
    return min(n + block + 2, k + block + max(2, _least_reserve(block, copies)))


def _least_reserve(block: int, copies: bool) -> int:
    return (LEAST_RESERVE if copies else 2) + block - 1


def divided(
    n: int,
    k: int,
    vector: int,
    room: Room,
    *,
    made: int | None = None,
    block: int = 1,
    copies: bool = True,
) -> Quota:
    """The rows of a ``room`` for ``k`` pairs of ``n`` directions; raises if they are too few.

    Args:
        vector: Bytes of a working vector, as far as it is held here.
        made: Vectors of the result while it is made, if not ``k``.
    """
    made = k if made is None else made
    reserve = (min(RESERVE, n + 2) if copies else 2) + block - 1
    total, file = room.rows, None if room.file is None else Path(room.file)
    if room.bytes is not None:
        total = room.bytes // vector - made - PASSING
    if total is None:
        search = min(usual_rows(k, n, block), n + block + 2)
        return Quota(search, reserve, search + reserve, file)
    least = least_rows(n, k, block, copies)
    if total < least:
        asked = f"rows={room.rows}" if room.bytes is None else f"bytes={room.bytes}"
        raise ValueError(
            f"Room({asked}) is too little: k = {k} needs at least {least} rows "
            f"({solve_bytes(least, made, vector)} bytes with the result). Ask for fewer pairs at a "
            "time with deflate=, or keep the rows in a file: Room(file=...)"
        )
    beside = total - k - block  # what a chain can have at most
    reserve = min(reserve, beside, _least_reserve(block, copies))
    search = min(total, n + block + 2)
    return Quota(search, reserve, min(total, search + reserve), file)


def _require_memory(products: Products, quota: Quota, made: int, least: int) -> None:
    """Raise before anything is allocated if the rows do not fit what is free."""
    vector = row_bytes(products.width, products.dtype)
    held = 0 if quota.file is not None else quota.total
    needed, free = solve_bytes(held, made, vector), free_bytes(products.device)
    if needed <= free:
        return
    smallest = solve_bytes(least, made, vector)
    cures = ["Room(file=...), which keeps the rows in a mapped file"]
    if smallest <= free:
        cures.insert(0, f"Room(bytes=...) between {smallest} and {int(free)}, at more products")
    if products.dtype == torch.float64:
        cures.append("an operator in float32, which takes half")
    cures.append("fewer pairs at a time with deflate=")
    raise MemoryError(
        f"a solve with {quota.total} rows of {products.width} elements takes {needed} bytes, and "
        f"{int(free)} are free on {products.device}. What would do: {'; '.join(cures)}"
    )


def working_rows(quota: Quota, products: Products) -> Rows:
    """The rows of a solve, none in use; on a CPU memory is touched only when a row is written."""
    tier: Tier | None = None
    if quota.file is not None:
        if products.device.type != "cpu":
            raise ValueError(
                f"Room(file=) keeps rows in the CPU's memory; these are on {products.device}"
            )
        tier = MappedFile(quota.file.parent, resident=True)
    rows = Rows(
        products.space, quota.total, dtype=products.dtype, device=products.device, tier=tier
    )
    rows.reserve(quota.total)
    return rows
