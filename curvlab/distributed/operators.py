"""Operators over the ranks of a job: shares of the data, shards of the vectors.

``DataParallel`` adds the ranks' products: each rank has its share of the samples, and every rank
holds whole vectors. ``Sharded`` divides the vectors as well: a shard goes in and a shard comes out,
and in between every rank has one whole vector and one whole product, but never a basis of them.

With every product the ranks compare what they are doing, in a few numbers that travel with it: a
rank that multiplies another vector, has failed, or found NaN is named on all ranks, at once.
"""

import math
from collections import Counter

import torch
from torch import Tensor

from curvlab.distributed.agreement import (
    facts_of,
    fingerprint,
    layout_from,
    require_distinct,
    require_same,
)
from curvlab.distributed.group import Group, current
from curvlab.distributed.replicated import Replicated
from curvlab.distributed.shards import Shards
from curvlab.distributed.watch import RankError
from curvlab.operators import Curvature, Operator
from curvlab.probe import Certificate, LinearOperator, OperatorError, probe

_FAILED, _NOT_FINITE = -1.0, -2.0  # in place of a fingerprint


class DataParallel(Operator):
    """The mean (or sum) over all ranks' samples, from a part on each rank.

    ``DataParallel(Hessian(model, loss, share))``: the same model on every rank, shares of any
    sizes; a rank without samples passes ``None``. Weights are exact: each rank's mean counts with
    what it divided by. One sum over the ranks per product or block of products.

    Args:
        part: This rank's operator, on its share of the data.
        samples: What the mean on this rank divides by; by default what ``part`` says. Needed for
            operators that are not made from a model, a loss and data.
        group: The ranks; by default those of the job.

    Attributes:
        weight: Of this rank's part in the whole.
        vector_space: Whole vectors, the same on every rank: solvers run on all ranks alike.
    """

    def __init__(
        self,
        part: LinearOperator | None,
        *,
        samples: float | None = None,
        group: Group | None = None,
    ) -> None:
        self.group = current(group)
        self.part = part
        mine = self.group.together(lambda: self._facts(samples), "making a part")
        facts = require_same(self.group, mine)
        require_distinct(self.group, part)
        n, dtype = int(facts["n"]), getattr(torch, facts["dtype"].removeprefix("torch."))
        device = facts["device"] if part is None else part.device
        device = torch.empty(0, device=device).device  # "cuda" becomes "cuda:0"
        super().__init__(n, dtype, device, layout_from(facts))
        self.limit = facts["limit"]
        self.weight = self._weight(samples, facts.get("reduction", "mean"))
        self.number = 0  # of the product
        self._of_a_loss = "reduction" in facts
        self.vector_space = Replicated(n, self.group)

    def _facts(self, samples: float | None) -> dict[str, object] | None:
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
        return facts_of(part)

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
        count, ranks = block.numel(), self.group.size
        buffer = torch.zeros(count + ranks, dtype=self.dtype, device=self.device)
        mine = self.multiply_into(block, buffer[:count].view(block.shape), fingerprint(block))
        buffer[count + self.group.rank] = mine.mark
        self.group.sum_(buffer, f"product {self.number}")
        mine.compare(buffer[count:], self.group)
        return buffer[:count].view(block.shape)

    def multiply_into(self, block: Tensor, target: Tensor, mark: int) -> "Said":
        """This rank's weighted share of the product into ``target``, zeros if there is none.

        Args:
            block: Whole vectors ``(b, n)``.
            target: Zeros of its shape.
            mark: What every rank should have for this product.
        """
        self.number += 1
        said = Said(float((mark + self.number) % 2**22 + 1))
        if self.part is None:
            return said
        try:
            torch.mul(self.part @ block, self.weight, out=target)
        except Exception as error:
            target.zero_()
            return Said(_FAILED, error)
        if not bool(torch.isfinite(target).all()):
            target.zero_()
            return Said(_NOT_FINITE)
        return said


class Said:
    """What this rank tells the others of its product."""

    def __init__(self, mark: float, error: Exception | None = None) -> None:
        self.mark, self.error = mark, error

    def compare(self, marks: Tensor, group: Group) -> None:
        """Raise on every rank unless all ``marks`` ``(ranks,)`` are the same and good."""
        said = marks.tolist()
        if all(mark == said[0] for mark in said) and said[0] > 0:
            return
        failed = [rank for rank, mark in enumerate(said) if mark == _FAILED]
        if failed:
            own = None if self.error is None else f"{type(self.error).__name__}: {self.error}"
            reasons = group.facts(own, "what failed")
            if self.error is not None:
                raise self.error
            group.require_none(reasons, "a product")
        wrong = [rank for rank, mark in enumerate(said) if mark == _NOT_FINITE]
        if wrong:
            raise OperatorError(
                f"the product of rank {wrong[0]} holds NaN or infinity: look at that rank's "
                "parameters and data"
            )
        usual = Counter(said).most_common(1)[0][0]
        odd = [rank for rank, mark in enumerate(said) if mark != usual]
        raise RankError(
            f"rank {odd[0]} multiplies another vector, or has made another number of products, "
            f"than rank {said.index(usual)}: every rank must run the same program with the same "
            "seeds, on the same kind of processor"
        )


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
        certificate: Of the whole operator, from four products with whole vectors.
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

    def __repr__(self) -> str:
        return f"Sharded({self.operator!r}, {self.vector_space!r})"
