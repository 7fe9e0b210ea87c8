"""Drift through later tasks: how much of what a basis protects is still worth protecting.

Eigenvectors are of the Hessian where they were computed. Training goes on elsewhere, and the old
task's Hessian there has other leading vectors.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from curvlab.eigen import lanczos
from curvlab.probe import LinearOperator
from curvlab.rows import Rows


@dataclass(frozen=True, slots=True, eq=False)
class Drift:
    """What :func:`subspace_drift` measured.

    Attributes:
        kept: The share of the old space that is still in the leading space: the mean squared cosine
            of the principal angles. 1 is all of it; k / n is what a random space would have.
        curvature: The sum of the curvatures along the old rows beside the largest sum that as many
            directions can have now. 1 where the old rows are as good as new ones.
        angles: The principal angles, radians, ascending ``(k,)``.
    """

    kept: float
    curvature: float
    angles: Tensor


def subspace_drift(
    protected: Rows, operator: LinearOperator, *, tol: float = 1e-3, seed: int = 0
) -> Drift:
    """Compare what is protected with the leading eigenvectors of the same loss's Hessian now.

    Args:
        protected: A basis of the old task's rows, k of them.
        operator: The old task's curvature at the present parameters.
        tol: The tolerance of the k eigenpairs that are computed.
        seed: The seed of their starting vector.
    """
    k = protected.size
    if not k:
        raise ValueError("the basis is empty: there is nothing that could drift")
    if operator.n != protected.n:
        raise ValueError(
            f"the basis covers {protected.n} parameters, the operator {operator.n}: pass the "
            "curvature of the same parameters"
        )
    pairs = lanczos(operator, k, tol=tol, which="LM", seed=seed, progress=False)
    pairs.require_converged()
    now = Rows.of(pairs.vectors, "lanczos", protected.n)
    angles = protected.principal_angles(now)
    # No k orthonormal directions have a larger sum than the k largest magnitudes (Ky Fan).
    rows = protected.rows().to(pairs.vectors)
    along = torch.stack([(row * (operator @ row)).sum() for row in rows])
    largest = float(pairs.values.abs().sum())
    share = float(along.double().abs().sum()) / largest if largest > 0.0 else float("nan")
    return Drift(float(angles.cos().square().mean()), share, angles)
