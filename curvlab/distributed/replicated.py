"""Whole vectors on every rank: all ranks solve alike, and one of them writes.

The ranks do the same arithmetic on the same bits, so nothing of a vector needs to be exchanged.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from curvlab.distributed.files import seen_by_all
from curvlab.distributed.group import Group
from curvlab.rows import Whole


class Replicated(Whole):
    """The space of a :class:`~curvlab.distributed.DataParallel` operator's vectors."""

    shared = True

    def __init__(self, n: int, group: Group) -> None:
        super().__init__(n)
        self.group = group
        self.leads = group.rank == 0

    def exists(self, path: Path) -> bool:
        """Whether there is a state to load, which all ranks must see."""
        return seen_by_all(self.group, path)

    def require_writable(self, path: Path) -> None:
        """Raise on every rank unless rank 0 can write."""

        def attempt() -> None:
            if self.leads:
                Whole.require_writable(self, path)

        self.group.together(attempt, f"trying {path}")

    def save(
        self,
        path: Path,
        kind: str,
        rows: Mapping[str, Tensor],
        others: Mapping[str, Tensor],
        facts: Mapping[str, Any],
    ) -> None:
        """Rank 0 writes; the others wait for it."""

        def write() -> None:
            if self.leads:
                Whole.save(self, path, kind, rows, others, facts)

        self.group.together(write, f"saving {path}")

    def load(self, path: Path, kind: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Every rank reads the same file."""
        return self.group.together(lambda: Whole.load(self, path, kind), f"loading {path}")
