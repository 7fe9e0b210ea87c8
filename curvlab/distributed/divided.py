"""A model's parameters in shards, whole only where a block of the model is at work.

All parameters together are one vector, in the order of :class:`~curvlab.parameters.Layout`, and
each rank holds its range of it, as it holds its range of every vector (:class:`Shards`). So a rank
has a piece of some parameters and nothing of others, whatever way the model itself was divided. A
block's parameters are gathered for it: those that lie side by side go out together, from each rank
that holds some of them. Derivatives are added up on the ranks that own them.

In the modules stand placeholders, which know their shape and dtype and hold nothing. A block finds
the whole parameters in their place; code that reads a parameter outside the block that owns it (a
position embedding, a tied weight) gets it gathered there and then.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from curvlab.distributed.shards import Shards
from curvlab.operators.products.blocks import find_blocks
from curvlab.operators.products.recompute import recomputed
from curvlab.parameters import Layout


@dataclass(frozen=True, slots=True)
class Run:
    """Parameters that lie side by side in the vector: ``numbers`` of them, from ``start`` on."""

    numbers: tuple[int, ...]
    start: int
    stop: int


class Divided:
    """Parameters as one vector in shards: this rank's pieces, and how to have some of them whole.

    Args:
        layout: The layout of the whole parameters.
        pieces: This rank's part of each, flat; many are empty.
        space: How their vector is divided.

    Attributes:
        own: The layout of the pieces: the elements of a shard that are not padding.
    """

    def __init__(self, layout: Layout, pieces: Sequence[Tensor], space: Shards) -> None:
        self.layout, self.pieces, self.space = layout, tuple(pieces), space
        sizes = [piece.numel() for piece in pieces]
        offsets = tuple(accumulate(sizes[:-1], initial=0)) if sizes else ()
        shapes = tuple(torch.Size([size]) for size in sizes)
        self.own = Layout(layout.names, shapes, offsets, sum(sizes))

    @contextmanager
    def using(self, pieces: Sequence[Tensor]) -> Iterator[None]:
        """Others in place of the pieces, for what is evaluated in the context."""
        before, self.pieces = self.pieces, tuple(pieces)
        try:
            yield
        finally:
            self.pieces = before

    def gather(self, numbers: Sequence[int], pieces: Sequence[Tensor]) -> list[Tensor]:
        """Whole tensors of which every rank has a piece, for parameters ``numbers``."""
        shapes = self.layout.shapes
        if self.space.group.size == 1:
            return [piece.view(shapes[i]) for i, piece in zip(numbers, pieces, strict=True)]
        held, whole = dict(zip(numbers, pieces, strict=True)), dict[int, Tensor]()
        waits: list[Callable[[], None]] = []
        for run in self._runs(numbers):
            buffer = pieces[0].new_empty(run.stop - run.start)
            for number in run.numbers:
                self._mine(buffer, run, number).copy_(held[number])
            for owner, part in self._shares(buffer, run):
                waits.append(self.space.group.begin_broadcast(owner, part, "a block's parameters"))
            for number in run.numbers:
                first, size = self._place(number)
                part = buffer[first - run.start : first - run.start + size]
                whole[number] = part.view(shapes[number])
        for wait in waits:
            wait()
        return [whole[number] for number in numbers]

    def add_up(self, numbers: Sequence[int], tensors: Sequence[Tensor]) -> list[Tensor]:
        """This rank's pieces of the sums over the ranks of whole ``tensors``."""
        if self.space.group.size == 1:
            return [tensor.reshape(-1) for tensor in tensors]
        given, mine = dict(zip(numbers, tensors, strict=True)), dict[int, Tensor]()
        waits: list[Callable[[], None]] = []
        buffers = []
        for run in self._runs(numbers):
            buffer = torch.cat([given[number].reshape(-1) for number in run.numbers])
            buffers.append((run, buffer))
            for owner, part in self._shares(buffer, run):
                waits.append(self.space.group.begin_sum_to(owner, part, "a block's derivatives"))
        for wait in waits:
            wait()
        for run, buffer in buffers:
            for number in run.numbers:
                mine[number] = self._mine(buffer, run, number).clone()
        return [mine[number] for number in numbers]

    def _place(self, number: int) -> tuple[int, int]:
        return self.layout.offsets[number], self.layout.shapes[number].numel()

    def _runs(self, numbers: Sequence[int]) -> list[Run]:
        runs: list[Run] = []
        for number in sorted(numbers):
            first, size = self._place(number)
            if runs and runs[-1].stop == first:
                last = runs.pop()
                runs.append(Run((*last.numbers, number), last.start, first + size))
            else:
                runs.append(Run((number,), first, first + size))
        return runs

    def _shares(self, buffer: Tensor, run: Run) -> Iterator[tuple[int, Tensor]]:
        """The ranks that hold something of a run, and their part of its ``buffer``."""
        width = self.space.width
        for owner in range(run.start // width, -(-run.stop // width)):
            low, high = max(run.start, owner * width), min(run.stop, (owner + 1) * width)
            if low < high:
                yield owner, buffer[low - run.start : high - run.start]

    def _mine(self, buffer: Tensor, run: Run, number: int) -> Tensor:
        """This rank's part of parameter ``number`` in the run's ``buffer``."""
        first, size = self._place(number)
        low = min(max(first, self.space.start), first + size)
        high = max(low, min(first + size, self.space.start + self.space.held))
        return buffer[low - run.start : high - run.start]


class Placeholder(Tensor):
    """Stands for a parameter in shards: its shape, dtype and device, and no memory."""

    division: Divided
    number: int
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def of(division: Divided, number: int) -> "Placeholder":
        piece = division.pieces[number]
        made: Placeholder = Tensor._make_wrapper_subclass(
            Placeholder,
            division.layout.shapes[number],
            dtype=piece.dtype,
            device=piece.device,
            requires_grad=piece.requires_grad,
        )
        made.division, made.number = division, number
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: Any, **__: Any) -> Any:  # type: ignore[override]
        raise TypeError(
            f"{func} met a parameter in shards where it cannot be gathered: read parameters in "
            "the forward pass only; turn activation checkpointing off, which runs parts of the "
            "model again after it (blocks are computed again anyway, in as little memory); or fill "
            "a plain model with curvlab.distributed.fill"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Placeholder({self.division.layout.names[self.number]})"


class InShards:
    """How blocks hold placeholders: pieces are kept, whole tensors are worked with."""

    def pieces(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        return [place.division.pieces[place.number] for place in _places(parameters)]

    def open(self, parameters: Sequence[Tensor], pieces: Sequence[Tensor]) -> list[Tensor]:
        found = dict[int, Tensor]()
        for division, positions in _by_division(parameters):
            numbers = [_places(parameters)[i].number for i in positions]
            whole = division.gather(numbers, [pieces[i] for i in positions])
            found.update(zip(positions, whole, strict=True))
        return [found[i] for i in range(len(parameters))]

    def close(
        self, parameters: Sequence[Tensor], tensors: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        result: list[Tensor | None] = [None] * len(parameters)
        for division, positions in _by_division(parameters):
            used = [(i, t) for i in positions if (t := tensors[i]) is not None]
            numbers = [_places(parameters)[i].number for i, _ in used]
            sums = division.add_up(numbers, [tensor for _, tensor in used]) if used else []
            for (i, _), total in zip(used, sums, strict=True):
                result[i] = total
        return result


def _places(parameters: Sequence[Tensor]) -> list[Placeholder]:
    return [parameter for parameter in parameters if isinstance(parameter, Placeholder)]


def _by_division(parameters: Sequence[Tensor]) -> list[tuple[Divided, list[int]]]:
    groups: dict[int, tuple[Divided, list[int]]] = {}
    for i, place in enumerate(_places(parameters)):
        groups.setdefault(id(place.division), (place.division, []))[1].append(i)
    return list(groups.values())


IN_SHARDS = InShards()


@dataclass(frozen=True, slots=True)
class _Alone:
    """One parameter, read outside the block that owns it."""

    place: Placeholder
    second: bool
    parameters: int = 1
    name: str = "a parameter"

    def run(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return self.open(tensors, range(1))

    def again(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return list(tensors)

    def open(self, tensors: Sequence[Tensor], _places: Sequence[int]) -> list[Tensor]:
        return IN_SHARDS.open([self.place], tensors)

    def close(
        self, tensors: Sequence[Tensor | None], _places: Sequence[int]
    ) -> list[Tensor | None]:
        return IN_SHARDS.close([self.place], tensors)


# what can be asked of a placeholder as it is
_ABOUT = [
    *(
        getattr(Tensor, name).__get__
        for name in ("shape", "dtype", "device", "requires_grad", "ndim", "is_leaf", "layout")
    ),
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.element_size),
]


class Gathering(TorchFunctionMode):
    """Gathers the placeholders among the arguments of every call made inside the context.

    Args:
        second: As for :func:`curvlab.operators.products.blocks.recomputing`.
    """

    def __init__(self, *, second: bool) -> None:
        super().__init__()
        self.second = second

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _ABOUT:
            return func(*args, **kwargs)
        given = [self._whole(value) for value in args]
        return func(*given, **{name: self._whole(value) for name, value in kwargs.items()})

    def _whole(self, value: Any) -> Any:
        if type(value) in (tuple, list):
            return type(value)(self._whole(item) for item in value)
        if not isinstance(value, Placeholder):
            return value
        piece = IN_SHARDS.pieces([value])
        alone = _Alone(value, self.second)
        if torch.is_grad_enabled() and piece[0].requires_grad:
            return recomputed(alone, piece)[0]
        return alone.run(piece)[0]


def units(model: nn.Module) -> list[nn.Module]:
    """What parameters are gathered for: the model's blocks, and other modules with parameters."""
    found = find_blocks(model)
    inside = {module for block in found for module in block.modules()}
    above = {module for module in model.modules() if any(m in inside for m in module.modules())}

    def descend(module: nn.Module) -> None:
        if module in found or module in inside:
            return
        if module not in above and next(module.parameters(recurse=False), None) is not None:
            found.append(module)
            inside.update(module.modules())
            return
        for child in module.children():
            descend(child)

    descend(model)
    return found
