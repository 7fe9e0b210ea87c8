"""Operators seen on part of the space: some coordinates, or the complement of a basis."""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from curvlab.operators.operator import Operator
from curvlab.parameters import Layout
from curvlab.precision import working
from curvlab.probe import LinearOperator
from curvlab.rows import Rows

Where = str | Sequence[str] | slice | Tensor


class Restricted(Operator):
    """The principal submatrix of some coordinates of ``base``.

    Args:
        base: Any operator.
        where: Patterns of parameter names (the base then needs a layout), a slice, or indices
            ``(m,)`` without repetition.
    """

    def __init__(self, base: LinearOperator, where: Where) -> None:
        layout = getattr(base, "layout", None)
        self.base = base
        kept: Layout | None = None
        if isinstance(where, slice):
            index = torch.arange(base.n)[where]
        elif isinstance(where, Tensor):
            index = _checked_index(where, base.n)
        else:
            index, kept = _named(layout, [where] if isinstance(where, str) else list(where))
        if not len(index):
            raise ValueError("the restriction is empty: choose at least one coordinate")
        super().__init__(len(index), base.dtype, base.device, kept)
        self.limit = getattr(base, "limit", None)
        self.index = index.to(base.device)

    def _product(self, block: Tensor) -> Tensor:
        whole = torch.zeros(len(block), self.base.n, dtype=self.dtype, device=self.device)
        whole[:, self.index] = block
        return (self.base @ whole)[:, self.index]


class Projected(Operator):
    """``(I - M'M) A (I - M'M)``: ``base`` outside the span of the orthonormal rows of M.

    Args:
        base: Any operator.
        basis: A :class:`~curvlab.basis.Basis`, or orthonormal rows ``(m, n)``.
    """

    def __init__(self, base: LinearOperator, basis: Any) -> None:
        super().__init__(base.n, base.dtype, base.device, getattr(base, "layout", None))
        self.limit = getattr(base, "limit", None)
        self.base = base
        if isinstance(basis, Tensor):
            if basis.dim() != 2 or basis.shape[1] != self.n:
                raise ValueError(f"project needs rows (m, {self.n}); got {tuple(basis.shape)}")
            basis = Rows.of(basis, "project", self.n, working(self.dtype))
        elif not hasattr(basis, "project_out_"):
            raise TypeError(
                f"project needs a Basis or orthonormal rows (m, n); got {type(basis).__name__}"
            )
        elif basis.n != self.n:
            raise ValueError(f"the basis has vectors of {basis.n} elements, the operator {self.n}")
        self.basis = basis

    def _product(self, block: Tensor) -> Tensor:
        inside = block.clone()
        self.basis.project_out_(inside)  # on both sides, or the product would not be symmetric
        result = (self.base @ inside).clone()  # what comes back may be the base's own memory
        self.basis.project_out_(result)
        return result


def _checked_index(index: Tensor, n: int) -> Tensor:
    if index.dtype == torch.bool and index.shape == (n,):
        index = index.nonzero().squeeze(1)
    if index.dtype != torch.int64 or index.dim() != 1:
        raise TypeError(
            f"indices must be int64 (m,) or bool ({n},); got {index.dtype} {tuple(index.shape)}"
        )
    if len(index) and (int(index.min()) < 0 or int(index.max()) >= n):
        raise ValueError(
            f"indices must lie in [0, {n}); got {int(index.min())}..{int(index.max())}"
        )
    if len(set(index.tolist())) != len(index):
        raise ValueError("indices repeat: a principal submatrix takes each coordinate once")
    return index


def _named(layout: Layout | None, patterns: list[str]) -> tuple[Tensor, Layout]:
    if layout is None:
        raise TypeError(
            "this operator has no layout, so names mean nothing: pass indices or a slice"
        )
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in layout.names):
            raise ValueError(f"{pattern!r} matches no parameter of the operator: {layout.names}")
    names = [n for n in layout.names if any(fnmatchcase(n, p) for p in patterns)]
    return layout.indices(names), layout.only(names)
