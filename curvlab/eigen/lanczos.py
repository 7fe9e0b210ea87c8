"""Lanczos with thick restart: the fewest products for the outer eigenpairs, and proof of them.

Guarantees, for an operator that is symmetric and linear to rounding:

- The vectors are orthonormal to rounding: every new row is orthogonalised twice against all
  others, with coefficients summed in float64. There are no ghost copies.
- A reported residual is not below the true one. It comes from ``A V = V H + R C`` with every
  coefficient measured, plus an allowance for rounding and for the operator error that the solve
  has seen; ``verify="explicit"`` spends one product per pair to compute each from its vector.
- With ``multiplicity="certify"`` (the default) a result with ``complete=True`` misses an
  eigenvalue, copies included, with probability at most ``doubt``; see :mod:`curvlab.eigen.hidden`
  for how, and for the one case that this does not cover. It costs about a dozen products. With
  ``"skip"`` the result says that it is not complete.
- The same arguments and the same operator give the same bits; the global generators are not used.

An operator that fails its probe, or whose products contradict each other later, raises
:class:`~curvlab.probe.OperatorError`. A tolerance that the precision does not allow, or a budget
that runs out, ends with the pairs found so far, flagged, and a reason.
"""

from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from curvlab.eigen.arguments import (
    basis_rows,
    certify_operator,
    check_choice,
    check_numbers,
    check_patience,
    check_start,
    error_limit,
    product_budget,
    reserve_rows,
)
from curvlab.eigen.dense import dense_is_cheaper, solve_dense
from curvlab.eigen.options import Options
from curvlab.eigen.products import Deflation, Products
from curvlab.eigen.result import Eigenpairs, RelativeTo
from curvlab.eigen.run import Keeping, run
from curvlab.eigen.selection import Which
from curvlab.eigen.source import Source, as_operator

Multiplicity = Literal["certify", "skip"]
Verify = Literal["recurrence", "explicit"]


def lanczos(
    operator: Source,
    k: int,
    *,
    which: Which = "LM",
    tol: float = 1e-3,
    relative_to: RelativeTo = "value",
    deflate: Deflation | Tensor | None = None,
    v0: Tensor | None = None,
    seed: int = 0,
    max_products: int | None = None,
    basis: int | None = None,
    memory: int | None = None,
    multiplicity: Multiplicity = "certify",
    doubt: float = 1e-3,
    certify_products: int | None = None,
    verify: Verify = "recurrence",
    dense: bool | None = None,
    limit: float | None = None,
    checkpoint: str | Path | None = None,
    checkpoint_every: int = 50,
    progress: bool | None = None,
    stride: int | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Eigenpairs:
    """The ``k`` outermost eigenpairs of a symmetric operator.

    Args:
        operator: A curvlab operator, a symmetric tensor ``(n, n)``, ``(matvec, n)`` or a SciPy
            ``LinearOperator``.
        k: How many pairs, ``1 <= k <= n`` (less the deflated directions).
        which: ``"LM"`` largest magnitude, ``"LA"`` largest, ``"SA"`` smallest, ``"both"`` half from
            each end.
        tol: Residual allowed, relative to ``relative_to``. Zero asks for what the precision gives.
        relative_to: Each pair's own ``"value"``, or the ``"norm"`` of the operator.
        deflate: Directions to leave out: a curvlab ``Basis`` or orthonormal rows ``(q, n)``. The
            pairs are those of ``P A P``.
        v0: Start from a vector ``(n,)`` or from rows ``(b, n)``, such as earlier eigenvectors.
        seed: Of the random vectors.
        max_products: Products after which the solve ends, certification included (default
            ``max(1000, 50 k)``).
        basis: Rows of the working basis (default about ``3 k + 12``); a full basis is compressed.
        memory: Bytes that the basis may take, in place of ``basis``.
        multiplicity: ``"certify"`` looks for hidden copies until they are excluded; ``"skip"``
            does not.
        doubt: Probability with which certification may be wrong.
        certify_products: Most products for one attempt to certify (default half of those used to
            converge, at least 24); after them the result says that it is not complete.
        verify: Where residuals come from, see the header; ``"explicit"`` costs ``k`` products.
        dense: Force or forbid the eigendecomposition of the whole matrix; by default it is used
            where it is cheaper, and ``method`` says so.
        limit: Largest relative error accepted of the operator; by default what rounding explains.
        checkpoint: File for the state; if it exists, the solve resumes from it.
        checkpoint_every: Products between two checkpoints.
        progress: Show a line on the terminal; by default when there is one.
        stride: Steps between two looks at the coefficients (default 1, on a GPU 4): a larger one
            saves transfers and may waste products.
        dtype: Of the vectors given to ``matvec`` (only with ``(matvec, n)``).
        device: Of the same.

    Returns:
        Fewer than ``k`` pairs only if the solve ended before there were ``k``. Ctrl-C ends it with
        the pairs found so far (and a checkpoint, if there is a file for it).
    """
    products = Products(as_operator(operator, dtype=dtype, device=device), deflate)
    check_numbers(products, k, which=which, tol=tol, relative_to=relative_to, seed=seed)
    check_patience(doubt, certify_products, checkpoint_every, stride)
    start = check_start(v0, products)
    keeping = Keeping(None if checkpoint is None else Path(checkpoint), checkpoint_every, progress)
    certificate = certify_operator(products, limit, seed, keeping.resumes(products.space))
    accepted = error_limit(products, limit, certificate)
    if dense and products.space.sharded:
        raise ValueError("dense=True needs whole vectors; this operator's are in shards")
    if dense or (dense is None and start is None and dense_is_cheaper(products, k)):
        return solve_dense(
            products,
            k,
            which=which,
            tol=tol,
            relative_to=relative_to,
            limit=accepted,
            certificate=certificate,
        )
    certify = check_choice("multiplicity", multiplicity, Multiplicity) == "certify"
    options = Options(
        k=k,
        which=which,
        tol=tol,
        relative_to=relative_to,
        seed=seed,
        max_products=product_budget(max_products, k),
        basis=basis_rows(products, k, 1, basis, memory, certify),
        reserve=reserve_rows(products, memory, certify),
        block=1,
        certify=certify,
        doubt=doubt,
        certify_products=certify_products,
        limit=accepted,
        stride=(1 if products.device.type == "cpu" else 4) if stride is None else stride,
    )
    return run(
        products,
        options,
        start=start,
        explicit=check_choice("verify", verify, Verify) == "explicit",
        certificate=certificate,
        keeping=keeping,
        method="lanczos",
    )
