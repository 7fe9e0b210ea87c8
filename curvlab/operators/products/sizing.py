"""How much memory products take, and how to cut the data so that a budget holds.

The cost of a chunk is measured on two small ones and extrapolated: a fixed part (gradients, which
are as long as the parameters) and a part per sample (activations kept for the second pass).
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

SHARE = 0.5  # of the free memory, when no budget is given: a solver needs the rest for its rows
# Times what tensors hold, that a process grows by: allocators keep freed blocks. The ResNet of
# 480,902 parameters grew by 450 MB for 360 MB of tensors.
FRAGMENTED = 1.25
LIBRARIES = 5_000_000  # bytes of buffers that libraries keep, whatever they are used for
# In units of a kept graph's product with one sample, about two of its gradients:
OVERHEAD = 1.0  # of a chunk, for small parameters; measured on the ResNet
OVERHEAD_LENGTH = 0.3  # more for each time the parameters are larger than a sample's graph; ViT
REBUILDING = 0.5  # more for a rebuilt graph: three gradients, not two


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

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # torch would import its compiler at the first operation, to keep it out of this class;
        # nothing compiled runs in here, and that import takes about as long as torch's own
        return False

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self._seen: dict[int, int] = {}

    def _meet(self, tensor: Tensor, size: int) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._seen:
            self._seen[key] = size
            self.live += size
            weakref.finalize(storage, self._part, key)

    def _part(self, key: int) -> None:
        self.live -= self._seen.pop(key, 0)


def _count(self: LiveBytes, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
    for value in args:
        for tensor in value if isinstance(value, list | tuple) else (value,):
            if isinstance(tensor, Tensor):
                self._meet(tensor, 0)  # what was there before is not counted
    result = func(*args, **(kwargs or {}))
    for tensor in result if isinstance(result, list | tuple) else (result,):
        if isinstance(tensor, Tensor):
            self._meet(tensor, tensor.untyped_storage().nbytes())
    self.peak = max(self.peak, self.live)
    return result


# Set here and not in the class, where torch would wrap it and import its compiler to do so: that
# takes as long as importing torch itself.
LiveBytes.__torch_dispatch__ = _count  # type: ignore[method-assign, assignment]


def measure(run: Callable[[int], Callable[[], object]], samples: int, budget: float) -> Cost:
    """The cost of chunks, from ones of about 2 and 8 samples, as far as the budget allows them.

    Args:
        run: ``run(s)`` makes the graph of ``s`` samples and returns a function that uses it once.
        samples: At most this many are there.
        budget: Measuring must not take more than this either.
    """
    small = min(samples, 2)
    kept_small, peak_small = _track(run, small)
    large = min(samples, 8, int(budget / max(1.0, peak_small / small)))
    if large <= small:
        return Cost(0.0, kept_small / small, 0.0, peak_small / small)
    kept_large, peak_large = _track(run, large)
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
    """How many samples to a chunk, so that products take the least time within the budget.

    Large chunks have less overhead; of small chunks, more can keep their graphs.
    """
    if cost.peak(samples) <= budget:
        return samples
    overhead = OVERHEAD + OVERHEAD_LENGTH * cost.kept_fixed / max(1.0, cost.kept_each)

    def seconds(size: int) -> float:
        chunks = -(-samples // size)
        rebuilt = 1.0 - fitting(cost, size, budget, chunks) / chunks
        return chunks * overhead + samples * (1.0 + REBUILDING * rebuilt)

    sizes = {-(-samples // chunks) for chunks in range(1, min(samples, 2000) + 1)}
    possible = [size for size in sizes | {1} if cost.peak(size) <= budget]
    if not possible:
        raise ValueError(
            f"products with one sample need {cost.peak(1) / 2**20:.1f} MiB; beside data, "
            f"parameters and vectors the budget leaves {max(0.0, budget) / 2**20:.1f} MiB: "
            "pass a larger budget=, or take fewer parameters with select="
        )
    return min(possible, key=lambda size: (seconds(size), -size))


def fitting(cost: Cost, size: int, budget: float, chunks: int) -> int:
    """How many of the ``chunks`` of ``size`` samples can keep their graphs while one more works."""
    kept, working = cost.kept(size), cost.peak(size) - cost.kept(size)
    if chunks * kept + working <= budget:
        return chunks
    # a chunk that is rebuilt needs room for its own graph too
    return max(0, min(chunks, int((budget - cost.peak(size)) / max(1.0, kept))))


def operator_room(
    budget: float, data: float, parameters: float, n: int, element: int, checked: bool = True
) -> float:
    """What a budget leaves for graphs.

    Args:
        budget: Bytes that an operator may take.
        data: Bytes of its samples.
        parameters: Bytes of its copy of the model.
        n: Length of a vector, whose elements take ``element`` bytes.
        checked: Whether the operator is probed when it is made.
    """
    return budget / FRAGMENTED - data - parameters - vector_bytes(n, element, checked)


def vector_bytes(n: int, element: int, checked: bool = True) -> int:
    """A product's input and a float64 sum; for a check also its output and a probe's vectors.

    The output of a product alone is in the figure of its graph.
    """
    return n * ((6 if checked else 1) * element + 8)


def default_budget(free: float) -> float:
    """What an operator takes at most of ``free`` bytes when nobody says."""
    return SHARE * free
