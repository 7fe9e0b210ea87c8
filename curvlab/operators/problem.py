"""One model, one loss, one data set, frozen: everything the curvature operators differentiate.

Parameters, buffers, modules and data are copied when the problem is made: training the model
further, switching its heads or changing the data in place does not change it, and evaluating it
does not touch the model. What cannot be copied (a global that the forward pass reads) is watched:
every evaluation must reproduce the loss recorded at the start.
"""

import contextlib
import dataclasses
import itertools
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import CheckpointError

from curvlab.batches import map_tensors, read, require_finite, sample_count
from curvlab.operators.functions import Replaced
from curvlab.operators.narrow import is_narrow, storage_of
from curvlab.operators.objective import (
    Loss,
    Objective,
    Reduction,
    require_scalar,
    stated_reduction,
    terms,
)
from curvlab.operators.own import Traces, own_copy, refuse_reentrant, uses
from curvlab.operators.policy import (
    Mode,
    Precision,
    arithmetic,
    drew,
    evaluation,
    modes,
    training_flags,
    unwrap,
)
from curvlab.operators.products.autograd import Around
from curvlab.operators.products.blocks import find_blocks, recomputing
from curvlab.operators.verify import (
    require_additive,
    require_deterministic,
    require_finite_loss,
    same,
    settle_reduction,
    settle_whole,
)
from curvlab.parameters import Selection, layout_of, select_parameters
from curvlab.probe import OperatorError
from curvlab.refusals import Refusal

log = logging.getLogger("curvlab")

Count = Callable[[Any], float]
TRIED = -1  # the number of a chunk that is not part of the data as they are cut
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
        self.model = self._inner(model)
        self.terms = terms(loss)
        stated = stated_reduction(loss)
        self.precision = precision
        policies = modes(mode)
        self.flags = training_flags(self.model, policies)
        self.masks_frozen = "frozen-masks" in policies
        self._take_parameters(select, dtype)
        self._recurrent = any(isinstance(module, nn.RNNBase) for module in self.flags)
        # whether a forward pass draws random numbers, and whether that is still being found out
        self.draws, self.watching = False, True
        self.computed_in = self.dtype  # the dtype of the loss, which a model may compute in another
        self.attention = False  # whether a forward pass calls scaled_dot_product_attention
        self.recomputes = False  # whether products run checkpointed parts of the model again
        self.autocast = False  # whether the model turns autocast on, which is then left out
        self.use_own_modules()
        # masks and batch statistics belong to batches as they were given
        together = whole_batches or bool(policies - {"eval"})
        found = read(data, bare=self.terms.loss is None, together=together)
        require_finite(found)
        self.batches = found.to(self.device, dtype)
        self.asked = together  # for batches that are never cut
        self.whole = together or self.batches.samples is None
        self.count = count or getattr(loss, "count", None)
        self.inputs_change = False  # whether the model writes into its inputs
        self._second: bool | None = None  # whether graphs are made in blocks, and for what
        self.chunks: list[Chunk] = []
        self.values: list[float] = []
        self.normaliser = 1.0
        self.known: dict[int, float] = {}  # losses of joined batches that were found to add up
        with arithmetic(self.device, precision):
            self._settle(reduction, stated)

    _inner = staticmethod(unwrap)

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

    def _take_parameters(self, select: Selection, dtype: torch.dtype | None) -> None:
        chosen = self._choose(select, dtype)
        self.layout = layout_of(chosen)

        def own_copy(tensor: Tensor) -> Tensor:
            cast = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
            return tensor.detach().to(cast, copy=True)

        everything = dict(self.model.named_parameters())
        for name, parameter in everything.items():
            if not bool(torch.isfinite(parameter).all()):
                raise ValueError(f"parameter {name!r} holds NaN or infinity: there is no curvature")
        self.parameters = tuple(own_copy(p).requires_grad_() for p in chosen.values())
        others = {n: p for n, p in everything.items() if n not in chosen}
        kept = {n for n, p in others.items() if dtype is not None and is_narrow(p, dtype)}
        self.narrow = bool(kept)  # whether frozen weights are widened where they are used
        self.fixed = {
            f"model.{name}": parameter.detach().clone() if name in kept else own_copy(parameter)
            for name, parameter in others.items()
        }
        self._frozen = frozenset(storage_of(self.fixed[f"model.{name}"]) for name in kept)
        self.buffers = {f"model.{n}": own_copy(b) for n, b in self.model.named_buffers()}
        self._names = [f"model.{name}" for name in chosen]

    def _choose(self, select: Selection, dtype: torch.dtype | None) -> dict[str, nn.Parameter]:
        """The selected parameters, all of one kind; settles device and dtype."""
        chosen = select_parameters(self.model, select)
        kinds = {(parameter.dtype, parameter.device) for parameter in chosen.values()}
        if len({device for _, device in kinds}) > 1:
            raise ValueError(f"the selected parameters are on several devices: {kinds}")
        if dtype is None and len(kinds) > 1:
            raise TypeError(f"the parameters have several dtypes ({kinds}): pass dtype=")
        own, self.device = next(iter(kinds))
        self.dtype = dtype or own
        narrow = [
            name
            for name, parameter in self.model.named_parameters()
            if parameter.is_floating_point() and parameter.itemsize < own.itemsize
        ]
        if dtype is None and narrow and self.precision == "exact":
            raise TypeError(
                f"the selected parameters are {own} and others are narrower ({narrow[0]}, "
                f"{len(narrow)} in all), so that products would have two or three digits: pass "
                'dtype=torch.float32 (--dtype float32), or precision="bfloat16" to take that'
            )
        if self.dtype not in (torch.float32, torch.float64):
            raise TypeError(
                f"curvature is computed in float32 or float64; parameters are {self.dtype}: "
                'pass dtype=torch.float32 (--dtype float32), with precision="bfloat16" if the '
                "speed is wanted"
            )
        return chosen

    def use_own_modules(self) -> None:
        """Copy the modules, with this problem's tensors in them."""
        # buffers are copied once more, because the forward pass may write to them
        buffers = {name.removeprefix("model."): b.clone() for name, b in self.buffers.items()}
        own = own_copy(self.model, {**self._in_modules(), **buffers})
        if own is None:
            self._borrow_modules()
            return
        for module, flag in zip(own.modules(), self.flags.values(), strict=True):
            module.training = flag
        self._modules, self._traces = _Call(own), Traces(own)
        self._held = self.parameters, self.fixed, self.buffers
        self.borrowed = False

    def _in_modules(self) -> dict[str, Tensor]:
        """What stands in the modules for the parameters."""
        return self.named()

    def _borrow_modules(self) -> None:
        """Use the user's own, with this problem's tensors swapped in for each evaluation.

        For what a copy cannot follow: a function that closes over the model, or over a part of it.
        """
        self._modules, self._held, self.borrowed = _Call(self.model), ((), {}, {}), True

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

    def _run(
        self,
        function: Callable[[nn.Module, Any], Any],
        chunk: Chunk,
        parameters: Sequence[Tensor] | None = None,
        seed: int | None = None,
    ) -> Any:
        parameters = self.parameters if parameters is None else parameters
        batch = map_tensors(chunk.batch, torch.clone) if self.inputs_change else chunk.batch
        others = {} if self.fixed is self._held[1] else dict(self.fixed)
        if parameters is not self._held[0]:
            others.update(zip(self._names, parameters, strict=True))
        seed = chunk.number if seed is None else seed
        with self._evaluation(self._seed(seed)) as mode:
            traces = Traces(self.model) if self.borrowed else self._traces
            if self.buffers is not self._held[2]:
                others.update((name, buffer.clone()) for name, buffer in self.buffers.items())
            if self.borrowed:
                for module, flag in self.flags.items():
                    module.training = flag
            try:
                with self._blocks(seed):
                    if others:
                        return functional_call(self._modules, others, (function, batch))
                    return self._modules(function, batch)
            finally:
                traces.undo()
                if self.watching:
                    self.draws = self.draws or drew(seed, self.device)
                    self.attention = self.attention or mode.attention
                    self.autocast = self.autocast or mode.autocast

    def _seed(self, seed: int) -> int | None:
        return seed if self.watching or self.draws else None

    @property
    def around(self) -> Around:
        """Makes what products need around them: a context if parts of the model run again."""
        if not self.recomputes and not self.narrow:
            return contextlib.nullcontext
        return lambda: self._evaluation(None)

    def _evaluation(self, seed: int | None) -> contextlib.AbstractContextManager[Replaced]:
        return evaluation(
            seed,
            self.device,
            self.precision,
            recurrent=self._recurrent,
            recomputes=self.recomputes,
            widen=self.parameters[0].dtype if self.narrow else None,
            frozen=self._frozen,
        )

    # -- blocks that are computed again, see curvlab.operators.products.blocks ---------------------

    @property
    def blocks(self) -> list[nn.Module]:
        """The blocks of the modules that are run, if these are made of some."""
        return find_blocks(self._modules.model)

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
        return recomputing(self.blocks, partial(self._again, seed), self._second)

    @contextlib.contextmanager
    def _again(self, seed: int, block: nn.Module) -> Iterator[None]:
        """As :meth:`_run`, for one block that is computed again."""
        with arithmetic(self.device, self.precision), self._evaluation(seed):
            traces = Traces(block)
            for module in block.modules() if self.borrowed else ():
                module.training = self.flags[module]
            try:
                yield
            finally:
                traces.undo()

    def named(self) -> dict[str, Tensor]:
        """All parameters, selected or not, by their names in the model."""
        everything = {**self.fixed, **dict(zip(self._names, self.parameters, strict=True))}
        return {name.removeprefix("model."): tensor for name, tensor in everything.items()}

    def value(self, batch: Any, seed: int) -> float:
        """The loss of ``batch``, unweighted."""
        with torch.no_grad():
            value = require_scalar(self._run(self.terms.whole, Chunk(batch), seed=seed))
        self.computed_in = value.dtype
        return float(value)

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

    @contextlib.contextmanager
    def cast(self, dtype: torch.dtype) -> Iterator[None]:
        """Every parameter and buffer in ``dtype``, for the checks at construction."""
        kept = self.parameters, self.fixed, self.buffers

        def cast(tensor: Tensor) -> Tensor:
            return tensor.detach().to(dtype) if tensor.is_floating_point() else tensor

        self.parameters = tuple(cast(tensor).requires_grad_() for tensor in kept[0])
        self.fixed = {name: cast(tensor) for name, tensor in kept[1].items()}
        self.buffers = {name: cast(tensor) for name, tensor in kept[2].items()}
        try:
            yield
        finally:
            self.parameters, self.fixed, self.buffers = kept

    def fine(self, chunk: Chunk) -> Chunk:
        """``chunk`` with its numbers in the parameters' dtype, whatever that is now."""
        dtype = self.parameters[0].dtype

        def cast(tensor: Tensor) -> Tensor:
            return tensor.to(dtype) if tensor.is_floating_point() else tensor

        return dataclasses.replace(chunk, batch=map_tensors(chunk.batch, cast))

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

    def recompute(self, error: CheckpointError) -> None:
        """Evaluate so that checkpointed parts run the second time as they did the first.

        They run inside torch's backward pass, where functions cannot be replaced.
        """
        if self.recomputes:
            raise OperatorError(
                "an activation checkpoint does not run again as it did the first time: turn "
                'checkpointing off (gradient_checkpointing_disable()); engine="blockwise" needs as '
                f"little memory. torch says: {str(error).splitlines()[0]}"
            ) from error
        log.info("activation checkpointing: products run the checkpointed parts again")
        self.recomputes = True

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
            uncut = len(pieces) == len(self.batches.joined) == len(self.chunks)
            for i, chunk in enumerate(self.chunks):
                known = self.known.get(id(self.batches.joined[i])) if uncut else None
                value = self.value(chunk.batch, chunk.number) if known is None else known
                require_finite_loss(chunk, value)
                if known is None:
                    require_additive(self, chunk.batch, value, self.reduction)
                self.values.append(value * chunk.weight)

    def check(self, chunk: Chunk, value: Tensor) -> None:
        """Raise unless ``value``, the chunk's share of the loss, is what it was at the start."""
        if chunk.number == TRIED or not self.values:
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

    def objective(self, flat: Tensor) -> float:
        """The objective at other parameters ``(n,)``."""
        moved = self.layout.unflatten(flat)
        with arithmetic(self.device, self.precision), torch.no_grad():
            return math.fsum(float(self.loss(chunk, moved)) for chunk in self.chunks)

    def gradient(self) -> Tensor:
        """The gradient of the objective, ``(n,)``; chunks are added in float64."""
        total = torch.zeros(self.layout.n, dtype=torch.float64, device=self.device)
        with arithmetic(self.device, self.precision):
            for chunk in self.chunks:
                value = self.loss(chunk, self.parameters)
                self.check(chunk, value)
                with self.around():
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
