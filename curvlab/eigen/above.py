"""All eigenvalues beyond a threshold, however many there are: such as those above ``2 / lr``."""

import math
from dataclasses import replace
from typing import Literal

from curvlab.checks import seeded, shown, whole
from curvlab.eigen.growing import Growing
from curvlab.eigen.lanczos import lanczos
from curvlab.eigen.outcome import Outcome
from curvlab.eigen.products import Products
from curvlab.eigen.request import check_choice
from curvlab.eigen.result import Eigenpairs
from curvlab.eigen.source import Source, as_operator

FIRST = 8  # pairs of the first attempt; each later one has twice as many
SMALL = 64  # up to this size the whole matrix is cheaper

Side = Literal["LA", "SA", "LM"]


def eigenpairs_above(
    operator: Source,
    threshold: float,
    *,
    which: Side = "LA",
    tol: float = 1e-3,
    largest: int = 1000,
    seed: int = 0,
    progress: bool | None = None,
) -> Eigenpairs:
    """Every eigenpair whose value lies beyond ``threshold``, copies included.

    The search goes on until the last pair found lies on the other side, and is then certified: the
    result is ``complete`` as that of :func:`curvlab.lanczos` is. A value that is nearer to the
    threshold than its residual may truly lie on the other side.

    Args:
        operator: As for :func:`curvlab.lanczos`.
        threshold: With ``2 / lr`` of gradient descent: the directions in which it is unstable.
        which: ``"LA"`` values above the threshold, ``"SA"`` below it, ``"LM"`` magnitudes above it.
        tol: Relative residual of the pairs.
        largest: Most pairs to compute; if there are more, an error says so.
        seed: Of the random vectors.
        progress: As for :func:`curvlab.lanczos`.

    Returns:
        The pairs in the order of ``which``; there may be none.

    Raises:
        NotConvergedError: If pairs do not converge.
        Interrupted: On Ctrl-C, with the pairs found so far.
    """
    check_choice("which", which, Side)
    [largest], seed = whole(largest=largest), seeded(seed)
    shown(progress)
    if not math.isfinite(threshold) or (which == "LM" and threshold < 0.0):
        raise ValueError(f"threshold= is a finite number (at least 0 with 'LM'); got {threshold}")
    products = Products(as_operator(operator), None, near_one=True)
    n = products.n
    if n <= SMALL and not products.space.sharded:
        pairs = lanczos(operator, n, which=which, tol=tol, seed=seed, dense=True, progress=False)
        found = pairs.head(_beyond(pairs, threshold, which))
        if not bool(found.converged.all()):
            return found
        # all values are known: what is uncertain on the other side is nobody's concern
        return replace(
            found, complete=True, doubt=0.0, outcome=Outcome.CONVERGED, reason="converged"
        )
    certificate = products.probe(seed)
    growing = Growing(products, certificate, which=which, tol=tol, seed=seed, progress=progress)
    k, certify = min(FIRST, n, largest), False
    outer = which == "LM" or (threshold > 0.0) == (which == "LA")
    while True:
        pairs = growing.pairs(k, certify=certify)
        if not bool(pairs.converged.all()) and growing.relative_to == "value" and outer:
            # Precision may not do for values far within. They need not be known to their own size:
            # what allows for the threshold's is no wider for those beyond it.
            growing.relative_to = "norm"
            growing.tol = tol * min(1.0, abs(threshold) / pairs.norm)
            continue
        pairs.require_converged()
        count = _beyond(pairs, threshold, which)
        if count < len(pairs) or len(pairs) == n:
            if certify:
                found = replace(pairs.head(count), matvecs=products.count)
                return replace(found, tol=tol, relative_to="value") if outer else found
            # Of all attempts only the last has to be complete, and it no further than to the first
            # value on the other side: what is deep in the bulk is hard to certify.
            k, certify = min(n, count + 1), True
        elif k == largest:
            raise ValueError(
                f"{count} eigenvalues or more lie beyond {threshold:g}: raise largest=, or "
                "choose a threshold further out (Density.count_above estimates how many there are)"
            )
        else:
            k, certify = min(n, largest, 2 * k), False


def _beyond(pairs: Eigenpairs, threshold: float, which: str) -> int:
    """How many of the pairs, the first of them in their order, lie beyond."""
    values = pairs.values
    if which == "LM":
        return int((values.abs() > threshold).sum())
    return int(((values > threshold) if which == "LA" else (values < threshold)).sum())
