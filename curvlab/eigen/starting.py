"""Where a search begins: from random rows, or from rows that were given."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from curvlab.eigen.krylov import Krylov, reflection

if TYPE_CHECKING:
    from curvlab.eigen.solver import Solver

NEAR = 4.0  # times tol that given rows may be off for Rayleigh-Ritz on them: then never above cold


def start(solver: "Solver", vectors: Tensor | None) -> None:
    """Begin from given rows ``(b, width)``, or from random ones.

    The sum of the rows is multiplied first: earlier eigenvectors come out of it in as many products
    as there are, and what is new comes with them. Where that product stays among the rows,
    :func:`settle` multiplies the others too. Rows of which the deflation leaves nothing are
    skipped; without any, the start is random.
    """
    krylov, block, k = solver.krylov, solver.request.block, solver.request.k
    if vectors is not None:
        b = len(vectors)
        if block == 1 and k <= b and 2 * b + 8 <= solver.request.quota.search:
            for row in vectors:
                krylov.add(row)
            if krylov.frontier:
                krylov.lead(torch.ones(krylov.frontier, dtype=torch.float64))
        else:
            space, dtype = solver.products.space, solver.products.dtype
            for first in range(min(block, b)):
                total = torch.zeros_like(vectors[0], dtype=dtype)
                for row in vectors[first::block]:
                    total += row / float(space.norm(row.to(dtype)))
                krylov.add(total)
            if block == 1 < b and solver.add_random():  # some pairs are lacking: half by chance
                krylov.lead(torch.ones(krylov.frontier, dtype=torch.float64))
                krylov.drop(1)
    while krylov.frontier < block and solver.add_random():
        pass


def settle(krylov: Krylov, given: int, tol: float) -> None:
    """Are the ``given`` rows nearly eigenvectors? If not, go on from their sum alone.

    Rayleigh-Ritz multiplies every row and leaves one remainder for each: the fewest products where
    most pairs have converged then. Where the rows have moved further, the Krylov space of their sum
    needs fewer; in between neither wins always (trained networks).
    """
    krylov.settle()
    if krylov.size == given:  # not even a remainder
        return
    image = krylov.coupling[: given + 1, 0]
    values = reflection(torch.ones(given, dtype=torch.float64)) @ image[:given]
    if float(image[-1]) > NEAR * tol * given**0.5 * float(values.abs().min()):
        krylov.lead(image[1:].clone())
        krylov.drop(2)
