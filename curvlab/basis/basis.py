"""The memory M: orthonormal rows that know what they protect and when they were computed."""

import json
from collections.abc import Mapping, Sequence
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from curvlab.basis.segments import Segment, from_json, joined, to_json, truncated
from curvlab.html import block, spark
from curvlab.precision import least_share
from curvlab.rows import Rows


class Basis(Rows):
    """:class:`~curvlab.rows.Rows` with their provenance; a Gram matrix is recorded as they come.

    ``Basis(parameter_count(model), capacity=100)`` holds whole vectors in this process;
    ``Basis(Shards(n), capacity=100)`` a range of every vector on each rank of a job.
    """

    kind = "basis"
    _segments: tuple[Segment, ...] = ()

    @property
    def segments(self) -> tuple[Segment, ...]:
        """Which rows were added for which task, in order; nothing is known of mixed rows."""
        known = self._segments[-1].stop if self._segments else 0
        rest = () if known == self.size else (Segment("", known, self.size),)
        return self._segments + rest

    @property
    def values(self) -> Tensor:
        """The eigenvalues of all rows that have one, float64."""
        known = [value for segment in self.segments for value in segment.values]
        return torch.tensor(known, dtype=torch.float64)

    def _repr_html_(self) -> str:
        """In a notebook: what its rows protect, and their eigenvalues as bars."""
        rows = [
            [
                part.task or "(unnamed)",
                f"{part.start} to {part.stop - 1}",
                "" if part.step is None else str(part.step),
                f"{max(part.values, key=abs):.5g}" if part.values else "",
            ]
            for part in self.segments
        ]
        title = (
            f"{type(self).__name__}: {self.size} of {self.capacity} rows, n = {self.n:,}, "
            f"{self.dtype}, {self.bytes / 1e6:.1f} MB"
        )
        return block(
            title, ["task", "rows", "step", "largest value"], rows, spark(self.values.tolist())
        )

    def append(
        self, vector: Tensor, *, task: str = "", step: int | None = None, value: float | None = None
    ) -> bool:
        """Add one vector ``(width,)``; returns whether it was kept (not if it is dependent)."""
        if vector.dim() != 1:
            raise ValueError(f"append takes a vector ({self.width},); got {tuple(vector.shape)}")
        values = None if value is None else [value]
        return bool(self.extend(vector.unsqueeze(0), task=task, step=step, values=values)[0])

    def extend(
        self,
        vectors: Tensor,
        *,
        least: float | None = None,
        task: str = "",
        step: int | None = None,
        values: Sequence[float] | Tensor | None = None,
    ) -> Tensor:
        """Add the directions of ``vectors`` ``(k, width)`` that are not in the basis yet.

        Args:
            vectors: In order of importance: of dependent ones the first is kept. Not changed.
            least: As for :meth:`Rows.extend`.
            task: What they protect; with ``step`` and ``values`` kept as provenance.
            step: The training step at which they were computed.
            values: One eigenvalue per vector.

        Returns:
            Which vectors were kept: bool ``(k,)``. A vector is dropped if what is left of it after
            removal of the basis is rounding: of the arithmetic, or of the stored rows.
        """
        known = () if values is None else tuple(map(float, values))
        if known and len(known) != vectors.shape[0]:
            raise ValueError(f"{vectors.shape[0]} vectors need as many values; got {len(known)}")
        with self._lock:
            before = self.size
            kept = super().extend(vectors, least=least)
            if self.size > before:
                chosen = tuple(compress(known, kept.tolist()))
                new = Segment(task, before, self.size, step, chosen)
                self._segments = joined(self._segments, new)
                _ = self.gram  # recorded now, so that a later change of the rows shows
        return kept

    def merge(self, other: "Basis", at_once: int = 64) -> Tensor:
        """Add the rows of ``other``, with their provenance; returns which were kept: bool."""
        if other.n != self.n:
            raise ValueError(f"cannot merge vectors of {other.n} elements into one of {self.n}")
        if other is self:
            raise ValueError("a basis cannot be merged into itself")
        before, kept = self.size, list[Tensor]()
        least = least_share(other.dtype)
        try:
            for segment in other.segments:
                for start in range(segment.start, segment.stop, at_once):
                    stop = min(start + at_once, segment.stop)
                    values = segment.values[start - segment.start : stop - segment.start]
                    rows = other.rows(start, stop).to(self.device)
                    kept.append(
                        self.extend(
                            rows,
                            least=least,
                            task=segment.task,
                            step=segment.step,
                            values=values or None,
                        )
                    )
        except BaseException:
            self.truncate(before)
            raise
        return torch.cat(kept) if kept else torch.zeros(0, dtype=torch.bool, device=self.device)

    def _forget(self, first: int) -> None:
        super()._forget(first)
        self._segments = truncated(self._segments, first)

    def state(self) -> dict[str, Tensor]:
        """As :meth:`Rows.state`, with the provenance."""
        text = json.dumps(to_json(self.segments)).encode()
        origins = torch.tensor(list(text), dtype=torch.uint8)
        return {**super().state(), "origins": origins}

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Take up what :meth:`state` gave."""
        super().load_state(tensors)
        text = bytes(tensors["origins"].tolist()).decode()
        self._segments = from_json(json.loads(text), self.size)

    def _facts(self) -> dict[str, Any]:
        return {"segments": to_json(self.segments)}

    def _recall(self, facts: dict[str, Any]) -> None:
        self._segments = from_json(facts["segments"], self.size)
