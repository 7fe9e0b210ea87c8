"""Eigenpairs when their number is not known beforehand: the same Krylov space, grown on.

A larger ``k`` goes on from the basis that the smaller one left, so that no product is made twice.
Whether copies are hidden is looked into only when asked: of several attempts, the last is enough.
"""

import time
from dataclasses import replace

from curvlab.eigen.finish import eigenpairs
from curvlab.eigen.products import Products
from curvlab.eigen.request import product_budget, request
from curvlab.eigen.result import Eigenpairs
from curvlab.eigen.run import iterate
from curvlab.eigen.solver import Solver
from curvlab.probe import Certificate


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
        self.seed = seed
        self.progress = progress
        self.solver: Solver | None = None

    def pairs(self, k: int, *, certify: bool) -> Eigenpairs:
        """The leading ``k`` pairs; nothing of the last call is lost, whatever ``k`` was then."""
        began, before = time.perf_counter(), self.products.count
        most = self.products.spent + product_budget(None, k)
        asked = request(
            self.products, k, which=self.which, tol=self.tol, seed=self.seed, max_products=most,
            certify=certify,
        )  # fmt: skip
        asked = replace(
            asked, quota=request(self.products, k, which=self.which).quota
        )  # as if every one certified
        if self.solver is None:
            self.solver = Solver(self.products, asked, self.certificate)
            self.solver.start(None)
        else:
            self.solver.go_on(asked)
        solver = self.solver

        def result() -> Eigenpairs:
            return eigenpairs(solver, seconds=lambda: time.perf_counter() - began, method="lanczos")

        pairs = iterate(
            solver, lambda: None, result, every=None, progress=self.progress, method="lanczos"
        )
        return replace(pairs, matvecs=self.products.count - before)
