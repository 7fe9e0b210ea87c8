"""An operator's data: read once, checked, kept, and cut into chunks of samples.

A *batch* is anything a model and a loss take: ``(inputs, targets)``, a dict of tensors, an object
of the user's own. Its *samples* run along the first dimension of its tensors. An operator must see
the same data in every product, so data are frozen: copied when the operator is made. A loader that
shuffles a data set is read in the data set's own order (:mod:`curvlab.loaders`). A source that
gives other samples each time it is read (an augmenting loader, a one-shot generator) is refused,
unless :func:`freeze` is called on it, which says that one pass is the data set.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from curvlab.loaders import AS_GIVEN, FREEZE, in_order
from curvlab.refusals import Refusal, Trap
from curvlab.storage import tensor_digest


@dataclass(frozen=True, slots=True, eq=False)
class Batches:
    """Frozen data: consecutive batches of one form are joined, their boundaries kept.

    Attributes:
        joined: Batches as large as their shapes allow.
        sizes: For each of ``joined``, the samples of the batches it was joined from; ``None`` for
            a batch whose tensors do not share a first dimension, which cannot be cut.
        taken: How they were read, for the record.
    """

    joined: tuple[Any, ...]
    sizes: tuple[tuple[int, ...] | None, ...]
    taken: str = AS_GIVEN

    @property
    def samples(self) -> int | None:
        """How many samples, or ``None`` when a batch cannot be counted."""
        known = [sum(sizes) for sizes in self.sizes if sizes is not None]
        return sum(known) if len(known) == len(self.sizes) else None

    def __len__(self) -> int:
        return sum(1 if sizes is None else len(sizes) for sizes in self.sizes)

    def __iter__(self) -> Iterator[Any]:
        """The batches as they were given."""
        return iter(self.pieces(None))

    def pieces(self, size: int | None) -> list[Any]:
        """The data in order, as views of at most ``size`` samples and nearly equal lengths.

        ``None`` gives the batches as they were given. A batch that cannot be cut stays whole.
        """
        return list(self._cut(size))

    def first(self, size: int | None) -> Any:
        """The first of :meth:`pieces`; the others are not made."""
        return next(self._cut(size))

    def _cut(self, size: int | None) -> Iterator[Any]:
        for batch, sizes in zip(self.joined, self.sizes, strict=True):
            if sizes is None:
                yield batch
                continue
            total = sum(sizes)
            count = -(-total // size) if size else 0
            steps = [total * (i + 1) // count - total * i // count for i in range(count)]
            start = 0
            for step in steps if size else sizes:
                yield rows(batch, slice(start, start + step))
                start += step

    def to(self, device: torch.device, dtype: torch.dtype | None) -> "Batches":
        """On ``device``; floating-point tensors in ``dtype`` when one is given."""

        def move(tensor: Tensor) -> Tensor:
            wanted = dtype if dtype is not None and tensor.is_floating_point() else None
            return tensor.to(device=device, dtype=wanted)

        moved = tuple(map_tensors(batch, move) for batch in self.joined)
        return dataclasses.replace(self, joined=moved)


def freeze(data: Any, *, bare: bool = False) -> Batches:
    """Read ``data`` once, copy it, check it; what comes back never changes.

    Args:
        data: One batch (a tuple, a dict, an object with ``inputs`` and ``targets``), a list of
            batches, or an iterable of batches such as a DataLoader.
        bare: Whether a batch may be a single tensor, as for an objective that needs no target; a
            list of two tensors is then two batches, not ``[inputs, targets]``.
    """
    if isinstance(data, Batches):
        return data
    source = as_batches(data, bare)
    # a DataLoader draws its base seed from the global generator
    with torch.random.fork_rng(devices=[]):
        kept = _joined([map_tensors(batch, _own) for batch in source])
    return kept if isinstance(source, list) else dataclasses.replace(kept, taken="one pass, kept")


def read(data: Any, *, bare: bool = False, together: bool = False) -> Batches:
    """:func:`freeze`, after refusing a source that gives other data each time it is read.

    Args:
        data: As for :func:`freeze`.
        bare: As for :func:`freeze`.
        together: Whether it matters which samples share a batch.
    """
    if isinstance(data, Batches):
        return data
    source, taken = as_batches(data, bare), AS_GIVEN
    if isinstance(source, list):
        return _joined([map_tensors(batch, _own) for batch in source])
    if isinstance(source, DataLoader):
        source, taken = in_order(source, together=together)
    with torch.random.fork_rng(devices=[]):
        first = [map_tensors(batch, _own) for batch in source]
        again = 0
        for number, batch in enumerate(source):
            if number >= len(first) or not _same(first[number], batch):
                raise Refusal(
                    f"data= gave another batch {number} when it was read again: it shuffles or "
                    f"augments, so every product would be of another operator. Turn that off, "
                    f"{FREEZE}",
                    Trap.CHANGING_DATA,
                )
            again += 1
    if again != len(first):
        raise Refusal(
            f"data= gave {len(first)} batches, then {again} when read again: pass a list of "
            f"batches, {FREEZE}",
            Trap.CHANGING_DATA,
        )
    return dataclasses.replace(_joined(first), taken=taken)


def sample_count(batch: Any) -> int | None:
    """The first dimension that all tensors of ``batch`` share, or ``None``."""
    found = set()
    for leaf in leaves(batch):
        if isinstance(leaf, Tensor):
            found |= {leaf.shape[0]} if leaf.dim() else set()
        elif leaf is not None and not isinstance(leaf, bool | int | float | str):
            return None  # an object that may hold one entry per sample: cutting would miss it
    return found.pop() if len(found) == 1 else None


def rows(batch: Any, which: slice | Tensor) -> Any:
    """Some samples of ``batch``, in the same form; a slice gives views."""
    return map_tensors(batch, lambda tensor: tensor[which] if tensor.dim() else tensor)


def map_tensors(batch: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """``batch`` in the same form with ``function`` applied to its tensors."""
    return map_leaves(batch, lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf)


def map_leaves(batch: Any, function: Callable[[Any], Any]) -> Any:
    """``batch`` in the same form with ``function`` applied to all that is not a container."""
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_leaves(item, function) for item in batch))
    if isinstance(batch, tuple | list):
        return type(batch)(map_leaves(item, function) for item in batch)
    if isinstance(batch, Mapping):
        mapped = {key: map_leaves(item, function) for key, item in batch.items()}
        return mapped if type(batch) is dict else type(batch)(mapped)  # type: ignore[call-arg]
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        names = [field.name for field in dataclasses.fields(batch) if field.init]
        return dataclasses.replace(
            batch, **{name: map_leaves(getattr(batch, name), function) for name in names}
        )
    return function(batch)


def leaves(batch: Any) -> list[Any]:
    """All that is not a container, in a fixed order."""
    children = _children(batch)
    if children is None:
        return [batch]
    return [leaf for child in children for leaf in leaves(child)]


def tensors(batch: Any) -> list[Tensor]:
    """The tensors of ``batch``, in a fixed order."""
    return [leaf for leaf in leaves(batch) if isinstance(leaf, Tensor)]


def digest(batches: Iterable[Any]) -> str:
    """A short hash over every tensor of ``batches``, for the record."""
    return tensor_digest(tensor for batch in batches for tensor in tensors(batch))[:16]


def require_finite(batches: Batches) -> None:
    """Raise if a tensor of the data holds NaN or infinity."""
    for number, batch in enumerate(batches):
        for tensor in tensors(batch):
            if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                raise ValueError(
                    f"batch {number} of data= holds NaN or infinity in a tensor "
                    f"{tuple(tensor.shape)}: clean or drop those samples"
                )


def as_batches(data: Any, bare: bool) -> "list[Any] | Iterable[Any]":
    """What :func:`freeze` would read, batch by batch: a list, or what gives them one by one."""
    if isinstance(data, list) and not (not bare and len(data) == 2 and isinstance(data[0], Tensor)):
        return [_pair(batch) for batch in data]
    if isinstance(data, tuple | list | Mapping) or (bare and isinstance(data, Tensor)):
        return [data]
    if _pair(data) is not data:
        return [_pair(data)]
    if isinstance(data, Tensor):
        raise TypeError(
            "data= is a tensor without targets: pass (inputs, targets), or an Objective as the loss"
        )
    if isinstance(data, Iterator):
        raise TypeError(
            "data= can be read only once (an iterator or generator): pass list(data), a DataLoader "
            "or tensors"
        )
    if isinstance(data, Iterable) and not isinstance(data, str | bytes):
        return data
    if isinstance(data, Dataset):
        raise TypeError("data= is a Dataset of single samples: wrap it in a DataLoader")
    raise TypeError(
        "data= must be a batch (inputs, targets), a dict, a list of batches, a DataLoader or an "
        f"object with .inputs and .targets; got {type(data).__name__}"
    )


def _pair(batch: Any) -> Any:
    """``(inputs, targets)`` of an object that has those attributes; anything else as it is."""
    if hasattr(batch, "inputs") and hasattr(batch, "targets"):
        return batch.inputs, batch.targets
    return batch


def _joined(batches: Sequence[Any]) -> Batches:
    if not batches:
        raise ValueError("data= is empty: there is no batch in it")
    groups: list[list[Any]] = []
    sizes: list[list[int] | None] = []
    for number, batch in enumerate(batches):
        count = sample_count(batch)
        if count == 0:
            raise ValueError(f"batch {number} of data= is empty: it has no samples")
        fits = count is not None and sizes and sizes[-1] is not None
        if fits and _form(batch) == _form(groups[-1][0]):
            groups[-1].append(batch)
            sizes[-1].append(count)  # type: ignore[union-attr, arg-type]
        else:
            groups.append([batch])
            sizes.append(None if count is None else [count])
    return Batches(
        tuple(_concatenated(group) for group in groups),
        tuple(None if size is None else tuple(size) for size in sizes),
    )


def _concatenated(group: list[Any]) -> Any:
    if len(group) == 1:
        return group[0]
    columns = zip(*(tensors(batch) for batch in group), strict=True)
    whole = iter([parts[0] if parts[0].dim() == 0 else torch.cat(parts) for parts in columns])
    return map_tensors(group[0], lambda _: next(whole))


def _children(batch: Any) -> list[Any] | None:
    if isinstance(batch, tuple | list):
        return list(batch)
    if isinstance(batch, Mapping):
        return list(batch.values())
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return [getattr(batch, field.name) for field in dataclasses.fields(batch) if field.init]
    return None


def _form(batch: Any) -> Any:
    """Everything but the samples: batches of one form can be joined along their first dimension."""
    if isinstance(batch, Tensor):
        value = batch.item() if batch.dim() == 0 else None
        return batch.shape[1:], batch.dtype, batch.device, value
    children = _children(batch)
    if children is None:
        return batch
    keys = list(batch) if isinstance(batch, Mapping) else None
    return type(batch), keys, [_form(child) for child in children]


def _same(first: Any, second: Any) -> bool:
    if [type(leaf) for leaf in leaves(first)] != [type(leaf) for leaf in leaves(second)]:
        return False
    return all(
        a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.nan_to_num(), b.nan_to_num())
        for a, b in zip(tensors(first), tensors(second), strict=True)
    )


def _own(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()
