"""Model parameters as one flat vector: the only place that knows the order.

The order is that of ``model.named_parameters()``: a tied parameter appears once, under its first
name. Operators, bases, optimizers and saved files all use it: a vector means one thing everywhere.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

Selection = str | Sequence[str] | Callable[[str, nn.Parameter], bool] | None


@dataclass(frozen=True, slots=True)
class Layout:
    """Names, shapes and offsets of the selected parameters in a flat vector of ``n`` elements."""

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    offsets: tuple[int, ...]
    n: int

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(shape.numel() for shape in self.shapes)

    def slices(self) -> dict[str, slice]:
        """Where each parameter lies in the flat vector."""
        return {
            name: slice(offset, offset + size)
            for name, offset, size in zip(self.names, self.offsets, self.sizes, strict=True)
        }

    def layers(self) -> dict[str, list[slice]]:
        """Slices by the module that owns them: a layer's weight and bias are one block (eq. 7)."""
        blocks: dict[str, list[slice]] = {}
        for name, where in self.slices().items():
            blocks.setdefault(name.rpartition(".")[0], []).append(where)
        return blocks

    def only(self, names: Sequence[str]) -> "Layout":
        """The layout of some of the parameters, packed, in the order given."""
        return _packed({name: self.shapes[self.names.index(name)] for name in names})

    def indices(self, names: Sequence[str]) -> Tensor:
        """Where the elements of some parameters lie in the flat vector, int64 ``(m,)``."""
        where = self.slices()
        pieces = [torch.arange(where[name].start, where[name].stop) for name in names]
        return torch.cat(pieces) if pieces else torch.arange(0)

    def flatten(
        self,
        tensors: Iterable[Tensor | None],
        like: Tensor | None = None,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """One vector ``(n,)`` from tensors in this order; ``None`` stands for zeros.

        Args:
            tensors: One tensor per parameter, of its shape; ``None`` for an unused parameter.
            like: Gives dtype and device when every tensor may be ``None``.
            out: Written to and returned in place of a new vector.
        """
        if out is None:
            tensors = list(tensors)
            known = next((piece for piece in tensors if piece is not None), like)
            if known is None:
                raise ValueError("flatten needs a tensor, or like=, to know dtype and device")
            out = torch.empty(self.n, dtype=known.dtype, device=known.device)
        flat = out
        for piece, offset, size in zip(tensors, self.offsets, self.sizes, strict=True):
            target = flat[offset : offset + size]
            if piece is None:
                target.zero_()
            else:
                target.copy_(piece.detach().reshape(-1))
        return flat

    def unflatten(self, vector: Tensor) -> list[Tensor]:
        """Views of ``vector`` ``(n,)``, or of rows ``(b, n)``, with the parameters' shapes."""
        if vector.shape[-1] != self.n:
            raise ValueError(
                f"a vector for these parameters has {self.n} elements; got {tuple(vector.shape)}"
            )
        lead = vector.shape[:-1]
        return [
            vector[..., offset : offset + size].reshape((*lead, *shape))
            for offset, size, shape in zip(self.offsets, self.sizes, self.shapes, strict=True)
        ]


def select_parameters(model: nn.Module, select: Selection = None) -> dict[str, nn.Parameter]:
    """The parameters an operator acts on, by name, in the model's order.

    Args:
        model: Any module.
        select: ``None`` takes every parameter that requires a gradient. A pattern (``"head.*"``), a
            list of patterns or a predicate ``(name, parameter) -> bool`` takes exactly what it
            matches, frozen parameters included; a tied parameter goes by any of its names.
    """
    named = dict(model.named_parameters())
    first = {id(parameter): name for name, parameter in named.items()}
    # every name a parameter goes by, so that a tied one is found by any of them
    every = model.named_parameters(remove_duplicate=False)
    aliases = [(name, first[id(parameter)]) for name, parameter in every]
    if select is None:
        chosen = {name: p for name, p in named.items() if p.requires_grad}
        cure = "every parameter is frozen: unfreeze some, or name them with select="
    elif callable(select):
        chosen = {name: p for name, p in named.items() if select(name, p)}
        cure = "the predicate select= matched no parameter"
    else:
        patterns = [select] if isinstance(select, str) else list(select)
        matched: set[str] = set()
        for pattern in patterns:
            found = {original for name, original in aliases if fnmatchcase(name, pattern)}
            if not found:
                raise ValueError(
                    f"select={pattern!r} matches no parameter; names are {_some(list(named))}"
                )
            matched |= found
        chosen = {name: p for name, p in named.items() if name in matched}
        cure = "select= is an empty list of patterns"
    if not chosen:
        raise ValueError(f"no parameters selected: {cure}" if named else "the model has none")
    for name, parameter in chosen.items():
        if not parameter.is_floating_point():
            raise TypeError(f"parameter {name!r} is {parameter.dtype}; curvature needs real floats")
    return chosen


def layout_of(parameters: dict[str, nn.Parameter]) -> Layout:
    """The flat layout of ``parameters`` in their own order."""
    return _packed({name: parameter.shape for name, parameter in parameters.items()})


def _packed(shapes: dict[str, torch.Size]) -> Layout:
    offsets, total = [], 0
    for shape in shapes.values():
        offsets.append(total)
        total += shape.numel()
    return Layout(tuple(shapes), tuple(shapes.values()), tuple(offsets), total)


def parameter_count(model: nn.Module, select: Selection = None) -> int:
    """How many numbers the selected parameters hold."""
    return sum(p.numel() for p in select_parameters(model, select).values())


def parameter_vector(model: nn.Module, select: Selection = None) -> Tensor:
    """A copy of the selected parameters as one vector ``(n,)``."""
    parameters = select_parameters(model, select)
    return layout_of(parameters).flatten(parameters.values())


@torch.no_grad()
def load_parameter_vector(model: nn.Module, vector: Tensor, select: Selection = None) -> None:
    """Write ``vector`` ``(n,)`` into the selected parameters, in place."""
    parameters = select_parameters(model, select)
    for parameter, piece in zip(
        parameters.values(), layout_of(parameters).unflatten(vector), strict=True
    ):
        parameter.copy_(piece)


def _some(names: list[str], most: int = 8) -> str:
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown}, ... ({len(names)} in all)"


def call_with(
    module: nn.Module,
    tensors: Mapping[str, Tensor],
    arguments: tuple[Any, ...],
    keywords: dict[str, Any] | None = None,
) -> Any:
    """Call ``module`` with ``tensors`` in place of its own of these names, tied ones too.

    ``torch.func.functional_call`` swaps a tensor once for each of its names. Of a module that is
    registered under two names it would put back what it had swapped in itself.
    """
    swapped = _in_every_place(module, tensors)
    return functional_call(module, swapped, arguments, keywords, tie_weights=False)


def _in_every_place(module: nn.Module, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """``given`` for one name of every attribute that holds the same tensor."""
    held: dict[str, int] = {}
    places: dict[int, dict[tuple[int, str], str]] = {}
    for prefix, owner in module.named_modules(remove_duplicate=False):
        for attribute, tensor in (*owner._parameters.items(), *owner._buffers.items()):
            if tensor is not None:
                name = f"{prefix}.{attribute}" if prefix else attribute
                held[name] = id(tensor)
                places.setdefault(id(tensor), {}).setdefault((id(owner), attribute), name)
    found: dict[str, Tensor] = {}
    for name, tensor in given.items():
        for place in places[held[name]].values() if name in held else (name,):
            if found.setdefault(place, tensor) is not tensor:
                raise ValueError(f"two tensors are given for {place} and {name}, which are tied")
    return found
