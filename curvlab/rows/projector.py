"""Rows in use, and the arithmetic of vectors against them: coefficients, projection, Gram-Schmidt.

A solver that makes its rows orthonormal itself writes them with :meth:`Projector.row` and
:meth:`Projector.admit`, at the cost of nothing else. How rows are otherwise added, certified and
saved is in :mod:`curvlab.rows.orthonormal`.
"""

import operator
import threading
from collections.abc import Callable, Sequence
from typing import TypeGuard

import torch
from curvlab_kernels import checks, ops
from curvlab_kernels.block import orthonormalise_with_
from curvlab_kernels.checks import STORAGE, WORKING
from torch import Tensor

from curvlab.rows import gradients, steps
from curvlab.rows.space import Space, Whole
from curvlab.rows.store import Store
from curvlab.rows.tiers import DeviceMemory, Tier


class Projector:
    """Rows and what they span; :class:`curvlab.rows.Rows` says what the arguments are."""

    def __init__(
        self,
        space: Space | int,
        capacity: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        tier: Tier | None = None,
    ) -> None:
        try:
            space = space if hasattr(space, "width") else operator.index(space)
            capacity = operator.index(capacity)
        except TypeError as error:
            raise TypeError(
                f"a basis needs whole numbers n (or a space) and capacity; got {space!r} and "
                f"{capacity!r}"
            ) from error
        if (isinstance(space, int) and space < 1) or capacity < 0:
            raise ValueError(
                f"a basis needs n >= 1 and capacity >= 0; got n={space}, capacity={capacity}"
            )
        if dtype not in STORAGE:
            raise TypeError(f"a basis is not stored as {dtype}; use float32, float16, int8, ...")
        self.space: Space = Whole(space) if isinstance(space, int) else space
        self.n, self.width, self.capacity = self.space.n, self.space.width, capacity
        self.dtype = dtype
        self.device = torch.empty(0, device=device).device  # "cuda" becomes "cuda:0"
        self.tier = DeviceMemory() if tier is None else tier
        self.store = Store(self.width, capacity, dtype, self.device, self.tier)
        self.factor: Tensor | None = None
        if dtype not in WORKING:
            self.factor = torch.zeros(0, 0, dtype=torch.float64, device=self.device)
        self._gram = torch.zeros(0, 0, dtype=torch.float64, device=self.device)
        self._lock = threading.RLock()
        self._local, self._one = not self.space.sharded, torch.Size([self.width])
        self._takes = (dtype,) if dtype == torch.float64 else WORKING
        # what is called most often goes straight to the kernel, without the checks of ops
        kernels = ops.backend(self.device.type)
        self._project: Callable[..., Tensor] = kernels.project_
        self._sgd_step: Callable[..., Tensor] = kernels.sgd_step_
        self._lanczos_step: Callable[..., tuple[Tensor, Tensor, Tensor]] = kernels.lanczos_step_

    @property
    def size(self) -> int:
        """Rows in use."""
        return self.store.size

    def __len__(self) -> int:
        return self.store.size

    @property
    def whole(self) -> tuple[Tensor, Tensor | None] | None:
        """Stored rows ``(size, ld)`` and scales, if one piece of memory on the device has them."""
        return self.store.whole

    # Single rows

    def rows(self, start: int = 0, stop: int | None = None) -> Tensor:
        """A copy of rows ``start`` to ``stop`` ``(count, width)``: float32 or float64."""
        stop = self.size if stop is None else stop
        if not 0 <= start <= stop <= self.size:
            raise ValueError(f"rows {start} to {stop} of a basis with {self.size} rows")
        return self.store.values(start, stop)

    def row(self, index: int) -> Tensor:
        """Row ``index`` ``(width,)`` of float rows: itself where it is at hand, else a copy.

        The rows after those in use can be had as well, to be filled, up to the capacity: after
        :meth:`put` and :meth:`admit` they count.
        """
        if not 0 <= index < max(self.capacity, 1):
            raise IndexError(f"row {index} of a basis with room for {self.capacity}")
        row = self.store.row(index, self.width)
        return row if row.device == self.device else row.to(self.device)

    def put(self, index: int, vector: Tensor) -> None:
        """Write ``vector`` ``(width,)`` to row ``index``; nothing to do if it is that row."""
        row = self.store.row(index, self.width)
        if row.data_ptr() != vector.data_ptr():
            row.copy_(vector)

    def admit(self, count: int = 1) -> None:
        """Take the next ``count`` rows, which the caller made orthonormal, as in use."""
        self._require_float()
        size = self.store.size + count
        if size > self.capacity:
            raise ValueError(f"{size} rows are more than the capacity of {self.capacity}")
        self.store.make_room(size)
        self.store.size = size

    def reserve(self, count: int) -> None:
        """Room for ``count`` rows in one piece of memory; ``capacity`` grows to it."""
        self.capacity = self.store.capacity = max(self.capacity, count)
        self.store.make_whole(count)

    # Projecting

    def coefficients(self, vectors: Tensor) -> Tensor:
        """``M g`` with the stored rows: ``(size,)`` or ``(b, size)``, float64."""
        self._check(vectors)
        return self.space.total(steps.coefficients(self, vectors))

    def project_out_(self, vectors: Tensor | Sequence[Tensor]) -> Tensor:
        """Remove the span of the rows in place; returns the coefficients removed, float64.

        Args:
            vectors: ``(width,)``, rows ``(b, width)``, or a list of whole tensors with ``n``
                elements together, such as a model's gradients in the order of its parameters.
        """
        whole = self.store.whole
        if whole is not None and self._good(vectors):
            checks.check_not_of(whole[0], vectors)
            return self._project(whole[0], vectors, self.factor, whole[1])
        if not isinstance(vectors, Tensor):
            return gradients.project_list_(self, list(vectors))
        self._check(vectors)
        if whole is not None and self._local:
            return ops.project_(whole[0], vectors, self.factor, whole[1])
        checks.check_in_place(vectors)
        return steps.project_out_(self, vectors)

    def _good(self, vector: object) -> TypeGuard[Tensor]:
        """Whether ``vector`` can go straight to a kernel.

        A small model projects more often than it can afford to ask: ops would check it again,
        together with our own rows.
        """
        return (
            self._local
            and type(vector) is Tensor
            and vector.shape == self._one
            and vector.dtype in self._takes
            and vector.device == self.device
            and vector.is_contiguous()
            and not vector.requires_grad
        )

    def subtract_(self, weights: Tensor, vectors: Tensor) -> None:
        """``g -= M' c`` in place: ``weights`` ``(size,)`` or ``(b, size)``, float64."""
        for first, rows, scales in self.store.pieces():
            part = weights[..., first : first + rows.shape[0]].contiguous()
            ops.apply_(rows, part, vectors, scales)

    def orthonormalise_(self, vector: Tensor) -> tuple[Tensor, Tensor]:
        """Make ``vector`` ``(width,)`` orthogonal to the rows and of unit norm, in place.

        Returns:
            The coefficients removed ``(size,)`` and the norm after them ``()``, float64; a vector
            of which only rounding is left becomes zero, and so is its norm.
        """
        whole = self.store.whole
        if whole is not None and not self.space.sharded:
            return ops.orthonormalise_(whole[0], vector)
        return steps.orthonormalise_(self, vector)

    def orthonormalise_block_(self, block: Tensor) -> Tensor:
        """The same for ``block`` ``(b, width)``, also among each other; which were kept: bool."""
        whole = self.store.whole
        if whole is not None and self._local:
            return ops.orthonormalise_block_(whole[0], block)
        total = self.space.total if self.space.sharded else None
        return orthonormalise_with_(self.project_out_, block, self.size, 0.0, total)

    def lanczos_step_(
        self, vector: Tensor, previous_beta: float | Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The next Lanczos vector from ``w = A v``, in place, ``v`` the last row.

        Returns:
            ``alpha``, ``beta`` (0 when exhausted) and every coefficient removed, ``(size,)``,
            float64; see :func:`curvlab_kernels.reference.lanczos_step_`.
        """
        whole = self.store.whole
        if whole is not None and self._local:
            return self._lanczos_step(whole[0], vector, previous_beta)
        return steps.lanczos_step_(self, vector, previous_beta)

    # Checks

    def _require_float(self) -> None:
        if self.factor is not None:
            raise TypeError(
                f"rows stored as {self.dtype} are rounded and known by their Gram matrix: they are "
                "added with extend and cannot be written one by one"
            )

    def _check(self, vectors: Tensor, dimensions: int | None = None) -> None:
        w = self.width
        wrong_dimension = dimensions is not None and vectors.dim() != dimensions
        if wrong_dimension or vectors.dim() not in (1, 2) or vectors.shape[-1] != w:
            shapes = {1: f"({w},)", 2: f"(k, {w})", None: f"({w},) or (b, {w})"}
            raise ValueError(
                f"this basis needs vectors of shape {shapes[dimensions]}; got "
                f"{tuple(vectors.shape)}"
            )
        if vectors.dtype not in WORKING:
            raise TypeError(f"vectors must be float32 or float64; got {vectors.dtype}")
        if vectors.device != self.device:
            raise ValueError(f"vectors are on {vectors.device}, the basis on {self.device}")
