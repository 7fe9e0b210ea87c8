"""A problem whose parameters are in shards and whose samples are a share, on every rank.

Everything that decides what is computed next is agreed upon, so that all ranks make the same
collective calls.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
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


class ShardedProblem(Problem):
    """A :class:`Problem` whose parameters are pieces of shards, and whose samples are a share.

    Attributes:
        whole_layout: Of the whole parameters; ``layout`` is that of this rank's pieces.
        space: How vectors are divided.
        given: The model as it was given, with FSDP2's hooks.
    """

    _inner = staticmethod(inner)

    def __init__(self, model: nn.Module, *given: Any, **options: Any) -> None:
        self.group, self.given = current(), model
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
        stop = space.start + space.held
        pieces, unsound = [], None
        for name, parameter, first in zip(
            parameters, parameters.values(), layout.offsets, strict=True
        ):
            flat = whole(parameter).reshape(-1)
            low, high = (min(max(x - first, 0), flat.numel()) for x in (space.start, stop))
            piece = copied(flat[low:high], dtype)
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

    def _run(
        self,
        function: Callable[[nn.Module, Any], Any],
        chunk: Chunk,
        parameters: Sequence[Tensor] | None = None,
        seed: int | None = None,
    ) -> Any:
        with self.selected.using(self.parameters if parameters is None else parameters):
            return super()._run(function, chunk, self._held[0], seed)

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

    # -- what all ranks agree on -------------------------------------------------------------------

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
        if self.whole or self.fewest < 2:
            return claimed or "mean"
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
