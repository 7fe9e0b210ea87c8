"""The search itself: one product per step, until the wanted pairs and their completeness are shown.

Each step multiplies one frontier row of the :class:`~curvlab.eigen.krylov.Krylov` basis. Searching,
it is the row that matters most to the wanted pairs that have not converged. Once all have, a random
row starts the chain that looks for what may be hidden (:mod:`curvlab.eigen.hidden`); if that finds
something, the search goes on with it. A full basis is compressed to its best Ritz vectors. The
state is the basis and a few numbers, so that it can be saved between any two steps.
"""

import math

import torch
from torch import Tensor

from curvlab.eigen.hidden import Chain, tilted
from curvlab.eigen.krylov import Krylov, reflection
from curvlab.eigen.noise import require_rounding
from curvlab.eigen.outcome import Outcome
from curvlab.eigen.products import Products
from curvlab.eigen.request import Request
from curvlab.eigen.ritz import Bounds, Ritz
from curvlab.eigen.room import working_rows
from curvlab.probe import Certificate, usual_limit

NEAR = 4.0  # times tol that given rows may be off for Rayleigh-Ritz on them: then never above cold
LOOK = 4  # products of a chain between two looks for what it has found
SLOWEST = math.exp(0.5)  # by which a product of a chain brings the doubt down, or patience ends
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
        self.draws = 0
        self.chain: Chain | None = None
        self.doubts: list[float] = []  # of each edge; none before a chain has shown anything
        self.converged_at: int | None = None  # products when all wanted pairs had converged
        self.outcome: Outcome | None = None
        self.reason = ""
        self.whole = True  # whether the state is one between two steps
        self.spent = products.spent  # products at the end of the last whole step
        self.finds = 0  # chains that found something
        self.exhausted = False  # every direction of the space has been multiplied
        self.found = 0  # wanted pairs that have converged, shown in the progress line
        self.next_look = 0  # products at which the Ritz pairs are looked at again
        self.sought = 0  # products until which what a chain found may still come into sight

    @property
    def doubt(self) -> float:
        """Probability that an eigenvalue was missed: one that was lies beyond one of the edges."""
        return max(self.doubts, default=1.0)

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
        turns = 1.0 + krylov.restarts + self.finds  # each rewrites the rows, with its rounding
        rounding = 6.0 * work_eps * norm * math.sqrt(turns)
        measured = max(krylov.noise, self.products.rounding(norm))
        loss = rounding + 2.0 * measured + krylov.lost
        return Bounds(norm, loss, 2.0 * loss + 16.0 * self.products.eps * norm)

    def ritz(self) -> Ritz:
        """The Ritz pairs as they are now."""
        return Ritz.of(self.krylov, self.request)

    def start(self, vectors: Tensor | None) -> None:
        """Begin from given rows ``(b, width)``, or from random ones.

        The sum of the rows is multiplied first: earlier eigenvectors come out of it in as many
        products as there are, and what is new comes with them. Where that product stays among the
        rows, :meth:`_settle_start` multiplies the others too. Rows of which the deflation leaves
        nothing are skipped; without any, the start is random.
        """
        if vectors is not None:
            block, b = self.request.block, len(vectors)
            if block == 1 and self.request.k <= b and 2 * b + 8 <= self.request.quota.search:
                for row in vectors:
                    self.krylov.add(row)
                if self.krylov.frontier:
                    self.krylov.lead(torch.ones(self.krylov.frontier, dtype=torch.float64))
            else:
                for first in range(min(block, b)):
                    total = torch.zeros_like(vectors[0], dtype=self.products.dtype)
                    for row in vectors[first::block]:
                        total += row / float(self.products.space.norm(row.to(total.dtype)))
                    self.krylov.add(total)
                if block == 1 < b and self._add_random():  # some pairs are lacking: half by chance
                    self.krylov.lead(torch.ones(self.krylov.frontier, dtype=torch.float64))
                    self.krylov.drop(1)
        while self.krylov.frontier < self.request.block and self._add_random():
            pass

    def _settle_start(self, given: int) -> None:
        """Are the given rows nearly eigenvectors? If not, go on from their sum alone.

        Rayleigh-Ritz multiplies every row and leaves one remainder for each: the fewest products
        where most pairs have converged then. Where the rows have moved further, the Krylov space of
        their sum needs fewer; in between neither wins always (trained networks).
        """
        krylov = self.krylov
        krylov.settle()
        if krylov.size == given:  # not even a remainder
            return
        image = krylov.coupling[: given + 1, 0]
        values = reflection(torch.ones(given, dtype=torch.float64)) @ image[:given]
        if float(image[-1]) > NEAR * self.request.tol * given**0.5 * float(values.abs().min()):
            krylov.lead(image[1:].clone())
            krylov.drop(2)

    def go_on(self, request: Request) -> None:
        """Take up a solve that has ended: for more pairs, or to look for hidden copies."""
        self.whole = False
        self.krylov.bring_back(self.krylov.multiplied)
        self.krylov.grow(request.quota.total)
        self.request, self.outcome, self.reason = request, None, ""
        self.chain, self.doubts, self.converged_at = None, [], None
        self._judge()
        self.spent, self.whole = self.products.spent, True

    def step(self) -> None:
        """One product (or one block of them), and what follows from it."""
        self.whole = False
        if self.products.spent >= self.request.search_products:
            most = self.request.max_products
            self.finish(Outcome.OUT_OF_PRODUCTS, f"the budget of {most} products is exhausted")
        elif self.chain is not None:
            self._certify_step(self.chain)
        else:
            self._search_step()
        self.spent = self.products.spent
        self.whole = True

    def settle(self) -> None:
        """Record what the last products have shown, as a checkpoint needs it."""
        self.whole = False
        self.krylov.settle()
        self.whole = True

    def finish(self, outcome: Outcome, reason: str) -> None:
        """End the solve; the pairs are those found so far."""
        self.krylov.settle()
        if self.chain is not None:  # what it has multiplied is no part of the decomposition yet
            self.krylov.forget(self.chain.first)
            self.chain = None
        self.outcome, self.reason = outcome, reason

    def _search_step(self) -> None:
        krylov = self.krylov
        if krylov.frontier == 0 and not self._add_random():
            self.exhausted = True
            self._judge()
            return
        k, basis, block = self.request.k, self.request.quota.search, self.request.block
        if krylov.size + block > basis:
            free = min(basis - krylov.frontier - block, krylov.multiplied)
            self._compress(min(max(k + 1, k + (basis - k) // 2), free))
        if self.products.spent < self.sought and krylov.frontier > 1:
            krylov.lead(torch.eye(krylov.frontier, dtype=torch.float64)[-1])  # what it led to
        elif block == 1:
            self._turn_frontier()
        given = krylov.frontier if krylov.multiplied == 0 and block == 1 else 1
        self._expand()
        if given > 1:
            self._settle_start(given)
        spent = self.products.spent
        out = krylov.size + block > basis or spent >= self.request.search_products
        if out or krylov.multiplied >= self.products.room or spent >= self.next_look:
            krylov.settle()
            require_rounding(self.products, krylov, self.limit, self.request.seed)
            self._judge()

    def _expand(self) -> None:
        """Multiply the next frontier row, or a block of them, and take up what comes back."""
        krylov, rows = self.krylov, self.krylov.rows
        first, single = krylov.multiplied, self.request.block == 1 or self.chain is not None
        if single:
            vectors, images = rows.row(first), rows.row(krylov.size)
        else:
            left = self.request.search_products - self.products.spent
            vectors = rows.rows(first, first + min(self.request.block, krylov.frontier, left))
            images = torch.zeros_like(vectors)
        self.whole = True  # until it comes back, a product changes nothing
        self.products.into(vectors, images)
        self.whole = False
        if self.chain is not None:
            krylov.aside.tilt_(vectors, images)
        if single:
            krylov.expand(images)
        else:
            krylov.expand_block(images)

    def _judge(self) -> None:
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
            self.doubts = [0.0]
            self.finish(Outcome.CONVERGED, "converged: the basis spans the whole space")
        elif not bool(found.all()):
            self.converged_at, self.sought = None, 0
        elif self.products.spent < self.sought:
            return
        elif not request.certify.copies:
            self.finish(Outcome.NOT_CERTIFIED, "converged; hidden copies were not looked for")
        else:
            if self.converged_at is None:
                self.converged_at = self.products.spent
            self._begin_chain(ritz)

    def _begin_chain(self, ritz: Ritz) -> None:
        """Set the frontier aside and start a chain from a random row orthogonal to what is left."""
        krylov, k = self.krylov, self.request.k
        # Each chain that finds something leaves a frontier row more. What is aside comes back, so
        # beside it and the pairs there must be room for a chain's row and its product.
        if k + krylov.frontier + len(krylov.aside) + 2 > krylov.rows.capacity:
            self.finish(
                Outcome.NOT_EXCLUDED,
                f"converged, but beside {krylov.frontier + len(krylov.aside)} rows that were found "
                "there was no room to exclude that an eigenvalue or a copy was missed",
            )
            return
        krylov.set_aside()
        most = krylov.rows.capacity - self.request.quota.reserve - len(krylov.aside)
        if krylov.multiplied > most:
            self._compress(max(k, most))
            ritz = self.ritz()
        ends = ritz.edges(self.bounds)
        self.doubts = self.doubts or [1.0] * len(ends)
        open_ends = {
            n: ends[n] for n, doubt in enumerate(self.doubts) if doubt > self.request.certify.doubt
        }
        couplings = krylov.aside.coupling[:, : krylov.multiplied] @ ritz.mixing
        error = self.bounds.loss + float(krylov.dropped.max())
        chosen, tilt = tilted(open_ends, ritz.values, couplings, k, error)
        krylov.aside.lean(tilt)
        if self._add_random():
            self.chain = Chain(krylov.multiplied, chosen)
        else:
            self.exhausted = True
            self._judge()

    def _certify_step(self, chain: Chain) -> None:
        krylov, asked = self.krylov, self.request.certify.doubt
        if krylov.frontier:  # else a checkpoint was written just when the chain had closed
            self._expand()
        full = krylov.size + len(krylov.aside) + 1 >= krylov.rows.capacity
        stuck = full and krylov.multiplied < chain.first + 2  # no room even for a recurrence
        slides = chain.gone > 0 or (full and not stuck)
        out = stuck or self._out_of_patience()
        if 0 < krylov.unsettled < self.request.stride and not (out or slides):
            return
        krylov.settle()
        require_rounding(self.products, krylov, self.limit, self.request.seed)
        seen, doubts, closed = len(chain), list(self.doubts), krylov.frontier == 0
        chain.read(krylov)
        for number, doubt in chain.doubts(self.products.room).items():
            doubts[number] *= doubt
        shown = all(doubts[number] <= asked for number in chain.edges)
        ends = shown or closed or out
        # What comes into sight stays there, and a few more products show more of it.
        if (ends or len(chain) // LOOK > seen // LOOK) and chain.found():
            self._take_up(chain)
            return
        if not ends:
            if slides:
                chain.slide(krylov)
            return
        gained = any(doubts[number] <= 0.9 * self.doubts[number] for number in chain.edges)
        self.chain, self.doubts = None, doubts
        if closed and not shown and not chain.gone:
            krylov.bring_back(chain.first)  # the next one starts outside of it
        else:
            krylov.forget(chain.first)
        if self.doubt <= asked:
            self.finish(Outcome.CONVERGED, "converged")
        elif self._out_of_patience() or (stuck and not gained):
            self._give_up()
        else:
            # Another one from a new random vector: for an edge that this one could not show, or
            # because there was no room to go on. Start vectors are independent, so what is missed
            # stays unseen only if each of them misses it: the doubts multiply.
            self._begin_chain(self.ritz())

    def _take_up(self, chain: Chain) -> None:
        """Go on with the search: a chain has found something."""
        krylov = self.krylov
        self.finds += 1
        self.chain, self.doubts = None, []
        if not chain.gone:
            self.converged_at = None
            krylov.bring_back(chain.first)
            self._judge()
            return
        # Its rows are gone, but the newest has more of what was found than a random one would: what
        # that leads to is searched for. Should it not come into sight, patience counts on.
        newest = krylov.rows.row(krylov.size - 1).clone()
        krylov.forget(chain.first)
        krylov.bring_back(chain.first)
        if krylov.add(newest):
            self.sought = self.products.spent + LOOK + len(chain)
        self.next_look = self.products.spent + LOOK

    def _out_of_patience(self) -> bool:
        """Whether certifying has cost more than it may."""
        if self.converged_at is None:
            return False
        certify, n = self.request.certify, self.products.room
        limit = certify.products
        if limit is None:
            # What a random vector of this length takes for the doubt where the rest ends an eighth
            # inside the edge: a product then brings the doubt down by SLOWEST.
            usual = math.ceil(math.log(math.sqrt(n) / certify.doubt) / math.log(SLOWEST))
            limit = max(24, usual, self.converged_at // 2)
        return self.products.spent - self.converged_at >= limit

    def _give_up(self) -> None:
        more = self.products.spent - (self.converged_at or 0)
        self.finish(
            Outcome.NOT_EXCLUDED,
            f"converged, but {more} more products could not exclude that an eigenvalue or a copy "
            "was missed",
        )

    def _compress(self, keep: int) -> None:
        self.krylov.settle()
        ritz = self.ritz()
        self.krylov.compress(ritz.mixing[:, :keep], ritz.values[:keep])

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

    def _add_random(self) -> bool:
        """A random frontier row, orthogonal to all others; False if the space is exhausted."""
        if self.krylov.size >= self.products.room:
            return False
        generator = torch.Generator().manual_seed((self.request.seed + 1) * 1_000_003 + self.draws)
        self.draws += 1
        return self.krylov.add(self.products.space.normal(generator, self.products.dtype))
