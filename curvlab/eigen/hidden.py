"""Has an eigenvalue been missed? A random vector and a few products tell, with a known doubt.

A Krylov space grown from one vector sees one direction of every eigenspace: further copies of a
multiple eigenvalue stay hidden, and so does an eigenvector to which a warm start is orthogonal.
Such a hidden eigenvector ``u`` is orthogonal to the basis. So take a random ``z`` orthogonal to
the basis and run a second Lanczos chain from it, in the complement of the basis. ``z`` meets ``u``
with weight ``g^2 / n``, where ``g`` is standard normal. After some steps, the largest weight that
a measure with the observed recurrence can have at a point ``x`` is the Christoffel number
``1 / sum p_i(x)^2`` of the chain's orthonormal polynomials, and outside their zeros it only falls
further away. As soon as it is below ``q / n`` at the edge of the wanted part of the spectrum, an
eigenvalue hidden beyond it would need ``g^2 < q``: an event of probability ``doubt``. If instead a
Ritz value of basis and chain together passes the edge, an eigenvalue was missed, and the search
goes on with it.

What this does not cover: an eigenvector that is neither orthogonal to the basis nor resolved by it,
but just emerging from it. :func:`emerging` looks for the mark that it leaves, and the search goes
on until there is none. That is a criterion, not a proof: the frontier's own products are unknown.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from curvlab.eigen.selection import Edge


@dataclass(slots=True)
class Chain:
    """The recurrence of the chain from a random vector: ``A z_i = b z_{i-1} + a z_i + b z_{i+1}``.

    Attributes:
        first: Row of the basis that holds ``z_0``.
        edges: Beyond which an eigenvalue would be a missed one.
        known: For each edge, the Ritz values before the chain, from the outermost inwards, and how
            far each may move: ``[(value, allowance), ...]``.
    """

    first: int
    edges: list[Edge]
    known: list[list[tuple[float, float]]]
    alphas: list[float] = field(default_factory=list)
    betas: list[float] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.alphas)

    def found(self, values: Tensor) -> bool:
        """Whether the Ritz values of basis and chain together show an eigenvalue missed before.

        Ritz values only move outwards when the basis grows, and those that have converged hardly
        move. One that is new pushes all further ones by a place.
        """
        for edge, known in zip(self.edges, self.known, strict=True):
            for i, value in enumerate(values.sort(descending=edge.side > 0).values.tolist()):
                if edge.side * (value - edge.point) <= 0.0:
                    break
                if i >= len(known) or edge.side * (value - known[i][0]) > known[i][1]:
                    return True
        return False

    def doubt(self, n: int) -> float:
        """Probability that a hidden eigenvalue beyond the edges went unseen, at most 1.

        Args:
            n: Dimension of the space in which ``z`` was drawn.
        """
        # The worst edge decides: an eigenvalue may hide beyond any of them.
        weight = max(1.0 / _square_sum(self.alphas, self.betas, edge.point) for edge in self.edges)
        return math.erf(math.sqrt(weight * n / 2.0))  # P(g^2 < weight n)


def emerging(
    values: Tensor, remainder: Tensor, ends: Sequence[Edge], share: float
) -> Tensor | None:
    """Which unwanted Ritz vectors may still become wanted, bool ``(m,)``; ``None`` if none may.

    Were the frontier multiplied, could a Ritz value pass an edge? A frontier row of value ``a``
    with couplings ``s`` makes one pass ``x`` if ``sum s_i^2 / (x - theta_i) > x - a``. ``a`` is not
    known; the middle of the unwanted values stands for it. A wanted eigenvector that lies partly in
    the unwanted Ritz vectors and partly in the frontier shows in this sum. Near the edge one vector
    alone can do it: an eigenvalue lies within its residual, so none may reach beyond the edge.

    Args:
        values: Unwanted Ritz values ``(m,)``.
        remainder: Their couplings ``(f, m)`` to the frontier.
        ends: Of the wanted part of the spectrum.
        share: Of the distance ``x - a`` that the sum may reach.
    """
    for edge in ends:
        distance = edge.side * (edge.point - values)
        # The floor keeps one Ritz value on the edge from making the sum infinite.
        push = remainder.square().sum(0) / distance.clamp_min(1e-3 * abs(edge.point))
        reaching = remainder.square().sum(0) >= distance.clamp_min(0.0).square()
        if bool(reaching.any()):
            return reaching
        if float(push.sum()) >= share * edge.side * (edge.point - float(values.mean())):
            return push >= 0.5 * push.max()
    return None


def _square_sum(alphas: Sequence[float], betas: Sequence[float], point: float) -> float:
    """``sum p_i(point)^2`` over the orthonormal polynomials of the recurrence."""
    # Forward recurrence is stable here: outside the zeros the polynomials only grow.
    total, before, here = 1.0, 0.0, 1.0
    last = 0.0
    for alpha, beta in zip(alphas, betas, strict=True):
        if beta == 0.0:  # an invariant subspace, wholly known: nothing that meets z hides from it
            return math.inf
        before, here = here, ((point - alpha) * here - last * before) / beta
        last = beta
        total += here * here
        if not total < 1e200:  # no doubt is left, and further terms would overflow
            return math.inf
    return total
