"""One model, one loss, one data set, frozen: everything the curvature operators differentiate.

Parameters, buffers and data are copied when the problem is made: training the model further, or
changing the data in place, does not change it. The model itself is only borrowed for its code. Its
tensors are swapped in for the length of an evaluation (``torch.func.functional_call``), so that
parameters, gradients, flags, buffers and modes stay as they are. What cannot be copied (a switch
between heads, a global the forward pass reads) is watched: every evaluation must reproduce the loss
recorded at the start.
"""

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call

from curvlab.batches import map_tensors, read, require_finite, sample_count
from curvlab.operators.objective import (
    Loss,
    Objective,
    Reduction,
    require_scalar,
    stated_reduction,
    terms,
)
from curvlab.operators.policy import (
    Mode,
    Precision,
    arithmetic,
    evaluation,
    modes,
    training_flags,
    unwrap,
)
from curvlab.operators.products.blocks import find_blocks, recomputing
from curvlab.operators.verify import (
    describe,
    require_additive,
    require_deterministic,
    same,
    settle_reduction,
)
from curvlab.parameters import Selection, layout_of, select_parameters
from curvlab.probe import OperatorError

Count = Callable[[Any], float]
ChunkSize = int | Literal["batch"] | None


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """Some samples, the weight of their loss in the whole, and their place."""

    batch: Any
    weight: float = 1.0
    number: int = 0
    start: int = 0  # of its first sample in the data


class Problem:
    """The weighted loss of every chunk as a function of the selected parameters.

    Attributes:
        parameters: The selected parameters: fresh leaves, in the layout's order.
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
        self.model = unwrap(model)
        self.terms = terms(loss)
        stated = stated_reduction(loss)
        self.precision = precision
        policies = modes(mode)
        self.flags = training_flags(self.model, policies)
        self.masks_frozen = "frozen masks" in policies
        self._take_parameters(select, dtype)
        found = read(data, bare=self.terms.loss is None)
        require_finite(found)
        self.batches = found.to(self.device, dtype)
        # masks and batch statistics belong to batches as they were given
        coupled = bool(policies - {"eval"})
        self.whole = whole_batches or coupled or self.batches.samples is None
        self.count = count
        self.inputs_change = False  # whether the model writes into its inputs
        self._second: bool | None = None  # whether graphs are made in blocks, and for what
        self.chunks: list[Chunk] = []
        self.values: list[float] = []
        self.normaliser = 1.0
        with arithmetic(self.device, precision):
            require_deterministic(self)
            self.reduction = settle_reduction(self, reduction, stated)

    def _take_parameters(self, select: Selection, dtype: torch.dtype | None) -> None:
        chosen = select_parameters(self.model, select)
        self.layout = layout_of(chosen)
        kinds = {(parameter.dtype, parameter.device) for parameter in chosen.values()}
        if len({device for _, device in kinds}) > 1:
            raise ValueError(f"the selected parameters are on several devices: {kinds}")
        if dtype is None and len(kinds) > 1:
            raise TypeError(f"the parameters have several dtypes ({kinds}): pass dtype=")
        own, self.device = next(iter(kinds))
        self.dtype = dtype or own
        if self.dtype not in (torch.float32, torch.float64):
            raise TypeError(
                f"curvature is computed in float32 or float64, not {self.dtype}: pass "
                'dtype=torch.float32, with precision="bfloat16" if the speed is wanted'
            )

        def own_copy(tensor: Tensor) -> Tensor:
            cast = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
            return tensor.detach().to(cast, copy=True)

        everything = dict(self.model.named_parameters())
        for name, parameter in everything.items():
            if not bool(torch.isfinite(parameter).all()):
                raise ValueError(f"parameter {name!r} holds NaN or infinity: there is no curvature")
        self.parameters = tuple(own_copy(p).requires_grad_() for p in chosen.values())
        self.fixed = {
            f"model.{name}": own_copy(parameter)
            for name, parameter in everything.items()
            if name not in chosen
        }
        self.buffers = {f"model.{n}": own_copy(b) for n, b in self.model.named_buffers()}
        self._names = [f"model.{name}" for name in chosen]

    # -- evaluation: differentiable functions of the parameters ------------------------------------

    def loss(self, chunk: Chunk, parameters: Sequence[Tensor]) -> Tensor:
        """The chunk's share of the objective, a scalar."""
        return require_scalar(self._run(self.terms.whole, chunk, parameters)) * chunk.weight

    def output(self, chunk: Chunk, parameters: Sequence[Tensor]) -> Tensor:
        """The model's outputs on the chunk, ``(samples, ...)``."""
        function = self.terms.output
        output = self._run(function, chunk, parameters) if function else None
        if not isinstance(output, Tensor):
            raise TypeError(
                "this operator needs a model whose output is one tensor (or has .logits); got "
                f"{type(output).__name__}"
            )
        return output

    def criterion(self, chunk: Chunk, output: Tensor) -> Tensor:
        """The chunk's share of the objective as a function of the model's outputs."""
        function = self.terms.split("this operator").criterion
        with evaluation({}, chunk.number, self.device, self.precision):
            value = function(output, chunk.batch) if function else None
        return require_scalar(value) * chunk.weight

    def _run(
        self,
        function: Callable[[nn.Module, Any], Tensor],
        chunk: Chunk,
        parameters: Sequence[Tensor] | None = None,
        seed: int | None = None,
    ) -> Any:
        parameters = self.parameters if parameters is None else parameters
        batch = map_tensors(chunk.batch, torch.clone) if self.inputs_change else chunk.batch
        state = {**self.fixed, **{name: buffer.clone() for name, buffer in self.buffers.items()}}
        state.update(zip(self._names, parameters, strict=True))
        seed = chunk.number if seed is None else seed
        with evaluation(self.flags, seed, self.device, self.precision), self._blocks(seed):
            return functional_call(_Call(self.model), state, (function, batch))

    # -- blocks that are computed again, see curvlab.operators.products.blocks ---------------------

    @cached_property
    def blocks(self) -> list[nn.Module]:
        """The blocks of the model, if it is made of some."""
        return find_blocks(self.model)

    @contextlib.contextmanager
    def in_blocks(self, *, second: bool) -> Iterator[None]:
        """Graphs made in the context hold what lies between blocks, not what is inside them."""
        before, self._second = self._second, second
        try:
            yield
        finally:
            self._second = before

    def _blocks(self, seed: int) -> contextlib.AbstractContextManager[None]:
        if self._second is None:
            return contextlib.nullcontext()

        @contextlib.contextmanager
        def again(block: nn.Module) -> Iterator[None]:
            flags = {module: self.flags[module] for module in block.modules()}
            evaluated = evaluation(flags, seed, self.device, self.precision)
            with arithmetic(self.device, self.precision), evaluated:
                yield

        return recomputing(self.blocks, again, self._second)

    def named(self) -> dict[str, Tensor]:
        """All parameters, selected or not, by their names in the model."""
        everything = {**self.fixed, **dict(zip(self._names, self.parameters, strict=True))}
        return {name.removeprefix("model."): tensor for name, tensor in everything.items()}

    def value(self, batch: Any, seed: int) -> float:
        """The loss of ``batch``, unweighted."""
        with torch.no_grad():
            return float(require_scalar(self._run(self.terms.whole, Chunk(batch), seed=seed)))

    @contextlib.contextmanager
    def moved(self, relative: float) -> Iterator[None]:
        """Every parameter a little off, each by ``relative`` times itself, up or down at random.

        Only for the checks at construction, when nobody else has the problem.
        """
        kept = self.parameters, self.fixed
        generator = torch.Generator().manual_seed(0)

        def move(tensor: Tensor) -> Tensor:
            if not tensor.is_floating_point():
                return tensor
            signs = torch.randint(0, 2, tensor.shape, generator=generator, dtype=torch.int8)
            signs = signs.mul_(2).sub_(1).to(tensor.device)
            return torch.addcmul(tensor.detach(), tensor.detach(), signs, value=relative)

        self.parameters = tuple(move(tensor).requires_grad_() for tensor in kept[0])
        self.fixed = {name: move(tensor) for name, tensor in kept[1].items()}
        try:
            yield
        finally:
            self.parameters, self.fixed = kept

    def depends(self, batch: Any) -> bool:
        """Whether a selected parameter affects the loss of ``batch``."""
        value = require_scalar(self._run(self.terms.whole, Chunk(batch)))
        if not value.requires_grad:
            return False
        gradients = torch.autograd.grad(value, self.parameters, allow_unused=True)
        return any(gradient is not None for gradient in gradients)

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
        counts = [self.count_of(piece) if mean else 1.0 for piece in pieces]
        self.normaliser = math.fsum(counts) if mean else 1.0
        if not self.normaliser > 0:
            raise ValueError(f"count= adds up to {self.normaliser}: it must be positive")
        starts = itertools.accumulate((sample_count(piece) or 0 for piece in pieces), initial=0)
        weighed = [
            (piece, count / self.normaliser if mean else 1.0, start)
            for piece, count, start in zip(pieces, counts, starts, strict=False)
            if count  # a chunk that counts nothing (all targets ignored) has no mean
        ]
        self.chunks = [
            Chunk(piece, weight, number, start)
            for number, (piece, weight, start) in enumerate(weighed)
        ]
        with arithmetic(self.device, self.precision):
            self.values = []
            for chunk in self.chunks:
                value = self.value(chunk.batch, chunk.number)
                if not math.isfinite(value):
                    raise ValueError(
                        f"the loss of chunk {chunk.number} ({describe(chunk.batch)}) is {value}: "
                        "there is no curvature there. Look at these samples and the learning rate"
                    )
                require_additive(self, chunk.batch, value, self.reduction)
                self.values.append(value * chunk.weight)

    def check(self, chunk: Chunk, value: Tensor) -> None:
        """Raise unless ``value``, the chunk's share of the loss, is what it was at the start."""
        if not self.values:  # the data are not cut yet: a small chunk is being measured
            return
        expected, now = self.values[chunk.number], float(value.detach())
        weight = chunk.weight or 1.0
        if not same(self, chunk.batch, now / weight, expected / weight):
            raise OperatorError(
                f"the loss of chunk {chunk.number} was {expected:.9g} when the operator was made "
                f"and is {now:.9g} now: something outside the copied parameters, buffers and data "
                "has changed (an active head, a global, an unseeded random choice). Make a new "
                "operator"
            )

    def gradient(self) -> Tensor:
        """The gradient of the objective, ``(n,)``; chunks are added in float64."""
        total = torch.zeros(self.layout.n, dtype=torch.float64, device=self.device)
        with arithmetic(self.device, self.precision):
            for chunk in self.chunks:
                value = self.loss(chunk, self.parameters)
                self.check(chunk, value)
                pieces = torch.autograd.grad(value, self.parameters, allow_unused=True)
                total += self.layout.flatten(pieces, like=self.parameters[0])
        return total.to(self.dtype)


class _Call(nn.Module):
    """Gives ``functional_call`` a module whose forward is any function of the model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[[nn.Module, Any], Tensor], batch: Any) -> Tensor:
        return function(self.model, batch)
