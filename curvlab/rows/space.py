"""Where long vectors live: here, or in shards over the ranks of a job.

Little is asked of a long vector: sums over its elements, a random draw, its sign, a file. A
:class:`Space` gives these; everything else (scaling, mixing rows, products with rows) is the same
for a shard as for the whole, up to a sum over the ranks. :class:`Whole` has all elements in this
process; :class:`curvlab.distributed.Shards` has a range of them on each rank.
"""

import hashlib
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from curvlab_kernels import ops
from torch import Tensor

from curvlab.storage import (
    MissingFileError,
    Pieces,
    StorageError,
    load_tensors,
    open_pieces,
    save_pieces,
    save_tensors,
    tensor_bytes,
    write_atomically,
)


class Space(Protocol):
    """What rows and solvers ask of long vectors.

    Attributes:
        n: Elements of a vector.
        width: Elements of it that are held here: the length of every tensor that stands for one.
        sharded: Whether ``width`` is only a part.
        shared: Whether other processes take part, so that all must do the same at the same time.
        leads: Whether this process may write to the terminal.
    """

    @property
    def n(self) -> int: ...
    @property
    def width(self) -> int: ...
    @property
    def sharded(self) -> bool: ...
    @property
    def shared(self) -> bool: ...
    @property
    def leads(self) -> bool: ...

    def total(self, parts: Tensor) -> Tensor:
        """Sums over the elements held here, float64, made sums over all elements."""
        ...

    def norm(self, vectors: Tensor) -> Tensor:
        """Norms ``()`` or ``(b,)`` of ``(width,)`` or ``(b, width)``, float64."""
        ...

    def largest(self, values: Tensor) -> Tensor:
        """Maxima over the elements held here made maxima over all elements."""
        ...

    def check(self, vectors: Tensor) -> None:
        """Raise unless what stands in ``vectors`` ``(..., width)`` can be what is held here."""
        ...

    def take_list(self, tensors: Sequence[Tensor]) -> Tensor:
        """What is held here, ``(width,)``, of whole tensors that make one vector; a copy."""
        ...

    def give_list(self, held: Tensor, tensors: Sequence[Tensor]) -> None:
        """Write the vector of which ``held`` ``(width,)`` is here into whole ``tensors``."""
        ...

    def gather(self, held: Tensor) -> Tensor:
        """Whole vectors ``(n,)`` or ``(b, n)`` of what is held here."""
        ...

    def normal(self, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
        """A standard normal vector ``(width,)``, on the CPU."""
        ...

    def signs(self, generator: torch.Generator, count: int) -> Tensor:
        """Random ``+1`` and ``-1``, int64 ``(count, width)``, on the CPU."""
        ...

    def canonical_signs_(self, vectors: Tensor) -> Tensor:
        """Flip rows ``(k, width)`` in place so that the largest element of each is positive."""
        ...

    def digest(self, rows: Tensor | None) -> str:
        """Of rows ``(k, width)``; the same however they are divided."""
        ...

    def exists(self, path: Path) -> bool:
        """Whether there is a state to :meth:`load`."""
        ...

    def require_writable(self, path: Path) -> None:
        """Raise unless a state can be saved there: at the start, not after minutes of work."""
        ...

    def save(
        self,
        path: Path,
        kind: str,
        rows: Mapping[str, Tensor],
        others: Mapping[str, Tensor],
        facts: Mapping[str, Any],
    ) -> None:
        """Write a state, keeping the one before: ``rows`` are ``(k, width)``, ``others`` small."""
        ...

    def load(self, path: Path, kind: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """What :meth:`save` wrote: all tensors, and the facts."""
        ...

    def save_rows(
        self,
        path: Path,
        kind: str,
        rows: Mapping[str, Pieces],
        others: Mapping[str, Pieces],
        facts: Mapping[str, Any],
    ) -> None:
        """Write rows larger than the memory, in pieces: ``(k, padded(width))``, or their scales."""
        ...

    def open_rows(
        self, path: Path, kind: str
    ) -> AbstractContextManager[tuple[dict[str, Pieces], dict[str, Any]]]:
        """What :meth:`save_rows` wrote, verified, to be read in pieces; and the facts."""
        ...


@runtime_checkable
class SpacedOperator(Protocol):
    """An operator that says where its vectors live."""

    @property
    def vector_space(self) -> Space: ...


def space_of(operator: Any) -> Space:
    """The space of an operator's vectors."""
    return operator.vector_space if isinstance(operator, SpacedOperator) else Whole(operator.n)


class Whole:
    """Whole vectors of ``n`` elements, in this process."""

    sharded = False
    shared = False
    leads = True
    norm = staticmethod(ops.norm)

    def __init__(self, n: int) -> None:
        if n < 1:
            raise ValueError(f"vectors have at least one element; got n={n}")
        self.n = self.width = n

    def __repr__(self) -> str:
        return f"Whole({self.n})"

    def total(self, parts: Tensor) -> Tensor:
        return parts

    def largest(self, values: Tensor) -> Tensor:
        return values

    def check(self, vectors: Tensor) -> None:
        """All elements are here: there is nothing to check."""

    def take_list(self, tensors: Sequence[Tensor]) -> Tensor:
        return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])

    def give_list(self, held: Tensor, tensors: Sequence[Tensor]) -> None:
        parts = torch.split(held, [tensor.numel() for tensor in tensors])
        shaped = [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
        torch._foreach_copy_(list(tensors), shaped)

    def gather(self, held: Tensor) -> Tensor:
        return held

    def normal(self, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
        return torch.randn(self.n, generator=generator, dtype=dtype)

    def signs(self, generator: torch.Generator, count: int) -> Tensor:
        return 2 * torch.randint(2, (count, self.n), generator=generator) - 1

    def canonical_signs_(self, vectors: Tensor) -> Tensor:
        if vectors.numel():
            # no abs(), which is a copy of all rows; no index, for which a GPU would wait
            vectors *= torch.where(-vectors.amin(1) > vectors.amax(1), -1, 1).unsqueeze(1)
        return vectors

    def digest(self, rows: Tensor | None) -> str:
        if rows is None:
            return ""
        return hashlib.sha256(tensor_bytes(rows)).hexdigest()

    def exists(self, path: Path) -> bool:
        return path.exists()

    def require_writable(self, path: Path) -> None:
        write_atomically(path, None)

    def save(
        self,
        path: Path,
        kind: str,
        rows: Mapping[str, Tensor],
        others: Mapping[str, Tensor],
        facts: Mapping[str, Any],
    ) -> None:
        if path.exists():
            write_atomically(previous(path), lambda temporary: _link(path, temporary))
        save_tensors(path, kind, {**rows, **others}, facts)

    def load(self, path: Path, kind: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
        try:
            return load_tensors(path, kind)
        except MissingFileError:
            raise  # a folder, say: nothing that could be deleted and begun again
        except StorageError as error:
            kept = previous(path)
            if kept.exists():
                raise StorageError(
                    f"{error}. The checkpoint before it is in {kept}: move it to {path} to resume "
                    "from there, or delete both to start again"
                ) from error
            raise StorageError(f"{error}. Delete it to start again") from error

    def save_rows(
        self,
        path: Path,
        kind: str,
        rows: Mapping[str, Pieces],
        others: Mapping[str, Pieces],
        facts: Mapping[str, Any],
    ) -> None:
        save_pieces(path, kind, {**rows, **others}, {"n": self.n, **facts})

    @contextmanager
    def open_rows(
        self, path: Path, kind: str
    ) -> Iterator[tuple[dict[str, Pieces], dict[str, Any]]]:
        with open_pieces(path, kind) as (tensors, facts):
            yield tensors, facts


def previous(path: str | Path) -> Path:
    """Where the checkpoint before the last one is kept."""
    path = Path(path)
    return path.with_name(path.name + ".previous")


def _link(source: Path, target: str) -> None:
    Path(target).unlink()
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links
        shutil.copyfile(source, target)
