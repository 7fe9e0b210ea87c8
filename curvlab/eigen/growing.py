"""Eigenpairs when their number is not known beforehand: the same Krylov space, grown on.

A larger ``k`` goes on from the basis that the smaller one left, so that no product is made twice.
Whether copies are hidden is looked into only when asked: of several attempts, the last is enough.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from curvlab.eigen.checkpoint import restore, state_of
from curvlab.eigen.outcome import Outcome
from curvlab.eigen.products import Products
from curvlab.eigen.request import EVERY, Request, product_budget, request
from curvlab.eigen.result import Eigenpairs, RelativeTo
from curvlab.eigen.run import iterate
from curvlab.eigen.solver import Solver
from curvlab.eigen.starting import start
from curvlab.eigen.work import State
from curvlab.manifest import COUNT, require_facts
from curvlab.probe import Certificate

_ATTEMPT = {"k": COUNT, "certify": bool, "most": COUNT, "solver": dict}


class Growing:
    """A Lanczos solve for the outer eigenvalues that can be asked for more pairs."""

    def __init__(
        self,
        products: Products,
        certificate: Certificate,
        *,
        tol: float,
        seed: int,
        progress: bool | None,
        which: str = "LM",
    ) -> None:
        self.products = products
        self.certificate = certificate
        self.which = which
        self.tol = tol
        self.relative_to: RelativeTo = "value"
        self.seed = seed
        self.progress = progress
        self.solver: Solver | None = None
        self.resumed = False  # whether the solver came from a file, within an attempt

    def pairs(self, k: int, *, certify: bool, save: Callable[[], None] | None = None) -> Eigenpairs:
        """The leading ``k`` pairs; nothing of the last call is lost, whatever ``k`` was then.

        Args:
            save: Called every so many products, and when the pairs are there.
        """
        began, before = time.perf_counter(), self.products.count
        if self.solver is None:
            solver = Solver(self.products, self._request(k, certify), self.certificate)
            start(solver, None)
            self.solver = solver
        elif not self.resumed:
            self.solver.go_on(self._request(k, certify))
        solver, self.resumed = self.solver, False
        pairs = iterate(
            solver,
            save or (lambda: None),
            began=began,
            every=None if save is None else EVERY,
            progress=self.progress,
            method="lanczos",
        )
        if save is not None:
            save()
        return replace(pairs, matvecs=self.products.count - before)

    def _request(self, k: int, certify: bool, most: int | None = None) -> Request:
        most = self.products.spent + product_budget(None, k) if most is None else most
        asked = request(
            self.products, k, which=self.which, tol=self.tol, relative_to=self.relative_to,
            seed=self.seed, max_products=most, certify=certify,
        )  # fmt: skip
        # as if every one certified
        return replace(asked, quota=request(self.products, k, which=self.which).quota)

    def state(self) -> State | None:
        """The attempt as it is, for a file; ``None`` within a step, or where there is none yet."""
        solver = self.solver
        if solver is None or not solver.whole or solver.outcome is Outcome.INTERRUPTED:
            return None
        state, asked = state_of(solver), solver.request
        attempt = {"k": asked.k, "certify": asked.certify.copies, "most": asked.max_products}
        return replace(state, facts={**attempt, "solver": dict(state.facts)})

    def restore(self, path: str | Path, saved: State) -> tuple[int, bool]:
        """Take up an attempt from :meth:`state`; the next call of :meth:`pairs` goes on with it.

        Returns:
            Its ``k`` and whether it certifies.
        """
        require_facts(path, saved.facts, _ATTEMPT)
        k, certify = saved.facts["k"], saved.facts["certify"]
        solver = Solver(
            self.products, self._request(k, certify, saved.facts["most"]), self.certificate
        )
        restore(path, solver, {**saved.rows, **saved.others}, saved.facts["solver"])
        solver.spent = self.products.spent
        self.solver, self.resumed = solver, True
        return k, certify
