"""Orthonormal rows that grow, are projected off, mixed and saved: one owner for all of them.

Guarantees: :meth:`Rows.extend` adds rows orthonormal to those before them (``|G - I|`` as in
:mod:`curvlab.precision`), drops vectors that are dependent to rounding and says so, and leaves the
rows as they were when it raises. Memory grows with what is kept; nothing is copied to grow.

Storage narrower than float32 rounds the rows, after which they are no longer orthonormal. New rows
are made orthogonal to the *stored* ones, and the projection is ``I - M' G^-1 M`` with the Gram
matrix ``G`` of the stored rows, so it is exact for the span of what is stored. What rounding costs
is that this span is not quite the one that was asked for.

What is computed with vectors and the rows in use is in :mod:`curvlab.rows.projector`. Where vectors
live in shards, every method is collective: every rank calls it, with its own shards; Gram matrices
and coefficients are the same on all ranks.
"""

import threading
from collections.abc import Iterable, Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any, Self

import torch
from curvlab_kernels import ops
from curvlab_kernels.block import gram, orthonormalise_with_
from curvlab_kernels.spans import ranges_differ
from torch import Tensor, nn

from curvlab.precision import given_limit, least_share, working
from curvlab.rows import certificate, files, gradients, mixing, spans, steps
from curvlab.rows.certificate import Orthogonality
from curvlab.rows.projector import Projector
from curvlab.rows.sizes import basis_bytes
from curvlab.rows.space import Space
from curvlab.rows.tiers import Tier


class Rows(Projector):
    """Orthonormal rows of ``n`` elements.

    Args:
        space: Where vectors live; a number is the elements of whole vectors in this process.
        capacity: The most rows there may be.
        dtype: The dtype of the stored rows: float64, float32, float16, bfloat16, int8 or float8.
            Vectors are float32 or float64 in each case (float64 rows need float64 vectors).
        device: Where vectors are projected.
        tier: Where rows are kept: ``DeviceMemory()`` (default), ``PinnedHost()`` or
            ``MappedFile(folder)``.

    Attributes:
        n: Elements of a vector; ``width`` of them are held here, which is what tensors have.
        factor: Lower Cholesky factor of :attr:`gram`; ``None`` for float32 and float64 rows, which
            are orthonormal as stored.
        store: The rows as they are stored.
    """

    kind = "rows"  # of a saved file

    @classmethod
    def of(
        cls, vectors: Tensor, name: str, space: Space | int, dtype: torch.dtype | None = None
    ) -> Self:
        """Rows of ``vectors`` ``(m, width)`` that a caller says are orthonormal; ``name`` is his.

        They are checked to a limit that tells a mistake from rounding, and what rounding there is
        (of another program, of a narrower dtype) is put right: the span is theirs, exactly.

        Args:
            dtype: The dtype of the rows; by default the working dtype of ``vectors``.
        """
        rows = cls(
            space, len(vectors), dtype=dtype or working(vectors.dtype), device=vectors.device
        )
        given = vectors.detach().to(rows.dtype)
        error = 0.0
        if len(given):
            products = rows.space.total(gram(given))
            error = float((products - torch.eye(*products.shape).to(products)).abs().max())
        if not error <= given_limit(vectors.dtype):
            raise ValueError(
                f"{name} needs orthonormal rows; |M M' - I| reaches {error:.1e}. Orthonormalise "
                "them first, e.g. torch.linalg.qr(rows.T).Q.T, or put them in a curvlab Basis"
            )
        Rows.extend(rows, given)
        return rows

    @classmethod
    def exactly(cls, vectors: Tensor, capacity: int) -> Self:
        """Rows that are ``vectors`` ``(m, n)``, float32 or float64, bit for bit; not checked."""
        rows = cls(vectors.shape[1], capacity, dtype=vectors.dtype, device=vectors.device)
        rows.store.size = len(rows.store.write(vectors.detach()))
        return rows

    def copy(self) -> Self:
        """The same rows, bit for bit, in memory of their own."""
        rows = type(self)(
            self.space, self.capacity, dtype=self.dtype, device=self.device, tier=self.tier
        )
        rows.load_state(self.state())
        return rows

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(n={self.n}, size={self.size}, capacity={self.capacity}, "
            f"dtype={self.dtype}, device={self.device}, tier={self.tier}, "
            f"{self.bytes / 1e6:.1f} MB)"
        )

    @property
    def bytes(self) -> int:
        """What the rows in use, their scales and their Gram matrix take here."""
        return basis_bytes(self.width, self.size, self.dtype)

    @property
    def gram(self) -> Tensor:
        """Gram matrix ``(size, size)`` of the stored rows, float64."""
        if len(self._gram) < self.size:
            self._gram = spans.bordered(self, self._gram)
        return self._gram

    # Growing and shrinking

    def append(self, vector: Tensor) -> bool:
        """Add one vector ``(width,)``; returns whether it was kept (not if it is dependent)."""
        if vector.dim() != 1:
            raise ValueError(f"append takes a vector ({self.width},); got {tuple(vector.shape)}")
        return bool(self.extend(vector.unsqueeze(0))[0])

    def extend(self, vectors: Tensor, *, least: float | None = None) -> Tensor:
        """Add the directions of ``vectors`` ``(k, width)`` that are not there yet.

        Args:
            vectors: In order of importance: of dependent ones the first is kept. Not changed.
            least: What must be left of a vector for it to be kept, as a share of its norm; at least
                the rounding of the arithmetic and of the stored rows.

        Returns:
            Which vectors were kept: bool ``(k,)``.
        """
        with self._lock:  # two threads would write to the same place
            self._check(vectors, 2)
            self.space.check(vectors)
            rounding = max(least_share(self.dtype), least or 0.0)
            total = self.space.total if self.space.sharded else None
            work = steps.brought_near(self, vectors.detach(), self.store.working)
            kept = orthonormalise_with_(self.project_out_, work, self.size, rounding, total)
            count = int(kept.sum())
            if self.size + count > self.capacity:
                raise ValueError(
                    f"{count} new vectors do not fit: {self.size} of {self.capacity} rows are in "
                    "use. Nothing was added; choose a larger capacity, or truncate first"
                )
            if count:
                self._add(work[kept])
            return kept

    def _add(self, vectors: Tensor) -> None:
        """Store orthonormal ``vectors`` ``(k, width)``; the Gram matrix too, if it is needed."""
        values = self.store.write(vectors)
        if self.factor is not None:
            across, corner = self.coefficients(values), self.space.total(gram(values))
            factor = spans.bordered_factor(self.factor, across, corner)
            self._gram = spans.border(self._gram, across, corner)
            self.factor = factor
        self.store.size += vectors.shape[0]

    def truncate(self, size: int) -> None:
        """Keep the first ``size`` rows; the others' memory stays reserved for new ones."""
        if not 0 <= size <= self.size:
            raise ValueError(f"truncate needs 0 <= size <= {self.size}; got {size}")
        self.store.size = size
        self._forget(size)
        if self.factor is not None:
            self.factor = self.factor[:size, :size].clone()

    def _forget(self, first: int) -> None:
        """What is known of rows ``first`` and after is no longer true."""
        self._gram = self._gram[:first, :first].clone()

    def restore(self, products: Tensor) -> None:
        """Take as in use the rows written to :attr:`store`, whose Gram matrix is ``products``."""
        self._gram = products
        if self.factor is not None:
            self.factor = torch.linalg.cholesky(products)
        self.store.size = products.shape[0]

    def mix(self, weights: Tensor, first: int = 0) -> None:
        """Thick restart: ``m`` rows become ``p`` combinations of them, in place.

        Rows after them move up; in float64, rounded once.

        Args:
            weights: Shape ``(m, p)``, orthonormal columns, float64, ``p <= m``.
            first: Row from which they are counted.
        """
        self._require_float()
        mixing.mix(self, weights, first)
        self._forget(0)

    def combine(self, weights: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """``p`` combinations ``(p, width)`` of the first ``m`` rows, in float64 and rounded once.

        Args:
            weights: Shape ``(m, p)``, float64.
            dtype: The dtype of the result; by default that in which rows are computed.
        """
        return mixing.combine(self, weights, dtype or self.store.working)

    # A model's gradients

    @torch.no_grad()
    def project_gradients_(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        """:meth:`project_out_` on the parameters' ``.grad``; a missing one counts as zeros."""
        chosen = list(parameters)
        for parameter in chosen:
            if parameter.grad is None:  # zero, but its projection need not be
                parameter.grad = torch.zeros_like(parameter)
        return self.project_out_([p.grad for p in chosen if p.grad is not None])

    def sgd_step_(
        self,
        parameters: Sequence[Tensor],
        gradients_: Sequence[Tensor],
        momenta: Sequence[Tensor],
        lr: float,
        weight_decay: float = 0.0,
        momentum: float = 0.0,
    ) -> Tensor:
        """``d = P(g + wd p)``, ``buf = momentum buf + d``, ``p -= lr buf``, on lists of tensors.

        In shards ``gradients_`` may be ``[shard]``, what ``Shards.sum_list`` made of each rank's
        own, and ``momenta`` is ``[shard]``; the parameters are whole.
        """
        whole, good = self.store.whole, self._good
        # One flat tensor of each, as learners have them, goes straight to the kernel.
        if (
            whole is not None
            and len(parameters) == len(gradients_) == 1
            and len(momenta) == (momentum != 0.0)
            and good(weight := parameters[0])
            and good(slope := gradients_[0])
            and weight.dtype is slope.dtype
            and (not momenta or (good(momenta[0]) and momenta[0].dtype is slope.dtype))
        ):
            hyper = (float(lr), float(weight_decay), float(momentum))
            # Otherwise the operation says what is wrong, if anything is.
            flat = [weight, slope, *momenta]
            if isfinite(sum(hyper)) and ranges_differ(whole[0], flat, (self.width,)):
                return self._sgd_step(
                    whole[0], parameters, gradients_, momenta, *hyper, self.factor, whole[1]
                )
        return gradients.sgd_step_(
            self, parameters, gradients_, momenta, lr, weight_decay, momentum
        )

    def leak(self, vectors: Tensor) -> Tensor:
        """The share of each vector's norm that lies in the span: ``()`` or ``(b,)``, float64.

        A vector of zeros has nothing in it: 0.
        """
        if vectors.dtype == torch.float64 and vectors.numel():  # squares leave float64 at 1e+-154
            largest = self.space.largest(vectors.abs().amax(-1, keepdim=True))
            exponent = torch.frexp(largest).exponent.clamp(-1000, 1000)
            vectors = vectors * torch.exp2(-exponent.double())
        inside = ops.norm(spans.whitened(self.factor, self.coefficients(vectors)))
        norm = self.space.norm(vectors)
        return torch.where(norm == 0, norm, inside / norm)

    # Certifying and keeping

    def orthogonality(self, recompute: bool = False) -> Orthogonality:
        """How far the stored rows are from orthonormal.

        Args:
            recompute: Read all rows again and compare with what was recorded when they were
                stored; costs ``size^2 n`` products and shows a damaged memory or file.
        """
        found = spans.cross(self, self) if recompute else self.gram
        return certificate.certify(found, self.gram, self.dtype)

    def principal_angles(self, other: "Rows") -> Tensor:
        """Angles between the spans, in radians, ascending: ``(min(size, other.size),)``."""
        return spans.principal_angles(self, other)

    def save(self, path: str | Path, about: Mapping[str, Any] | None = None) -> Path:
        """Write everything atomically, in pieces: one file, or a folder of the ranks' shards.

        Args:
            about: More facts for the manifest (JSON).
        """
        return files.save(self, path, {**self._facts(), "about": dict(about or {})})

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        capacity: int | None = None,
        device: torch.device | str = "cpu",
        tier: Tier | None = None,
        space: Space | None = None,
    ) -> Self:
        """Read what :meth:`save` wrote, verifying its checksum; in pieces.

        Args:
            capacity: How many rows there may be; by default as many as of the saved ones.
            device: Where the rows go.
            tier: In what memory they are kept, as for new ones.
            space: By default whole vectors in this process. ``Shards.saved(path)`` reads each
                rank's columns of what any number of ranks saved, one included.
        """
        return files.load(cls, path, capacity, device, tier, space)

    def state(self) -> dict[str, Tensor]:
        """Rows as they are stored, scales and Gram matrix, for a checkpoint of something larger."""
        stored = list(self.store.stored())
        tensors = {"gram": self.gram}
        if stored:
            tensors["rows"] = torch.cat([rows for _, rows, _ in stored])
            if stored[0][2] is not None:
                tensors["scales"] = torch.cat([s for _, _, s in stored if s is not None])
        return tensors

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Take up what :meth:`state` gave."""
        if "rows" in tensors:
            self.store.write_rows(0, tensors["rows"])
            if "scales" in tensors:
                self.store.write_scales(0, tensors["scales"])
        self.restore(tensors["gram"].to(self.device))

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.RLock())

    def _facts(self) -> dict[str, Any]:
        """What the manifest says beside sizes."""
        return {}

    def _recall(self, facts: dict[str, Any]) -> None:
        """Take up :meth:`_facts` of a file, when the rows are there; raises ``ValueError``."""
