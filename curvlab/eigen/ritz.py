"""Ritz pairs of a basis: which of them count as found, and where a missed one would show."""

from dataclasses import dataclass

import torch
from torch import Tensor

from curvlab.eigen.krylov import Krylov
from curvlab.eigen.request import Request
from curvlab.eigen.result import tolerances
from curvlab.eigen.selection import Edge, edges, order


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a solve can tell apart.

    Attributes:
        norm: Of the operator, as far as it was seen.
        loss: How far a residual known from the decomposition can be below the true one.
        floor: What the operator's precision cannot tell from zero.
    """

    norm: float
    loss: float
    floor: float


@dataclass(frozen=True, slots=True)
class Ritz:
    """Ritz pairs ``(values[i], V mixing[:, i])``: the wanted first, in their order, then the rest.

    Attributes:
        residuals: From the decomposition, of all pairs.
    """

    request: Request
    values: Tensor
    mixing: Tensor
    residuals: Tensor

    @classmethod
    def of(cls, krylov: Krylov, request: Request) -> "Ritz":
        """All pairs of the basis."""
        values, mixing = torch.linalg.eigh(krylov.projected())
        positions = order(values, request.k, request.which)
        values, mixing = values[positions], mixing[:, positions]
        return cls(request, values, mixing, krylov.residuals(mixing, values))

    def asked(self, bounds: Bounds) -> Tensor:
        """The tolerances of the wanted pairs, ``(k,)``."""
        request = self.request
        return tolerances(self.values[: request.k], request.tol, request.relative_to, bounds.norm)

    def allowed(self, bounds: Bounds) -> Tensor:
        """Residual from the decomposition with which a wanted pair counts as found, ``(k,)``.

        Below the floor further products change nothing, so the search does not insist on it.
        """
        asked = self.asked(bounds)
        # Some more than the loss known so far: a check at the end may find it larger.
        return torch.maximum(asked - 4.0 * bounds.loss, torch.full_like(asked, bounds.floor / 4.0))

    def edges(self, bounds: Bounds) -> list[Edge]:
        """Beyond which an eigenvalue would be a missed one."""
        k = self.request.k
        slack = (self.residuals[:k] + bounds.loss).clamp_min(bounds.floor)
        slack = torch.maximum(self.asked(bounds), slack)
        return edges(self.values[:k], slack, self.request.which)
