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
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from curvlab.batches import digest, map_tensors, rows, sample_count, tensors
from curvlab.distributed.sharded_problem import ShardedProblem, whole
from curvlab.operators.curvature import Curvature
from curvlab.operators.frozen import Chunk
from curvlab.operators.gauss_newton import GaussNewton
from curvlab.operators.hessian import Hessian
from curvlab.operators.policy import BAND, arithmetic
from curvlab.operators.problem import TRIED, ChunkSize
from curvlab.operators.products import sizing
from curvlab.operators.products.blocks import REMEDY
from curvlab.operators.products.choose import Engine
from curvlab.operators.products.free import free_bytes
from curvlab.operators.verify import FEW
from curvlab.probe import Certificate, OperatorError, probe

MEASURED = 4  # samples of the larger of two chunks whose memory is measured
STEP, FAR = 1e-7, 1e-3  # of a difference of gradients, and the error it may have


class FullySharded(Curvature):
    """What Hessian and GaussNewton of FSDP2 models share; every rank makes the same calls.

    Attributes:
        n: Elements of a whole vector; ``@`` takes shards of ``vector_space.width``.
        vector_space: How vectors are divided, as :class:`curvlab.distributed.Shards`.
        weight: Of this rank's samples in the whole.
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
        self._divide_in_shards(chunk, budget, check)
        if check:
            few = self._few()
            with arithmetic(self.device, problem.precision):
                self._compare_gradients(few)
                self.certificate = probe(self, limit=self.limit)
                self.certificate.require()
                self._compare_differences_in_shards(few)

    # -- memory ------------------------------------------------------------------------------------

    def _divide_in_shards(self, chunk: ChunkSize, budget: float | None, check: bool) -> None:
        problem, group = self.problem, self.group
        if budget is None:
            hosts = group.facts(f"{socket.gethostname()} {os.uname().nodename}", "hosts")
            here = hosts.count(hosts[group.rank])
            budget = sizing.default_budget(free_bytes(self.device) / here)
        data = sum(t.nbytes for batch in problem.batches.joined for t in tensors(batch))
        held = sum(t.nbytes for t in (*problem.named().values(), *problem.buffers.values()))
        room = sizing.operator_room(
            budget, data, held, self.vector_space.width, self.dtype.itemsize, check
        )
        cost, room = self._agreed_cost(room)
        if problem.whole:
            size, units_ = None, 1
        elif isinstance(chunk, int):
            size = units_ = chunk
        else:
            size = units_ = sizing.chunk_size(max(problem.counted), cost, room)
        problem.cut(size)
        self._keep = sizing.fitting(cost, units_, room, len(problem.chunks))
        self._kept = {}

    def _agreed_cost(self, room: float) -> tuple[sizing.Cost, float]:
        """What chunks take on the rank where they take most, and the least room of a rank."""
        problem = self.problem
        sizes = [1] if problem.fewest == 1 else [1, min(MEASURED, problem.fewest)]
        largest = max(problem.batches.joined, key=lambda batch: sample_count(batch) or 0)
        found = []
        for size in sizes:
            batch = largest if problem.whole else rows(largest, slice(0, size))
            shard = torch.zeros(1, problem.layout.n, dtype=self.dtype, device=self.device)
            with arithmetic(self.device, problem.precision), sizing.LiveBytes() as live:
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
            "operator": type(self).__name__,
            "model": type(problem.model).__name__,
            "parameters": self.vector_space.digest(shard),
            "fixed": group.facts(digest([[*fixed, *problem.buffers.values()]]), "digests"),
            "data": group.facts(digest(problem.batches), "digests"),
            "samples": self.samples,
            "loss": self.loss,
            "reduction": problem.reduction,
            "precision": problem.precision,
            "dtype": str(self.dtype),
            "engine": self.engine,
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

    def probe(self, *, seed: int = 0) -> Certificate:
        """Measure the whole operator with four products; the result becomes its certificate."""
        self.certificate = probe(self, seed=seed, limit=self.limit)
        return self.certificate

    def _builders(self) -> dict[Engine, Callable[[Chunk], Any]]:
        return {"blockwise": self._blockwise}

    # -- checks ------------------------------------------------------------------------------------

    def _few(self) -> Chunk:
        """A few samples of every rank, with equal weights."""
        problem = self.problem
        few = problem.batches.first(None if problem.whole else min(FEW, problem.fewest))
        return Chunk(few, 1.0 / self.group.size, TRIED)

    def _compare_gradients(self, few: Chunk) -> None:
        """Raise unless a gradient in blocks is FSDP2's own, up to the factor it divides by."""
        problem, space = self.problem, self.vector_space
        if (
            _rounds(problem.model)
            or problem.draws
            or any(module.training != flag for module, flag in problem.flags.items())
        ):
            return  # its gradient is of another function, or rounded on purpose
        own = _own_gradient(problem, few)
        with problem.in_blocks(second=False):
            value = problem.loss(few, problem.parameters)
            pieces = torch.autograd.grad(value, problem.parameters, allow_unused=True)
        mine = problem.layout.flatten(pieces, like=problem.parameters[0]).double()
        products = torch.stack([own @ own, own @ mine, mine @ mine])
        square, inner_, length = space.total(products).tolist()
        factor = inner_ / square if square else 0.0
        error = math.sqrt(max(0.0, float(space.total((mine - factor * own).square().sum()))))
        coarse = max(torch.finfo(p.dtype).eps for p in problem.model.parameters())
        if not error <= 1e3 * coarse * math.sqrt(length):
            raise OperatorError(
                f"computed block by block, the gradient differs from FSDP2's own by "
                f"{error / math.sqrt(length):.1e} of its length. {REMEDY}"
            )

    def _compare_differences_in_shards(self, few: Chunk) -> None:
        """Raise if a product is not the difference of gradients (outputs) that it should be."""
        problem, space = self.problem, self.vector_space
        if problem.precision != "exact" or problem.draws:
            return
        generator = torch.Generator().manual_seed(1)
        signs = space.signs(generator, 1)[0][: space.held].to(self.device)
        with problem.in_blocks(second=self.second):
            image = self._retained(few, keep=False)(signs.to(self.dtype)[None])[0].double()
        with problem.cast(torch.float64):
            chunk = problem.fine(few)
            flat = problem.layout.flatten(problem.parameters).detach()
            norm = math.sqrt(float(space.total(flat.square().sum())))
            size = STEP * max(1.0, norm) / math.sqrt(self.n)
            along = signs.double() * size
            up, here, down = (self._moved(chunk, along * sign) for sign in (1.0, 0.0, -1.0))
            rates = [(up - down) / (2 * size), (up - here) / size, (here - down) / size]
            found = [self._rate(chunk, rate).double() for rate in rates]
        gaps = torch.stack([image - found[0], found[1] - found[2], found[0]]).square().sum(1)
        error, doubt, length = space.total(gaps).sqrt().tolist()
        if error > FAR * length and doubt <= FAR * length:
            raise OperatorError(
                f"products differ from differences of gradients by {error / length:.1e} (limit "
                f"{FAR:.0e}): a part of the model is not differentiated twice (a custom "
                "autograd.Function, .detach() or .data in forward). check=False takes products as "
                "they are"
            )


class ShardedHessian(FullySharded, Hessian):
    """:class:`curvlab.Hessian` of an FSDP2 model; made by ``Hessian(model, ...)``."""


class ShardedGaussNewton(FullySharded, GaussNewton):
    """:class:`curvlab.GaussNewton` of an FSDP2 model; made by ``GaussNewton(model, ...)``."""


KINDS: dict[type[Curvature], type[FullySharded]] = {
    Hessian: ShardedHessian,
    GaussNewton: ShardedGaussNewton,
}


def _rounds(model: nn.Module) -> bool:
    """Whether FSDP2 has been told to compute in a narrower dtype than the parameters have."""
    for module in model.modules():
        found: Any = getattr(module, "_get_fsdp_state", None)
        state = None if found is None else found()
        dtype = getattr(getattr(state, "_mp_policy", None), "param_dtype", None)
        if dtype is not None and any(p.dtype != dtype for p in module.parameters()):
            return True
    return False


def _own_gradient(problem: ShardedProblem, few: Chunk) -> Tensor:
    """This rank's part of FSDP2's own gradient; the model's ``.grad`` stay as they were."""
    named = dict(problem.model.named_parameters())
    kept = {name: parameter.grad for name, parameter in named.items()}
    space, stop = problem.space, problem.space.start + problem.space.held
    batch = map_tensors(few.batch, torch.clone)
    kind = next(iter(named.values())).dtype
    batch = map_tensors(batch, lambda t: t.to(kind) if t.is_floating_point() else t)
    pieces = []
    try:
        for parameter in named.values():
            parameter.grad = None
        value = problem.terms.whole(problem.given, batch)
        value.backward()  # type: ignore[no-untyped-call]
        layout = problem.whole_layout
        for name, first, shape in zip(layout.names, layout.offsets, layout.shapes, strict=True):
            found = named[name].grad
            flat = torch.zeros(shape.numel()) if found is None else whole(found).reshape(-1)
            low, high = (min(max(x - first, 0), flat.numel()) for x in (space.start, stop))
            pieces.append(flat[low:high].double())
    finally:
        for name, parameter in named.items():
            parameter.grad = kept[name]
    return torch.cat(pieces)
