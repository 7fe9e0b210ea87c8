"""Orthonormal rows of one layer, small enough to be plain tensors, with what they protect."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from curvlab.basis.segments import Segment, from_json, joined
from curvlab.layerwise.spans import extended_basis
from curvlab.precision import certified_limit

STORED = (torch.float32, torch.float64)


@dataclass(frozen=True, slots=True, eq=False)
class Subspace:
    """Rows ``(r, width)``, orthonormal to the rounding of their dtype; the first added come first.

    Attributes:
        segments: Which rows came for which task, each with the energy along it (a sum of squares).
    """

    rows: Tensor
    segments: tuple[Segment, ...] = ()

    @classmethod
    def empty(cls, width: int, dtype: torch.dtype) -> "Subspace":
        """No rows yet."""
        return cls(torch.zeros(0, width, dtype=dtype))

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def width(self) -> int:
        return self.rows.shape[1]

    @property
    def values(self) -> Tensor:
        """The energy along each row, float64 ``(r,)``."""
        found = [value for segment in self.segments for value in segment.values]
        return torch.tensor(found, dtype=torch.float64)

    def extended(self, triangle: Tensor, energy: float, task: str) -> "Subspace":
        """With the fewest rows that hold ``energy`` of what ``triangle`` stands for."""
        rows, values = extended_basis(
            self.rows.double(), triangle.cpu(), energy, stored=self.rows.dtype
        )
        return self._with(rows[len(self) :], values, task, None)

    def merged(self, other: "Subspace") -> "Subspace":
        """With the rows of ``other`` that are not in the span yet."""
        found = self
        for segment in other.segments:
            rows = other.rows[segment.start : segment.stop].double()
            energies = torch.tensor(segment.values, dtype=torch.float64)
            stored = max(
                self.rows.dtype, other.rows.dtype, key=lambda dtype: torch.finfo(dtype).eps
            )
            longer, _ = extended_basis(found.rows.double(), rows, 1.0, stored=stored)
            added = longer[len(found) :]
            along = (added @ rows.T).square() @ energies
            found = found._with(added, along, segment.task, segment.step)
        return found

    def _with(self, added: Tensor, values: Tensor, task: str, step: int | None) -> "Subspace":
        if not len(added):
            return self
        stop = len(self) + len(added)
        segment = Segment(task, len(self), stop, step, tuple(values.tolist()))
        rows = torch.cat([self.rows, added.to(self.rows.dtype)])
        return Subspace(rows, joined(self.segments, segment))


def checked(rows: Tensor, width: int, segments: Any) -> Subspace:
    """What a file says; raises ``ValueError`` unless it is orthonormal rows of ``width``."""
    if rows.dim() != 2 or rows.shape[1] != width or len(rows) > width or rows.dtype not in STORED:
        raise ValueError(f"rows {tuple(rows.shape)} of {rows.dtype} do not fit a width of {width}")
    wide = rows.double()
    error = (wide @ wide.T - torch.eye(len(rows), dtype=torch.float64)).abs()
    if len(rows) and not float(error.max()) <= certified_limit(rows.dtype):  # NaN fails as well
        raise ValueError(f"its rows are not orthonormal: |G - I| reaches {float(error.max()):.1e}")
    found = from_json(segments, len(rows))
    if any(len(segment.values) != len(segment) for segment in found):
        raise ValueError("a segment has no energies")
    return Subspace(rows, found)
