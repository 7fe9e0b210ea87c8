"""The operator's certificate: is it repeatable, symmetric and linear, as far as rounding allows?

A wrong second derivative, live dropout, a reshuffling loader or a buffer handed out twice all show
up in a handful of products with random vectors. The figures are relative errors; each is compared
with what rounding in the operator's precision can explain. Random vectors see an error anywhere in
the operator with probability one, but an error confined to few coordinates is seen diluted: the
probe is strong evidence, not a proof.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor


@runtime_checkable
class LinearOperator(Protocol):
    """A symmetric linear map over flat vectors; blocks are rows."""

    @property
    def n(self) -> int: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...
    def __matmul__(self, vectors: Tensor, /) -> Tensor:
        """``(n,) -> (n,)`` and ``(b, n) -> (b, n)``."""
        ...


class OperatorError(ValueError):
    """The operator is asymmetric, unrepeatable, nonlinear or not finite: no solver can use it."""


@dataclass(frozen=True, slots=True)
class Certificate:
    """Relative errors measured by :func:`probe`, and the limit that rounding explains."""

    symmetry: float
    repeatability: float
    linearity: float
    limit: float
    products: int

    @property
    def passed(self) -> bool:
        # written so that a NaN fails
        return all(x <= self.limit for x in (self.symmetry, self.repeatability, self.linearity))

    def require(self) -> None:
        """Raise :class:`OperatorError` naming what failed and its usual causes."""
        if self.passed:
            return
        problems = []
        if not self.repeatability <= self.limit:
            problems.append(
                f"two products with one vector differ by {self.repeatability:.1e} (usual causes: "
                "train-mode dropout, a loader that reshuffles or augments, changing parameters)"
            )
        if not self.symmetry <= self.limit:
            problems.append(
                f"u'Av and v'Au differ by {self.symmetry:.1e} (usual causes: a layer with a wrong "
                "second derivative, such as torch._weight_norm, or train-mode BatchNorm)"
            )
        if not self.linearity <= self.limit:
            problems.append(
                f"A(au + bv) and aAu + bAv differ by {self.linearity:.1e} (usual causes: an "
                "operator with a constant term, a clipped or quantised product)"
            )
        raise OperatorError(
            "this is not a symmetric linear operator to rounding "
            f"(limit {self.limit:.1e}): " + "; ".join(problems)
        )


def probe(operator: LinearOperator, *, seed: int = 0, limit: float | None = None) -> Certificate:
    """Measure repeatability, symmetry and linearity with four products.

    Args:
        operator: Anything with ``n``, ``dtype``, ``device`` and ``@``.
        seed: Of the random vectors; the global generator is not touched.
        limit: Largest relative error accepted; by default what rounding in ``operator.dtype``
            can explain, with room for products that sum over many samples.
    """
    # Not the seed itself: solvers draw from it. The check of symmetry is one random number, so some
    # seeds see little of a small asymmetry; seed 0 without the offset was one in the tests.
    generator = torch.Generator().manual_seed(seed + 1_000_003)

    def draw() -> Tensor:
        # float32 whatever the dtype: the same vectors for the same operator in another precision
        vector = torch.randn(operator.n, generator=generator, dtype=torch.float32)
        return vector.to(operator.dtype).to(operator.device)

    def product(vector: Tensor) -> Tensor:
        # copies: an operator that reuses its output buffer or overwrites its input must show as
        # wrong here, not corrupt the comparison.
        result = operator @ vector.clone()
        if result.shape != vector.shape:
            raise OperatorError(
                f"operator @ vector must keep the shape {tuple(vector.shape)}; "
                f"got {tuple(result.shape)}"
            )
        return result.detach().clone()

    u, v = draw(), draw()
    a_u, again = product(u), product(u)
    size_u = _norm((1.0, a_u))
    repeatability = _ratio(_norm((1.0, a_u), (-1.0, again)), size_u)
    del again  # vectors can be large: as few as possible at a time
    a_v = product(v)
    size_v = _norm((1.0, a_v))
    scale = size_u * _norm((1.0, v)) + size_v * _norm((1.0, u))
    # Random u, v are nearly orthogonal to each other's images, so u'Av is far below |u||Av|;
    # sqrt(n) gives the scale at which an asymmetric operator of the same size would show.
    symmetry = _ratio(abs(_dot(u, a_v) - _dot(v, a_u)) * operator.n**0.5, scale)
    mixed = 0.75 * u - 1.5 * v  # in the operator's dtype, so that both sides see the same input
    del u, v
    a_mixed = product(mixed)
    linearity = _ratio(
        _norm((1.0, a_mixed), (-0.75, a_u), (1.5, a_v)), 0.75 * size_u + 1.5 * size_v
    )
    return Certificate(
        symmetry=symmetry,
        repeatability=repeatability,
        linearity=linearity,
        limit=_default_limit(operator.dtype, operator.n) if limit is None else limit,
        products=4,
    )


PIECE = 1 << 15  # elements taken to float64 at a time: they stay in the cache


def _dot(a: Tensor, b: Tensor) -> float:
    pieces = zip(torch.split(a, PIECE), torch.split(b, PIECE), strict=True)
    return float(sum(one.double() @ other.double() for one, other in pieces))


def _norm(*terms: tuple[float, Tensor]) -> float:
    """The norm of a combination of vectors, in float64 without making it."""
    squares = torch.zeros((), dtype=torch.float64, device=terms[0][1].device)
    for pieces in zip(*(torch.split(vector, PIECE) for _, vector in terms), strict=True):
        total = torch.zeros(len(pieces[0]), dtype=torch.float64, device=squares.device)
        for (factor, _), piece in zip(terms, pieces, strict=True):
            total.add_(piece, alpha=factor)
        squares += total @ total
    return float(squares.sqrt())


def _ratio(error: float, scale: float) -> float:
    return 0.0 if error == 0.0 else error / scale if scale > 0.0 else float("inf")


def _default_limit(dtype: torch.dtype, n: int) -> float:
    growth: float = max(1.0, (n / 1e4) ** 0.25)
    return float(torch.finfo(dtype).eps) * 2e3 * growth
