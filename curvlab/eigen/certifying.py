"""Chains, one after the other, until it is shown that nothing was missed, or patience ends.

What a chain is and what it proves stands in :mod:`curvlab.eigen.hidden`. A chain in the place of
one that had to be given up has a chance of its own to miss what there is. So that all of them
together miss no more often than was asked for, the first is allowed most of the doubt and each
after it a part of the rest: a half, a sixth, a twelfth, ...

A chain that closes has shown all it can, though its doubt may still be too large. What is missed
after several of those was missed by each. Their start vectors are independent, and where something
is missed, a doubt is no smaller than a number that is uniform in 0..1 (where on the scale of chance
the weight lies that the start vector has on it). The product of ``m`` of these is below ``x`` with
probability ``x (1 + l + l^2 / 2 + ... + l^(m-1) / (m-1)!)``, ``l = -log x``: the doubt of all.
"""

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from curvlab.eigen.hidden import Chain, tilted, worth_keeping
from curvlab.eigen.outcome import Outcome
from curvlab.eigen.request import Certify
from curvlab.eigen.ritz import Ritz
from curvlab.eigen.selection import Edge

if TYPE_CHECKING:
    from curvlab.eigen.solver import Solver

LOOK = 4  # products of a chain between two looks for what it has found
FIRST = 0.9  # share of the doubt that is the first chain's
SLOWEST = math.exp(0.5)  # by which a product of a chain brings the doubt down, or patience ends


@dataclass(slots=True)
class Account:
    """What chains have shown of an edge.

    Attributes:
        product: Of the doubts of chains that have closed.
        closed: How many those are.
        again: Chains that were begun in the place of one that had seen something and lost it.
        doubt: Of all together, by the share of it that is allowed.
    """

    product: float = 1.0
    closed: int = 0
    again: int = 0
    doubt: float = 1.0

    def enter(self, doubt: float) -> None:
        """Take down the doubt of the present chain."""
        together = term = self.product * doubt
        depth = -math.log(term) if term > 0.0 else 0.0
        for j in range(1, self.closed + 1):
            term *= depth / j
            together += term
        before = self.closed + self.again
        share = FIRST if before == 0 else (1.0 - FIRST) / (before * (before + 1))
        self.doubt = min(1.0, together / share)

    def close(self, doubt: float) -> None:
        """The chain has closed, with this doubt."""
        self.product *= doubt
        self.closed += 1

    def lose(self) -> None:
        """The chain has seen something that it does not lead to."""
        self.product, self.closed, self.again, self.doubt = 1.0, 0, self.again + 1, 1.0


@dataclass(slots=True)
class Proof:
    """How far it has been shown that no eigenvalue is missing.

    Attributes:
        chain: The chain that is looking now.
        accounts: One for each edge; none before the first chain, or after a find.
        converged_at: Products when all wanted pairs had converged.
        finds: Chains that found something.
        lost: Of those, the ones that had let go of their rows.
    """

    chain: Chain | None = None
    accounts: list[Account] = field(default_factory=list)
    converged_at: int | None = None
    finds: int = 0
    lost: int = 0

    @property
    def doubt(self) -> float:
        """Probability that an eigenvalue was missed: one that was lies beyond one of the edges."""
        return max((account.doubt for account in self.accounts), default=1.0)

    def out_of_patience(self, certify: Certify, n: int, spent: int) -> bool:
        """Whether, after ``spent`` products, certifying has cost more than it may."""
        if self.converged_at is None:
            return False
        limit = certify.products
        if limit is None:
            # What a random vector of this length takes for the doubt where the rest ends an eighth
            # inside the edge: a product then brings the doubt down by SLOWEST.
            usual = math.ceil(math.log(math.sqrt(n) / certify.doubt) / math.log(SLOWEST))
            limit = max(24, usual, self.converged_at // 2)
        return spent - self.converged_at >= limit


def begin(solver: "Solver", ritz: Ritz) -> None:
    """Set the frontier aside and start a chain from a random row orthogonal to what is left.

    Args:
        ritz: The pairs as they are now; the wanted ones have converged.
    """
    krylov, proof, k = solver.krylov, solver.proof, solver.request.k
    if proof.converged_at is None:
        proof.converged_at = solver.products.spent
    # Each chain that finds something leaves a frontier row more. What is aside comes back, so
    # beside it and the pairs there must be room for a chain's row and its product.
    if k + krylov.frontier + len(krylov.aside) + 2 > krylov.rows.capacity:
        solver.finish(
            Outcome.NOT_EXCLUDED,
            f"converged, but beside {krylov.frontier + len(krylov.aside)} rows that were found "
            "there was no room to exclude that an eigenvalue or a copy was missed",
        )
        return
    krylov.set_aside()
    most = krylov.rows.capacity - solver.request.quota.reserve - len(krylov.aside)
    if krylov.multiplied > most:
        solver.compress(max(k, most))
        ritz = solver.ritz()
    kept = worth_keeping(*_known(solver, ritz))
    if kept < krylov.multiplied:
        solver.compress(kept)
        ritz = solver.ritz()
    edges, tilt = tilted(*_known(solver, ritz))
    krylov.aside.lean(tilt)
    if solver.add_random():
        proof.chain = Chain(krylov.multiplied, edges)
    else:
        solver.exhausted = True
        solver.judge()


def _known(solver: "Solver", ritz: Ritz) -> tuple[dict[int, Edge], Tensor, Tensor, int, float]:
    """The edges that are left to show, and what is known of them: see :func:`hidden.tilted`."""
    krylov, proof, edges = solver.krylov, solver.proof, ritz.edges(solver.bounds)
    proof.accounts = proof.accounts or [Account(again=proof.lost) for _ in edges]
    asked = solver.request.certify.doubt
    left = {n: edges[n] for n, account in enumerate(proof.accounts) if account.doubt > asked}
    couplings = krylov.aside.coupling[:, : krylov.multiplied] @ ritz.mixing
    error = solver.bounds.loss + float(krylov.dropped.max())
    return left, ritz.values, couplings, solver.request.k, error


def step(solver: "Solver", chain: Chain) -> None:
    """One product of the chain, and what follows from it."""
    krylov, proof, asked = solver.krylov, solver.proof, solver.request.certify.doubt
    if krylov.frontier:  # else a checkpoint was written just when the chain had closed
        solver.expand()
    n = solver.products.room
    full = krylov.size + len(krylov.aside) + 2 >= krylov.rows.capacity  # one row is for a sum
    stuck = full and krylov.multiplied < chain.first + 2  # no room even for a recurrence
    slides = chain.gone > 0 or (full and not stuck)
    impatient = proof.out_of_patience(solver.request.certify, n, solver.products.spent)
    out = stuck or impatient
    if 0 < krylov.unsettled < solver.request.stride and not (out or slides):
        return
    solver.look()
    seen, closed, before = len(chain), krylov.frontier == 0, set(chain.edges)
    chain.read(krylov)
    doubts = chain.doubts(n)
    for number, doubt in doubts.items():
        proof.accounts[number].enter(doubt)
    for number in before - set(chain.edges):
        proof.accounts[number].lose()
    shown = all(proof.accounts[number].doubt <= asked for number in chain.edges)
    ends = shown or closed or out
    # What comes into sight stays there, and a few more products show more of it.
    if (ends or slides or len(chain) // LOOK > seen // LOOK) and chain.found():
        _take_up(solver, chain)
        return
    if not ends:
        if slides:
            chain.slide(krylov)
        return
    proof.chain = None
    if closed and not shown and not chain.gone:
        krylov.bring_back(chain.first)  # the next one starts outside of it
    else:
        krylov.forget(chain.first)
    if closed and not shown:
        for number, doubt in doubts.items():
            proof.accounts[number].close(doubt)
    if proof.doubt <= asked:
        solver.finish(Outcome.CONVERGED, "converged")
    elif out:
        more = solver.products.spent - (proof.converged_at or 0)
        solver.finish(
            Outcome.NOT_EXCLUDED,
            f"converged, but {more} more products could not exclude that an eigenvalue or a copy "
            "was missed",
        )
    else:  # for an edge that this one could not show
        begin(solver, solver.ritz())


def _take_up(solver: "Solver", chain: Chain) -> None:
    """Go on with the search: a chain has found something."""
    krylov, proof = solver.krylov, solver.proof
    proof.finds += 1
    proof.chain, proof.accounts = None, []
    if not chain.gone:
        proof.converged_at = None
        krylov.bring_back(chain.first)
        solver.judge()
        return
    # Its rows are gone, but the sum of them shows what was found, together with what was aside:
    # multiplied next, it gives the basis one value more beyond the edge. Should rounding keep it
    # from that again and again, patience counts on.
    proof.lost += 1
    if proof.lost <= 2 * solver.request.k:
        proof.converged_at = None
    sight = chain.sight(krylov).clone()
    krylov.forget(chain.first)
    krylov.bring_back(chain.first)
    if krylov.add(sight):
        krylov.lead(krylov.rows.coefficients(sight).cpu()[krylov.multiplied :])
    solver.next_look = 0
