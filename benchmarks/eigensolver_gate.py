"""Whether a solver is right: the values that it should have found, and true residuals."""

import torch
from torch import Tensor

from benchmarks.eigensolver_contenders import Answer, Diagonal, Problem, Threads, scipy_solver
from curvlab.eigen import lanczos
from curvlab.probe import LinearOperator

DENSE = 4_000  # parameters up to which the wanted values come from the dense matrix
ALONE = Threads(2, 1)  # two pools of threads would spin against each other


def wanted(found: Problem, k: int, tol: float) -> Tensor:
    """The k values of largest magnitude ``(k,)``, by the surest way there is; prints which.

    A prescribed spectrum is known. Up to ``DENSE`` parameters the dense matrix is decomposed in
    float64. Above that two solvers that share nothing but the product, ours certified and ARPACK,
    go far below the tolerance and must agree.
    """
    operator = found.operator
    if isinstance(operator, Diagonal):
        values, way = operator.values.double(), "the prescribed spectrum"
    elif operator.n <= DENSE:
        columns = operator @ torch.eye(operator.n, dtype=operator.dtype)
        values = torch.linalg.eigvalsh(0.5 * (columns + columns.T).double())
        way = "the dense matrix"
    else:
        pairs = lanczos(operator, k, tol=tol / 30, progress=False)
        pairs.require_converged()
        with ALONE.pinned():
            other = scipy_solver(lambda v: operator @ v, operator.n, k)(tol / 30)[0]
        values, way = pairs.values.double(), "lanczos and ARPACK at a 30th of tol, which agree"
        apart = float((other.abs().sort().values - values.abs().sort().values).abs().max())
        if not apart <= tol * float(values.abs().max()) / 30:
            raise RuntimeError(
                f"{found.name}: lanczos and ARPACK differ by {apart:.1e} in the wanted values; "
                "one of them is wrong, so nothing can be judged here"
            )
    print(f"{found.name}: the wanted values are from {way}")
    return values[values.abs().argsort(descending=True)[:k]]


def residuals(operator: LinearOperator, values: Tensor, vectors: Tensor) -> Tensor:
    """True ``||A v - value v|| / |value|`` of unit vectors ``(k, n)``, float64, by products."""
    found = []
    for value, vector in zip(values.tolist(), vectors, strict=True):
        unit = vector.to(operator.dtype)
        image = (operator @ unit).double()
        found.append(float((image - value * unit.double()).norm() / abs(value)))
    return torch.tensor(found, dtype=torch.float64)


def judged(
    operator: LinearOperator, answer: Answer, truth: Tensor, tol: float
) -> tuple[float, int]:
    """Worst residual of the pairs, and how many of the wanted ones are not among them."""
    values, vectors, _ = answer
    found = residuals(operator, values, vectors)
    worst = float(found.max()) if bool(found.isfinite().all()) else float("inf")
    size = truth.abs()
    got = values.abs().sort(descending=True).values
    missing = ~((got - size).abs() <= tol * size + 1e-6 * size[0])
    return worst, int(missing.sum())
