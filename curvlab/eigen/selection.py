"""Which eigenvalues are wanted, in which order, and where the unwanted begin."""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

Which = Literal["LM", "LA", "SA", "both"]


def check_which(which: str) -> None:
    """Raise unless ``which`` names a part of the spectrum."""
    if which not in get_args(Which):
        raise ValueError(
            "which= is 'LM' (largest magnitude), 'LA' (largest), 'SA' (smallest) or 'both' "
            f"(half from each end); got {which!r}"
        )


def order(values: Tensor, k: int, which: str) -> Tensor:
    """Positions of all ``values`` ``(m,)``: the ``k`` wanted in the order of the result come first.

    ``"LM"`` by decreasing magnitude, ``"LA"`` decreasing, ``"SA"`` increasing. ``"both"`` takes one
    more from the upper end when ``k`` is odd, decreasing; those after them are from either end.
    """
    if which in ("LM", "SA"):
        return (values.abs() if which == "LM" else values).argsort(
            descending=which == "LM", stable=True
        )
    descending = values.argsort(stable=True).flip(0)
    if which == "LA":
        return descending
    k = min(k, len(values))
    upper, lower = k - k // 2, k // 2
    rest = descending[upper : len(values) - lower]
    inwards = torch.stack([rest, rest.flip(0)], 1).flatten()[: len(rest)]
    return torch.cat([descending[:upper], descending[len(values) - lower :], inwards])


@dataclass(frozen=True, slots=True)
class Edge:
    """Where the wanted part of the spectrum ends: beyond ``point``, above (+1) or below (-1) it.

    Attributes:
        slack: How far ``point`` is beyond the last wanted value.
    """

    point: float
    side: int
    slack: float = 0.0


def edges(values: Tensor, slack: Tensor, which: str) -> list[Edge]:
    """Where an eigenvalue would have to lie to belong among the wanted ``values`` ``(k,)``.

    Args:
        values: In the order of :func:`order`.
        slack: Shape ``(k,)``; moves the points outwards, so that ties with the last value are free.
    """

    def edge(wanted: Tensor, side: int, allowance: Tensor) -> Edge:
        last, room = float(wanted[-1]), float(allowance[-1])
        return Edge(last + side * room, side, room)

    if which == "LM":
        above = edge(values.abs(), 1, slack)
        return [above, Edge(-above.point, -1, above.slack)]
    if which == "LA":
        return [edge(values, 1, slack)]
    if which == "SA":
        return [edge(values, -1, slack)]
    upper = len(values) - len(values) // 2
    found = [edge(values[:upper], 1, slack[:upper])]
    if upper < len(values):
        found.append(edge(values[upper:].flip(0), -1, slack[upper:].flip(0)))
    return found
