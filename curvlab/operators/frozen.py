"""A model's own copy, frozen: its parameters, buffers and modules, and how they are run.

Training the model further or switching its heads does not change it, and running it does not touch
the model. Parts of it can be computed again in blocks, see
:mod:`curvlab.operators.products.blocks`.
"""

import contextlib
import dataclasses
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError

from curvlab.batches import map_tensors
from curvlab.float32 import EXACT
from curvlab.operators.functions import Replaced
from curvlab.operators.narrow import is_narrow, storage_of
from curvlab.operators.own import Traces, own_copy
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
from curvlab.parameters import Selection, call_with, layout_of, select_parameters
from curvlab.probe import OperatorError

log = logging.getLogger("curvlab")


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """Some samples, the weight of their loss in the whole, and their place."""

    batch: Any
    weight: float = 1.0
    number: int = 0
    start: int = 0  # of its first sample in the data


class Frozen:
    """Functions of a model and a batch, evaluated with this copy's tensors.

    Attributes:
        parameters: The selected parameters: fresh leaves, in the layout's order.
        fixed: All others; ``buffers`` are those of the modules.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        select: Selection,
        mode: Mode | Sequence[Mode] | None,
        dtype: torch.dtype | None,
        precision: Precision,
    ) -> None:
        self.model = self._inner(model)
        self.precision = precision
        self.matmul = EXACT  # how float32 matrices are multiplied on a processor
        self.policies = modes(mode)
        self.flags = training_flags(self.model, self.policies)
        self.masks_frozen = "frozen-masks" in self.policies
        self._take_parameters(select, dtype)
        self._recurrent = any(isinstance(module, nn.RNNBase) for module in self.flags)
        # whether a forward pass draws random numbers, and whether that is still being found out
        self.draws, self.watching = False, True
        self.attention = False  # whether a forward pass calls scaled_dot_product_attention
        self.recomputes = False  # whether products run checkpointed parts of the model again
        self.autocast = False  # whether the model turns autocast on, which is then left out
        self.inputs_change = False  # whether the model writes into its inputs
        self._second: bool | None = None  # whether graphs are made in blocks, and for what
        self.use_own_modules()

    _inner = staticmethod(unwrap)

    def arithmetic(self) -> contextlib.AbstractContextManager[None]:
        """Where products are computed: gradients on, and rounded as this problem allows."""
        return arithmetic(self.device, self.precision, self.matmul)

    def _take_parameters(self, select: Selection, dtype: torch.dtype | None) -> None:
        chosen = self._choose(select, dtype)
        self.layout = layout_of(chosen)

        everything = dict(self.model.named_parameters())
        for name, parameter in everything.items():
            if not bool(torch.isfinite(parameter).all()):
                raise ValueError(f"parameter {name!r} holds NaN or infinity: there is no curvature")
        self.parameters = tuple(copied(p, dtype).requires_grad_() for p in chosen.values())
        others = {n: p for n, p in everything.items() if n not in chosen}
        kept = {n for n, p in others.items() if dtype is not None and is_narrow(p, dtype)}
        self.narrow = bool(kept)  # whether frozen weights are widened where they are used
        self.fixed = {
            f"model.{name}": copied(parameter, None if name in kept else dtype)
            for name, parameter in others.items()
        }
        self._frozen = frozenset(storage_of(self.fixed[f"model.{name}"]) for name in kept)
        self.buffers = {f"model.{n}": copied(b, dtype) for n, b in self.model.named_buffers()}
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
                'dtype=torch.float32, or precision="bfloat16" to take that'
            )
        if self.dtype not in (torch.float32, torch.float64):
            raise TypeError(
                f"curvature is computed in float32 or float64; parameters are {self.dtype}: "
                'pass dtype=torch.float32, with precision="bfloat16" if the '
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

    # -- evaluation -------------------------------------------------------------------------------

    def _run(
        self,
        function: Callable[[nn.Module, Any], Any],
        chunk: Chunk,
        parameters: Sequence[Tensor] | None = None,
        seed: int | None = None,
    ) -> Any:
        parameters = self.parameters if parameters is None else parameters
        batch = map_tensors(chunk.batch, torch.clone) if self.inputs_change else chunk.batch
        seed = chunk.number if seed is None else seed
        with self._evaluation(self._seed(seed)) as mode, self._swapped(parameters) as others:
            traces = Traces(self.model) if self.borrowed else self._traces
            if self.buffers is not self._held[2]:
                others.update((name, buffer.clone()) for name, buffer in self.buffers.items())
            if self.borrowed:
                for module, flag in self.flags.items():
                    module.training = flag
            try:
                with self._blocks(seed):
                    if others:
                        return call_with(self._modules, others, (function, batch))
                    return self._modules(function, batch)
            finally:
                traces.undo()
                if self.watching:
                    self.draws = self.draws or drew(seed, self.device)
                    self.attention = self.attention or mode.attention
                    self.autocast = self.autocast or mode.autocast

    @contextlib.contextmanager
    def _swapped(self, parameters: Sequence[Tensor]) -> Iterator[dict[str, Tensor]]:
        """What an evaluation with ``parameters`` has to put in place of what the modules hold."""
        others = {} if self.fixed is self._held[1] else dict(self.fixed)
        if parameters is not self._held[0]:
            others.update(zip(self._names, parameters, strict=True))
        yield others

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
        with self.arithmetic(), self._evaluation(seed):
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

    # -- other tensors in their place, for checks -------------------------------------------------

    @contextlib.contextmanager
    def moved(self, relative: float) -> Iterator[None]:
        """Every parameter a little off, each by ``relative`` times itself, up or down at random.

        Only for the checks at construction, when nobody else has the problem.
        """
        generator = torch.Generator().manual_seed(0)

        def move(tensor: Tensor) -> Tensor:
            signs = torch.randint(0, 2, tensor.shape, generator=generator, dtype=torch.int8)
            signs = signs.mul_(2).sub_(1).to(tensor.device)
            return torch.addcmul(tensor.detach(), tensor.detach(), signs, value=relative)

        with self._changed(move):
            yield

    @contextlib.contextmanager
    def displaced(self, relative: float) -> Iterator[None]:
        """The selected parameters elsewhere, those that are 0 too; the others as they are.

        Each moves by the root mean square of all, or of a vector of length 1, times ``relative``
        and a random normal number.
        """
        kept, size = self.parameters, self.distance(relative)
        generator = torch.Generator().manual_seed(0)

        def move(tensor: Tensor) -> Tensor:
            along = torch.randn(tensor.shape, generator=generator).to(tensor)
            return torch.add(tensor.detach(), along, alpha=size)

        self.parameters = tuple(move(tensor).requires_grad_() for tensor in kept)
        try:
            yield
        finally:
            self.parameters = kept

    def distance(self, relative: float) -> float:
        """How far one parameter moves, for all to move by ``relative`` of their length."""
        own = [p.detach().reshape(-1) for p in self.parameters]
        count = float(self.added(torch.tensor(self.layout.n, dtype=torch.float64)))
        return relative * max(1.0, math.hypot(*self.lengths(*own))) / math.sqrt(count)

    def added(self, parts: Tensor) -> Tensor:
        """Sums over all that hold parts of a vector."""
        return parts

    def lengths(self, *vectors: Tensor) -> list[float]:
        """Norms of flat vectors, summed in float64."""
        norms = [torch.linalg.vector_norm(v, dtype=torch.float64) for v in vectors]
        return [float(x) for x in self.added(torch.stack(norms).square()).sqrt()]

    def everywhere(self, fact: bool) -> bool:
        """Whether it is so for all of them."""
        return fact

    @contextlib.contextmanager
    def cast(self, dtype: torch.dtype) -> Iterator[None]:
        """Every parameter and buffer in ``dtype``, for the checks at construction."""
        kept = self.buffers
        self.buffers = {name: _cast(tensor, dtype) for name, tensor in kept.items()}
        try:
            with self._changed(lambda tensor: _cast(tensor, dtype)):
                yield
        finally:
            self.buffers = kept

    @contextlib.contextmanager
    def _changed(self, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
        kept = self.parameters, self.fixed
        self.parameters = tuple(change(tensor).requires_grad_() for tensor in kept[0])
        self.fixed = {
            name: change(tensor) if tensor.is_floating_point() else tensor
            for name, tensor in kept[1].items()
        }
        try:
            yield
        finally:
            self.parameters, self.fixed = kept

    def fine(self, chunk: Chunk) -> Chunk:
        """``chunk`` with its numbers in the parameters' dtype, whatever that is now."""
        dtype = self.parameters[0].dtype
        return dataclasses.replace(
            chunk, batch=map_tensors(chunk.batch, lambda tensor: _cast(tensor, dtype))
        )


def copied(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """A copy, in ``dtype`` if that is given and the tensor holds numbers."""
    cast = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    return tensor.detach().to(cast, copy=True)


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.detach().to(dtype) if tensor.is_floating_point() else tensor


class _Call(nn.Module):
    """Gives :func:`call_with` a module whose forward is any function of the model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[[nn.Module, Any], Tensor], batch: Any) -> Tensor:
        return function(self.model, batch)
