"""The exact way for small matrices: every eigenvalue, from one symmetric eigendecomposition.

Nothing can be hidden from it, so the result is always complete. Residuals are computed from the
matrix itself.
"""

import math
import time

import torch
from torch import Tensor

from curvlab.eigen.noise import rounding
from curvlab.eigen.outcome import Outcome
from curvlab.eigen.products import Products, orthogonality
from curvlab.eigen.request import Request
from curvlab.eigen.result import Eigenpairs, canonical_signs_, judge
from curvlab.eigen.selection import order
from curvlab.operators import Dense
from curvlab.probe import RAGGED, OperatorError, brought_near

BLOCK = 64  # identity rows multiplied at a time
MOST_PROBED = 6  # products that a probe makes at most


def dense_is_cheaper(products: Products, k: int) -> bool:
    """Whether an eigendecomposition of the whole matrix costs less than a search for ``k`` pairs.

    A search needs two or three products per pair and a few dozen more. A matrix that is already
    there needs none at all, only the decomposition, cheap up to a few hundred rows.
    """
    if products.space.sharded:
        return False
    if isinstance(products.operator, Dense):
        return products.n <= max(256, 6 * k)
    return products.n <= 2 * k + 24


def dense_products(products: Products) -> int:
    """Most products that :func:`solve_dense` makes, those apart that explain an asymmetry."""
    if isinstance(products.operator, Dense):
        return 0 if products.deflation is None else products.n
    return products.n + MOST_PROBED


def dense_matrix(products: Products) -> Tensor:
    """``P A P`` as a float64 matrix ``(n, n)`` on the operator's device, by ``n`` products."""
    if isinstance(products.operator, Dense) and products.deflation is None:
        return brought_near(products.operator.dense().double(), products.exponent)
    n = products.n
    matrix = torch.zeros(n, n, dtype=torch.float64, device=products.device)
    for start in range(0, n, BLOCK):
        rows = torch.zeros(min(BLOCK, n - start), n, dtype=products.dtype, device=products.device)
        rows[torch.arange(rows.shape[0]), torch.arange(start, start + rows.shape[0])] = 1.0
        products.project_out_(rows)
        images = torch.zeros_like(rows)
        products.into(rows, images)
        matrix[start : start + rows.shape[0]] = images
    if not bool(torch.isfinite(matrix).all()):
        raise OperatorError("the operator returned NaN or infinity")
    return matrix


def solve_dense(products: Products, request: Request) -> Eigenpairs:
    """The wanted pairs of ``P A P`` from all of them."""
    began = time.perf_counter()
    certificate = products.probe(request.seed)
    limit = certificate.limit
    matrix = dense_matrix(products)
    scale = max(float(matrix.abs().max()), products.size / math.sqrt(products.n))
    asymmetry = float((matrix - matrix.T).abs().max()) / scale if scale > 0 else 0.0
    if asymmetry > limit and asymmetry > RAGGED * _rounding(products, limit * scale) / scale:
        raise OperatorError(
            f"the matrix of this operator differs from its transpose by {asymmetry:.1e} (limit "
            f"{limit:.1e}): it is not symmetric, or it changes between products"
        )
    values, columns = torch.linalg.eigh(_without_deflated(products, (matrix + matrix.T) / 2))
    # The deflated directions were moved to the upper end.
    values, columns = values[: products.room], columns[:, : products.room]
    norm = float(values.abs().max())
    reach = max(norm, products.size)
    chosen = order(values.cpu(), request.k, request.which)[: request.k].to(values.device)
    values, stored = values[chosen], columns[:, chosen].T.to(products.operator.dtype).contiguous()
    rest = stored.double() @ matrix.T - values[:, None] * stored.double()
    residuals = torch.linalg.vector_norm(rest, dim=1) + (products.eps + products.error) * reach
    residuals += torch.finfo(torch.float64).eps * float(matrix.norm())  # the sums in rest
    floor = 2.0 * products.error * reach + 16.0 * products.eps * reach
    tol, relative_to = request.tol, request.relative_to
    judged = judge(values, residuals, tol=tol, relative_to=relative_to, norm=norm, floor=floor)
    good = bool(judged.converged.all())
    return Eigenpairs(
        space=products.space,
        values=values * products.unit,
        vectors=canonical_signs_(stored),
        residuals=residuals * products.unit,
        converged=judged.converged,
        complete=good,
        doubt=0.0 if good else 1.0,
        orthogonality=orthogonality(stored.double(), products.space),
        norm=norm * products.unit,
        floor=floor * products.unit,
        asymmetry=asymmetry,
        matvecs=products.count,
        restarts=0,
        seconds=time.perf_counter() - began,
        outcome=Outcome.CONVERGED if good else Outcome.IMPRECISE,
        reason="converged" if good else "the tolerance is below the operator's precision",
        method="dense: eigendecomposition of the whole matrix",
        which=request.which,
        tol=tol,
        relative_to=relative_to,
        certificate=certificate,
    )


def _rounding(products: Products, limit: float) -> float:
    """Largest change of an element when every product is rounded otherwise."""
    if isinstance(products.operator, Dense):
        return 0.0
    rows = torch.eye(products.n, dtype=products.dtype, device=products.device)
    products.project_out_(rows)
    return float(rounding(products, rows, limit).abs().max())


def _without_deflated(products: Products, matrix: Tensor) -> Tensor:
    """``P A P + shift (I - P)``: the deflated directions get the largest eigenvalue."""
    if products.deflation is None:
        return matrix
    kept = torch.eye(products.n, dtype=products.dtype, device=products.device)
    products.project_out_(kept)
    shift = 4.0 * float(matrix.abs().sum(1).max()) + 1.0
    removed = torch.eye(*matrix.shape).to(matrix) - (kept + kept.T).double() / 2
    return matrix + shift * removed
