"""Lists of tensors as pieces of one vector: large ones as they are, runs of small ones gathered."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

SMALL = 1 << 15  # elements: tensors below it are gathered, for a call costs more than their copy


@dataclass(frozen=True, slots=True)
class Group:
    """Tensors of a list that are treated as one piece of the long vector."""

    first: int  # column
    members: slice


def groups(*lists: Sequence[Tensor]) -> list[Group]:
    """Cut lists of equal shapes into pieces: large tensors alone, runs of small ones together."""
    found = list[Group]()
    first = begin = column = 0
    for index, alike in enumerate(zip(*lists, strict=True)):
        size = alike[0].numel()
        if size >= SMALL and all(tensor.is_contiguous() for tensor in alike):
            if begin < index:
                found.append(Group(first, slice(begin, index)))
            found.append(Group(column, slice(index, index + 1)))
            begin, first = index + 1, column + size
        column += size
    if begin < len(lists[0]):
        found.append(Group(first, slice(begin, len(lists[0]))))
    return found


def flat(group: Group, tensors: Sequence[Tensor]) -> Tensor:
    """The group's piece ``(k,)``: a view of a contiguous tensor that is alone, else a copy."""
    return gathered(tensors[group.members], tensors[0])


def gathered(tensors: Sequence[Tensor], like: Tensor) -> Tensor:
    """All as one vector: a view of a contiguous tensor that is alone, else a copy."""
    if len(tensors) == 1 and tensors[0].is_contiguous():
        return tensors[0] if tensors[0].dim() == 1 else tensors[0].view(-1)
    if not tensors:
        return torch.zeros(0, dtype=torch.promote_types(like.dtype, torch.float32))
    return torch._C._nn.flatten_dense_tensors(list(tensors))


def scatter(piece: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy a changed piece back into the tensors it was copied from; nothing for a view."""
    if len(tensors) == 1 and tensors[0].is_contiguous():
        return
    parts = torch._C._nn.unflatten_dense_tensors(piece, list(tensors))
    torch._foreach_copy_(list(tensors), parts)
