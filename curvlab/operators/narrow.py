"""Frozen weights that stay in bfloat16 or float16 and are widened where they are used.

An adapter is trained on a model whose weights are frozen and narrow. Its curvature is computed in
float32, and a float32 copy of all frozen weights would take twice their memory. So they are widened
for each call, and a graph keeps the narrow weight in place of the wide one.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

_WRITES = {"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__"}
_DTYPE = Tensor.dtype.__get__  # type: ignore[attr-defined]  # made anew at every access


def is_narrow(value: Any, dtype: torch.dtype) -> bool:
    """Whether ``value`` is a tensor of floats with fewer bits than ``dtype``."""
    return (
        isinstance(value, Tensor) and value.is_floating_point() and value.itemsize < dtype.itemsize
    )


def storage_of(tensor: Tensor) -> int:
    """What tells a frozen weight and its views from other tensors."""
    return tensor.untyped_storage().data_ptr()


def widened(
    func: Any, args: Any, kwargs: Any, dtype: torch.dtype, frozen: frozenset[int]
) -> tuple[Any, Any]:
    """The arguments of a torch function with its narrow tensors in ``dtype``.

    Frozen weights always are; others, which the model may write to, also through views, only
    where they meet a wide one.
    """
    name = getattr(func, "__name__", "")
    if func != _DTYPE and (name in ("__get__", "__set__") or _in_place(name)):
        return args, kwargs  # shapes and flags; what is written to must stay what it is
    given = {key: arg for key, arg in kwargs.items() if key != "out"}
    mixed = func != _DTYPE and any(_is_wide(value, dtype, frozen) for value in _flat((args, given)))

    def widen(value: Any) -> Any:
        if isinstance(value, tuple | list):
            return type(value)(widen(item) for item in value) if _plain(value) else value
        wanted = is_narrow(value, dtype) and (mixed or storage_of(value) in frozen)
        return _wide(value, dtype) if wanted else value

    return tuple(widen(arg) for arg in args), {
        key: arg if key == "out" else widen(arg) for key, arg in kwargs.items()
    }


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, tuple | list):
        for item in value:
            yield from _flat(item)
    else:
        yield value


def _is_wide(value: Any, dtype: torch.dtype, frozen: frozenset[int]) -> bool:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return False
    return value.dtype == dtype or (is_narrow(value, dtype) and storage_of(value) in frozen)


def _plain(value: Any) -> bool:
    return type(value) in (tuple, list)


def _in_place(name: str) -> bool:
    return (name.endswith("_") and not name.endswith("__")) or name in _WRITES


def _wide(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    wide = tensor.to(dtype)
    if not tensor.requires_grad and tensor.grad_fn is None:
        wide._narrow = tensor, wide._version  # type: ignore[attr-defined]
    return wide


class KeepNarrow(saved_tensors_hooks):
    """Graphs made in the context keep narrow weights in place of the wide ones they were used as.

    Args:
        dtype: The wide one.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        def pack(tensor: Tensor) -> Any:
            base = tensor._base if tensor._is_view() and tensor._base is not None else tensor
            source, version = getattr(base, "_narrow", (None, 0))
            if source is None or tensor.requires_grad or base._version != version:  # written to
                return tensor
            return source, tensor.size(), tensor.stride(), tensor.storage_offset()

        def unpack(kept: Any) -> Tensor:
            if isinstance(kept, Tensor):
                return kept
            source, *geometry = kept
            return torch.as_strided(_wide(source, dtype), *geometry)

        super().__init__(pack, unpack)
