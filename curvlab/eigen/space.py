"""Where the long vectors of a solve live: here, or in shards over the ranks of a job.

A solver needs little of a long vector: inner products with the rows of a basis, norms, a random
draw, its sign, a file. A :class:`Space` gives these; everything else that a solver does to long
vectors (scaling, mixing rows) is the same for a shard as for the whole. :class:`Local` hands the
kernels through as they are; :class:`curvlab.distributed.Shards` sums what they return over ranks.
"""

import hashlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from curvlab_kernels import ops
from torch import Tensor

from curvlab.eigen.result import Eigenpairs, canonical_signs_
from curvlab.probe import LinearOperator
from curvlab.storage import StorageError, load_tensors, save_tensors, write_atomically


class Space(Protocol):
    """What a solver asks of long vectors; the first six are those of ``curvlab_kernels.ops``.

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

    def coefficients(self, rows: Tensor, vectors: Tensor, /) -> Tensor: ...
    def norm(self, vectors: Tensor, /) -> Tensor: ...
    def project_(self, rows: Tensor, vectors: Tensor, /) -> Tensor: ...
    def orthonormalise_(self, rows: Tensor, vector: Tensor, /) -> tuple[Tensor, Tensor]: ...
    def orthonormalise_block_(self, rows: Tensor, block: Tensor, /) -> Tensor: ...
    def lanczos_step_(
        self, rows: Tensor, vector: Tensor, previous_beta: float, /
    ) -> tuple[Tensor, Tensor, Tensor]: ...

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

    def result(self, **fields: Any) -> Eigenpairs:
        """The result of a solve."""
        ...


@runtime_checkable
class SpacedOperator(Protocol):
    """An operator that says where its vectors live."""

    @property
    def vector_space(self) -> Space: ...


def space_of(operator: LinearOperator) -> Space:
    """The space of an operator's vectors."""
    return operator.vector_space if isinstance(operator, SpacedOperator) else Local(operator.n)


class Local:
    """Whole vectors, in this process."""

    sharded = False
    shared = False
    leads = True
    coefficients = staticmethod(ops.coefficients)
    norm = staticmethod(ops.norm)
    project_ = staticmethod(ops.project_)
    orthonormalise_ = staticmethod(ops.orthonormalise_)
    orthonormalise_block_ = staticmethod(ops.orthonormalise_block_)
    lanczos_step_ = staticmethod(ops.lanczos_step_)
    canonical_signs_ = staticmethod(canonical_signs_)

    def __init__(self, n: int) -> None:
        self.n = self.width = n

    def result(self, **fields: Any) -> Eigenpairs:
        return Eigenpairs(**fields)

    def normal(self, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
        return torch.randn(self.n, generator=generator, dtype=dtype)

    def signs(self, generator: torch.Generator, count: int) -> Tensor:
        return 2 * torch.randint(2, (count, self.n), generator=generator) - 1

    def digest(self, rows: Tensor | None) -> str:
        if rows is None:
            return ""
        data = rows.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return hashlib.sha256(data.numpy().data).hexdigest()

    def exists(self, path: Path) -> bool:
        return path.exists()

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
        except StorageError as error:
            kept = previous(path)
            if kept.exists():
                raise StorageError(
                    f"{error}. The checkpoint before it is in {kept}: move it to {path} to resume "
                    "from there, or delete both to start again"
                ) from error
            raise StorageError(f"{error}. Delete it to start again") from error


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
