"""Do products contradict each other by more than rounding? Asked only where they seem to.

Gram-Schmidt measures every coefficient twice, as ``v_i'A v_j`` and as ``v_j'A v_i``. Where the two
differ by more than the usual rounding, the operator is wrong, or it is right and inaccurate: that
of a network that fits its data loses digits to cancellation. :func:`require_rounding` tells them
apart with products of vectors from the basis itself, as :mod:`curvlab.probe` does with random ones.
"""

import torch
from torch import Tensor

from curvlab.eigen.krylov import Krylov
from curvlab.eigen.products import Products
from curvlab.probe import RAGGED, TWICE, OperatorError

MIXED = 0.7  # share of the next vector in a mixture


def require_rounding(products: Products, krylov: Krylov, limit: float, seed: int) -> None:
    """Measure rounding if the basis shows an asymmetry above ``limit``; raise if that is more.

    Args:
        limit: Relative error of a product that needs no explanation.
        seed: Of the mixture of rows that is multiplied.
    """

    def size() -> float:
        return max(krylov.norm, products.size)

    def explained() -> bool:
        return krylov.error <= limit * size() or krylov.asymmetry <= RAGGED * krylov.ragged

    if explained():
        return
    # A start that the operator takes to zero shows nothing of its norm, and rounding is a share of
    # that: a random vector does.
    krylov.norm = max(krylov.norm, _random_length(products, seed))
    if explained():
        return
    generator = torch.Generator().manual_seed(seed + 11)
    m = krylov.multiplied
    values, columns = torch.linalg.eigh(krylov.projected())
    # The longest product, and mixtures of all rows, as the asymmetry is one.
    mixing = torch.randn(m, 3, generator=generator, dtype=torch.float64)
    mixing[:, 0] = columns[:, values.abs().argmax()]
    vectors = krylov.rows.combine(mixing / mixing.norm(dim=0))
    change = rounding(products, vectors, limit * size())
    along = krylov.rows.coefficients(change).cpu().square()
    krylov.rounding = max(krylov.rounding, float(products.space.norm(change).max()))
    krylov.ragged = max(krylov.ragged, float(along.mean(1).max().sqrt()))
    if krylov.asymmetry > RAGGED * krylov.ragged:
        raise OperatorError(
            f"products made during the solve disagree by {krylov.error / size():.1e} of "
            f"the operator's norm (limit {limit:.1e}), and rounding explains "
            f"{krylov.rounding / size():.1e}: it is not symmetric, or it changes between "
            "products (parameters updated, dropout, a reshuffling loader)"
        )


def _random_length(products: Products, seed: int) -> float:
    """``||P A z||`` for a random unit vector ``z`` in the range of ``P``."""
    generator = torch.Generator().manual_seed(seed + 13)
    z = products.space.normal(generator, products.dtype).to(products.device)
    products.project_out_(z)
    image = torch.empty_like(z)
    products.into(z.div_(products.space.norm(z)), image)
    return float(products.space.norm(image))


def rounding(products: Products, vectors: Tensor, limit: float) -> Tensor:
    """How far products with mixtures of ``vectors`` ``(b, width)`` are from mixtures of products.

    Args:
        limit: By which products may differ that are rounded in the same way.
    """
    once, mixed, twice = (torch.zeros_like(rows) for rows in (vectors, vectors, vectors[:1]))
    products.into(vectors, once)
    products.into(vectors + MIXED * vectors.roll(1, 0), mixed)
    products.into(vectors[:1] * TWICE, twice)
    difference = float(products.space.norm(twice / TWICE - once[:1]).max())
    if not difference <= limit:
        raise OperatorError(
            f"products disagree: one with a vector and one with {TWICE:g} times it differ by "
            f"{difference:.1e} (limit {limit:.1e}). Usual causes: train-mode dropout, a loader "
            "that reshuffles or augments, changing parameters, a constant term"
        )
    return mixed.sub_(once).sub_(once.roll(1, 0), alpha=MIXED)
