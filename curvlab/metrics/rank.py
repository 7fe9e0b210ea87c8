"""Rank and effective rank of a Hessian, from a dense spectrum or from its outer part alone.

The paper plots "effective rank for various lambda" without saying what lambda is compared with:
here an eigenvalue counts where its magnitude exceeds ``threshold`` itself, or ``threshold`` times
the largest magnitude with ``relative=True``. Report which.

Three ways: all eigenvalues of a small matrix; the outer ones, enumerated with certainty
(:func:`spectrum_above`), while there are some hundreds; and below them an estimate with an error
bar, by quadrature outside their span (:func:`counts_above`), where it resolves what quadrature of
the whole spectrum cannot.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from curvlab.checks import inside, whole
from curvlab.eigen import Estimate, lanczos, spectral_density
from curvlab.operators.subspace import Projected
from curvlab.probe import LinearOperator


@dataclass(frozen=True, slots=True, eq=False)
class Spectrum:
    """Eigenvalues from the largest magnitude down, and whether they are all above a threshold.

    Attributes:
        values: ``(k,)``, float64, in order of falling magnitude.
        residuals: ``(k,)``: each value is within its residual of a true one.
        vectors: ``(k, n)``: their orthonormal eigenvectors.
        reached: Whether the threshold was passed. If not, counts are lower bounds.
        complete: Whether no eigenvalue is missing between these (certified by the solver).
        products: Operator products spent.
    """

    values: Tensor
    residuals: Tensor
    vectors: Tensor
    reached: bool
    complete: bool
    products: int


def effective_rank(values: Tensor, threshold: float, *, relative: bool = False) -> int:
    """How many of ``values`` ``(k,)`` exceed the threshold in magnitude.

    Args:
        values: Eigenvalues; at least all those above the threshold (:func:`spectrum_above`).
        threshold: lambda.
        relative: Whether it multiplies the largest magnitude.
    """
    inside("[0, inf)", threshold=threshold)
    magnitudes = values.detach().abs()
    if relative and len(magnitudes):
        threshold = threshold * float(magnitudes.max())
    return int((magnitudes > threshold).sum())


def spectrum_above(
    operator: LinearOperator,
    threshold: float,
    *,
    relative: bool = False,
    first: int = 32,
    most: int = 512,
    tol: float = 1e-3,
    seed: int = 0,
) -> Spectrum:
    """All eigenvalues of magnitude above ``threshold``, by Lanczos in growing batches.

    Each batch deflates the vectors found before it, so nothing is computed twice; they take
    ``k * n`` numbers.

    Args:
        operator: Symmetric, e.g. the average Hessian of past tasks.
        threshold: Where to stop.
        relative: Whether it multiplies the largest magnitude.
        first: Pairs in the first batch; each later one doubles it.
        most: Pairs after which to give up; the result then says ``reached=False``, and counts are
            lower bounds (:func:`counts_above` estimates the rest).
        tol: Residuals, relative to each value.
    """
    inside("[0, inf)", threshold=threshold)
    whole(first=first, most=most)
    values, residuals, vectors = torch.zeros(0).double(), torch.zeros(0).double(), None
    products, complete, batch = 0, True, first
    while True:
        room = min(most, operator.n) - len(values)
        pairs = lanczos(
            operator, min(batch, room), tol=tol, deflate=vectors, seed=seed, progress=False
        )
        products += pairs.matvecs
        complete = complete and pairs.complete
        values = torch.cat([values, pairs.values.cpu()])
        residuals = torch.cat([residuals, pairs.residuals.cpu()])
        vectors = pairs.vectors if vectors is None else torch.cat([vectors, pairs.vectors])
        limit = threshold * float(values.abs().max()) if relative else threshold
        smallest = float(pairs.values.abs().min())
        reached = smallest <= max(limit, pairs.floor) or len(values) >= operator.n
        stuck = not bool(pairs.converged.all())
        if reached or stuck or len(values) >= most:
            break
        batch *= 2
    order = values.abs().argsort(descending=True)
    return Spectrum(
        values[order], residuals[order], vectors[order.to(vectors.device)], reached,
        complete and not stuck, products,
    )  # fmt: skip


def counts_above(
    operator: LinearOperator,
    outer: Spectrum,
    thresholds: Sequence[float],
    *,
    probes: int = 4,
    steps: int = 80,
    seed: int = 0,
) -> list[Estimate]:
    """How many eigenvalues exceed each threshold in magnitude.

    Counted where ``outer`` reaches; below it, its number and an estimate of the rest by quadrature
    outside its span. Without the large eigenvalues all steps resolve the small ones.

    Args:
        operator: That of ``outer``.
        outer: Its outer spectrum.
        thresholds: Absolute.
        probes: Random vectors.
        steps: Products with each.
        seed: The seed of the vectors.
    """
    least = float(outer.values.abs().min()) if len(outer.values) else float("inf")
    inner = None
    found = []
    for threshold in thresholds:
        counted = effective_rank(outer.values, threshold)
        if threshold >= least or len(outer.values) == operator.n:
            found.append(Estimate(counted, 0.0, 0))
            continue
        if inner is None:
            rest = Projected(operator, outer.vectors)
            inner = spectral_density(rest, probes=probes, steps=steps, seed=seed)
        below = inner.count_above(threshold)
        found.append(Estimate(counted + below.value, below.error, below.samples))
    return found
