"""One model, one loss, one data set, frozen: everything the curvature operators differentiate.

Parameters, buffers, modules and data are copied when the problem is made: training the model
further, switching its heads or changing the data in place does not change it, and evaluating it
does not touch the model. What cannot be copied (a global that the forward pass reads) is watched:
every evaluation must reproduce the loss recorded at the start.
"""

import itertools
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError

from curvlab.batches import read, require_finite, sample_count
from curvlab.float32 import float32_switch
from curvlab.operators.frozen import Chunk, Frozen
from curvlab.operators.objective import (
    Loss,
    Objective,
    Reduction,
    require_scalar,
    stated_reduction,
    terms,
)
from curvlab.operators.own import refuse_reentrant, uses
from curvlab.operators.policy import Mode, Precision, evaluation
from curvlab.operators.verify import (
    require_additive,
    require_deterministic,
    require_finite_loss,
    same,
    settle_reduction,
    settle_whole,
)
from curvlab.parameters import Selection
from curvlab.probe import OperatorError
from curvlab.refusals import Refusal

log = logging.getLogger("curvlab")

Count = Callable[[Any], float]
TRIED = -1  # the number of a chunk that is not part of the data as they are cut
ChunkSize = int | Literal["batch"] | None
Counted = tuple[Any, float, int]  # some samples, what their mean divides by, where they start


class Problem(Frozen):
    """The weighted loss of every chunk as a function of the selected parameters.

    Attributes:
        chunks: Set by :meth:`cut`.
        normaliser: What each sample's term is divided by: the sum of counts for a mean, else 1.
    """

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
        whole_batches: bool = False,
        dtype: torch.dtype | None = None,
        precision: Precision = "exact",
    ) -> None:
        super().__init__(model, select=select, mode=mode, dtype=dtype, precision=precision)
        self.terms = terms(loss)
        stated = stated_reduction(loss)
        self.computed_in = self.dtype  # the dtype of the loss, which a model may compute in another
        # masks and batch statistics belong to batches as they were given
        together = whole_batches or bool(self.policies - {"eval"})
        found = read(data, bare=self.terms.loss is None, together=together)
        require_finite(found)
        self.batches = found.to(self.device, dtype)
        self.asked = together  # for batches that are never cut
        self.whole = together or self.batches.samples is None
        samples = self.batches.samples or 1
        self.matmul = float32_switch(samples, self.model.parameters(), self.dtype)
        self.count = count or getattr(loss, "count", None)
        self.chunks: list[Chunk] = []
        self.values: list[float] = []
        self.normaliser = 1.0
        self.known: dict[int, float] = {}  # losses of joined batches that were found to add up
        with self.arithmetic():
            self._settle(reduction, stated)

    def _settle(self, reduction: Reduction | None, stated: Reduction | None) -> None:
        """Is it one function, and summed how? A batch that cannot be cut is taken whole."""
        try:
            require_deterministic(self)
            self.reduction = settle_reduction(self, reduction, stated)
        except Refusal:
            raise
        except (ArithmeticError, AssertionError, LookupError, RuntimeError, ValueError) as error:
            if self.whole:
                raise
            settle_whole(self, error)
            self._settle(reduction, stated)

    # -- evaluation: differentiable functions of the parameters ------------------------------------

    def loss(self, chunk: Chunk, parameters: Sequence[Tensor]) -> Tensor:
        """The chunk's share of the objective, a scalar."""
        return require_scalar(self._run(self.terms.whole, chunk, parameters)) * chunk.weight

    def output(self, chunk: Chunk, parameters: Sequence[Tensor]) -> Tensor:
        """The model's outputs on the chunk, ``(samples, ...)``."""
        output = self._run(self.terms.split("this operator").output, chunk, parameters)
        if not isinstance(output, Tensor):
            raise TypeError(
                "this operator needs a model whose output is one tensor (or has .logits); got "
                f"{type(output).__name__}"
            )
        return output

    def criterion(self, chunk: Chunk, output: Tensor) -> Tensor:
        """The chunk's share of the objective as a function of the model's outputs."""
        function = self.terms.split("this operator").criterion
        with evaluation(self._seed(chunk.number), self.device, self.precision):
            value = function(output, chunk.batch)
        return require_scalar(value) * chunk.weight

    def slope(
        self,
        function: Callable[[nn.Module, Any], Tensor],
        chunk: Chunk,
        parameters: Sequence[Tensor],
        seed: Tensor | None = None,
    ) -> Tensor:
        """The gradient ``(n,)`` of ``function(model, batch)`` with respect to ``parameters``.

        It is taken while they are in the model, for checkpointed parts that run again. ``seed``
        gives the weights of a function that is not a scalar.
        """

        def gradient(model: nn.Module, batch: Any) -> tuple[Tensor | None, ...]:
            value = function(model, batch)
            return torch.autograd.grad(value, parameters, seed, allow_unused=True)

        return self.layout.flatten(self._run(gradient, chunk, parameters), like=parameters[0])

    def value(self, batch: Any, seed: int) -> float:
        """The loss of ``batch``, unweighted."""
        with torch.no_grad():
            value = require_scalar(self._run(self.terms.whole, Chunk(batch), seed=seed))
        self.computed_in = value.dtype
        return float(value)

    def depend(self, batch: Any) -> float:
        """The loss of ``batch``; notes selected parameters without a gradient, and closures."""
        closes = "the loss or a layer closes over the model, which is therefore borrowed"
        try:
            value, self.unused, foreign = self._gradients_of(batch)
        except CheckpointError as error:
            self.recompute(error)
            return self.depend(batch)
        except RuntimeError:  # tensors of the model and of its copy that do not go together
            if self.borrowed:
                raise
            self._borrow_modules()
            value, self.unused, foreign = self._gradients_of(batch)
            log.info(closes)
        if (foreign or self.unused) and not self.borrowed:
            self._borrow_modules()
            value, unused, _ = self._gradients_of(batch)
            if foreign or len(unused) < len(self.unused):
                self.unused = unused
                log.info(closes)
            else:
                self.use_own_modules()
        return value

    def _gradients_of(self, batch: Any) -> tuple[float, tuple[str, ...], bool]:
        """The loss, the parameters without a gradient, whether the user's own were used."""

        def both(model: nn.Module, batch: Any) -> tuple[Tensor, Sequence[Tensor | None]]:
            value = require_scalar(self.terms.whole(model, batch))
            if not value.requires_grad:
                return value, [None] * len(self.parameters)
            refuse_reentrant(value)
            # here and not outside: checkpointed parts have to run again as they did before
            return value, torch.autograd.grad(
                value, self.parameters, retain_graph=True, allow_unused=True
            )

        value, found = self._run(both, Chunk(batch))
        named = zip(self.layout.names, found, strict=True)
        unused = tuple(name for name, gradient in named if gradient is None)
        return float(value.detach()), unused, uses(value, self.model.parameters())

    def count_of(self, batch: Any) -> float:
        """What the mean over ``batch`` divides by."""
        if self.count is not None:
            return float(self.count(batch))
        samples = sample_count(batch)
        if samples is None and len(self.batches) > 1:
            raise ValueError(
                "a batch has no common first dimension, so its samples cannot be counted: pass "
                "count=, a function of a batch, to weigh the batches' means"
            )
        return float(samples or 1)

    @property
    def tolerance(self) -> float:
        """How far apart two values of one loss may be by rounding alone, relatively."""
        limit = {"tf32": 1e-2, "bfloat16": 3e-2}
        exact = 1e-10 if self.dtype == torch.float64 else 3e-5
        return limit.get(self.precision, exact)

    # -- the objective as a whole ------------------------------------------------------------------

    def cut(self, size: int | None) -> None:
        """Divide the data into chunks of at most ``size`` samples; check every chunk's loss."""
        pieces = self.batches.pieces(None if self.whole else size)
        mean = self.reduction == "mean"
        starts = itertools.accumulate((sample_count(piece) or 0 for piece in pieces), initial=0)
        counts = [self.count_of(piece) if mean else 1.0 for piece in pieces]
        counted = [
            (piece, count, start)
            for piece, count, start in zip(pieces, counts, starts, strict=False)
            if count  # a chunk that counts nothing (all targets ignored) has no mean
        ]
        total, counted = self._agree(counted)
        self.normaliser = total if mean else 1.0
        self.chunks = [
            Chunk(piece, count / self.normaliser, number, start)
            for number, (piece, count, start) in enumerate(counted)
        ]
        with self.arithmetic():
            found = self._losses(uncut=len(pieces) == len(self.batches.joined) == len(counted))
        self.values = [v * chunk.weight for v, chunk in zip(found, self.chunks, strict=True)]

    def _agree(self, counted: list[Counted]) -> tuple[float, list[Counted]]:
        """What all counts add up to, and the chunks to compute."""
        total = math.fsum(count for _, count, _ in counted)
        if not total > 0:
            raise ValueError(f"count= adds up to {total}: it must be positive")
        return total, counted

    def _losses(self, *, uncut: bool) -> list[float]:
        """Every chunk's loss, checked; ``uncut`` ones are batches, and may be known."""
        found = []
        for i, chunk in enumerate(self.chunks):
            known = self.known.get(id(self.batches.joined[i])) if uncut else None
            value = self.value(chunk.batch, chunk.number) if known is None else known
            require_finite_loss(chunk, value)
            if known is None:
                require_additive(self, chunk.batch, value, self.reduction)
            found.append(value)
        return found

    def check(self, chunk: Chunk, value: Tensor) -> None:
        """Raise unless ``value``, the chunk's share of the loss, is what it was at the start."""
        if chunk.number == TRIED or not self.values:
            return
        expected, now = self.values[chunk.number], float(value.detach())
        if not self._same(chunk, now, expected):
            raise OperatorError(
                f"the loss of chunk {chunk.number} was {expected:.9g} when the operator was made "
                f"and is {now:.9g} now: something outside the copied parameters, buffers and data "
                "has changed (an active head, a global, an unseeded random choice). Make a new "
                "operator"
            )

    def _same(self, chunk: Chunk, now: float, before: float) -> bool:
        weight = chunk.weight or 1.0
        return same(self, chunk.batch, now / weight, before / weight)

    def objective(self, flat: Tensor) -> float:
        """The objective at other parameters ``(n,)``."""
        moved = self.layout.unflatten(flat)
        with self.arithmetic(), torch.no_grad():
            return math.fsum(float(self.loss(chunk, moved)) for chunk in self.chunks)

    def gradient(self) -> Tensor:
        """The gradient of the objective, ``(n,)``; chunks are added in float64."""
        total = torch.zeros(self.layout.n, dtype=torch.float64, device=self.device)
        with self.arithmetic():
            for chunk in self.chunks:
                total += self.gradient_of(chunk)
        return total.to(self.dtype)

    def gradient_of(self, chunk: Chunk) -> Tensor:
        """The gradient of the chunk's share of the objective, ``(n,)``."""
        value = self.loss(chunk, self.parameters)
        self.check(chunk, value)
        with self.around():
            pieces = torch.autograd.grad(value, self.parameters, allow_unused=True)
        return self.layout.flatten(pieces, like=self.parameters[0])

    def plain_gradient(self, sample: Chunk) -> Tensor | None:
        """The same without blocks, for a comparison; ``None`` if there is none to compare with."""
        return self.gradient_of(sample)

    def factor(self, _plain: Tensor, _found: Tensor) -> float:
        """What a plain gradient has to be multiplied by to be the one in blocks."""
        return 1.0
