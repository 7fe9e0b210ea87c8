"""A problem whose parameters are in shards and whose samples are a share, on every rank.

Everything that decides what is computed next is agreed upon, so that all ranks make the same
collective calls.
"""

import contextlib
import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from curvlab.batches import map_tensors, rows, sample_count, tensors
from curvlab.distributed.agreement import require_same
from curvlab.distributed.divided import IN_SHARDS, Divided, Gathering, Placeholder, units
from curvlab.distributed.group import current
from curvlab.distributed.shards import Shards
from curvlab.operators.frozen import Chunk, copied
from curvlab.operators.objective import Reduction
from curvlab.operators.policy import inner
from curvlab.operators.problem import Counted, Problem
from curvlab.operators.products.blocks import recomputing
from curvlab.operators.verify import FEW, require_finite_loss
from curvlab.parameters import Selection, layout_of
from curvlab.refusals import Refusal, Trap


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, on every rank."""
    gather = getattr(tensor.detach(), "full_tensor", None)  # a DTensor's; importing it takes long
    return tensor.detach() if gather is None else gather()


def _local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor, in the same memory."""
    held = getattr(tensor, "to_local", None)
    return tensor if held is None else held()


def _divided_as(model: Any, tensor: Tensor) -> Tensor:
    """``tensor``, which every rank has whole, divided as ``model`` is."""
    if not hasattr(model, "placements"):
        return tensor.to(model.device)
    from torch.distributed.tensor import DTensor, Replicate

    mesh = model.device_mesh
    same = DTensor.from_local(tensor.to(model.device), mesh, [Replicate()] * mesh.ndim)
    return same.redistribute(mesh, model.placements)


def _reshard(model: nn.Module) -> None:
    """Let go of parameters that FSDP2 has left whole, as after a forward pass without gradients.

    They are the modules' parameters as long as they are there: shards that move would not be seen,
    nor the gradients that go to the shards.
    """
    for module in model.modules():
        reshard: Any = getattr(module, "reshard", None)
        if reshard is not None and hasattr(module, "_get_fsdp_state"):
            reshard()


def _rounds(model: nn.Module) -> bool:
    """Whether FSDP2 has been told to compute in a narrower dtype than the parameters have."""
    for module in model.modules():
        found: Any = getattr(module, "_get_fsdp_state", None)
        state = None if found is None else found()
        dtype = getattr(getattr(state, "_mp_policy", None), "param_dtype", None)
        if dtype is not None and any(p.dtype != dtype for p in module.parameters()):
            return True
    return False


class ShardedProblem(Problem):
    """A :class:`Problem` whose parameters are pieces of shards, and whose samples are a share.

    Attributes:
        whole_layout: The layout of the whole parameters; ``layout`` is that of this rank's pieces.
        space: How vectors are divided.
        given: The model as it was given, with FSDP2's hooks.
    """

    _inner = staticmethod(inner)

    def __init__(self, model: nn.Module, *given: Any, **options: Any) -> None:
        self.group, self.given = current(), model
        _reshard(model)
        super().__init__(model, *given, **options)

    # -- parameters in shards ----------------------------------------------------------------------

    def _take_parameters(self, select: Selection, dtype: torch.dtype | None) -> None:
        chosen = self._choose(select, dtype)
        everything = dict(self.model.named_parameters())
        others = {name: p for name, p in everything.items() if name not in chosen}
        self.whole_layout = layout_of(chosen)
        require_same(
            self.group,
            {
                "names": list(self.whole_layout.names),
                "shapes": [list(shape) for shape in self.whole_layout.shapes],
                "frozen parameters": list(others),
                "dtype": str(self.dtype),
            },
        )
        self.selected = self._divided(chosen, self.dtype)
        self.space = self.selected.space
        self.layout = self.selected.own
        self.parameters = tuple(piece.requires_grad_() for piece in self.selected.pieces)
        self.selected.pieces = self.parameters
        self.others = self._divided(others, dtype) if others else None
        self.fixed, self.narrow, self._frozen = {}, False, frozenset()
        self.buffers = {f"model.{n}": copied(b, dtype) for n, b in self.model.named_buffers()}
        self._names = [f"model.{name}" for name in chosen]

    def _divided(self, parameters: dict[str, nn.Parameter], dtype: torch.dtype | None) -> Divided:
        """This rank's pieces of ``parameters``, each of which is whole for a moment."""
        layout = layout_of(parameters)
        space = Shards(layout.n, self.group)
        pieces, unsound = [], None
        for name, parameter, first in zip(
            parameters, parameters.values(), layout.offsets, strict=True
        ):
            piece = copied(space.part(whole(parameter), first), dtype)
            pieces.append(piece)
            if piece.is_floating_point() and not bool(torch.isfinite(piece).all()):
                unsound = name
        found = [name for name in self.group.facts(unsound, "a look for NaN") if name is not None]
        if found:
            raise ValueError(f"parameter {found[0]!r} holds NaN or infinity: there is no curvature")
        return Divided(layout, pieces, space)

    def _in_modules(self) -> dict[str, Tensor]:
        divisions = [self.selected] if self.others is None else [self.selected, self.others]
        return {
            name: Placeholder.of(division, number)
            for division in divisions
            for number, name in enumerate(division.layout.names)
        }

    def _borrow_modules(self) -> None:
        raise TypeError(
            "the modules of a model in shards must be copied, and something in them cannot be (a "
            "lock, a compiled function): fill a plain model with curvlab.distributed.fill"
        )

    def named(self) -> dict[str, Tensor]:
        """This rank's pieces of all parameters, selected or not."""
        frozen = (
            {}
            if self.others is None
            else dict(zip(self.others.layout.names, self.others.pieces, strict=True))
        )
        return {**dict(zip(self.layout.names, self.parameters, strict=True)), **frozen}

    # -- evaluation --------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _swapped(self, parameters: Sequence[Tensor]) -> Iterator[dict[str, Tensor]]:
        with self.selected.using(parameters):
            yield {}

    def _blocks(self, seed: int) -> contextlib.AbstractContextManager[None]:
        return self._in_shards(seed, bool(self._second))

    @contextlib.contextmanager
    def _in_shards(self, seed: int, second: bool) -> Iterator[None]:
        blocks = units(self._modules.model)
        again = partial(self._again, seed)
        with recomputing(blocks, again, second, IN_SHARDS), Gathering(second=second):
            yield

    @contextlib.contextmanager
    def cast(self, dtype: torch.dtype) -> Iterator[None]:
        """Every parameter and buffer in ``dtype``, for the checks at construction."""
        frozen = self.others
        with super().cast(dtype):
            if frozen is None:
                yield
                return
            pieces = [p.to(dtype) if p.is_floating_point() else p for p in frozen.pieces]
            with frozen.using(pieces):
                yield

    # -- FSDP2's own gradient, to compare with -----------------------------------------------------

    def plain_gradient(self, sample: Chunk) -> Tensor | None:
        """This rank's part of FSDP2's own gradient, up to the :meth:`factor` it divides by.

        ``None`` where that is of another function, or rounded on purpose. The model's ``.grad``
        stay as they were.
        """
        modes = any(module.training != flag for module, flag in self.flags.items())
        if modes or self.draws or _rounds(self.model):
            return None
        named, layout = dict(self.model.named_parameters()), self.whole_layout
        kept = {name: parameter.grad for name, parameter in named.items()}
        coarsest = max((p.dtype for p in named.values()), key=lambda kind: torch.finfo(kind).eps)
        batch = map_tensors(sample.batch, torch.clone)
        kind = next(iter(named.values())).dtype
        batch = map_tensors(batch, lambda t: t.to(kind) if t.is_floating_point() else t)
        pieces = []
        try:
            for parameter in named.values():
                parameter.grad = None
            self.terms.whole(self.given, batch).backward()  # type: ignore[no-untyped-call]
            for name, first, shape in zip(layout.names, layout.offsets, layout.shapes, strict=True):
                found = named[name].grad
                gradient = torch.zeros(shape) if found is None else whole(found)
                pieces.append(self.space.part(gradient, first).to(coarsest))
        finally:
            _reshard(self.given)  # which a model may be told to leave out
            for name, parameter in named.items():
                parameter.grad = kept[name]
        return torch.cat(pieces)

    def factor(self, plain: Tensor, found: Tensor) -> float:
        """Of FSDP2's gradient, which it divides by the ranks or by what it was told."""
        plain = plain.to(found.dtype)
        square, inner_ = self.added(torch.stack([plain @ plain, plain @ found]).double()).tolist()
        return inner_ / square if square else 0.0

    @contextlib.contextmanager
    def displaced(self, relative: float) -> Iterator[None]:
        """The parameters elsewhere, and those of the model that was given, which are put back."""
        layout, size = self.whole_layout, self.distance(relative)
        named, generator = dict(self.model.named_parameters()), torch.Generator().manual_seed(0)
        kept, locals_, pieces = self.parameters, list[tuple[Tensor, Tensor]](), []
        try:
            for name, piece, first in zip(layout.names, kept, layout.offsets, strict=True):
                # the same on every rank; whole for a moment, as when they were read
                given = named[name].detach()
                along = size * torch.randn(given.shape, generator=generator)
                pieces.append(piece.detach() + self.space.part(along, first).to(piece))
                local, moved = _local(given), _local(_divided_as(given, along.to(given.dtype)))
                locals_.append((local, local.clone()))
                local += moved
            self.parameters = tuple(piece.requires_grad_() for piece in pieces)
            yield
        finally:
            self.parameters = kept
            for local, before in locals_:
                local.copy_(before)

    # -- what all ranks agree on -------------------------------------------------------------------

    def added(self, parts: Tensor) -> Tensor:
        """Sums over the ranks."""
        return self.space.total(parts)

    def everywhere(self, fact: bool) -> bool:
        """Whether it is so on every rank."""
        return all(self.group.facts(fact, "what all ranks have found"))

    def _settle(self, reduction: Reduction | None, stated: Reduction | None) -> None:
        counted = self.batches.samples
        everyone = self.group.facts([counted, len(self.batches)], "numbers of samples")
        self.counted = [samples for samples, _ in everyone]
        self.whole = self.whole or None in self.counted
        self.fewest = 1 if self.whole else min(self.counted)
        batch = self.batches.first(None if self.whole else min(FEW, self.fewest))
        copied = map_tensors(batch, torch.clone)
        once = self.value(copied, 0)
        self.inputs_change = any(tensor._version for tensor in tensors(copied))
        again = self.value(batch, 0 if self.masks_frozen else 1)
        self.watching, self.unused = False, ()
        if not all(self.group.facts(self._near(once, again), "two losses")):
            raise Refusal(
                f"the loss of the same samples is {once:.9g}, then {again:.9g}: the model or the "
                "loss draws random numbers (dropout, noise, sampling). Call model.eval(), or pass "
                'mode="eval" or mode="frozen-masks"',
                Trap.RANDOM,
            )
        self.reduction = self._summed(batch, once, reduction, stated)

    def _near(self, one: float, other: float) -> bool:
        return not abs(one - other) > self.tolerance * max(abs(one), abs(other))

    def _summed(
        self, batch: Any, value: float, given: Reduction | None, stated: Reduction | None
    ) -> Reduction:
        """Mean or sum, verified on a few samples of every rank unless batches stay whole."""
        if given not in (None, "mean", "sum"):
            raise ValueError(f'reduction= is "mean" or "sum"; got {given!r}')
        claimed = given or stated
        if self.whole:
            return claimed or "mean"
        if self.fewest < 2:  # one sample twice tells a sum from a mean as well
            batch = rows(batch, torch.zeros(2, dtype=torch.int64, device=self.device))
            value = self.value(batch, 0)
        samples = sample_count(batch) or 2
        parts = [rows(batch, slice(0, 1)), rows(batch, slice(1, samples))]
        counts, values = [self.count_of(p) for p in parts], [self.value(p, 0) for p in parts]
        terms = [(n, v) for n, v in zip(counts, values, strict=True) if n]
        total = math.fsum(n for n, _ in terms)
        mean = math.fsum(n * v for n, v in terms) / total if total else value
        fits = [self._near(value, mean), self._near(value, math.fsum(values))]
        said = self.group.facts(fits, "a look at the reduction")
        means, sums = (all(found[i] for found in said) for i in (0, 1))
        if claimed is None:
            claimed = "sum" if sums and not means else "mean"
        if not (means if claimed == "mean" else sums):
            raise Refusal(
                f"the loss of a few samples is not the {claimed} over them: cut in two, the parts "
                "make another value. Class weights and ignore_index need count=, coupled samples "
                'chunk="batch"',
                Trap.NOT_ADDITIVE,
            )
        return claimed

    def _agree(self, counted: list[Counted]) -> tuple[float, list[Counted]]:
        """As many chunks on every rank; one that has fewer computes some twice, with weight 0."""
        said = self.group.facts([math.fsum(c for _, c, _ in counted), len(counted)], "chunks")
        empty = [rank for rank, (_, number) in enumerate(said) if not number]
        if empty:
            raise ValueError(f"rank {empty[0]} has no samples that count: give every rank some")
        more = max(number for _, number in said) - len(counted)
        again = [(counted[0][0], 0.0, counted[0][2])] * more
        return math.fsum(count for count, _ in said), [*counted, *again]

    def _losses(self, **_: bool) -> list[float]:
        found = [self.value(chunk.batch, chunk.number) for chunk in self.chunks]

        def sound() -> None:
            for chunk, value in zip(self.chunks, found, strict=True):
                require_finite_loss(chunk, value)

        self.group.together(sound, "the losses of the chunks")
        return found

    def _same(self, _chunk: Chunk, now: float, before: float) -> bool:
        return abs(before - now) <= 30 * self.tolerance * max(abs(before), abs(now))
