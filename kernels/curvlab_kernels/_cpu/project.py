"""Projection on a CPU: one vector, a block, or a list of tensors that are not flattened."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from curvlab_kernels._cpu.products import accumulate, subtract
from curvlab_kernels.algebra import solve

SMALL = 1 << 15  # elements: tensors below it are gathered, for a call costs more than their copy


def coefficients(rows: Tensor, vectors: Tensor, scales: Tensor | None = None) -> Tensor:
    """See :func:`curvlab_kernels.reference.coefficients`."""
    total = vectors.new_zeros((*vectors.shape[:-1], rows.shape[0]), dtype=torch.float64)
    accumulate(rows, scales, 0, vectors, total)
    return total


def apply_(
    rows: Tensor, coefficients: Tensor, vectors: Tensor, scales: Tensor | None = None
) -> None:
    """See :func:`curvlab_kernels.reference.apply_`."""
    subtract(rows, scales, 0, coefficients, vectors)


def project_(
    rows: Tensor, vectors: Tensor, factor: Tensor | None = None, scales: Tensor | None = None
) -> Tensor:
    """See :func:`curvlab_kernels.reference.project_`."""
    removed = solve(factor, coefficients(rows, vectors, scales))
    subtract(rows, scales, 0, removed, vectors)
    return removed


def project_list_(
    rows: Tensor,
    tensors: Sequence[Tensor],
    factor: Tensor | None = None,
    scales: Tensor | None = None,
) -> Tensor:
    """See :func:`curvlab_kernels.reference.project_list_`."""
    total = rows.new_zeros(rows.shape[0], dtype=torch.float64)
    pieces = [(group, flat(group, tensors)) for group in groups(tensors)]
    for group, piece in pieces:
        accumulate(rows, scales, group.first, piece, total)
    removed = solve(factor, total)
    for group, piece in pieces:
        subtract(rows, scales, group.first, removed, piece)
        scatter(group, piece, tensors)
    return removed


@dataclass(frozen=True, slots=True)
class Group:
    """Tensors of a list that are treated as one piece of the long vector."""

    first: int  # column
    members: slice
    in_place: bool  # one large contiguous tensor; otherwise the piece is a copy


def groups(*lists: Sequence[Tensor]) -> list[Group]:
    """Cut lists of equal shapes into pieces: large tensors alone, runs of small ones together."""
    found = list[Group]()
    first = begin = column = 0
    for index, alike in enumerate(zip(*lists, strict=True)):
        size = alike[0].numel()
        if size >= SMALL and all(tensor.is_contiguous() for tensor in alike):
            if begin < index:
                found.append(Group(first, slice(begin, index), in_place=False))
            found.append(Group(column, slice(index, index + 1), in_place=True))
            begin, first = index + 1, column + size
        column += size
    if begin < len(lists[0]):
        found.append(Group(first, slice(begin, len(lists[0])), in_place=False))
    return found


def flat(group: Group, tensors: Sequence[Tensor]) -> Tensor:
    """The group's piece ``(k,)``: a view of the tensor if ``in_place``, else a copy."""
    if group.in_place:
        alone: Tensor = tensors[group.members.start].detach()
        return alone.view(-1)
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors[group.members]])


def scatter(group: Group, piece: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy a changed piece back into the tensors it was copied from."""
    if not group.in_place:
        targets = [tensor.detach() for tensor in tensors[group.members]]
        parts = torch.split(piece, [target.numel() for target in targets])
        shaped = [part.view(target.shape) for part, target in zip(parts, targets, strict=True)]
        torch._foreach_copy_(targets, shaped)
