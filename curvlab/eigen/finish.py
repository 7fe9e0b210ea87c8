"""From a finished search to the result: vectors, residuals that can be relied on, the reason.

A residual is that of the vector as it is returned, with the operator's entries in exact arithmetic.
It comes from the decomposition ``A V = V H + R C``, which holds to rounding; the amount by which it
may not hold is added (``Bounds.loss``: rounding, and the operator error that the solve itself has
measured; ``Krylov.missing``: remainders that were dropped). Where that allowance alone decides
whether a pair has converged, or where ``Certify(explicit=True)`` is asked for, the residual is
computed from a product with the vector itself. That of a matrix is computed from its entries.
"""

import math
import time

import torch
from torch import Tensor

from curvlab.eigen.krylov import Krylov
from curvlab.eigen.noise import rounding
from curvlab.eigen.outcome import Outcome
from curvlab.eigen.products import Products, orthogonality
from curvlab.eigen.request import Request
from curvlab.eigen.result import Eigenpairs, Judgement, judge, tolerances
from curvlab.eigen.ritz import Ritz
from curvlab.eigen.solver import Solver
from curvlab.probe import RAGGED, OperatorError, combined_square


def eigenpairs(solver: Solver, *, began: float, method: str) -> Eigenpairs:
    """The result of a solve that has ended; it ``began`` then, by :func:`time.perf_counter`."""
    request, products, krylov = solver.request, solver.products, solver.krylov
    k = min(request.k, krylov.multiplied)
    ritz = solver.ritz()
    # A solve that was stopped makes no more products, and of a matrix none are needed.
    checks = solver.outcome is not Outcome.INTERRUPTED and products.matrix is None
    explicit = request.certify.explicit and checks
    if checks and not explicit and not solver.exhausted:
        _spot_check(solver, ritz, k)
    values = ritz.values[:k]
    residuals = ritz.residuals[:k] + solver.bounds.loss + krylov.missing(ritz.mixing[:, :k])
    if products.operator.dtype != products.dtype:
        residuals += _rounded(solver, ritz.mixing[:, :k], values)
    if checks:  # before there is a result: an operator has long vectors of its own meanwhile
        asked = tolerances(values, request.tol, request.relative_to, krylov.norm)
        doubtful = (residuals > asked) & (ritz.residuals[:k] <= asked)
        doubtful &= values.abs() > solver.bounds.floor
        chosen = torch.arange(k) if explicit else doubtful.nonzero().flatten()
        if products.spent + len(chosen) <= request.max_products:
            for i in chosen.tolist():
                residuals[i] = _true_residual(solver, ritz.mixing[:, i], float(values[i]))
    vectors = krylov.rows.combine(ritz.mixing[:, :k])
    stored = vectors.to(products.operator.dtype)
    entries = products.residuals(stored, values)
    residuals = residuals if entries is None else entries
    tol, relative_to, bounds = request.tol, request.relative_to, solver.bounds
    judged = judge(
        values, residuals, tol=tol, relative_to=relative_to, norm=bounds.norm, floor=bounds.floor
    )
    outcome, reason = _ending(solver, judged, residuals)
    settled = outcome.converged and bool(judged.converged.all())
    if settled and (more := _ties(ritz.values, k, request)):
        reason += f" ({more} more within tol of the last: which of them is number {k} is open)"
    device, unit = products.device, products.unit
    return Eigenpairs(
        space=products.space,
        values=values.to(device) * unit,
        vectors=products.space.canonical_signs_(stored),
        residuals=residuals.to(device) * unit,
        converged=judged.converged.to(device),
        complete=settled and outcome is Outcome.CONVERGED,
        doubt=solver.proof.doubt if settled else 1.0,
        orthogonality=orthogonality(stored, products.space),
        norm=bounds.norm * unit,
        floor=bounds.floor * unit,
        asymmetry=krylov.noise / krylov.norm if krylov.norm > 0 else 0.0,
        matvecs=products.count,
        restarts=krylov.restarts,
        seconds=time.perf_counter() - began,
        outcome=outcome,
        reason=reason,
        method=method,
        which=request.which,
        tol=tol,
        relative_to=relative_to,
        certificate=solver.certificate,
    )


def _ties(values: Tensor, k: int, request: Request) -> int:
    """How many of the unwanted Ritz ``values`` are as far out as the last wanted one, within tol.

    A tolerance for residuals is one for values: which of two that are nearer to each other is the
    larger has not been settled, and completeness says nothing about them.
    """
    if request.which == "both" or not 0 < k < len(values) or request.relative_to != "value":
        return 0
    outwards = {"LM": values.abs(), "LA": values, "SA": -values}[request.which]
    return int((outwards[k:] >= outwards[k - 1] - request.tol * values[k - 1].abs()).sum())


def _ending(solver: Solver, judged: Judgement, residuals: Tensor) -> tuple[Outcome, str]:
    outcome, reason = solver.outcome or Outcome.INTERRUPTED, solver.reason
    late = int((~judged.converged).sum())
    if outcome.converged and late:
        outcome = Outcome.IMPRECISE
        worst = float(residuals[~judged.converged].max())
        reason = imprecise(solver.products, late, worst, solver.bounds.loss, solver.krylov.norm)
    return outcome, reason + judged.note


def imprecise(products: Products, late: int, worst: float, loss: float, norm: float) -> str:
    """What is said where the operator's precision does not allow the tolerance."""
    reason = (
        f"the tolerance is below the operator's precision for {late} pairs: products are accurate "
        f"to {loss / norm if norm > 0 else 0.0:.1e} of the operator's norm, and residuals stay at "
        f"{worst * products.unit:.1e}"
    )
    value = getattr(products.operator, "loss", None)
    if isinstance(value, float) and 0.0 <= value < 1e-2 and loss > 1e3 * products.eps * norm:
        reason += (
            f". The loss, {value:.1e}, is so near 0 that its second derivatives are differences of "
            "nearly equal numbers"
        )
    return reason


def _true_residual(solver: Solver, weights: Tensor, value: float) -> float:
    """From a product with the vector itself; what rounding can hide of it is added."""
    products, norm = solver.products, solver.krylov.norm
    vector = _stored(solver, weights)
    image = torch.empty_like(vector)
    products.into(vector, image)
    square = combined_square((1.0, image), (-value, vector))
    length = math.sqrt(float(products.space.total(square)))
    if not length < float("inf"):
        raise OperatorError("the operator returned NaN or infinity when a result was checked")
    work_eps = float(torch.finfo(products.dtype).eps)
    error = products.rounding(norm) + 2.0 * work_eps * max(abs(value), length)
    if products.deflation is not None:
        # What is left in the vector of the deflated directions, A may take elsewhere. Of its image,
        # which may be as long as the norm before they are removed, half an epsilon stays.
        image.copy_(vector)
        products.project_out_(image)
        left = float(products.space.norm(image.sub_(vector)))
        error += (left + 0.5 * work_eps) * norm
    return length + error


def _stored(solver: Solver, weights: Tensor) -> Tensor:
    """A Ritz vector ``(width,)`` as it is returned, in the dtype of the work."""
    products = solver.products
    vector = _combined(solver.krylov, weights, products.dtype)
    return vector.to(products.operator.dtype).to(products.dtype)


def _rounded(solver: Solver, mixing: Tensor, values: Tensor) -> Tensor:
    """What rounding the vectors that are returned adds to their residuals, ``(k,)``."""
    krylov, products = solver.krylov, solver.products
    lengths = []
    for weights in mixing.T:
        lost = _combined(krylov, weights, products.dtype).sub_(_stored(solver, weights))
        lengths.append(float(products.space.norm(lost)))
    return torch.tensor(lengths, dtype=torch.float64) * (krylov.norm + values.abs())


def _combined(krylov: Krylov, weights: Tensor, dtype: torch.dtype) -> Tensor:
    """One combination ``(width,)`` of rows; no row is read after the last with a weight."""
    used = int(weights.nonzero().max()) + 1 if bool(weights.any()) else 1
    return krylov.rows.combine(weights[:used, None], dtype)[0]


def _spot_check(solver: Solver, ritz: Ritz, k: int) -> None:
    """One product more, against what the decomposition says of it.

    Without a certificate it is that of a random mixture of the pairs, which shows drift since the
    products were made, and any loss that rounding does not explain: the difference is a random
    mixture of the pairs' own losses, and rarely shorter than any of them. With one it is that of
    the oldest row, to which a right operator gives the same answer as before. One that was copied
    when it was made, a matrix or a curvature of a model, is not asked again.
    """
    products, krylov = solver.products, solver.krylov
    m, size = krylov.multiplied, krylov.size
    if products.frozen or m == 0 or products.spent >= solver.request.max_products:
        return
    if solver.request.certify.copies:
        weights = torch.eye(m, 1, dtype=torch.float64).flatten()
    else:
        generator = torch.Generator().manual_seed(solver.request.seed + 7)
        weights = ritz.mixing[:, :k] @ torch.randn(k, generator=generator, dtype=torch.float64)
    mixture = _combined(krylov, weights, products.dtype)
    image = torch.empty_like(mixture)
    products.into(mixture, image)
    del mixture
    # After the product: the operator has long vectors of its own meanwhile.
    expected = _combined(krylov, krylov.coupling[:size, :m] @ weights, torch.float64)
    for held, share in zip(krylov.aside.rows, krylov.aside.coupling[:, :m] @ weights, strict=True):
        expected.add_(held, alpha=float(share))
    known = float(products.space.norm(expected))
    difference = float(products.space.norm(expected.sub_(image)))
    del expected, image
    length = float(weights.norm())
    if solver.request.certify.copies:
        # The operator may leave little of the oldest row, and rounds what it leaves: a change is a
        # share of that.
        if known <= 10.0 * krylov.breakdown(krylov.norm):
            return
        rounded = solver.bounds.floor if krylov.restarts else 8.0 * products.eps * known
        difference = max(0.0, difference - rounded) * krylov.norm / known
    norm = max(krylov.norm, products.size)
    allowed = solver.limit * norm * length
    if not difference <= allowed:
        # What the basis has not shown may still be rounding: measure it.
        mixture = _combined(krylov, weights / length, products.dtype)
        parts = torch.stack([mixture, krylov.rows.row(0)])
        change = rounding(products, parts, solver.limit * norm)
        krylov.rounding = max(krylov.rounding, float(products.space.norm(change).max()))
        allowed = max(allowed, RAGGED * krylov.rounding * length)
    if not difference <= allowed:
        raise OperatorError(
            f"a product made after the solve differs by {difference / length / norm:.1e} of "
            "the operator's norm from what the products made during it say: it has changed "
            "meanwhile (parameters updated, a reshuffling loader), or it is not linear"
        )
    krylov.lost = max(krylov.lost, difference)
