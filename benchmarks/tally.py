"""Counts instead of seconds: what torch was asked to do, the same on every machine and every run.

    with Tally() as tally:
        operator @ vector
    tally.calls, tally.moved, tally.allocated, tally.peak, tally.kernels

``moved`` are the bytes of all tensors that torch operators read and made, views aside: the traffic
if nothing stayed in a cache. Compiled loops of ``curvlab_kernels`` are not torch operators; each
call of a CPU kernel counts in ``kernels`` with the bytes of what it was given.
"""

import functools
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any

from curvlab_kernels import _cpu
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

KERNELS = (
    "apply_",
    "coefficients",
    "lanczos_step_",
    "norm",
    "orthonormalise_",
    "orthonormalise_block_",
    "project_",
    "project_list_",
    "sgd_step_",
)


class Tally(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context that counts, for one thread; it cannot be nested.

    Attributes:
        calls: Operators that made or changed numbers.
        moved: Bytes of their arguments and results.
        allocated: Bytes of new storage.
        peak: Most bytes of new storage alive at once.
        kernels: Bytes given to the project's kernels, call by call.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls = self.moved = self.allocated = self.live = self.peak = self.kernels = 0
        self._seen: dict[int, int] = {}
        self._originals: dict[str, Callable[..., Any]] = {}

    def __enter__(self) -> "Tally":
        for name in KERNELS:
            original = getattr(_cpu, name, None)
            if original is not None:  # an older revision may not have it
                self._originals[name] = original
                setattr(_cpu, name, self._counting(original))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        super().__exit__(kind, value, trace)  # type: ignore[no-untyped-call]
        for name, original in self._originals.items():
            setattr(_cpu, name, original)
        self._originals.clear()

    def _counting(self, kernel: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(kernel)
        def counted(*arguments: Any, **named: Any) -> Any:
            self.kernels += sum(_bytes(leaf) for leaf in tree_leaves((arguments, named)))
            return kernel(*arguments, **named)

        return counted

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [leaf for leaf in tree_leaves((args, kwargs or {})) if isinstance(leaf, Tensor)]
        for tensor in given:
            self._meet(tensor, 0)  # what was there before is not an allocation
        result = func(*args, **(kwargs or {}))
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if not _is_view(func):
            self.calls += 1
            self.moved += sum(_bytes(tensor) for tensor in (*given, *made))
        for tensor in made:
            self._meet(tensor, tensor.untyped_storage().nbytes())
        self.peak = max(self.peak, self.live)
        return result

    def _meet(self, tensor: Tensor, size: int) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._seen:
            self._seen[key] = size
            self.allocated += size
            self.live += size
            weakref.finalize(storage, self._part, key)

    def _part(self, key: int) -> None:
        self.live -= self._seen.pop(key, 0)


def _bytes(leaf: object) -> int:
    return leaf.numel() * leaf.element_size() if isinstance(leaf, Tensor) else 0


def _is_view(func: Any) -> bool:
    """Whether the result aliases an argument that is not written: nothing moves."""
    schema = getattr(func, "_schema", None)
    if schema is None:
        return False
    results = [one.alias_info for one in schema.returns]
    return any(info is not None and not info.is_write for info in results)
