"""Long vectors in shards: each rank holds an equal range of the elements, and sums what it must.

Rank ``r`` holds elements ``r * width`` to ``(r + 1) * width``; beyond ``n`` there are zeros, so
that every rank has tensors of the same shape. ``width`` is a multiple of 64 elements, the block
that shares a scale in one-byte storage: a stored basis has the same scales on any number of ranks.
What crosses between ranks is coefficients, squared norms and Gram matrices, in float64. A
collective sum gives every rank the same bits, so all ranks take the same decisions.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from curvlab_kernels import ops
from curvlab_kernels.formats import BLOCK
from torch import Tensor

from curvlab.distributed import files
from curvlab.distributed.group import Group, current
from curvlab.distributed.watch import RankError
from curvlab.storage import Pieces, write_atomically

DRAWN = 1 << 16  # random numbers drawn at a time, a multiple of 16


def shard_width(n: int, ranks: int) -> int:
    """Elements that each of ``ranks`` holds of a vector of ``n``."""
    width = -(-n // (ranks * BLOCK)) * BLOCK
    # A shard must not be mistaken for a whole vector, nor the other way round.
    return width + BLOCK if ranks > 1 and width == n else width


class Shards:
    """How vectors of ``n`` elements are divided over the ranks; what solvers ask of them.

    Args:
        n: Elements of a whole vector.
        group: The ranks; by default those of the job.

    Attributes:
        width: Elements of a shard, the same on every rank.
        start: Position in the whole vector of this rank's first element.
        held: How many of this rank's elements belong to the vector; the others are zero.
    """

    sharded = True
    shared = True

    def __init__(self, n: int, group: Group | None = None) -> None:
        if n < 1:
            raise ValueError(f"vectors have at least one element; got n={n}")
        self.group = current(group)
        self.n = n
        self.width = shard_width(n, self.group.size)
        self.start = min(self.group.rank * self.width, n)
        self.held = min(self.width, n - self.start)

    @classmethod
    def saved(cls, path: str | Path, group: Group | None = None) -> "Shards":
        """How this job divides what is saved in ``path``: a folder of shards, or a file of rows."""
        return cls(files.elements(path), group)

    @property
    def leads(self) -> bool:
        return self.group.rank == 0

    # Whole vectors and shards

    def take(self, whole: Tensor) -> Tensor:
        """This rank's shard ``(width,)`` or ``(b, width)`` of ``(n,)`` or ``(b, n)``; a copy."""
        if whole.shape[-1] != self.n:
            raise ValueError(f"whole vectors have {self.n} elements; got {tuple(whole.shape)}")
        shard = whole.new_zeros((*whole.shape[:-1], self.width))
        shard[..., : self.held] = whole[..., self.start : self.start + self.held]
        return shard

    def gather(self, shard: Tensor) -> Tensor:
        """The whole vectors ``(n,)`` or ``(b, n)`` on every rank, from their shards."""
        self.require_shard(shard)
        parts = self.group.gather(shard, "shards of a vector")
        whole = parts.movedim(0, -2).reshape((*shard.shape[:-1], self.group.size * self.width))
        return whole[..., : self.n].contiguous()

    def take_list(self, tensors: Sequence[Tensor]) -> Tensor:
        """This rank's shard ``(width,)`` of tensors that make one vector together, in order."""
        total = sum(tensor.numel() for tensor in tensors)
        if total != self.n:
            raise ValueError(f"the tensors have {total} elements together; {self.n} were expected")
        shard = tensors[0].new_zeros(self.width)
        for piece, where in self._overlaps(tensors):
            shard[where] = piece
        return shard

    def give_list(self, shard: Tensor, tensors: Sequence[Tensor]) -> None:
        """Write the whole vector that the ranks' shards make into ``tensors``, on every rank."""
        whole, first = self.gather(shard), 0
        for tensor in tensors:
            tensor.copy_(whole[first : first + tensor.numel()].view(tensor.shape))
            first += tensor.numel()

    def sum_list(self, tensors: Sequence[Tensor], weight: float = 1.0) -> Tensor:
        """This rank's shard ``(width,)`` of ``weight * tensors``, added over the ranks.

        With gradients and this rank's share of the samples this is the reduction of a data-parallel
        step, at half the cost of giving every rank the whole sum.
        """
        parts = tensors[0].new_zeros(self.group.size * self.width)
        torch.cat([tensor.detach().reshape(-1) for tensor in tensors], out=parts[: self.n])
        parts *= weight
        return self.group.sum_scatter(parts.view(self.group.size, self.width), "gradients")

    def require_shard(self, vectors: Tensor) -> None:
        """Raise unless ``vectors`` are shards ``(width,)`` or ``(b, width)``."""
        if vectors.dim() not in (1, 2) or vectors.shape[-1] != self.width:
            raise ValueError(
                f"this takes shards of shape ({self.width},) or (b, {self.width}), rank "
                f"{self.group.rank}'s part of vectors of {self.n} elements; got "
                f"{tuple(vectors.shape)}. Shards.take cuts one out of a whole vector"
            )

    def _overlaps(self, tensors: Sequence[Tensor]) -> list[tuple[Tensor, slice]]:
        """Parts of ``tensors`` that this rank holds, and where in its shard."""
        found, first, stop = [], 0, self.start + self.held
        for tensor in tensors:
            low, high = max(first, self.start), min(first + tensor.numel(), stop)
            if low < high:
                piece = tensor.detach().reshape(-1)[low - first : high - first]
                found.append((piece, slice(low - self.start, high - self.start)))
            first += tensor.numel()
        return found

    def part(self, tensor: Tensor, first: int) -> Tensor:
        """What this rank holds, flat, of a tensor that begins at ``first`` of the vector."""
        flat = tensor.reshape(-1)
        ends = self.start, self.start + self.held
        low, high = (min(max(end - first, 0), flat.numel()) for end in ends)
        return flat[low:high]

    # Sums over ranks

    def total(self, parts: Tensor) -> Tensor:
        """Sum float64 ``parts`` over the ranks; a rank that gave NaN or infinity is named."""
        summed = self.group.sum_(parts.clone(memory_format=torch.contiguous_format), "coefficients")
        if not bool(summed.isfinite().all()):
            sound = bool(parts.isfinite().all())
            flags = self.group.facts(sound, "a look for the rank with NaN")
            wrong = [rank for rank, good in enumerate(flags) if not good]
            raise RankError(f"vectors of ranks {wrong} hold NaN or infinity; nothing was changed")
        return summed

    def largest(self, values: Tensor) -> Tensor:
        """The largest of every rank's ``values``, element by element."""
        return self.group.gather(values, "largest elements").amax(0)

    def check(self, vectors: Tensor) -> None:
        """Raise unless the elements after those that this rank holds are zero."""
        if bool(vectors[..., self.held :].any()):
            raise ValueError(
                f"rank {self.group.rank} holds {self.held} elements of every vector; those after "
                "them must be zero. Shards.take cuts shards out of whole vectors"
            )

    def norm(self, vectors: Tensor) -> Tensor:
        """Norms ``()`` or ``(b,)``, float64."""
        return self.total(ops.norm(vectors).square()).sqrt()

    # What else a solver asks of its vectors

    def normal(self, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
        """A shard of the vector that one process would draw."""
        return self._drawn(lambda size: torch.randn(size, generator=generator, dtype=dtype))

    def signs(self, generator: torch.Generator, count: int) -> Tensor:
        """Shards ``(count, width)`` of the random signs that one process would draw, int8."""
        signs = torch.zeros(count, self.width, dtype=torch.int8)
        for row in signs:
            row.copy_(self._drawn(lambda size: torch.randint(2, (size,), generator=generator)))
        signs[:, : self.held].mul_(2).sub_(1)
        return signs

    def _drawn(self, draw: Callable[[int], Tensor]) -> Tensor:
        """This rank's shard of what ``draw(n)`` gives, without ever holding it whole.

        The generator gives the same numbers in pieces as at once, if no piece is shorter than the
        16 elements that it fills together and all but the last are multiples of them.
        """
        mine, first = list[Tensor](), 0
        while first < self.n:
            rest = self.n - first
            size = rest if rest < DRAWN + 16 else DRAWN
            piece = draw(size)
            low, high = max(self.start - first, 0), min(self.start + self.held - first, size)
            if low < high:
                mine.append(piece[low:high].clone())
            first += size
        drawn = torch.cat(mine) if mine else piece[:0]
        return torch.nn.functional.pad(drawn, (0, self.width - self.held))

    def canonical_signs_(self, vectors: Tensor) -> Tensor:
        """Flip rows so that the element of largest magnitude in the whole vector is positive."""
        if vectors.numel():
            ends = torch.stack([-vectors.amin(1), vectors.amax(1)])
            below, above = self.group.gather(ends, "signs").amax(0)  # of (ranks, 2, k)
            vectors *= torch.where(below > above, -1, 1).unsqueeze(1)
        return vectors

    def digest(self, rows: Tensor | None) -> str:
        """A sum over the elements' bits and places, which does not depend on the division."""
        if rows is None:
            return ""
        bits = rows.detach().cpu().to(torch.float64).contiguous().view(torch.int64)
        k = rows.shape[0]
        place = (
            torch.arange(self.start, self.start + self.width) + self.n * torch.arange(k)[:, None]
        )
        place = place * 2_654_435_761 + 0x5851F42D4C957F2D  # int64 wraps around, as it should
        mixed = (bits * place).sum().reshape(1)
        return f"{int(self.group.sum_(mixed, 'a digest')) & (2**64 - 1):016x}"

    def exists(self, path: Path) -> bool:
        """Whether every rank sees a saved state; raises if only some do."""
        return files.seen_by_all(self.group, path / files.CURRENT)

    def require_writable(self, path: Path) -> None:
        """Raise on every rank unless all can write to the folder ``path``."""
        self.group.together(lambda: write_atomically(path / files.CURRENT, None), f"trying {path}")

    def save(
        self,
        path: Path,
        kind: str,
        rows: Mapping[str, Tensor],
        others: Mapping[str, Tensor],
        facts: Mapping[str, Any],
    ) -> None:
        """Write shards to the folder ``path``; the state before is replaced when all is written."""
        files.save(self, path, kind, rows, others, facts)

    def load(self, path: Path, kind: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """This rank's columns of what any number of ranks saved."""
        return files.load(self, path, kind)

    def save_rows(
        self,
        path: Path,
        kind: str,
        rows: Mapping[str, Pieces],
        others: Mapping[str, Pieces],
        facts: Mapping[str, Any],
    ) -> None:
        """Write shards to the folder ``path``, in pieces; every rank calls this."""
        files.save(self, path, f"sharded {kind}", rows, others, facts)

    def open_rows(
        self, path: Path, kind: str
    ) -> AbstractContextManager[tuple[dict[str, Pieces], dict[str, Any]]]:
        """This rank's columns of what any number of ranks saved, or of a file of whole rows."""
        return files.open_rows(self, path, kind)

    def __repr__(self) -> str:
        share = 100.0 * self.held / self.n
        return (
            f"Shards(n={self.n}, rank {self.group.rank} of {self.group.size} holds {self.held} "
            f"elements, {share:.1f} %)"
        )
