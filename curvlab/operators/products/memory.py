"""How much memory products take, and how to cut the data so that a budget holds.

The cost of a chunk is measured on two small ones and extrapolated: a fixed part (gradients, which
are as long as the parameters) and a part per sample (activations kept for the second pass).
"""

import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

SHARE = 0.5  # of the free memory, when no budget is given
# Beyond this the parts of a graph are so large that the C library maps and clears fresh pages for
# each of them at every product; smaller chunks reuse warm memory.
COMFORTABLE = 1 << 30


@dataclass(frozen=True, slots=True)
class Cost:
    """Bytes of one chunk of ``s`` samples: ``fixed + each * s``, kept and at the peak."""

    kept_fixed: float
    kept_each: float
    peak_fixed: float
    peak_each: float

    def kept(self, samples: int) -> float:
        return self.kept_fixed + self.kept_each * samples

    def peak(self, samples: int) -> float:
        """At most this while the chunk's graph is made and used, the graph included."""
        return max(self.peak_fixed + self.peak_each * samples, self.kept(samples))


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of tensors made inside the context: alive now, and at most."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self._seen: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, Tensor):
                self._meet(tensor, 0)  # what was there before is not counted
        result = func(*args, **kwargs)
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._meet(tensor, tensor.untyped_storage().nbytes())
        self.peak = max(self.peak, self.live)
        return result

    def _meet(self, tensor: Tensor, size: int) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._seen:
            self._seen[key] = size
            self.live += size
            weakref.finalize(storage, self._part, key)

    def _part(self, key: int) -> None:
        self.live -= self._seen.pop(key, 0)


def measure(run: Callable[[int], Callable[[], object]], samples: int) -> Cost:
    """The cost of chunks, from ones of about 2 and 8 samples.

    Args:
        run: ``run(s)`` makes the graph of ``s`` samples and returns a function that uses it once.
        samples: At most this many are there.
    """
    large = min(samples, 8)
    small = max(1, large // 4)
    kept_large, peak_large = _track(run, large)
    if small == large:
        return Cost(0.0, kept_large / large, 0.0, peak_large / large)
    kept_small, peak_small = _track(run, small)
    kept_each = max(0.0, (kept_large - kept_small) / (large - small))
    peak_each = max(kept_each, (peak_large - peak_small) / (large - small))
    return Cost(
        max(0.0, kept_large - kept_each * large),
        kept_each,
        max(0.0, peak_large - peak_each * large),
        peak_each,
    )


def _track(run: Callable[[int], Callable[[], object]], samples: int) -> tuple[int, int]:
    with LiveBytes() as bytes_:
        use = run(samples)
        kept = bytes_.live
        use()
        return kept, bytes_.peak


def chunk_size(samples: int, cost: Cost, budget: float) -> int:
    """The largest comfortable chunks of which every graph can be kept; else ones to rebuild."""
    for chunks in range(1, samples + 1):
        size = -(-samples // chunks)
        if size > 1 and cost.kept(size) > COMFORTABLE:
            continue
        if fitting(cost, size, budget, chunks) == chunks:
            return size
        if chunks * cost.kept_fixed > budget:
            break
    size = samples
    while size > 1 and cost.peak(size) > min(0.3 * budget, 2.0 * COMFORTABLE):
        size = max(1, int(size * 0.8))
    if cost.peak(size) > budget:
        raise ValueError(
            f"products with {size} samples need {cost.peak(size) / 2**20:.0f} MiB, the budget "
            f"leaves {budget / 2**20:.0f} MiB: pass a larger budget=, or select fewer parameters"
        )
    return size


def fitting(cost: Cost, size: int, budget: float, chunks: int) -> int:
    """How many of the ``chunks`` of ``size`` samples can keep their graphs while one more works."""
    kept, working = cost.kept(size), cost.peak(size) - cost.kept(size)
    if chunks * kept + working <= budget:
        return chunks
    # a chunk that is rebuilt needs room for its own graph too
    return max(0, min(chunks, int((budget - cost.peak(size)) / kept)))


def free_bytes(device: torch.device) -> int:
    """Memory that can be had now without pushing anything else out."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(free + cached)
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pages, size = os.sysconf("SC_AVPHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
        return int(pages * size)
    return int(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
