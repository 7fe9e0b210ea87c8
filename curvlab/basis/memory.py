"""The basis: orthonormal rows that grow, are projected off, and know where they came from.

Guarantees: rows are added orthonormal to those before them (largest entry of ``|G - I|`` below 1e-6
in float32), vectors that are dependent to rounding are dropped and said so, and a call that raises
leaves the basis as it was. Rows are allocated once, or a slab at a time; nothing is ever copied to
grow.

Storage narrower than float32 rounds the rows, after which they are no longer orthonormal. New rows
are made orthogonal to the *stored* ones, and the projection is ``I - M' G^-1 M`` with the Gram
matrix ``G`` of the stored rows, so it is exact for the span of what is stored. What rounding costs
is that this span is not quite the one that was asked for.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import compress
from pathlib import Path
from typing import Any

import torch
from curvlab_kernels import ops
from curvlab_kernels.algebra import solve
from curvlab_kernels.block import gram, orthonormalise_with_
from curvlab_kernels.checks import STORAGE, WORKING
from curvlab_kernels.formats import ROUNDING
from torch import Tensor, nn

from curvlab.basis import certificate, files, gradients, subspaces
from curvlab.basis.certificate import Orthogonality
from curvlab.basis.segments import Segment, joined, truncated
from curvlab.basis.sizes import basis_bytes
from curvlab.basis.store import Store
from curvlab.basis.tiers import DeviceMemory, Tier


class Basis:
    """Orthonormal rows of ``n`` elements.

    Args:
        n: Elements of a vector.
        capacity: The most vectors it may hold.
        dtype: Of the stored rows: float64, float32, float16, bfloat16, int8 or float8. Gradients
            may be float32 or float64 whatever it is (float64 only for float64 rows).
        device: Where vectors are projected.
        tier: Where rows are kept: ``DeviceMemory()`` (default), ``PinnedHost()`` or
            ``MappedFile(folder)``.
        slab: Rows allocated at a time; by default all ``capacity`` rows at the start.

    Attributes:
        gram: Gram matrix ``(size, size)`` of the stored rows, float64.
        factor: Its lower Cholesky factor; ``None`` for float32 and float64 rows, which are
            orthonormal as stored.
        store: The stored rows.
    """

    shared = False  # whether other processes hold further columns of every row

    def __init__(
        self,
        n: int,
        capacity: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        tier: Tier | None = None,
        slab: int | None = None,
    ) -> None:
        if n < 1 or capacity < 0 or (slab is not None and slab < 1):
            raise ValueError(
                f"a basis needs n >= 1, capacity >= 0 and slab >= 1; got n={n}, "
                f"capacity={capacity}, slab={slab}"
            )
        if dtype not in STORAGE:
            raise TypeError(f"a basis is not stored as {dtype}; use float32, float16, int8, ...")
        self.n, self.capacity, self.dtype = n, capacity, dtype
        self.device = torch.empty(0, device=device).device  # "cuda" becomes "cuda:0"
        self.tier = DeviceMemory() if tier is None else tier
        self.store = Store(n, capacity, dtype, self.device, self.tier, slab)
        self._segments: list[Segment] = []
        self.gram = torch.zeros(0, 0, dtype=torch.float64, device=self.device)
        self.factor = None if dtype in WORKING else self.gram

    @property
    def size(self) -> int:
        """Rows in use."""
        return self.store.size

    def __len__(self) -> int:
        return self.size

    def __repr__(self) -> str:
        return (
            f"Basis(n={self.n}, size={self.size}, capacity={self.capacity}, dtype={self.dtype}, "
            f"device={self.device}, tier={self.tier}, {self.bytes / 1e6:.1f} MB)"
        )

    @property
    def bytes(self) -> int:
        """What the rows in use, their scales and their Gram matrix take."""
        return basis_bytes(self.n, self.size, self.dtype)

    @property
    def segments(self) -> tuple[Segment, ...]:
        """Which rows were added for which task, in order."""
        return tuple(self._segments)

    def rows(self, start: int = 0, stop: int | None = None) -> Tensor:
        """A copy of rows ``start`` to ``stop`` ``(count, n)``: float32, or float64 for float64."""
        stop = self.size if stop is None else stop
        if not 0 <= start <= stop <= self.size:
            raise ValueError(f"rows {start} to {stop} of a basis with {self.size} rows")
        return self.store.values(start, stop)

    # Growing

    def append(
        self, vector: Tensor, *, task: str = "", step: int | None = None, value: float | None = None
    ) -> bool:
        """Add one vector ``(n,)``; returns whether it was kept (not if it is dependent)."""
        if vector.dim() != 1:
            raise ValueError(f"append takes a vector ({self.n},); got {tuple(vector.shape)}")
        values = None if value is None else [value]
        return bool(self.extend(vector.unsqueeze(0), task=task, step=step, values=values)[0])

    def extend(
        self,
        vectors: Tensor,
        *,
        task: str = "",
        step: int | None = None,
        values: Sequence[float] | Tensor | None = None,
    ) -> Tensor:
        """Add the directions of ``vectors`` ``(k, n)`` that are not in the basis yet.

        Args:
            vectors: In order of importance: of dependent ones the first is kept. Not changed.
            task: What they protect; with ``step`` and ``values`` kept as provenance.
            step: The training step at which they were computed.
            values: One eigenvalue per vector.

        Returns:
            Which vectors were kept: bool ``(k,)``. A vector is dropped if what is left of it after
            removal of the basis is rounding: of the arithmetic, or of the stored rows.
        """
        origin = Segment(task, 0, 0, step, () if values is None else tuple(map(float, values)))
        return self._extend(vectors, origin, ROUNDING.get(self.dtype, 0.0))

    def _extend(self, vectors: Tensor, origin: Segment, least: float) -> Tensor:
        """:meth:`extend` with the rank rule's tolerance at ``least``."""
        self._check(vectors, 2)
        if origin.values and len(origin.values) != vectors.shape[0]:
            raise ValueError(
                f"{vectors.shape[0]} vectors need as many values; got {len(origin.values)}"
            )
        work = vectors.detach().to(self.store.working, copy=True).contiguous()
        kept = orthonormalise_with_(
            self.project_out_, work, self.size, least, self.total if self.shared else None
        )
        count = int(kept.sum())
        if self.size + count > self.capacity:
            raise ValueError(
                f"{count} new vectors do not fit: {self.size} of {self.capacity} rows are in use. "
                "Nothing was added; choose a larger capacity, or truncate first"
            )
        if count:
            self._add(work[kept])
            values = tuple(compress(origin.values, kept.tolist()))
            new = replace(origin, start=self.size - count, stop=self.size, values=values)
            self._segments = joined(self._segments, new)
        return kept

    def merge(self, other: "Basis", at_once: int = 64) -> Tensor:
        """Add the rows of ``other``, with their provenance; returns which were kept: bool."""
        if other.n != self.n:
            raise ValueError(f"cannot merge vectors of {other.n} elements into one of {self.n}")
        if other is self:
            raise ValueError("a basis cannot be merged into itself")
        before, kept = self.size, list[Tensor]()
        least = max(ROUNDING.get(self.dtype, 0.0), ROUNDING.get(other.dtype, 0.0))
        try:
            for segment in other.segments:
                for start in range(segment.start, segment.stop, at_once):
                    stop = min(start + at_once, segment.stop)
                    values = segment.values[start - segment.start : stop - segment.start]
                    rows = other.rows(start, stop).to(self.device)
                    kept.append(self._extend(rows, replace(segment, values=values), least))
        except BaseException:
            self.truncate(before)
            raise
        return torch.cat(kept) if kept else torch.zeros(0, dtype=torch.bool, device=self.device)

    def truncate(self, size: int) -> None:
        """Keep the first ``size`` rows; the others' memory stays reserved for new ones."""
        if not 0 <= size <= self.size:
            raise ValueError(f"truncate needs 0 <= size <= {self.size}; got {size}")
        self.store.size = size
        self._segments = truncated(self._segments, size)
        self.gram = self.gram[:size, :size].clone()
        if self.factor is not None:
            self.factor = self.factor[:size, :size].clone()

    def restore(self, gram: Tensor, origin: Sequence[Segment]) -> None:
        """Take as in use the rows that were written to :attr:`store`; for :meth:`load`."""
        self.gram = gram
        if self.factor is not None:
            self.factor = torch.linalg.cholesky(gram)
        self._segments = list(origin)
        self.store.size = gram.shape[0]

    def _add(self, vectors: Tensor) -> None:
        """Store orthonormal ``vectors`` ``(k, n)`` and border the Gram matrix and its factor."""
        values = self.store.write(vectors)
        across, corner = self.coefficients(values), self.total(gram(values))
        factor = None
        if self.factor is not None:
            factor = subspaces.bordered_factor(self.factor, across, corner)
        self.gram = torch.cat([torch.cat([self.gram, across.T], 1), torch.cat([across, corner], 1)])
        self.factor = factor
        self.store.size += vectors.shape[0]

    # Projecting

    def coefficients(self, vectors: Tensor) -> Tensor:
        """``M g`` with the stored rows: ``(size,)`` or ``(b, size)``, float64."""
        self._check(vectors)
        parts = [ops.coefficients(rows, vectors, scales) for _, rows, scales in self.store.pieces()]
        empty = vectors.new_zeros((*vectors.shape[:-1], 0), dtype=torch.float64)
        return torch.cat([empty, *parts], -1)

    def project_out_(self, vectors: Tensor | Sequence[Tensor]) -> Tensor:
        """Remove the span of the basis in place; returns the coefficients removed, float64.

        Args:
            vectors: ``(n,)``, rows ``(b, n)``, or a list of tensors with ``n`` elements together,
                such as a model's gradients in the order of its parameters.
        """
        if not isinstance(vectors, Tensor):
            return gradients.project_list_(self, vectors)
        self._check(vectors)
        whole = self.store.whole
        if whole is not None:
            return ops.project_(whole[0], vectors, self.factor, whole[1])
        if self.factor is None:
            # Orthonormal pieces can be removed one after the other: each is fetched once.
            parts = [ops.project_(rows, vectors) for _, rows, _ in self.store.pieces()]
            empty = vectors.new_zeros((*vectors.shape[:-1], 0), dtype=torch.float64)
            return torch.cat([empty, *parts], -1)
        removed = solve(self.factor, self.coefficients(vectors))
        for first, rows, scales in self.store.pieces():
            part = removed[..., first : first + rows.shape[0]].contiguous()
            ops.apply_(rows, part, vectors, scales)
        return removed

    def project_gradients_(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        """:meth:`project_out_` on the parameters' ``.grad``; a missing one counts as zeros."""
        return gradients.project_gradients_(self, parameters)

    def sgd_step_(
        self,
        parameters: Sequence[Tensor],
        gradients_: Sequence[Tensor],
        momenta: Sequence[Tensor],
        lr: float,
        weight_decay: float = 0.0,
        momentum: float = 0.0,
    ) -> Tensor:
        """``d = P(g + wd p)``, ``buf = momentum buf + d``, ``p -= lr buf``, on lists of tensors."""
        return gradients.sgd_step_(
            self, parameters, gradients_, momenta, lr, weight_decay, momentum
        )

    def leak(self, vectors: Tensor) -> Tensor:
        """The share of each vector's norm that lies in the basis: ``()`` or ``(b,)``, float64."""
        inside = ops.norm(subspaces.whitened(self.factor, self.coefficients(vectors)))
        return inside / self.lengths(vectors)

    # Columns in other processes

    def total(self, parts: Tensor) -> Tensor:
        """Sum float64 ``parts`` over the processes that hold the other columns: here none do."""
        return parts

    def lengths(self, vectors: Tensor) -> Tensor:
        """Norms ``()`` or ``(b,)`` of vectors, float64."""
        return ops.norm(vectors)

    # Certifying

    def orthogonality(self, recompute: bool = False) -> Orthogonality:
        """How far the stored rows are from orthonormal.

        Args:
            recompute: Read all rows again and compare with what was recorded when they were
                stored; costs ``size^2 n`` products and shows a damaged memory or file.
        """
        found = subspaces.cross(self, self) if recompute else self.gram
        return certificate.certify(found, self.gram, self.dtype)

    def principal_angles(self, other: "Basis") -> Tensor:
        """Angles between the spans, in radians, ascending: ``(min(size, other.size),)``."""
        return subspaces.principal_angles(self, other)

    def save(self, path: str | Path, about: Mapping[str, Any] | None = None) -> Path:
        """Write rows, Gram matrix and provenance to one file, atomically; in pieces.

        Args:
            about: More facts for the manifest (JSON).
        """
        return files.save(self, path, about or {})

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        capacity: int | None = None,
        device: torch.device | str = "cpu",
        tier: Tier | None = None,
        slab: int | None = None,
    ) -> "Basis":
        """Read a file written by :meth:`save`, verifying its checksum; in pieces.

        Args:
            capacity: Of the new basis; by default that of the saved one.
            device: As for a new basis, and so are ``tier`` and ``slab``.
        """
        return files.load(cls, path, capacity, device, tier, slab)

    def _check(self, vectors: Tensor, dimensions: int | None = None) -> None:
        shapes = {1: f"({self.n},)", 2: f"(k, {self.n})", None: f"({self.n},) or (b, {self.n})"}
        wrong_dimension = dimensions is not None and vectors.dim() != dimensions
        if wrong_dimension or vectors.dim() not in (1, 2) or vectors.shape[-1] != self.n:
            raise ValueError(
                f"this basis needs vectors of shape {shapes[dimensions]}; got "
                f"{tuple(vectors.shape)}"
            )
        if vectors.dtype not in WORKING:
            raise TypeError(f"vectors must be float32 or float64; got {vectors.dtype}")
        if vectors.device != self.device:
            raise ValueError(f"vectors are on {vectors.device}, the basis on {self.device}")
