"""Functions of a matrix from its outer eigenpairs: inverse, square root, logarithm, with bounds.

``F = f(V' L V + damping)``: exact on the span of the pairs, ``f(damping)`` outside of it. How far F
is from ``f(A + damping)`` follows from two things that the pairs prove: where the rest of the
spectrum lies (if they are complete, not beyond the last of them), and how far they are from
eigenpairs (their residuals). With ``A0`` the matrix without the coupling E that the residuals
bound, ``f(A0)`` and F differ outside the span by at most the change of f over the rest's interval,
and ``|f(A) - f(A0)| <= max |f'| |E|`` for every f that is operator monotone on the spectrum: the
reciprocal, the square root and its reciprocal, the logarithm.
"""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from curvlab.eigen.density import spectral_density
from curvlab.eigen.estimate import Estimate
from curvlab.eigen.selection import edges
from curvlab.eigen.source import Source, as_operator
from curvlab.operators import Operator, Projected

if TYPE_CHECKING:
    from curvlab.eigen.result import Eigenpairs

Function = Callable[[Tensor], Tensor]


class SpectralFunction(Operator):
    """``f(A + damping)`` as far as ``pairs`` of A know it; made by ``pairs.function``.

    Attributes:
        at_values: ``f(value + damping)`` of every pair, ``(k,)``, float64.
        outside: ``f(damping)``.
        rest: Between what the eigenvalues of A outside the pairs lie; infinite where nothing is
            known.
    """

    def __init__(
        self, pairs: "Eigenpairs", function: Function, damping: float, semidefinite: bool
    ) -> None:
        if pairs.space.sharded:
            raise TypeError("these vectors are in shards: use pairs.gather().function(...)")
        if not (isinstance(damping, int | float) and math.isfinite(damping)):
            raise ValueError(f"damping= is a finite number; got {damping!r}")
        super().__init__(pairs.n, pairs.vectors.dtype, pairs.vectors.device)
        self.pairs, self.function, self.damping = pairs, function, float(damping)
        values = pairs.values.double().cpu()
        self.at_values = self._of(values + damping)
        self.outside = float(self._of(torch.tensor([damping], dtype=torch.float64))[0])
        for name, found in (("at an eigenvalue", self.at_values), ("at damping", self.outside)):
            if not bool(torch.isfinite(torch.as_tensor(found)).all()):
                lowest = min(0.0, float(values.min())) if len(values) else 0.0
                raise ValueError(
                    f"the function is not finite {name}: the lowest value + damping is "
                    f"{lowest + damping:.3g}. Raise damping= above {-lowest:.3g}"
                )
        self.rest = _rest(pairs, semidefinite)
        self.coupling = float(torch.linalg.vector_norm(pairs.residuals.double()))

    def _of(self, x: Tensor) -> Tensor:
        found = self.function(x)
        if not isinstance(found, Tensor) or found.shape != x.shape:
            raise TypeError("the function takes a tensor (m,) to a tensor (m,), element by element")
        return found.detach().double()

    def _product(self, block: Tensor) -> Tensor:
        rows = self.pairs.vectors
        inside = block.double() @ rows.double().T  # (b, k)
        change = (self.at_values - self.outside).to(block.device)
        return (self.outside * block.double() + (inside * change) @ rows.double()).to(self.dtype)

    def error(self, vector: Tensor) -> float:
        """A bound of ``|f(A + damping) vector - self @ vector|`` for ``vector`` ``(n,)``.

        For functions that are operator monotone on the spectrum of ``A + damping``. Infinite where
        the pairs do not bound the rest of the spectrum (they are not complete, or one end of it is
        open: ``semidefinite=True`` closes the lower one), or the function is not finite there.
        """
        rows = self.pairs.vectors.double()
        inside = rows @ vector.double()
        outside = float(torch.linalg.vector_norm(vector.double() - inside @ rows))
        length = float(torch.linalg.vector_norm(vector.double()))
        rounding = 16.0 * float(torch.finfo(self.dtype).eps)
        largest = max([abs(self.outside), *self.at_values.abs().tolist()])
        if outside <= rounding * length:
            outside = 0.0
        away = self._deviation() if outside else 0.0
        near = self._slope(self.rest) * self.coupling if self.coupling else 0.0
        return float(away * outside + (near + rounding * largest) * length)

    def trace(
        self,
        operator: Source,
        *,
        probes: int = 8,
        steps: int = 60,
        seed: int = 0,
        progress: bool | None = None,
    ) -> Estimate:
        """``tr f(A + damping)``: the pairs' share exactly, the rest by random vectors.

        With ``torch.log`` this is the log-determinant. The error is that of the sampling, of the
        quadrature and of the pairs together.

        Args:
            operator: A itself, whose pairs these are, in any form that solvers take.
            probes: Random vectors.
            steps: Products with each.
            seed: Of the vectors.
            progress: As for :func:`curvlab.spectral_density`.
        """
        operator = as_operator(operator)
        if operator.n != self.n:
            raise ValueError(f"these pairs have {self.n} elements, the operator {operator.n}")
        outer = Projected(operator, self.pairs.vectors)
        density = spectral_density(outer, probes=probes, steps=steps, seed=seed, progress=progress)

        def change(x: Tensor) -> Tensor:  # zero inside the span, where the projection is zero
            return self._of(x + self.damping) - self.outside

        low = min(self.rest[0], 0.0)  # the projection has zeros
        rest = density.trace(change, lowest=low if math.isfinite(low) else None)
        known = math.fsum(self.at_values.tolist()) + (self.n - len(self.pairs)) * self.outside
        # where the pairs leave an end open, the density has seen how far the spectrum reaches
        seen = (float(density.nodes.min()), float(density.nodes.max()))
        ends = [end if math.isfinite(end) else s for end, s in zip(self.rest, seen, strict=True)]
        pairs = 2.0 * self._slope(ends) * float(self.pairs.residuals.double().sum())
        return Estimate(known + rest.value, rest.error + pairs, rest.samples)

    def _deviation(self) -> float:
        """The most by which f differs from its value outside, over the rest of the spectrum."""
        ends = [self.rest[0] - self.coupling, self.rest[1] + self.coupling]
        if not all(map(math.isfinite, ends)):
            return math.inf
        found = self._of(self._shifted(*ends)) - self.outside
        worst = float(found.abs().max())
        return worst if math.isfinite(worst) else math.inf

    def _shifted(self, low: float, high: float) -> Tensor:
        """The ends of an interval, and zero between them, where f may have a pole."""
        ends = [low + self.damping, high + self.damping]
        return torch.tensor([*ends, 0.0] if ends[0] < 0.0 < ends[1] else ends, dtype=torch.float64)

    def _slope(self, rest: Sequence[float]) -> float:
        """The steepest slope of f over the spectrum, at one of its ends (or zero)."""
        ends = (*rest, *self.pairs.values.tolist())
        low, high = min(ends) - self.coupling, max(ends) + self.coupling
        at = self._shifted(low, high).requires_grad_()
        with torch.enable_grad():
            (slopes,) = torch.autograd.grad(self.function(at).sum(), at)
        worst = float(slopes.abs().max())
        return worst if math.isfinite(worst) else math.inf


def _rest(pairs: "Eigenpairs", semidefinite: bool) -> tuple[float, float]:
    """Between what the eigenvalues that are not among ``pairs`` lie."""
    low, high = 0.0 if semidefinite else -math.inf, math.inf
    if len(pairs) == pairs.n:
        return 0.0, 0.0
    if pairs.complete and len(pairs):
        slack = (pairs.tolerances + pairs.residuals).clamp_min(pairs.floor).cpu()
        for edge in edges(pairs.values.cpu(), slack, pairs.which):
            # an eigenvalue beyond the last found by less than the slack may have been left out
            if edge.side > 0:
                high = min(high, edge.point)
            else:
                low = max(low, edge.point)
    return low, high
