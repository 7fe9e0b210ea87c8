"""Eigenpairs whose vectors are in shards."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from curvlab.distributed import files
from curvlab.distributed.group import Group
from curvlab.eigen.result import SMALL, Eigenpairs, facts_from
from curvlab.manifest import require_tensors

if TYPE_CHECKING:
    from curvlab.distributed.shards import Shards

KIND = "sharded eigenpairs"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ShardedEigenpairs(Eigenpairs):
    """:class:`~curvlab.eigen.Eigenpairs` with this rank's shard of every vector.

    Attributes:
        vectors: Shape ``(k, width)``; the ranks' shards together are orthonormal rows ``(k, n)``.
        shards: How they are divided.
    """

    shards: "Shards"

    @property
    def n(self) -> int:
        return self.shards.n

    def gather(self) -> Eigenpairs:
        """The pairs with whole vectors ``(k, n)``, on every rank."""
        kept: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(Eigenpairs)}
        return Eigenpairs(**{**kept, "vectors": self.shards.gather(self.vectors)})

    def save(self, path: str | Path, about: Mapping[str, Any] | None = None) -> Path:
        """Write shards to the folder ``path``; every rank calls this.

        Args:
            about: More facts for the manifest (JSON).
        """
        facts = {**self.facts(), "about": dict(about or {})}
        small = {name: getattr(self, name) for name in SMALL}
        files.save(self.shards, Path(path), KIND, {"vectors": self.vectors}, small, facts)
        return Path(path)

    @classmethod
    def load(
        cls, path: str | Path, device: torch.device | str = "cpu", group: Group | None = None
    ) -> "ShardedEigenpairs":
        """Read what any number of ranks saved; every rank calls this."""
        from curvlab.distributed.shards import Shards

        shards = Shards(files.elements(path), group)
        tensors, facts = files.load(shards, Path(path), KIND)
        require_tensors(path, tensors, {**SMALL, "vectors": (None, "k", shards.width)})
        placed: dict[str, Any] = {name: tensors[name].to(device) for name in (*SMALL, "vectors")}
        return cls(shards=shards, **placed, **facts_from(path, facts))
