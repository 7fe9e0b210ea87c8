"""Exact curvature of FSDP2 models as they are: parameters, vectors and images stay in shards.

``Hessian(model, loss, share)`` of a model after ``fully_shard`` is made here. FSDP2's own hooks cut
the graph of second derivatives, so they are left out: the operator has a copy of the modules and
its own shards of the parameters (:mod:`curvlab.distributed.divided`). The model's blocks are
computed again when they are differentiated (:mod:`curvlab.operators.products.blocks`), and a
block's parameters are whole only while it is. A rank holds its part of every vector, what passes
between blocks for its own samples, and one block.

Everything that decides what is computed next is agreed upon, so that all ranks make the same
collective calls. A model whose path depends on its data (a mixture of experts) may not do so, as it
may not in FSDP2 either.
"""

import math
import os
import socket
from typing import Any

import torch
from torch import Tensor

from curvlab.batches import digest, rows, sample_count
from curvlab.distributed.sharded_problem import ShardedProblem
from curvlab.operators.curvature import Curvature
from curvlab.operators.frozen import Chunk
from curvlab.operators.gauss_newton import GaussNewton
from curvlab.operators.hessian import Hessian
from curvlab.operators.policy import BAND
from curvlab.operators.problem import TRIED, ChunkSize
from curvlab.operators.products import sizing
from curvlab.operators.products.free import free_bytes
from curvlab.operators.trial import Trial, compare_differences, constant_rows
from curvlab.operators.verify import FEW, require_same_gradient

MEASURED = 4  # samples of the larger of two chunks whose memory is measured


class FullySharded(Curvature):
    """What Hessian and GaussNewton of FSDP2 models share; every rank makes the same calls.

    Attributes:
        n: Elements of a whole vector; ``@`` takes shards of ``vector_space.width``.
        vector_space: How vectors are divided, as :class:`curvlab.distributed.Shards`.
        weight: The weight of this rank's samples in the whole.
    """

    problem: ShardedProblem
    problem_kind = ShardedProblem

    def _start(self, chunk: ChunkSize, budget: float | None, engine: str, check: bool) -> None:
        if engine not in ("auto", "blockwise"):
            raise ValueError(f"a model in shards is multiplied block by block; got {engine=}")
        problem = self.problem
        self.n, self.dtype, self.device = problem.whole_layout.n, problem.dtype, problem.device
        self.layout, self.vector_space = problem.whole_layout, problem.space
        self.group = problem.group
        self.limit, self.products, self.plan = BAND[problem.precision], 0, None
        if self.needs_outputs:
            problem.terms.split(type(self).__name__)
        self._build, self._engine = self._blockwise, "blockwise"
        cost, self._room = self._agreed_cost(self._room_of(budget, check))
        self._cut(chunk, None if problem.whole else max(problem.counted), cost)
        if check:
            few = self._few()
            with problem.arithmetic():
                require_same_gradient(problem, few)
                self.probe().require()
                drawn, start = (
                    problem.space.signs(torch.Generator().manual_seed(1), 1),
                    problem.space.start,
                )
                for row in constant_rows(self):
                    drawn[:, max(0, row.start - start) : max(0, row.stop - start)] = 0
                signs = drawn[:, : problem.layout.n].to(self.device, self.dtype)
                product = self._blockwise(few, keep=False)
                image = product(signs)[0]
                compare_differences(self, Trial(few, product, signs[0], image, cost, 1))

    # -- memory ------------------------------------------------------------------------------------

    def _room_of(self, budget: float | None, check: bool) -> float:
        """As for one process; by default the ranks of a machine divide what is free there."""
        if budget is None:
            hosts = self.group.facts(f"{socket.gethostname()} {os.uname().nodename}", "hosts")
            here = hosts.count(hosts[self.group.rank])
            budget = sizing.default_budget(free_bytes(self.device) / here)
        return super()._room_of(budget, check)

    def _agreed_cost(self, room: float) -> tuple[sizing.Cost, float]:
        """What chunks take on the rank where they take most, and the least room of a rank."""
        problem = self.problem
        sizes = [1] if problem.fewest == 1 else [1, min(MEASURED, problem.fewest)]
        largest = max(problem.batches.joined, key=lambda batch: sample_count(batch) or 0)
        found = []
        for size in sizes:
            batch = largest if problem.whole else rows(largest, slice(0, size))
            shard = torch.zeros(1, problem.layout.n, dtype=self.dtype, device=self.device)
            with problem.arithmetic(), sizing.LiveBytes() as live:
                product = self._build(Chunk(batch, number=TRIED))
                kept = live.live
                product(shard)
            found.append([kept, live.peak])
            del product
        said = self.group.facts([room, found], "what products take")
        kept, peak = ([max(f[s][i] for _, f in said) for s in range(len(sizes))] for i in (0, 1))
        if len(sizes) == 1:
            return sizing.Cost(0.0, kept[0], 0.0, peak[0]), min(r for r, _ in said)
        each, peaks = ((x[1] - x[0]) / (sizes[1] - sizes[0]) for x in (kept, peak))
        cost = sizing.Cost(kept[0] - each, each, peak[0] - peaks, peaks)
        return cost, min(r for r, _ in said)

    # -- what a user reads -------------------------------------------------------------------------

    @property
    def loss(self) -> float:
        """The objective over all ranks' samples."""
        return math.fsum(self.group.facts(math.fsum(self.problem.values), "losses"))

    @property
    def samples(self) -> int | None:
        counted = self.problem.counted
        return None if None in counted else sum(counted)

    def gradient(self) -> Tensor:
        """This rank's shard ``(width,)`` of the gradient over all ranks' samples."""
        return self._padded(super().gradient()[None])[0]

    def about(self) -> dict[str, Any]:
        """What was differentiated, for a saved result: kind, sizes, settings, digests."""
        problem, group = self.problem, self.group
        shard = self._padded(problem.layout.flatten(problem.parameters)[None])
        fixed = [*problem.named().values()][len(problem.parameters) :]
        return {
            **super().about(),
            "parameters": self.vector_space.digest(shard),
            "fixed": group.facts(digest([[*fixed, *problem.buffers.values()]]), "digests"),
            "data": group.facts(digest(problem.batches), "digests"),
        }

    # -- products ----------------------------------------------------------------------------------

    def __matmul__(self, shards: Tensor) -> Tensor:
        """``(width,) -> (width,)`` and ``(b, width) -> (b, width)``; every rank calls this."""
        space = self.vector_space
        space.require_shard(shards)
        if shards.dtype != self.dtype or shards.device != self.device:
            raise TypeError(
                f"this operator works in {self.dtype} on {self.device}; the shards are "
                f"{shards.dtype} on {shards.device}: convert them"
            )
        block = shards.detach().reshape(-1, space.width)[:, : space.held]
        with torch.inference_mode(False):
            block = block.clone() if block.is_inference() else block
            result = self._product(block)
        return self._padded(result).reshape(shards.shape)

    def _padded(self, block: Tensor) -> Tensor:
        shards = block.new_zeros(len(block), self.vector_space.width)
        shards[:, : self.vector_space.held] = block
        return shards

    def multiply_last(self, *_: Any) -> None:
        raise TypeError("a model in shards is already divided over the ranks: use it as it is")

    def dense(self) -> Tensor:
        raise TypeError(
            "vectors of a model in shards are in shards: gather its products one by one"
        )

    # -- checks ------------------------------------------------------------------------------------

    def _few(self) -> Chunk:
        """A few samples of every rank, with equal weights."""
        problem = self.problem
        few = problem.batches.first(None if problem.whole else min(FEW, problem.fewest))
        return Chunk(few, 1.0 / self.group.size, TRIED)


class ShardedHessian(FullySharded, Hessian):
    """:class:`curvlab.Hessian` of an FSDP2 model; made by ``Hessian(model, ...)``."""


class ShardedGaussNewton(FullySharded, GaussNewton):
    """:class:`curvlab.GaussNewton` of an FSDP2 model; made by ``GaussNewton(model, ...)``."""


KINDS: dict[type[Curvature], type[FullySharded]] = {
    Hessian: ShardedHessian,
    GaussNewton: ShardedGaussNewton,
}
