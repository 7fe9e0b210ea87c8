"""Has an eigenvalue been missed? A random vector and a few products tell, with a known doubt.

A Krylov space grown from one vector sees one direction of every eigenspace: further copies of a
multiple eigenvalue stay hidden, and so does an eigenvector to which a warm start is orthogonal.
Others are seen in part: they are just emerging. One count covers them all. With the basis ``V``,
its Ritz pairs ``(theta_i, V y_i)``, its complement ``W`` and the frontier ``S`` in that, ``A`` is

    [ diag(theta)  c' S' ]        c_i = C y_i: what couples basis and complement, all of it known,
    [ S c          A_WW  ]

and Sylvester's law of inertia says: leave out the Ritz vectors with ``theta_i > x``, and what is
left of ``A`` has no eigenvalue above ``x`` if and only if

    A_WW + S M S' < x,    M = sum of c_i c_i' / (x - theta_i) over theta_i < x.

Then ``A`` itself has no more eigenvalues above ``x`` than there are Ritz values, and each is as far
from its own as the residuals of those pairs say (Weyl). To show it, a Lanczos chain is run in the
complement, from a random ``z``, with the operator on the left: ``A`` *tilted* by ``M``, which takes
no further product. Were there an eigenvector beyond ``x``, ``z`` would meet it with weight
``g^2 / n``, where ``g`` is standard normal. After some steps, the largest weight that a measure
with the observed recurrence can have at ``x`` is the Christoffel number ``1 / sum p_i(x)^2`` of the
chain's orthonormal polynomials, and outside their zeros it only falls further away. As soon as it
is below ``q / n``, an eigenvector beyond ``x`` would need ``g^2 < q``: an event of probability
``doubt``. If instead a Ritz value of the chain passes ``x``, there is more beyond ``x`` than the
wanted pairs, and the search goes on with what the chain has seen.

The recurrence needs the last two of the chain's rows. Where there is no room for more, the others
are let go of. The rows are then orthogonal to ``V`` and to their neighbours only, and what has
converged in the chain comes again. The recurrence is still, up to rounding, that of a measure whose
points are as near to the eigenvalues of ``B`` and, taken together, as heavy as without rounding
(Greenbaum 1989): the bound stands. What it finds is not lost with the rows. Where a Ritz value
passes ``x``, its vector is the sum of ``p_i(x) z_i``: a sum that can be kept from the first row on.

Products are those of ``A`` only up to rounding, and that moves eigenvalues by no more (Weyl again):
``x`` lies inside of the edge by that much. Where the wanted part of the spectrum has two edges each
has its own ``M``. A chain tilted for one shows the other at a point moved inwards by the norm of
the difference, or else another chain does. Fewer Ritz vectors in ``V`` make ``M`` smaller and the
law holds for any number of them: those deep inside are let go of where that spares a chain.
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from curvlab.eigen.krylov import Krylov
from curvlab.eigen.selection import Edge

CANDIDATES = 12  # numbers of Ritz vectors that are compared, at most: each costs a millisecond
NEAR = 0.1  # of the distance from the edge to the other values: a tilt that costs hardly a product


@dataclass(slots=True)
class Chain:
    """The recurrence of the chain from a random vector: ``B z_i = b z_{i-1} + a z_i + b z_{i+1}``.

    ``B`` is the operator in the complement, tilted for the first edge.

    Attributes:
        first: Row of the basis that holds ``z_0``.
        edges: Which this chain is to show: by their number, the point for ``B``.
        gone: How many of its rows are no longer held, but in the sum of ``p_i(x) z_i``.
    """

    first: int
    edges: dict[int, Edge]
    alphas: list[float] = field(default_factory=list)
    betas: list[float] = field(default_factory=list)
    gone: int = 0

    def __len__(self) -> int:
        return len(self.alphas)

    def read(self, krylov: Krylov) -> None:
        """Take the recurrence from the products since the last time."""
        for j in range(self.first + len(self) - self.gone, krylov.multiplied):
            column = krylov.coupling[:, j]
            self.alphas.append(float(column[j]))
            # Where the chain closes, what was left of the product counted as rounding: it may be
            # long beside a value that is small itself.
            closes = j + 1 == krylov.size
            self.betas.append(float(krylov.dropped[j] if closes else column[j + 1]))

    def slide(self, krylov: Krylov) -> None:
        """Let go of all rows but the two that the recurrence needs."""
        self._add_up(krylov, len(self) - 1)
        krylov.slide(self.first)
        self.gone = len(self) - 1

    def found(self) -> bool:
        """Whether ``B`` is seen to have an eigenvalue beyond its own edge."""
        return self._square_sum(next(iter(self.edges.values()))) is None

    def sight(self, krylov: Krylov) -> Tensor:
        """A vector ``(width,)`` whose Rayleigh quotient with ``B`` is beyond the edge, once found.

        It is where the rows let go of were summed, and rows are added to it.
        """
        self._add_up(krylov, len(self))
        return krylov.spare

    def _add_up(self, krylov: Krylov, stop: int) -> None:
        """Add ``p_i(x) z_i`` of the rows from ``gone`` to ``stop``."""
        edge = next(iter(self.edges.values()))
        if self.gone == 0:
            krylov.spare.zero_()
        polynomials = self._polynomials(edge)
        for i in range(self.gone, min(stop, len(polynomials))):
            row = krylov.rows.row(self.first + i - self.gone)
            krylov.spare.add_(row, alpha=polynomials[i] * edge.side**i)

    def doubts(self, n: int) -> dict[int, float]:
        """Probabilities that an eigenvalue beyond an edge went unseen, at most 1.

        One that is seen beyond another edge than the chain's own proves nothing: that edge is left
        to a chain of its own from then on.

        Args:
            n: Dimension of the space in which ``z`` was drawn.
        """
        squares = {number: self._square_sum(edge) for number, edge in self.edges.items()}
        own = next(iter(self.edges))
        self.edges = {i: self.edges[i] for i in squares if i == own or squares[i] is not None}
        return {  # P(g^2 < n / sum)
            i: 1.0 if (total := squares[i]) is None else math.erf(math.sqrt(n / 2.0 / total))
            for i in self.edges
        }

    def _square_sum(self, edge: Edge) -> float | None:
        """``sum p_i(point)^2``; ``None`` if a Ritz value is beyond: a ``p_i`` has changed sign."""
        polynomials = self._polynomials(edge)
        if len(polynomials) <= len(self) and math.isfinite(polynomials[-1]):
            return None
        return math.fsum(value * value for value in polynomials)

    def _polynomials(self, edge: Edge) -> list[float]:
        """``p_0, p_1, ...`` at the point, of ``-B`` for a lower edge.

        Up to the first that would have another sign, or else that is too large: infinite.
        """
        found, before, last = [1.0], 0.0, 0.0
        for alpha, beta in zip(self.alphas, self.betas, strict=True):
            ahead = edge.side * (edge.point - alpha) * found[-1] - last * before
            if ahead < 0.0:
                break
            before, last = found[-1], beta
            found.append(ahead / beta if ahead < 1e100 * beta else math.inf)
            if math.isinf(found[-1]):
                break
        return found


def tilted(
    ends: dict[int, Edge], values: Tensor, couplings: Tensor, k: int, error: float
) -> tuple[dict[int, Edge], Tensor]:
    """What one chain can show of ``ends``, and the ``M`` ``(d, d)`` that its operator is tilted by.

    Args:
        ends: Edges by their number.
        values: Ritz values ``(m,)``, the ``k`` wanted first.
        couplings: ``c`` ``(d, m)``.
        error: Norm of the error of a product.
    """
    placed = {number: _placed(edge, values, couplings, error) for number, edge in ends.items()}
    own = max(placed, key=lambda number: float(placed[number][1].norm()))
    edge, tilt = placed.pop(own)
    chosen = {own: edge}
    for number, (edge, other) in placed.items():
        moved = float(torch.linalg.matrix_norm(tilt - other, 2)) if len(tilt) else 0.0
        point = edge.point - edge.side * moved
        # The complement has much the same spectrum as the unwanted Ritz values.
        if bool((edge.side * (point - values[k:]) > 0.0).all()):
            chosen[number] = Edge(point, edge.side)
    return chosen, tilt


def worth_keeping(
    ends: dict[int, Edge], values: Tensor, couplings: Tensor, k: int, error: float
) -> int:
    """How many Ritz vectors to keep so that the chains for all edges take the fewest products.

    With all of them, chains converge fastest, but the tilts of two edges may be so different that
    each edge takes a chain of its own. Most of a tilt comes from Ritz values deep inside, which the
    basis hardly knows: without those one chain may do for both edges. Only the number of products
    depends on what is guessed here of the rest of the spectrum.

    Args:
        ends, values, couplings, k, error: As for :func:`tilted`.
    """
    count = len(values)
    if len(ends) == 1 or len(tilted(ends, values, couplings, k, error)[0]) == len(ends):
        return count
    # Further steps of the search would go on like the last: with a semicircle's density.
    weights = couplings[:, k:].square().sum(0)
    weights = weights / weights.sum()
    middle = float(weights @ values[k:])
    reach = 2.0 * math.sqrt(float(weights @ (values[k:] - middle).square()))

    def products(edge: Edge, kept: int) -> float:
        """In units of what the start vector takes; infinite where the edge is not outside."""
        gone = values[kept:]
        low = min([middle - reach, *gone.tolist()])
        high = max([middle + reach, *gone.tolist()])
        outside = edge.side * (2.0 * edge.point - low - high)  # twice, from the middle
        if high == low:
            return 0.0 if outside > 0.0 else math.inf
        ratio = outside / (high - low)
        return 1.0 / math.acosh(ratio) if ratio > 1.0 else math.inf

    best, least = count, sum(products(edge, count) for edge in ends.values())
    for kept in range(k, count, 1 + (count - k) // CANDIDATES):
        chosen, _ = tilted(ends, values[:kept], couplings[:, :kept], k, error)
        cost = max(products(edge, kept) for edge in chosen.values())
        if len(chosen) == len(ends) and cost < least:
            best, least = kept, cost
    return best


def _placed(edge: Edge, values: Tensor, couplings: Tensor, error: float) -> tuple[Edge, Tensor]:
    """The edge, or where that is just beyond a Ritz value a little inside, and its ``M``."""
    found = []
    for step in range(5):  # within half of the slack
        point = edge.point - edge.side * (error + edge.slack * step / 8)
        inside = edge.side * (point - values) > 0.0
        part, distances = couplings[:, inside], point - values[inside]
        tilt = (part / distances) @ part.T
        near = NEAR * float(distances.abs().sum()) / max(1, len(distances))
        found.append((float(tilt.norm()), near, Edge(point, edge.side), tilt))
    least = min(norm for norm, *_ in found)
    return next((at, tilt) for norm, near, at, tilt in found if norm <= least + near)
