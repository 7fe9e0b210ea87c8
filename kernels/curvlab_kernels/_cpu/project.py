"""Projection on a CPU: one vector, a block, or a list of tensors that are not flattened."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from curvlab_kernels._cpu import loops
from curvlab_kernels._cpu.loops import SHORT
from curvlab_kernels._cpu.products import SUMMED, accumulate, subtract
from curvlab_kernels.algebra import solve
from curvlab_kernels.formats import CHUNK

SMALL = 1 << 15  # elements: tensors below it are gathered, for a call costs more than their copy


def coefficients(rows: Tensor, vectors: Tensor, scales: Tensor | None = None) -> Tensor:
    """See :func:`curvlab_kernels.reference.coefficients`."""
    total = vectors.new_zeros((*vectors.shape[:-1], rows.shape[0]), dtype=torch.float64)
    accumulate(rows, scales, [(0, vectors)], total)
    return total


def apply_(
    rows: Tensor, coefficients: Tensor, vectors: Tensor, scales: Tensor | None = None
) -> None:
    """See :func:`curvlab_kernels.reference.apply_`."""
    subtract(rows, scales, coefficients, [(0, vectors)])


def project_(
    rows: Tensor, vectors: Tensor, factor: Tensor | None = None, scales: Tensor | None = None
) -> Tensor:
    """See :func:`curvlab_kernels.reference.project_`."""
    if factor is None:
        compiled = loops.choose_once(rows, vectors)
        if compiled is not None:
            return loops.project(compiled, rows, vectors)
    short = 0 < vectors.numel() <= SUMMED and rows.shape[0] * vectors.shape[-1] <= SHORT
    if short and rows.dtype == vectors.dtype and factor is None:
        return _project_short_(rows, vectors)
    removed = solve(factor, coefficients(rows, vectors, scales))
    subtract(rows, scales, removed, [(0, vectors)])
    return removed


def _project_short_(rows: Tensor, vectors: Tensor) -> Tensor:
    """:func:`project_` in one chunk: for a small model the calls cost more than the arithmetic."""
    columns = rows if rows.shape[1] == vectors.shape[-1] else rows[:, : vectors.shape[-1]]
    if vectors.dim() == 1:
        removed = torch.mv(columns, vectors)
        vectors.addmv_(columns.T, removed, alpha=-1)
    else:
        removed = vectors @ columns.T
        vectors.addmm_(removed, columns, alpha=-1)
    return removed.double()


def project_list_(
    rows: Tensor,
    tensors: Sequence[Tensor],
    factor: Tensor | None = None,
    scales: Tensor | None = None,
) -> Tensor:
    """See :func:`curvlab_kernels.reference.project_list_`."""
    if sum([tensor.numel() for tensor in tensors]) <= CHUNK:
        everything = Group(0, slice(0, len(tensors)), in_place=False)
        vector = flat(everything, tensors)
        removed = project_(rows, vector, factor, scales)
        scatter(everything, vector, tensors)
        return removed
    total = rows.new_zeros(rows.shape[0], dtype=torch.float64)
    plan = groups(tensors)
    pieces = [(group.first, flat(group, tensors)) for group in plan]
    accumulate(rows, scales, pieces, total)
    removed = solve(factor, total)
    subtract(rows, scales, removed, pieces)
    for group, (_, piece) in zip(plan, pieces, strict=True):
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
        alone: Tensor = tensors[group.members.start]
        return alone.view(-1)
    return torch._C._nn.flatten_dense_tensors(list(tensors[group.members]))


def scatter(group: Group, piece: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy a changed piece back into the tensors it was copied from."""
    if not group.in_place:
        targets = list(tensors[group.members])
        parts = torch._C._nn.unflatten_dense_tensors(piece, targets)
        torch._foreach_copy_(targets, parts)
