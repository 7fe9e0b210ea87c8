"""The soft form of a protection: a quadratic price on moving along a basis.

    penalty = SpectralPenalty(basis, model)
    loss = cross_entropy(model(x), y) + strength * penalty()

With eigenvectors v_i and eigenvalues of an old task's Hessian it is the second-order loss that the
old task would pay, as far as these directions know of it: ``1/2 sum_i |value_i| (v_i (theta -
theta_0))^2``. EWC is the same with the parameters' axes in place of eigenvectors.
"""

from typing import Any

import torch
from torch import Tensor, nn

from curvlab.basis import Basis
from curvlab.parameters import Selection, layout_of, select_parameters


class SpectralPenalty:
    """``1/2 sum_i |value_i| (v_i (theta - theta_0))^2`` of a model's parameters, differentiable.

    Args:
        basis: Rows v_i over the model's parameters, with their eigenvalues; rows that were stored
            without one weigh 1. Rows added later count from the next call on, from the same
            theta_0.
        model: The model; its present parameters are theta_0.
        select: Which parameters the basis covers, as for the operators.

    A call reads the rows twice, the second time when it is differentiated.
    """

    def __init__(self, basis: Basis, model: nn.Module, *, select: Selection = None) -> None:
        if basis.space.sharded:
            raise TypeError("a basis in shards has no penalty: pass one in this process")
        chosen = select_parameters(model, select)
        self.basis, self._layout = basis, layout_of(chosen)
        if self._layout.n != basis.n:
            raise ValueError(
                f"the parameters have {self._layout.n} elements together, the basis covers "
                f"{basis.n}: pass the model= the basis was computed for, with the same select="
            )
        self._parameters = list(chosen.values())
        self._start = self._flat()

    def __call__(self) -> Tensor:
        """The penalty now, a scalar."""
        found: Tensor = _Quadratic.apply(self, *self._parameters)  # type: ignore[no-untyped-call]
        return found

    @property
    def values(self) -> Tensor:
        """The weight of each row, float64 ``(m,)``."""
        found = [
            abs(value)
            for segment in self.basis.segments
            for value in (segment.values or (1.0,) * len(segment))
        ]
        return torch.tensor(found, dtype=torch.float64, device=self.basis.device)

    def _flat(self) -> Tensor:
        flat = self._layout.flatten(self._parameters)
        return flat if flat.dtype == torch.float64 else flat.float()


class _Quadratic(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, penalty: SpectralPenalty, *parameters: Tensor) -> Tensor:
        """Half the weighted sum of squared coefficients of the way gone."""
        moved = penalty._flat() - penalty._start
        basis = penalty.basis
        along = basis.coefficients(moved)
        ctx.penalty, ctx.weights = penalty, penalty.values * along
        ctx.like = parameters
        found: Tensor = 0.5 * (ctx.weights * along).sum()
        return found.to(parameters[0].dtype)

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor | None, ...]:
        """``sum_i value_i c_i v_i``, in pieces of the parameters' shapes."""
        basis, (scale,) = ctx.penalty.basis, outputs
        weights = (ctx.weights * scale.double()).unsqueeze(1)
        gradient = basis.combine(weights).squeeze(0)
        pieces = ctx.penalty._layout.unflatten(gradient)
        given = zip(pieces, ctx.like, strict=True)
        return (None, *(piece.to(like.dtype) for piece, like in given))
