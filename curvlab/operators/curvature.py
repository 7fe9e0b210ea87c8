"""Curvature of a model's loss on data: what Hessian, Gauss-Newton and Fisher operators share."""

import logging
import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property
from importlib import import_module
from typing import Any, Literal

import torch
from torch import Tensor, nn

from curvlab.batches import digest, rows, sample_count, tensors
from curvlab.operators.frozen import Chunk
from curvlab.operators.objective import Loss, Objective, Reduction
from curvlab.operators.operator import Operator
from curvlab.operators.policy import BAND, Mode, Precision, fully_sharded, inner
from curvlab.operators.problem import TRIED, ChunkSize, Count, Problem
from curvlab.operators.products import sizing
from curvlab.operators.products.autograd import Product
from curvlab.operators.products.choose import Engine, fastest
from curvlab.operators.products.free import free_bytes
from curvlab.operators.products.mlp import MLPProduct
from curvlab.operators.products.mlp_plan import MLPPlan, recognise
from curvlab.operators.trial import attempt, certify
from curvlab.operators.verify import require_same_gradient
from curvlab.parameters import Selection, select_parameters
from curvlab.probe import Certificate

log = logging.getLogger("curvlab")

Last = Callable[[Product, Tensor | None], None]


class Curvature(Operator):
    """A symmetric operator made of products per chunk of data.

    It is a snapshot: parameters, buffers and data are copied when it is made. Training the model
    on does not change it; make another to follow.
    """

    needs_outputs = False  # apart from the loss
    second = True  # whether second derivatives of the model are taken
    problem_kind = Problem

    def __new__(cls, model: nn.Module, *_: Any, **__: Any) -> "Curvature":
        """Of an FSDP2 model: the same curvature in shards, from a layer above this one."""
        if isinstance(model, nn.Module) and fully_sharded(inner(model)):
            module = import_module("curvlab.distributed.fully_sharded")
            kinds: dict[type, type[Curvature]] = module.KINDS
            return super().__new__(kinds.get(cls, cls))
        return super().__new__(cls)

    def __init__(
        self,
        model: nn.Module,
        loss: Loss | Objective | None,
        data: Any,
        *,
        select: Selection = None,
        mode: Mode | Sequence[Mode] | None = None,
        reduction: Reduction | None = None,
        count: Count | None = None,
        chunk: ChunkSize = None,
        dtype: torch.dtype | None = None,
        precision: Precision = "exact",
        budget: float | None = None,
        engine: Engine | Literal["auto", "measure"] = "auto",
        check: bool = True,
    ) -> None:
        """Copy, check and try the problem on a few samples.

        Args:
            model: Any module; nothing of it changes.
            loss: ``loss(output, target)`` with the reduction ``"mean"`` or ``"sum"``; an
                :class:`curvlab.Objective` for anything else; ``None`` for a model that returns its
                own ``.loss``.
            data: A batch ``(inputs, targets)``, a dict, an object with ``inputs`` and ``targets``,
                a list of batches or a DataLoader. The objective is the mean over all samples,
                whatever the batch sizes; with a sum reduction, the sum.
            select: Which parameters: patterns of names or a predicate. Default ``None``: all that
                require a gradient.
            mode: ``"eval"`` evaluates in eval mode, ``"frozen-masks"`` draws the same random
                numbers every time, ``"batch-statistics"`` has BatchNorm use each batch's own; or
                several of them. Default ``None``: the model's own modes, which are refused if they
                make the loss random or couple samples.
            reduction: ``"mean"`` or ``"sum"``. Default ``None``: as the loss says, or as it
                behaves; it is verified either way.
            count: ``count(batch)``, what the batch's mean divides by when that is not the number
                of its samples (class weights, ignored targets). Default ``None``: the loss's own
                ``.count`` if it has one, else samples.
            chunk: Most samples at a time; ``"batch"`` never cuts a batch, for samples that are
                coupled. Default ``None``: as many as the budget has room for.
            dtype: ``torch.float64`` evaluates everything in float64, ``torch.float32`` is what a
                model in bfloat16 or float16 needs. Default ``None``: the parameters' dtype.
            precision: Default ``"exact"``. ``"tf32"`` (CUDA) or ``"bfloat16"`` (autocast) trade
                accuracy, about 1e-3 and 1e-2 relative in a product, for speed.
            budget: Bytes the operator may take. Default ``None``: half of what is free.
            engine: Default ``"auto"``. Others are ``"retained"``, ``"rebuilt"``, ``"blockwise"``,
                ``"linearised"``, ``"compiled"``, ``"mlp"``, and ``"measure"``, which times the
                candidates once for this model and shape. ``"blockwise"`` needs the memory of one
                block of the model at a time, for about half as much time again; it is taken where
                no other fits the budget.
            check: Default ``True``: products of a few samples are probed for symmetry,
                repeatability and linearity, compared with plain autograd and with a difference of
                gradients, and :class:`curvlab.OperatorError` is raised if they are not right.
                ``False`` takes second derivatives as autograd gives them, which is what a
                straight-through estimator needs.

        Raises:
            Refusal: There is no curvature of this, or not one; ``trap`` is why.
        """
        if precision not in BAND:
            raise ValueError(f"precision= takes {', '.join(BAND)}; got {precision!r}")
        if chunk is not None and chunk != "batch" and (not isinstance(chunk, int) or chunk < 1):
            raise ValueError(f'chunk= is a number of samples, "batch" or None; got {chunk!r}')
        if budget is not None and not budget > 0:
            raise ValueError(f"budget= is a number of bytes; got {budget}")
        with torch.inference_mode(False):  # copies made in inference mode could not be used
            self.problem = self.problem_kind(
                model,
                loss,
                data,
                select=select,
                mode=mode,
                reduction=reduction,
                count=count,
                whole_batches=chunk == "batch",
                dtype=dtype,
                precision=precision,
            )
            self._start(chunk, budget, engine, check)

    def _start(self, chunk: ChunkSize, budget: float | None, engine: str, check: bool) -> None:
        problem = self.problem
        super().__init__(problem.layout.n, problem.dtype, problem.device, problem.layout)
        self.limit = BAND[problem.precision]
        self.products = 0
        if self.needs_outputs:
            problem.terms.split(type(self).__name__)
        self.plan = self._recognise()
        self._build, self._engine = self._choose(engine)
        self._room = self._room_of(budget, check)
        tried = attempt(self)
        large = tried.bound.peak(tried.units) > self._room
        if large and engine == "auto" and self._engine == "retained" and problem.blocks:
            del tried  # and its graph
            if self.cost.peak(1) > self._room:  # one block at a time may fit
                self._build, self._engine = self._blockwise, "blockwise"
                del self.cost
            tried = attempt(self)
        if check:
            if self._engine == "blockwise":
                require_same_gradient(problem, tried.chunk)
            self.certificate = certify(self, tried)
        bound = tried.bound
        del tried  # and its graph
        self._divide(chunk, bound)

    # -- what a user reads -------------------------------------------------------------------------

    @property
    def loss(self) -> float:
        """The objective: the mean (or sum) of the loss over the data."""
        return math.fsum(self.problem.values)

    @property
    def samples(self) -> int | None:
        """How many samples the data hold, if they can be counted."""
        return self.problem.batches.samples

    @property
    def engine(self) -> str:
        """Which engine multiplies, over how many chunks, and how many of their graphs are kept."""
        chunks = len(self.problem.chunks)
        return f"{self._engine}, {chunks} chunk(s), {min(self._keep, chunks)} kept"

    @property
    def ends_in_backward(self) -> bool:
        """Whether products end in a backward pass of autograd to the parameters."""
        return self._engine in ("retained", "rebuilt")

    def gradient(self) -> Tensor:
        """The gradient of the objective on the same data, ``(n,)``."""
        if self._engine != "blockwise":
            return self.problem.gradient()
        with self.problem.in_blocks(second=False):
            return self.problem.gradient()

    def about(self) -> dict[str, Any]:
        """What was differentiated, for a saved result: kind, sizes, settings, digests."""
        problem = self.problem
        return {
            "operator": type(self).__name__,
            "model": type(problem.model).__name__,
            "parameters": digest([problem.parameters]),
            "fixed": digest([[*problem.fixed.values(), *problem.buffers.values()]]),
            "data": digest(problem.batches),
            "data taken": problem.batches.taken,
            "samples": self.samples,
            "loss": self.loss,
            "reduction": problem.reduction,
            "precision": problem.precision,
            "dtype": str(self.dtype),
            "loss computed in": str(problem.computed_in),
            "autocast left out": problem.autocast,
            "batches cut": not problem.whole,
            "without gradient": list(problem.unused),
            "engine": self.engine,
        }

    def probe(self, *, seed: int = 0) -> Certificate:
        """Measure the whole operator with four products; the result becomes its certificate."""
        self.certificate = super().probe(seed=seed)
        return self.certificate

    # -- products ----------------------------------------------------------------------------------

    def _product(self, block: Tensor) -> Tensor:
        self.products += len(block)
        return self._sum(self.problem.chunks, block)

    def multiply_last(self, block: Tensor, last: Last) -> None:
        """Multiply with all chunks but the last, which is left to ``last(product, sum before)``.

        Args:
            block: Vectors ``(b, n)`` of this operator's dtype and device, as for ``@``.
            last: Called with the last chunk's product and the float64 sum of the others' images,
                ``None`` if there are no others.
        """
        self.products += len(block)
        *others, final = self.problem.chunks
        with self.problem.arithmetic():
            before = self._total(others, block) if others else None
            last(self._chunk_product(final), before)

    def _sum(self, chunks: Sequence[Chunk], block: Tensor) -> Tensor:
        with self.problem.arithmetic():
            if len(chunks) == 1:
                return self._chunk_product(chunks[0])(block)
            return self._total(chunks, block).to(self.dtype)

    def _total(self, chunks: Sequence[Chunk], block: Tensor) -> Tensor:
        # float64: thousands of float32 terms would drift
        total = torch.zeros(block.shape, dtype=torch.float64, device=self.device)
        for chunk in chunks:
            total += self._chunk_product(chunk)(block)
        return total

    def _chunk_product(self, chunk: Chunk) -> Product:
        if chunk.number in self._kept:
            return self._kept[chunk.number]
        if chunk.number >= self._keep:
            build = self._blockwise if self._engine == "blockwise" else self._retained
            return build(chunk, keep=False)
        self._kept[chunk.number] = self._build(chunk)
        return self._kept[chunk.number]

    def _mlp_product(self, chunk: Chunk) -> MLPProduct:
        if self.plan is None:
            raise TypeError("the model is not a plain MLP")
        inputs, targets = chunk.batch
        return MLPProduct(self.plan, self.problem.named(), inputs, targets, chunk.weight)

    def _blockwise(self, chunk: Chunk, keep: bool = True) -> Product:
        """By autograd, with a graph that holds only what passes between blocks of the model."""
        with self.problem.in_blocks(second=self.second):
            return self._retained(chunk, keep)

    @abstractmethod
    def _retained(self, chunk: Chunk, keep: bool = True) -> Product:
        """By autograd; the product holds the graph, and if not ``keep``, one block uses it up."""

    @abstractmethod
    def _moved(self, chunk: Chunk, step: Tensor) -> Tensor:
        """What products are the derivative of, with the parameters moved by ``step`` ``(n,)``."""

    @abstractmethod
    def _rate(self, chunk: Chunk, rate: Tensor) -> Tensor:
        """The product ``(n,)`` with a vector along which that changes at ``rate``."""

    @abstractmethod
    def _builders(self) -> dict[Engine, Callable[[Chunk], Product]]:
        """Every engine this operator has for its problem, the default first."""

    # -- choices -----------------------------------------------------------------------------------

    def _recognise(self) -> MLPPlan | None:
        problem = self.problem
        if problem.terms.loss is None or problem.precision != "exact" or problem.narrow:
            return None
        named = select_parameters(problem.model, lambda name, _: name in problem.layout.names)
        plan = recognise(problem.model, problem.terms.loss, named)
        pairs = [b for b in problem.batches.joined if isinstance(b, tuple | list) and len(b) == 2]
        if plan is None or len(pairs) != len(problem.batches.joined):
            return None
        return plan if all(plan.fits(x, y, problem.dtype) for x, y in pairs) else None

    def _choose(self, engine: str) -> tuple[Callable[[Chunk], Product], str]:
        builders = self._builders()
        if self.problem.narrow:  # tracing would keep every weight in its wide form
            builders = {"retained": self._retained}
        if self.problem.blocks:
            builders["blockwise"] = self._blockwise
        if engine == "auto":
            engine = next(iter(builders))
        elif engine == "measure":
            builders.pop("blockwise", None)  # for memory, never for speed
            engine = fastest(self.problem, type(self).__name__, builders)
        elif engine == "rebuilt":
            return self._retained, engine
        if engine not in builders:
            known = ", ".join(map(repr, ["auto", "measure", "rebuilt", *builders]))
            raise ValueError(
                f"engine={engine!r} cannot multiply with {type(self).__name__} of this model; "
                f"choose from {known}"
            )
        return builders[engine], engine

    def _room_of(self, budget: float | None, check: bool) -> float:
        """What is left of the budget for graphs."""
        problem = self.problem
        if budget is None:
            budget = sizing.default_budget(free_bytes(self.device))
        data = sum(t.nbytes for batch in problem.batches.joined for t in tensors(batch))
        copied = sum(t.nbytes for t in (*problem.named().values(), *problem.buffers.values()))
        element = problem.parameters[0].element_size()
        return sizing.operator_room(budget, data, copied, problem.layout.n, element, check)

    def _divide(self, chunk: ChunkSize, bound: sizing.Cost) -> None:
        """Cut the data; ``bound`` is what chunks take at most.

        Only where that does not fit is more found out.
        """
        problem = self.problem
        samples = None if problem.whole else problem.batches.samples
        largest = chunk if isinstance(chunk, int) else samples or 1
        count = -(-(samples or len(problem.batches)) // largest)
        small = sizing.fitting(bound, largest, self._room, count) == count
        self._cut(chunk, samples, bound if small else self.cost)

    def _cut(self, chunk: ChunkSize, samples: int | None, cost: sizing.Cost) -> None:
        """Cut the data into chunks that fit, and settle how many keep their graph."""
        size = chunk if isinstance(chunk, int) else None
        if samples is None:
            size = None
        elif size is None:
            size = sizing.chunk_size(samples, cost, self._room)
        self.problem.cut(size)
        chunks = len(self.problem.chunks)
        fitting = sizing.fitting(cost, size or 1, self._room, chunks)
        self._keep = 0 if self._engine == "rebuilt" else fitting
        self._kept: dict[int, Product] = {}
        if self._engine not in ("mlp", "rebuilt") and fitting < chunks:
            log.info(
                "%d of %d chunks fit %.0f MiB: others are rebuilt",
                fitting,
                chunks,
                self._room / 2**20,
            )
        log.info("%s: %s", type(self).__name__, self.engine)

    @cached_property
    def cost(self) -> sizing.Cost:
        """Bytes of a chunk by its number of samples, measured on small ones."""
        problem = self.problem
        samples = None if problem.whole else problem.batches.samples
        batches = problem.batches.pieces(None) if samples is None else problem.batches.joined
        largest = max(batches, key=lambda batch: sample_count(batch) or 0)
        build = self._build if self._engine in ("mlp", "blockwise") else self._retained

        def run(size: int) -> Callable[[], Tensor]:
            batch = largest if samples is None else rows(largest, slice(0, size))
            product = build(Chunk(batch, number=TRIED))
            one = torch.ones(1, self.n, dtype=self.dtype, device=self.device)
            return lambda: product(one)

        with problem.arithmetic():
            most = 1 if samples is None else sample_count(largest) or 1
            return sizing.measure(run, most, self._room)
