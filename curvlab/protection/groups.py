"""Matrices of one shape that are held to their subspaces together, in batched products.

What is held of a matrix W with orthonormal rows V of its inputs is ``W V'``: it is recorded once,
and after each step of the optimizer the matrix goes to the nearest one that has it::

    W <- W - (W V' - C) V,      C = W V' at the start

For a step from a matrix that has it, that is the projection of the step, ``D (I - V'V)``. But it
needs no copy of what was there before, and errors of rounding do not add up: each step corrects
those of the last. With rows U of output gradients the same is done from the left, with both of
them from both sides: ``W <- W - U'(U W V' - C) V``.

Where V holds more than half of the space, the rows N of its complement are fewer, and
``W <- B + (W N') N`` with ``B = W V' V`` at the start is the same matrix.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from curvlab.basis import Basis
from curvlab.layerwise.spans import extend_to_share
from curvlab.protection.local import local


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """One matrix and what holds it.

    Attributes:
        parameter: The weight, any shape whose first dimension is that of the outputs.
        bias: The weight of the constant input ``(out,)``, or ``None``.
        right: Rows ``(r, in)`` or, with a bias, ``(r, in + 1)``; ``None`` for all of the space.
        left: Rows ``(s, out)``; ``None`` for all of the space.
        transposed: Whether the weight is stored ``(in, out)``.
        zero: Whether ``U W V'`` is held at zero, and not at what it was.
    """

    parameter: nn.Parameter
    bias: nn.Parameter | None = None
    right: Tensor | None = None
    left: Tensor | None = None
    transposed: bool = False
    zero: bool = False

    def weight(self, tensor: Tensor) -> Tensor:
        """This rank's part of the parameter, or of its gradient, with outputs first."""
        part = local(tensor)
        return part.T if self.transposed else part.unsqueeze(1) if part.dim() == 1 else part

    def kind(self) -> tuple[object, ...]:
        """What must agree for two to be in one group: ranks only to a factor of two."""
        one = self.weight(self.parameter)
        ranks = [None if m is None else len(m).bit_length() for m in (self.right, self.left)]
        return one.shape, one.dtype, one.device, self.bias is None, *ranks, self.inverted

    @property
    def inverted(self) -> bool:
        """Whether the complement of ``right`` has fewer rows."""
        rows = self.right
        return self.left is None and rows is not None and 2 * len(rows) > rows.shape[1]


class Group:
    """Matrices ``(L, out, in)`` of one kind; see the module's header.

    Attributes:
        weights: Room for the weights; for bfloat16 and float16 parameters it stays, and holds what
            they would be if they did not round.
        biases: The same for the biases ``(L, out, 1)``, or ``None``.
    """

    def __init__(self, members: Sequence[Held]) -> None:
        first = members[0].weight(members[0].parameter)
        self.members, self._shape = tuple(members), first.shape
        outputs, inputs = len(first), first.shape[1:].numel()
        self.dtype = torch.float64 if first.dtype == torch.float64 else torch.float32
        self._rounds = first.dtype != self.dtype
        self._inverted = members[0].inverted
        like = torch.zeros(0, dtype=self.dtype, device=first.device)
        biased = members[0].bias is not None
        self.weights = like.new_zeros(len(members), outputs, inputs)
        self.biases = like.new_zeros(len(members), outputs, 1) if biased else None
        self._left = _stacked([m.left for m in members], like)
        right = _stacked([_fewer(m) for m in members], like)
        self._right = None if right is None else right[:, :, :inputs].contiguous()
        self._last = None if right is None or not biased else right[:, :, inputs:].contiguous()
        self._places = self._cut(self.weights, self.biases)
        self._given = [torch.zeros_like(t) for t in self.tensors] if self._rounds else []
        self.anchor()

    @property
    def tensors(self) -> list[Tensor]:
        """As they are now: ``p.data = ...`` gives a parameter other memory."""
        weights = [m.weight(m.parameter) for m in self.members]
        return [*weights, *(local(m.bias) for m in self.members if m.bias is not None)]

    def gradients(self) -> list[Tensor | None]:
        """Of the members' weights, then of their biases; ``None`` where there is none."""
        weights = [
            None if m.parameter.grad is None else m.weight(m.parameter.grad) for m in self.members
        ]
        biases = [m.bias for m in self.members if m.bias is not None]
        return [*weights, *(None if b.grad is None else local(b.grad) for b in biases)]

    def anchor(self) -> None:
        """Record what is to be held: the matrices as they are now, or zero."""
        torch._foreach_copy_(self._places, self.tensors)
        if self._rounds:
            torch._foreach_copy_(self._given, self.tensors)
        kept = self._inside(self.weights, self.biases)
        moves = torch.tensor([float(not m.zero) for m in self.members]).to(kept).view(-1, 1, 1)
        if self._inverted:
            weights, biases = self.weights.clone(), _copy(self.biases)
            self._add_(kept, weights, biases, -1.0)
            self._fixed = [one.mul_(moves) for one in (weights, biases) if one is not None]
        else:
            self._fixed = [kept.mul_(moves)]

    def take(self) -> None:
        """Copy in what the optimizer has made."""
        if not self._rounds:
            torch._foreach_copy_(self._places, self.tensors)
            return
        # The optimizer moved the parameters from where they were put, a rounding off the room.
        made = self._cut(*self._spare())
        torch._foreach_copy_(made, self.tensors)
        torch._foreach_sub_(made, self._given)
        torch._foreach_add_(self._places, made)

    def give(self) -> None:
        """Copy out what is left of it."""
        tensors = self.tensors
        torch._foreach_copy_(tensors, self._places)
        if self._rounds:
            torch._foreach_copy_(self._given, tensors)

    def hold_(self) -> None:
        """Bring the room to the nearest matrices that have what is held."""
        kept = self._inside(self.weights, self.biases)
        if self._inverted:
            room = [one for one in (self.weights, self.biases) if one is not None]
            torch._foreach_copy_(room, self._fixed)
        else:
            kept.sub_(self._fixed[0])
        self._add_(kept, self.weights, self.biases, 1.0 if self._inverted else -1.0)

    def project_gradients_(self, gradients: Sequence[Tensor | None]) -> None:
        """Project gradients, one for each of ``tensors``; ``None`` stands for zeros."""
        weights, biases = self._spare()
        room = self._cut(weights, biases)
        present = [(g, p) for g, p in zip(gradients, room, strict=True) if g is not None]
        if not present:
            return
        if len(present) < len(room):
            torch._foreach_zero_(room)
        given, places = [one for one, _ in present], [place for _, place in present]
        torch._foreach_copy_(places, given)
        kept = self._inside(weights, biases)
        if self._inverted:
            torch._foreach_zero_(room)
        self._add_(kept, weights, biases, 1.0 if self._inverted else -1.0)
        torch._foreach_copy_(given, places)

    def leak(self) -> Tensor:
        """``|U W V' - C| / |W|`` of each matrix, float64 ``(L,)``: what moved of what is held."""
        off = [self._inside(self.weights, self.biases)]
        if self._inverted:
            weights, biases = self.weights.clone(), _copy(self.biases)
            self._add_(off[0], weights, biases, -1.0)
            off = [one for one in (weights, biases) if one is not None]
        squares = [
            (one.double() - fixed.double()).square().flatten(1).sum(1)
            for one, fixed in zip(off, self._fixed, strict=True)
        ]
        sizes: Tensor = self.weights.double().flatten(1).norm(dim=1)
        return torch.stack(squares).sum(0).sqrt() / sizes

    @property
    def bytes(self) -> int:
        """Of rows, what is held, and room."""
        kept = [self.weights, self.biases, *self._fixed, self._left, self._right, self._last]
        return sum(t.numel() * t.element_size() for t in [*kept, *self._given] if t is not None)

    def _cut(self, weights: Tensor, biases: Tensor | None) -> list[Tensor]:
        """Room as one view for each of ``tensors``."""
        places = [one.view(self._shape) for one in weights]
        return [*places, *(() if biases is None else biases.squeeze(2))]

    def _spare(self) -> tuple[Tensor, Tensor | None]:
        """Room beside the weights' own, which is free between steps unless they round."""
        if not self._rounds:
            return self.weights, self.biases
        return torch.empty_like(self.weights), _copy(self.biases)

    def _inside(self, weights: Tensor, biases: Tensor | None) -> Tensor:
        """``U W V'``, the bias being the last column of W; with a complement ``W N'``."""
        found = weights
        if self._right is not None:
            found = torch.bmm(weights, self._right.mT)
            if biases is not None and self._last is not None:
                found.baddbmm_(biases, self._last.mT)
        return found if self._left is None else torch.bmm(self._left, found)

    def _add_(self, kept: Tensor, weights: Tensor, biases: Tensor | None, alpha: float) -> None:
        """``W += alpha U' X V`` in place, the bias being the last column of W."""
        if self._right is None:
            left = self._left
            assert left is not None  # a matrix with neither is not held by a group
            weights.baddbmm_(left.mT, kept, alpha=alpha)
            return
        found = kept if self._left is None else torch.bmm(self._left.mT, kept)
        weights.baddbmm_(found, self._right, alpha=alpha)
        if biases is not None and self._last is not None:
            biases.baddbmm_(found, self._last, alpha=alpha)


def grouped(held: Iterable[Held]) -> list[Group]:
    """As few groups as shapes and ranks allow, in the order in which they were met."""
    kinds: dict[tuple[object, ...], list[Held]] = {}
    for one in held:
        kinds.setdefault(one.kind(), []).append(one)
    return [Group(members) for members in kinds.values()]


def _copy(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.clone()


def _fewer(member: Held) -> Tensor | None:
    """The rows of ``right``, or of its complement if those are fewer."""
    if member.right is None or not member.inverted:
        return member.right
    square: Tensor = torch.linalg.qr(member.right.double().T, mode="complete").Q
    return square[:, len(member.right) :].T


def _stacked(rows: Sequence[Tensor | None], like: Tensor) -> Tensor | None:
    """``(L, r, width)``, with rows of zeros where a member has fewer."""
    present = [one for one in rows if one is not None]
    if not present:
        return None
    most = max(len(one) for one in present)
    found = like.new_zeros(len(present), most, present[0].shape[1])
    for place, one in zip(found, present, strict=True):
        place[: len(one)] = one.to(like)
    return found


def restricted(rows: Tensor, columns: slice) -> Tensor:
    """Orthonormal rows that span ``rows`` ``(r, width)`` cut to some columns, float64."""
    cut = rows[:, columns].double()
    spanned = Basis(cut.shape[1], cut.shape[1], dtype=torch.float64)
    extend_to_share(spanned, cut, 1.0, rounded=rows.dtype)
    return spanned.rows()
