"""Eigenpairs when their number is not known beforehand: the same Krylov space, grown on.

A larger ``k`` goes on from the basis that the smaller one left, so that no product is made twice.
Whether copies are hidden is looked into only when asked: of several attempts, the last is enough.
"""

import time
from dataclasses import replace

from curvlab.eigen.arguments import basis_rows, error_limit, product_budget, reserve_rows
from curvlab.eigen.finish import eigenpairs
from curvlab.eigen.options import Options
from curvlab.eigen.products import Products
from curvlab.eigen.result import Eigenpairs
from curvlab.eigen.run import Keeping, iterate
from curvlab.eigen.solver import Solver
from curvlab.probe import Certificate


class Growing:
    """A Lanczos solve for the eigenvalues of largest magnitude that can be asked for more pairs."""

    def __init__(
        self,
        products: Products,
        certificate: Certificate,
        *,
        tol: float,
        seed: int,
        progress: bool | None,
    ) -> None:
        self.products = products
        self.certificate = certificate
        self.tol = tol
        self.seed = seed
        self.keeping = Keeping(progress=progress)
        self.solver: Solver | None = None

    def pairs(self, k: int, *, certify: bool) -> Eigenpairs:
        """The leading ``k`` pairs, ``k`` not below that of the last call."""
        began, before = time.perf_counter(), self.products.count
        options = self._options(k, certify)
        if self.solver is None:
            self.solver = Solver(self.products, options)
            self.solver.start(None)
        else:
            self.solver.go_on(options)
        iterate(self.solver, self.keeping, lambda: None, "lanczos")
        found = eigenpairs(
            self.solver,
            explicit=False,
            certificate=self.certificate,
            seconds=lambda: time.perf_counter() - began,
            method="lanczos",
        )
        return replace(found, matvecs=self.products.count - before)

    def _options(self, k: int, certify: bool) -> Options:
        products = self.products
        return Options(
            k=k,
            which="LM",
            tol=self.tol,
            relative_to="value",
            seed=self.seed,
            max_products=products.count + product_budget(None, k),
            basis=basis_rows(products, k, 1, None, None, True),
            reserve=reserve_rows(products, None, True),
            block=1,
            certify=certify,
            doubt=1e-3,
            certify_products=None,
            limit=error_limit(products, None, self.certificate),
            stride=1 if products.device.type == "cpu" else 4,
        )
