"""The memory M in shards: every rank holds its columns of every row.

What :class:`~curvlab.basis.Basis` does with whole vectors, this does with shards, and the only
numbers that cross between ranks are coefficients, squared norms and Gram matrices. Gram matrix,
factor and provenance are the same on every rank. All methods are collective: every rank calls them,
with its own shards. Tensors of parameters and gradients are given whole, as each rank of a
data-parallel job has them; the step computes its own range of the parameters and gathers the rest.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from curvlab_kernels import ops
from curvlab_kernels.algebra import solve
from curvlab_kernels.formats import BLOCK, LEVELS, padded
from torch import Tensor, nn

from curvlab.basis import segments
from curvlab.basis.files import KIND as WHOLE
from curvlab.basis.memory import Basis
from curvlab.basis.segments import Segment
from curvlab.basis.tiers import Tier
from curvlab.distributed import files
from curvlab.distributed.group import Group
from curvlab.distributed.shards import Shards
from curvlab.distributed.watch import RankError
from curvlab.storage import Pieces, open_pieces

KIND = "sharded basis"


class ShardedBasis(Basis):
    """Orthonormal rows of ``n`` elements over the ranks of a job.

    Args:
        n: Elements of a whole vector; the attribute ``n`` of the basis is the length of a shard,
            ``shards.width``, which is what its vectors have.
        capacity: As for :class:`~curvlab.basis.Basis`, and so are the others.
        group: The ranks; by default those of the job.
    """

    shared = True

    def __init__(
        self,
        n: int,
        capacity: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        tier: Tier | None = None,
        slab: int | None = None,
        group: Group | None = None,
    ) -> None:
        self.shards = Shards(n, group)
        super().__init__(
            self.shards.width, capacity, dtype=dtype, device=device, tier=tier, slab=slab
        )

    def total(self, parts: Tensor) -> Tensor:
        """Sum float64 ``parts`` over the ranks; a rank that gave NaN or infinity is named."""
        sound = bool(parts.isfinite().all())
        summed = self.shards.total(parts)
        if not bool(summed.isfinite().all()):
            flags = self.shards.group.facts(sound, "a look for the rank with NaN")
            wrong = [rank for rank, good in enumerate(flags) if not good]
            raise RankError(f"vectors of ranks {wrong} hold NaN or infinity; nothing was changed")
        return summed

    def lengths(self, vectors: Tensor) -> Tensor:
        """Norms ``()`` or ``(b,)`` of whole vectors from their shards, float64."""
        return self.total(ops.norm(vectors).square()).sqrt()

    def coefficients(self, vectors: Tensor) -> Tensor:
        """``M g`` with the stored rows: ``(size,)`` or ``(b, size)``, float64; from shards."""
        return self.total(super().coefficients(vectors))

    def project_out_(self, vectors: Tensor | Sequence[Tensor]) -> Tensor:
        """Remove the span of the basis in place; returns the coefficients removed, float64.

        Args:
            vectors: Shards ``(width,)`` or ``(b, width)``; or a list of whole tensors, the same on
                every rank, such as averaged gradients.
        """
        if not isinstance(vectors, Tensor):
            shard = self.shards.take_list(vectors)
            removed = self.project_out_(shard)
            self.shards.give_list(shard, vectors)
            return removed
        removed = solve(self.factor, self.coefficients(vectors))
        for first, rows, scales in self.store.pieces():
            part = removed[..., first : first + rows.shape[0]].contiguous()
            ops.apply_(rows, part, vectors, scales)
        return removed

    def project_gradients_(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        """:meth:`project_out_` on the parameters' ``.grad``, which every rank has averaged."""
        chosen = list(parameters)
        for parameter in chosen:
            if parameter.grad is None:  # zero, but its projection need not be
                parameter.grad = torch.zeros_like(parameter)
        with torch.no_grad():
            return self.project_out_([p.grad for p in chosen if p.grad is not None])

    @torch.no_grad()
    def sgd_step_(
        self,
        parameters: Sequence[Tensor],
        gradients_: Sequence[Tensor],
        momenta: Sequence[Tensor],
        lr: float,
        weight_decay: float = 0.0,
        momentum: float = 0.0,
    ) -> Tensor:
        """``d = P(g + wd p)``, ``buf = momentum buf + d``, ``p -= lr buf``; p is whole again after.

        Args:
            parameters: Whole, the same on every rank.
            gradients_: Whole and the same on every rank; or ``[shard]``, what
                :meth:`Shards.sum_list` made of each rank's own gradients.
            momenta: ``[shard]`` of zeros ``(width,)`` before the first step, or ``[]``.
        """
        if momentum != 0.0 and not momenta:
            raise ValueError(f"momentum={momentum} needs momenta: [one shard of zeros]")
        for momenta_ in momenta:
            self.shards.require_shard(momenta_)
        step = self._gradient(gradients_)
        values = self.shards.take_list(parameters)
        if weight_decay:
            step.add_(values, alpha=weight_decay)
        removed = self.project_out_(step)
        if momenta:
            step = momenta[0].mul_(momentum).add_(step)
        values.sub_(step, alpha=lr)
        self.shards.give_list(values, parameters)
        return removed

    def _gradient(self, gradients: Sequence[Tensor]) -> Tensor:
        if len(gradients) == 1 and gradients[0].shape == (self.shards.width,):
            return gradients[0].clone()
        return self.shards.take_list(gradients)

    def _extend(self, vectors: Tensor, origin: Segment, least: float) -> Tensor:
        if bool(vectors[..., self.shards.held :].any()):
            raise ValueError(
                f"rank {self.shards.group.rank} holds {self.shards.held} elements of every vector; "
                "those after them must be zero. Shards.take cuts shards out of whole vectors"
            )
        return super()._extend(vectors, origin, least)

    def save(self, path: str | Path, about: Mapping[str, Any] | None = None) -> Path:
        """Write shards to the folder ``path``; every rank calls this.

        Args:
            about: More facts for the manifest (JSON).
        """
        store, width = self.store, self.shards.width
        rows = {
            "rows": Pieces(
                self.dtype, (self.size, width), lambda: (row for _, row, _ in store.stored())
            )
        }
        if self.dtype in LEVELS:
            rows["scales"] = Pieces(
                torch.float32,
                (self.size, width // BLOCK),
                lambda: (scale for _, _, scale in store.stored() if scale is not None),
            )
        facts = {
            "capacity": self.capacity,
            "segments": segments.to_json(self.segments),
            "about": dict(about or {}),
        }
        files.save(self.shards, Path(path), KIND, rows, {"gram": self.gram}, facts)
        return Path(path)

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        capacity: int | None = None,
        device: torch.device | str = "cpu",
        tier: Tier | None = None,
        slab: int | None = None,
        group: Group | None = None,
    ) -> "ShardedBasis":
        """Read what any number of ranks saved, or the file of a whole basis; every rank calls this.

        Args:
            capacity: Of the new basis; by default that of the saved one.
            device: As for a new basis, and so are the others.
        """
        path = Path(path)
        if path.is_file():
            shards, tensors, facts = _from_whole(path, group)
        else:
            shards = Shards(files.elements(path), group)
            tensors, facts = files.load(shards, path, KIND)
        size = tensors["gram"].shape[0]
        room = max(int(facts["capacity"]), size) if capacity is None else capacity
        if room < size:
            raise ValueError(f"{path} holds {size} rows; capacity={capacity} is too small")
        basis = cls(
            shards.n,
            room,
            dtype=tensors["rows"].dtype,
            device=device,
            tier=tier,
            slab=slab,
            group=shards.group,
        )
        basis.store.write_rows(0, tensors.pop("rows"))
        if "scales" in tensors:
            basis.store.write_scales(0, tensors["scales"])
        origin = segments.from_json(facts["segments"], size)
        basis.restore(tensors["gram"].to(basis.device), origin)
        return basis


def _from_whole(
    path: Path, group: Group | None
) -> tuple[Shards, dict[str, Tensor], dict[str, Any]]:
    """This rank's columns of a file that :meth:`Basis.save` wrote."""
    with open_pieces(path, WHOLE) as (pieces, manifest):
        shards = Shards(int(manifest["n"]), group)
        found: dict[str, Tensor] = {}
        blocks = -(-padded(shards.n) // BLOCK) * BLOCK
        for name, width in (("rows", padded(shards.n)), ("scales", blocks)):
            if name in pieces:
                files.copy_columns(shards, pieces[name], 0, width, found, name)
        gram = pieces["gram"]
        found["gram"] = torch.cat([torch.zeros(0, gram.shape[1]).double(), *gram.read()])
    return shards, found, manifest
