"""Whether a solver is right: the values that it should have found, and true residuals."""

from importlib import util

import torch
from torch import Tensor

from curvlab.bench.problem import Answer, Problem
from curvlab.bench.solvers import arpack
from curvlab.bench.timing import Threads
from curvlab.eigen import lanczos
from curvlab.probe import LinearOperator

DENSE = 4_000  # parameters up to which the wanted values come from the dense matrix
SURER = 30  # the wanted values come from solves at a 30th of the tolerance


def wanted(found: Problem, k: int, tol: float) -> tuple[Tensor, str]:
    """The k values of largest magnitude ``(k,)`` by the surest way there is, and which that is.

    A prescribed spectrum is known. Up to ``DENSE`` parameters the dense matrix is decomposed in
    float64. Above that two solvers that share nothing but the product, ours certified and ARPACK,
    go far below the tolerance and must agree.
    """
    operator = found.operator
    if found.spectrum is not None:
        values, way = found.spectrum.double(), "the prescribed spectrum"
    elif operator.n <= DENSE:
        eye = torch.eye(operator.n, dtype=operator.dtype, device=operator.device)
        columns = (operator @ eye).double()
        values, way = torch.linalg.eigvalsh(0.5 * (columns + columns.T)), "the dense matrix"
    else:
        values, way = _by_two_solvers(found, k, tol)
    values = values.cpu()
    return values[values.abs().argsort(descending=True)[:k]], way


def _by_two_solvers(found: Problem, k: int, tol: float) -> tuple[Tensor, str]:
    operator = found.operator
    pairs = lanczos(operator, k, tol=tol / SURER, progress=False)
    way = f"at a {SURER}th of the tolerance"
    if not bool(pairs.converged.all()):
        # Values are as near as residuals are short. Where precision forbids more, half of the
        # tolerance tells whether one is missing.
        if not bool((pairs.residuals <= 0.5 * tol * pairs.values.abs()).all()):
            raise ValueError(
                f"the wanted values need a solve at a {SURER}th of the tolerance, "
                f"{tol / SURER:.1e}, which ended: {pairs.reason}. Take a larger --tol, or "
                "--dtype float64"
            )
        way = "as near as the operator's precision allows"
    values = pairs.values.double()
    if not util.find_spec("scipy"):
        return values, f"lanczos {way} alone: SciPy is not installed"
    with Threads(torch.get_num_threads(), 1).pinned():  # two pools of threads would spin
        other = arpack(operator, k, tol / SURER)[0]
    apart = float((other.abs().sort().values - values.cpu().abs().sort().values).abs().max())
    if not apart <= tol * float(values.abs().max()) / SURER:
        raise RuntimeError(
            f"{found.name}: lanczos and ARPACK differ by {apart:.1e} in the wanted values; "
            "one of them is wrong, so nothing can be judged here. Try another --k: this one may "
            "cut a cluster of eigenvalues in two"
        )
    return values, f"lanczos and ARPACK {way}, which agree"


def residuals(operator: LinearOperator, values: Tensor, vectors: Tensor) -> Tensor:
    """True ``||A v - value v|| / |value|`` of unit vectors ``(k, n)``, float64, by products."""
    found = []
    for value, vector in zip(values.tolist(), vectors, strict=True):
        unit = vector.to(operator.device, operator.dtype)
        unit = unit / unit.norm()  # a short vector must not pass for an accurate one
        image = (operator @ unit).double()
        found.append(float((image - value * unit.double()).norm() / abs(value)))
    return torch.tensor(found, dtype=torch.float64)


def judged(
    operator: LinearOperator, answer: Answer, truth: Tensor, tol: float
) -> tuple[float, int]:
    """Worst residual of the pairs, and how many of the wanted ones are not among them."""
    values, vectors, _ = answer
    if not (isinstance(values, Tensor) and isinstance(vectors, Tensor)):
        kinds = f"{type(values).__name__} and {type(vectors).__name__}"
        raise TypeError(f"a solver returns two tensors, values and vectors; got {kinds}")
    values, vectors = values.detach(), vectors.detach()
    if values.shape != truth.shape or vectors.shape != (len(truth), operator.n):
        raise ValueError(
            f"a solver returns values ({len(truth)},) and vectors ({len(truth)}, {operator.n}); "
            f"got {tuple(values.shape)} and {tuple(vectors.shape)}"
        )
    if not bool(values.isfinite().all() and vectors.isfinite().all() and vectors.any(1).all()):
        raise ValueError("the solver returned NaN, infinity or a vector of zeros")
    found = residuals(operator, values, vectors)
    worst = float(found.max()) if bool(found.isfinite().all()) else float("inf")
    size = truth.abs()
    got = values.double().cpu().abs().sort(descending=True).values
    missing = ~((got - size).abs() <= tol * size + 1e-6 * size[0])
    return worst, max(int(missing.sum()), _copies(vectors))


def _copies(vectors: Tensor) -> int:
    """How many vectors repeat others: one vector twice is not a double eigenvalue."""
    unit = torch.nn.functional.normalize(vectors.double(), dim=1)
    # The Gram matrix of j copies of one vector has the singular value j once and 0 the other times;
    # that of orthogonal vectors has ones.
    return int((torch.linalg.svdvals(unit @ unit.T) < 0.25).sum())
