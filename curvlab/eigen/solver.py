"""The search itself: one product per step, until the wanted pairs and their completeness are shown.

Each step multiplies one frontier row of the :class:`~curvlab.eigen.krylov.Krylov` basis. Searching,
it is the row that matters most to the wanted pairs that have not converged. Once all have, chains
look for what may be hidden (:mod:`curvlab.eigen.certifying`); if one finds something, the search
goes on with it. A full basis is compressed to its best Ritz vectors. The state is the basis, a
:class:`~curvlab.eigen.certifying.Proof` and a few numbers, so that it can be saved between any two
steps.
"""

import math

import torch

from curvlab.eigen import certifying, starting
from curvlab.eigen.certifying import Account, Proof
from curvlab.eigen.krylov import Krylov
from curvlab.eigen.noise import require_rounding
from curvlab.eigen.outcome import Outcome
from curvlab.eigen.products import Products
from curvlab.eigen.request import Request
from curvlab.eigen.ritz import Bounds, Ritz
from curvlab.eigen.room import working_rows
from curvlab.probe import Certificate, usual_limit

FASTEST = 4.0  # by which a product may bring the worst residual down; networks' Hessians show 2.5


class Solver:
    """A solve in progress.

    Args:
        certificate: The operator's; ``None`` until a checkpoint gives it.
    """

    def __init__(
        self, products: Products, request: Request, certificate: Certificate | None
    ) -> None:
        self.products = products
        self.request = request
        self.certificate = certificate
        self.krylov = Krylov(working_rows(request.quota, products), products)
        self.proof = Proof()
        self.draws = 0
        self.outcome: Outcome | None = None
        self.reason = ""
        self.whole = True  # whether the state is one between two steps
        self.spent = products.spent  # products at the end of the last whole step
        self.exhausted = False  # every direction of the space has been multiplied
        self.found = 0  # wanted pairs that have converged, shown in the progress line
        self.next_look = 0  # products at which the Ritz pairs are looked at again

    # The algorithm

    def step(self) -> None:
        """One product (or one block of them), and what follows from it."""
        self.whole = False
        if self.products.spent >= self.request.search_products:
            self.finish(Outcome.OUT_OF_PRODUCTS, "max_products ran out")
        elif self.proof.chain is not None:
            certifying.step(self, self.proof.chain)
        else:
            self._search()
        self.spent = self.products.spent
        self.whole = True

    def _search(self) -> None:
        krylov = self.krylov
        if krylov.frontier == 0 and not self.add_random():
            self.exhausted = True
            self.judge()
            return
        k, basis, block = self.request.k, self.request.quota.search, self.request.block
        if krylov.size + block > basis:
            free = min(basis - krylov.frontier - block, krylov.multiplied)
            self.compress(min(max(k + 1, k + (basis - k) // 2), free))
        if block == 1:
            self._turn_frontier()
        given = krylov.frontier if krylov.multiplied == 0 and block == 1 else 1
        self.expand()
        if given > 1:
            starting.settle(krylov, given, self.request.tol)
        spent = self.products.spent
        out = krylov.size + block > basis or spent >= self.request.search_products
        if out or krylov.multiplied >= self.products.room or spent >= self.next_look:
            self.look()
            self.judge()

    def expand(self) -> None:
        """Multiply the next frontier row, or a block of them, and take up what comes back."""
        krylov, rows, chained = self.krylov, self.krylov.rows, self.proof.chain is not None
        first, single = krylov.multiplied, self.request.block == 1 or chained
        if single:
            vectors, images = rows.row(first), rows.row(krylov.size)
        else:
            left = self.request.search_products - self.products.spent
            vectors = rows.rows(first, first + min(self.request.block, krylov.frontier, left))
            images = torch.zeros_like(vectors)
        self.whole = True  # until it comes back, a product changes nothing
        self.products.into(vectors, images)
        self.whole = False
        if chained:
            krylov.aside.tilt_(vectors, images)
        if single:
            krylov.expand(images)
        else:
            krylov.expand_block(images)

    def judge(self) -> None:
        """Look at the Ritz pairs; go on, start certifying, or end."""
        krylov, request = self.krylov, self.request
        if krylov.multiplied < request.k:
            if self.exhausted:
                self.finish(Outcome.EXAMINED_ALL, "every direction that is left was examined")
            self.next_look = self.products.spent + request.k - krylov.multiplied
            return
        ritz = self.ritz()
        krylov.norm = max(krylov.norm, float(ritz.values.abs().max()))
        residuals, allowed = ritz.residuals[: request.k], ritz.allowed(self.bounds)
        found = residuals <= allowed
        self.found = int(found.sum())
        late = residuals[~found] / allowed[~found]  # in units of what is allowed
        worst = float(late.max()) if len(late) else 0.0
        # An eigenproblem a step would cost as much as a cheap product.
        wait = math.ceil(math.log(min(worst, 1e30)) / math.log(FASTEST)) if worst > 1.0 else 1
        self.next_look = self.products.spent + max(request.stride, krylov.multiplied // 64, wait)
        if self.exhausted or krylov.multiplied >= self.products.room:
            self.proof.accounts = [Account(doubt=0.0)]
            self.finish(Outcome.CONVERGED, "converged: the basis spans the whole space")
        elif not bool(found.all()):
            self.proof.converged_at = None
        elif not request.certify.copies:
            self.finish(Outcome.NOT_CERTIFIED, "converged; hidden copies were not looked for")
        else:
            certifying.begin(self, ritz)

    def _turn_frontier(self) -> None:
        """Multiply next what the unconverged wanted pairs have most of in common."""
        krylov, k = self.krylov, self.request.k
        if krylov.frontier == 1 or krylov.multiplied < k:  # rows that were given come in order
            return
        if self.products.spent % max(1, krylov.multiplied // 64):  # the eigenproblems of a large T
            return
        krylov.settle()
        ritz = self.ritz()
        allowed = ritz.allowed(self.bounds)
        late = ritz.residuals[:k] > allowed
        remainder = krylov.remainder(ritz.mixing[:, :k][:, late] / allowed[late])
        if float(remainder.abs().sum()) > 0.0:
            weights = torch.linalg.svd(remainder, full_matrices=False).U[:, 0]
            # A solve that was interrupted in its product has it there already.
            if float(weights[1:].norm()) > 1e-8:
                krylov.lead(weights)

    def go_on(self, request: Request) -> None:
        """Take up a solve that has ended: for more pairs, or to look for hidden copies."""
        self.whole = False
        self.krylov.bring_back(self.krylov.multiplied)
        self.krylov.grow(request.quota.total)
        self.request, self.outcome, self.reason = request, None, ""
        self.proof = Proof(finds=self.proof.finds)
        self.judge()
        self.spent, self.whole = self.products.spent, True

    def finish(self, outcome: Outcome, reason: str) -> None:
        """End the solve; the pairs are those found so far."""
        self.krylov.settle()
        if self.proof.chain is not None:  # what it has multiplied is no part of the decomposition
            self.krylov.forget(self.proof.chain.first)
            self.proof.chain = None
        self.outcome, self.reason = outcome, reason

    # What it works with

    @property
    def limit(self) -> float:
        """Relative error of a product that needs no explanation by measured rounding."""
        usual = usual_limit(self.products.operator.dtype, self.products.n)
        return usual if self.certificate is None else max(usual, self.certificate.limit)

    @property
    def bounds(self) -> Bounds:
        """What can be told apart after the products so far."""
        krylov, norm = self.krylov, self.krylov.norm
        work_eps = float(torch.finfo(self.products.dtype).eps)
        turns = 1.0 + krylov.restarts + self.proof.finds  # each rewrites the rows, with rounding
        rounding = 6.0 * work_eps * norm * math.sqrt(turns)
        measured = max(krylov.noise, self.products.rounding(norm))
        loss = rounding + 2.0 * measured + krylov.lost
        return Bounds(norm, loss, 2.0 * loss + 16.0 * self.products.eps * norm)

    def ritz(self) -> Ritz:
        """The Ritz pairs as they are now."""
        return Ritz.of(self.krylov, self.request)

    def settle(self) -> None:
        """Record what the last products have shown, as a checkpoint needs it."""
        self.whole = False
        self.krylov.settle()
        self.whole = True

    def look(self) -> None:
        """Record what the last products have shown, and ask whether they contradict each other."""
        self.krylov.settle()
        require_rounding(self.products, self.krylov, self.limit, self.request.seed)

    def compress(self, keep: int) -> None:
        """Keep the first ``keep`` Ritz vectors of all rows that were multiplied."""
        self.krylov.settle()
        ritz = self.ritz()
        self.krylov.compress(ritz.mixing[:, :keep], ritz.values[:keep])

    def add_random(self) -> bool:
        """A random frontier row, orthogonal to all others; False if the space is exhausted."""
        if self.krylov.size >= self.products.room:
            return False
        generator = torch.Generator().manual_seed((self.request.seed + 1) * 1_000_003 + self.draws)
        self.draws += 1
        return self.krylov.add(self.products.space.normal(generator, self.products.dtype))
