"""The one place that decides how a call runs on a CPU, and the way into the compiled loops.

A call takes one of three paths: compiled loops (one vector, and numba is there); torch as it is
(rows and vectors share a dtype); torch, converting some columns at a time. Loops run on as many
threads as torch uses; a whole operation on one vector is a single call, by a team of them.
"""

import functools
import importlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from curvlab_kernels._cpu import threads

TINY = 1 << 11  # elements of a vector up to which torch costs less than the call of a loop
SHARED = 1 << 16  # products from which a second thread of a team pays
KEPT = 1 << 20  # bytes of eight rows, most of which a cache keeps over one pass through them
COMPILED = (torch.float16, torch.bfloat16, torch.int8, torch.float32, torch.float64)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Path:
    """How a call runs.

    Attributes:
        loops: The compiled loops, or ``None`` for torch.
        alone: The same where one thread is enough, for a whole operation in one call.
        team: What does a whole operation in one call (:mod:`.team`), or ``None``.
        threads: Of the team; the rows it takes at once if they are orthonormal; the columns of a
            part of its sums.
    """

    loops: ModuleType | None = None
    alone: ModuleType | None = None
    team: ModuleType | None = None
    threads: int = 1
    at_once: int = 0
    width: int = 0


def choose(rows: Tensor, vectors: Tensor | Sequence[Tensor], team: bool = False) -> Path:
    """For ``m`` rows and ``vectors`` ``(n,)`` or ``(b, n)``, or tensors that are one vector.

    Args:
        team: Whether a whole operation in one call is wanted, for short vectors too.
    """
    if isinstance(vectors, Tensor):
        # A block of vectors reuses every converted element b times: a matrix product wins there.
        n = vectors.shape[0] if vectors.dim() == 1 and vectors.is_contiguous() else 0
        dtype = vectors.dtype
    else:
        n, dtype = sum([tensor.numel() for tensor in vectors]), vectors[0].dtype
    return _choose(rows.dtype, rows.shape[0], dtype, n, torch.get_num_threads(), team)


@functools.lru_cache(maxsize=4096)  # a training step asks the same questions again and again
def _choose(
    stored: torch.dtype, m: int, working: torch.dtype, n: int, count: int, whole_call: bool
) -> Path:
    if not m * n or stored not in COMPILED:
        return Path()
    if stored == working and n <= TINY and not whole_call:
        return Path()  # numba takes longer to import than many small solves
    whole = _compiled()
    spans = threads.spans(n, m, count)
    one = len(spans) == 1
    # Torch sums a long row in float32, in an order of the library's choosing: on some processors
    # its small terms are lost. The loops sum tiles.
    loops = whole if stored != working or n > TINY else None
    # Rounded rows are orthonormal only up to rounding: their products belong to the same vector.
    cached = stored == working and 8 * n * stored.itemsize <= KEPT
    team = None
    if whole is not None:
        team = importlib.import_module("curvlab_kernels._cpu.team")
        count = 1 if m * n < SHARED or not team.openmp()[0] else count
        team = team if one or count > 1 else None
    return Path(
        loops, whole if one else None, team, count, 8 if cached and one else m,
        threads.ALIGNMENT if one else spans[0][1],
    )  # fmt: skip


@functools.cache
def _compiled() -> ModuleType | None:
    try:
        importlib.import_module("numba")
    except ImportError:
        logger.info(
            "numba is not installed: float16, bfloat16 and int8 bases are converted to float32 "
            "chunk by chunk, to the same accuracy but slower; pip install numba"
        )
        return None
    return importlib.import_module("curvlab_kernels._cpu.compiled")


def spread(
    loop: Callable[..., None],
    stored: tuple[Any, Any],
    weights: np.ndarray | None,
    vector: Tensor,
    sums: int = 0,
) -> Tensor:
    """Run a loop of :mod:`.compiled` over a vector ``(n,)``, on spans of columns.

    Args:
        stored: What :func:`arrays` returned, or ``(None, None)``.
        sums: How many numbers the loop adds up.

    Returns:
        They, float64 ``(sums,)``: the spans' sums added in the order of the spans.
    """
    numbers, rows = vector.detach().numpy(), 1 if stored[0] is None else len(stored[0])
    parts = threads.spans(len(numbers), rows, torch.get_num_threads())
    found = np.zeros((len(parts), sums))

    def work(index: int, start: int, stop: int) -> None:
        loop(*stored, weights, numbers, found[index], start, stop)

    threads.run(work, parts)
    return torch.from_numpy(found[0] if len(parts) == 1 else found.sum(0))


def arrays(rows: Tensor, scales: Tensor | None = None) -> tuple[np.ndarray, np.ndarray | None]:
    """What the compiled loops read: the codes, by a type that says how to decode them."""
    rows = rows.detach()
    if rows.dtype == torch.float16:
        rows = rows.view(torch.int16)
    elif rows.dtype == torch.bfloat16:
        rows = rows.view(torch.uint16)
    return rows.numpy(), None if scales is None else scales.numpy()
