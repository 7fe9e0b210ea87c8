"""Operators over the ranks of a job: shares of the data, shards of the vectors.

``DataParallel`` adds the ranks' products: each rank has its share of the samples, and every rank
holds whole vectors. ``Sharded`` divides the vectors as well: a shard goes in and a shard comes out,
and in between every rank has one whole vector and one whole product, but never a basis of them.

With every product the ranks compare what they are doing, in a few numbers that travel with it: a
rank that multiplies another vector, has failed, or found NaN is named on all ranks, at once.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from curvlab.distributed.agreement import (
    FAILED,
    NOT_FINITE,
    Said,
    facts_of,
    fingerprint,
    layout_from,
    require_distinct,
    require_same,
)
from curvlab.distributed.group import Group, current
from curvlab.distributed.overlap import PIECE, Begin, Overlap, cut, hooked, width_of
from curvlab.distributed.replicated import Replicated
from curvlab.distributed.shards import Shards
from curvlab.distributed.watch import RankError
from curvlab.operators import Curvature, Operator
from curvlab.probe import Certificate, LinearOperator, probe


class DataParallel(Operator):
    """The mean (or sum) over all ranks' samples, from a part on each rank.

    ``DataParallel(Hessian(model, loss, share))``: the same model on every rank, shares of any
    sizes; a rank without samples passes ``None``. Weights are exact: each rank's mean counts with
    what it divided by. One sum over the ranks per product or block of products; the sum of a long
    vector's product goes out in pieces, while the last backward pass still runs.

    Args:
        part: This rank's operator, on its share of the data.
        samples: What the mean on this rank divides by; by default what ``part`` says. Needed for
            operators that are not made from a model, a loss and data.
        overlap: Least bytes of such a piece; ``None`` for one sum after the pass, always.
        group: The ranks; by default those of the job.

    Attributes:
        weight: The weight of this rank's part in the whole.
        piece: Elements of a piece of a product, if the sum of one vector's goes out in pieces.
        vector_space: Whole vectors, the same on every rank: solvers run on all ranks alike.
    """

    def __init__(
        self,
        part: LinearOperator | None,
        *,
        samples: float | None = None,
        overlap: int | None = PIECE,
        group: Group | None = None,
    ) -> None:
        self.group = current(group)
        self.part = part
        mine = self.group.together(lambda: self._facts(samples, overlap), "making a part")
        facts = require_same(self.group, mine)
        require_distinct(self.group, part)
        n, dtype = int(facts["n"]), getattr(torch, facts["dtype"].removeprefix("torch."))
        device = facts["device"] if part is None else part.device
        device = torch.empty(0, device=device).device  # "cuda" becomes "cuda:0"
        super().__init__(n, dtype, device, layout_from(facts))
        self.limit = facts["limit"]
        self.weight = self._weight(samples, facts.get("reduction", "mean"))
        self.piece = self._piece(facts["overlap"])
        self.number = 0  # of the product
        self._of_a_loss = "reduction" in facts
        self.vector_space = Replicated(n, self.group)

    def _facts(self, samples: float | None, overlap: int | None) -> dict[str, object] | None:
        """What must agree with other ranks, having checked what can be wrong on this one alone."""
        part = self.part
        if part is None:
            return None
        if not isinstance(part, LinearOperator):
            raise TypeError(f"a part is an operator or None; got {type(part).__name__}")
        if samples is None and not isinstance(part, Curvature):
            raise ValueError(
                f"{type(part).__name__} does not say how many samples its mean divides by: pass "
                "samples="
            )
        if samples is not None and not (samples > 0 and math.isfinite(samples)):
            raise ValueError(f"samples= is a positive number; got {samples}")
        if part.dtype not in (torch.float32, torch.float64):
            raise TypeError(
                f"products are added in float32 or float64; the part's are {part.dtype}"
            )
        if overlap is not None and overlap < 1:
            raise ValueError(f"overlap= is a number of bytes, or None; got {overlap}")
        return {**facts_of(part), "overlap": overlap}

    def _piece(self, overlap: int | None) -> int | None:
        """What all ranks agree on: pieces only pay where every rank's pass can begin them."""
        able = self.group.facts(self.part is None or hooked(self.part), "engines")
        if overlap is None or self.group.size == 1 or not all(able):
            return None
        width = width_of(self.n, overlap // torch.finfo(self.dtype).bits * 8)
        return width if width < self.n else None

    def _weight(self, samples: float | None, reduction: str) -> float:
        count = 0.0 if self.part is None else samples
        if count is None:
            count = self.part.problem.normaliser if isinstance(self.part, Curvature) else 0.0
        counts = self.group.facts(count, "numbers of samples")
        if reduction == "sum":
            return 1.0
        return float(count / math.fsum(counts))

    @property
    def loss(self) -> float:
        """The objective over all ranks' samples."""
        self._require_loss()
        own = self.part.loss * self.weight if isinstance(self.part, Curvature) else 0.0
        return math.fsum(self.group.facts(own, "losses"))

    def gradient(self) -> Tensor:
        """The gradient of the objective over all ranks' samples, ``(n,)``."""
        self._require_loss()
        total = torch.zeros(self.n, dtype=torch.float64, device=self.device)
        if isinstance(self.part, Curvature):
            total.add_(self.part.gradient(), alpha=self.weight)
        return self.group.sum_(total, "a gradient").to(self.dtype)

    def _require_loss(self) -> None:
        if not self._of_a_loss:
            raise TypeError(
                "the parts are not made from a model, a loss and data: there is no loss"
            )

    def _product(self, block: Tensor) -> Tensor:
        if self.piece is not None and len(block) == 1:
            return self._product_in_pieces(block, self.piece)
        count, ranks = block.numel(), self.group.size
        buffer = torch.zeros(count + ranks, dtype=self.dtype, device=self.device)
        mine = self.multiply_into(block, buffer[:count].view(block.shape), fingerprint(block))
        buffer[count + self.group.rank] = mine.mark
        self.group.sum_(buffer, f"product {self.number}")
        mine.compare(buffer[count:], self.group)
        return buffer[:count].view(block.shape)

    def _product_in_pieces(self, block: Tensor, width: int) -> Tensor:
        total = torch.zeros_like(block)

        def begin(piece: slice) -> Callable[[], None]:
            return self.group.begin_sum(total[0, piece], f"part of product {self.number}")

        self.multiply_in_pieces(block, total[0], cut(self.n, width), begin, fingerprint(block))
        return total

    def multiply_in_pieces(
        self, block: Tensor, target: Tensor, pieces: Sequence[slice], begin: Begin, mark: int
    ) -> None:
        """Add up the ranks' shares of a product, beginning while the last backward pass runs.

        Args:
            block: One whole vector ``(1, n)``.
            target: Zeros ``(n,)``; the sums are made in its memory.
            pieces: The pieces of ``target``, in the order of the sums.
            begin: Begins the sum of a piece.
            mark: As for :meth:`multiply_into`.
        """
        self.number += 1
        said = Said(self._mark(mark))
        overlap = Overlap(target, pieces, begin, self.weight)
        try:
            if isinstance(self.part, Curvature):
                overlap.multiply(self.part, block)
        except RankError:
            raise  # a sum failed, not the product
        except Exception as error:
            said = Said(FAILED, error)
        if not overlap.finish() and said.error is None:
            said = Said(NOT_FINITE)
        marks = torch.zeros(self.group.size, dtype=self.dtype, device=self.device)
        marks[self.group.rank] = said.mark
        said.compare(self.group.sum_(marks, f"end of product {self.number}"), self.group)

    def _mark(self, mark: int) -> float:
        return float((mark + self.number) % 2**22 + 1)

    def multiply_into(self, block: Tensor, target: Tensor, mark: int) -> Said:
        """This rank's weighted share of the product into ``target``, zeros if there is none.

        Args:
            block: Whole vectors ``(b, n)``.
            target: Zeros of its shape.
            mark: What every rank should have for this product.
        """
        self.number += 1
        said = Said(self._mark(mark))
        if self.part is None:
            return said
        try:
            torch.mul(self.part @ block, self.weight, out=target)
        except Exception as error:
            target.zero_()
            return Said(FAILED, error)
        if not bool(torch.isfinite(target).all()):
            target.zero_()
            return Said(NOT_FINITE)
        return said


class Sharded:
    """An operator over shards: ``sharded @ shard`` gives this rank's shard of the product.

    ``lanczos(Sharded(DataParallel(Hessian(model, loss, share))), k)`` works on shards throughout:
    so do ``block_lanczos`` and ``spectral_energy``. A product gathers the vector, multiplies with
    this rank's part and adds up shards: two collectives, together as many bytes as one sum.

    Args:
        operator: A :class:`DataParallel`; or any operator that every rank holds whole, whose
            products are then computed by all.
        group: The ranks, for the latter.

    Attributes:
        n: Elements of a whole vector; ``@`` takes shards of ``vector_space.width``.
        vector_space: How vectors are divided.
        certificate: The certificate of the whole operator, from four products with whole vectors.
    """

    def __init__(self, operator: LinearOperator, group: Group | None = None) -> None:
        if not isinstance(operator, LinearOperator):
            raise TypeError(
                f"Sharded takes a DataParallel or another operator; got {type(operator).__name__}"
            )
        parallel = operator if isinstance(operator, DataParallel) else None
        self.group = current(group) if parallel is None else parallel.group
        if parallel is None:
            require_same(self.group, facts_of(operator))
        self.operator, self._parallel = operator, parallel
        self.vector_space = Shards(operator.n, self.group)
        self.n, self.dtype = operator.n, operator.dtype
        self.device = torch.device(operator.device)
        known = getattr(operator, "certificate", None)
        self.certificate = known if isinstance(known, Certificate) else probe(operator)

    def __matmul__(self, shard: Tensor) -> Tensor:
        """``(width,) -> (width,)`` and ``(b, width) -> (b, width)``; every rank calls this."""
        space = self.vector_space
        space.require_shard(shard)
        block = space.gather(shard.detach().reshape(-1, space.width))
        if self._parallel is None:
            return space.take(self.operator @ block).reshape(shard.shape)
        ranks, b, width = self.group.size, block.shape[0], space.width
        if b == 1 and self._parallel.piece is not None:
            return self._product_in_pieces(self._parallel, block).view(shard.shape)
        product = torch.zeros_like(block)
        said = self._parallel.multiply_into(block, product, b)
        # one row per rank: its columns of every product, then what each rank says
        parts = torch.zeros(ranks, b * width + ranks, dtype=self.dtype, device=self.device)
        for rank in range(ranks):
            columns = product[:, rank * width : (rank + 1) * width]
            target = parts[rank, : b * width].view(b, width)
            target[:, : columns.shape[1]] = columns
        parts[:, b * width + self.group.rank] = said.mark
        mine = self.group.sum_scatter(parts, f"product {self._parallel.number}")
        said.compare(mine[b * width :], self.group)
        return mine[: b * width].view(b, width).reshape(shard.shape)

    def _product_in_pieces(self, parallel: DataParallel, block: Tensor) -> Tensor:
        """This rank's shard of the product with one vector; the ranks' shards are the pieces."""
        width, rank = self.vector_space.width, self.group.rank
        whole = torch.zeros(self.group.size * width, dtype=self.dtype, device=self.device)

        def begin(piece: slice) -> Callable[[], None]:
            shard = whole[piece.start : piece.start + width]
            what = f"part of product {parallel.number}"
            return self.group.begin_sum_to(piece.start // width, shard, what)

        parallel.multiply_in_pieces(block, whole[: self.n], cut(self.n, width), begin, 1)
        return whole[rank * width : (rank + 1) * width].clone()

    def __repr__(self) -> str:
        return f"Sharded({self.operator!r}, {self.vector_space!r})"
