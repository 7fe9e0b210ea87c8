"""Lanczos with thick restart: the fewest products for the outer eigenpairs, and proof of them.

Guarantees, for an operator that is symmetric and linear to rounding:

- The vectors are orthonormal to rounding: every new row is orthogonalised twice against all
  others, with coefficients summed in float64. There are no ghost copies.
- A reported residual is not below the true one. It comes from ``A V = V H + R C`` with every
  coefficient measured, plus an allowance for rounding and for the operator error that the solve
  has seen; ``Certify(explicit=True)`` spends one product per pair to compute each from its vector.
- With ``certify=True`` (the default) a result with ``complete=True`` misses an eigenvalue, copies
  and those just emerging from the basis included, with probability at most ``Certify.doubt``; see
  :mod:`curvlab.eigen.hidden` for how. It costs about a dozen products. With ``False`` the result
  says that it is not complete.
- The same arguments and the same operator give the same bits; the global generators are not used.

An operator that fails its probe, or whose products contradict each other later by more than
rounding explains, raises :class:`~curvlab.probe.OperatorError`. A tolerance that the precision does
not allow, or a budget that runs out, ends with the pairs found so far, flagged, and a reason.
"""

from pathlib import Path

from torch import Tensor

from curvlab.checks import flag, shown
from curvlab.eigen.dense import dense_is_cheaper, dense_products, solve_dense
from curvlab.eigen.products import Deflation, Products
from curvlab.eigen.request import Certify, Checkpoint, as_checkpoint, check_start, request
from curvlab.eigen.result import Eigenpairs, RelativeTo
from curvlab.eigen.room import Room
from curvlab.eigen.run import run
from curvlab.eigen.selection import Which
from curvlab.eigen.source import Source, as_operator


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
    certify: Certify | bool = True,
    room: Room | None = None,
    dense: bool | None = None,
    checkpoint: Checkpoint | str | Path | None = None,
    progress: bool | None = None,
) -> Eigenpairs:
    """The ``k`` outermost eigenpairs of a symmetric operator.

    Args:
        operator: A curvlab operator, a symmetric tensor ``(n, n)``, ``(matvec, n)`` with float32
            vectors on the CPU, or a SciPy ``LinearOperator``. For another dtype or device there is
            :class:`curvlab.operators.FromFunction`.
        k: How many pairs, ``1 <= k <= n`` (less the deflated directions).
        which: ``"LM"`` largest magnitude, ``"LA"`` largest, ``"SA"`` smallest, ``"both"`` half from
            each end.
        tol: Residual allowed, relative to ``relative_to``. Zero asks for what the precision gives.
        relative_to: Each pair's own ``"value"``, or the ``"norm"`` of the operator.
        deflate: Directions to leave out: a curvlab ``Basis`` or orthonormal rows ``(q, n)``. The
            pairs are those of ``P A P``.
        v0: Start from a vector ``(n,)`` or from rows ``(b, n)``, such as earlier eigenvectors: from
            their sum, or where they nearly are eigenvectors still, from all of them.
        seed: Of the random vectors.
        max_products: Products after which the solve ends, all checks included (default
            ``max(1000, 50 k)``, and not more than ``n``). The probe of an operator that has not
            been probed is made in any case, four to six of them. Only where products contradict
            each other those that tell whether it is rounding come on top.
        certify: Whether to look for hidden copies until they are excluded; ``Certify(...)`` says
            with what doubt and for how many products.
        room: ``Room(rows=, bytes=, file=)``: what the working rows may take, and where they are.
        dense: Force or forbid the eigendecomposition of the whole matrix; by default it is used
            where it is cheaper and ``max_products`` allows its ``n``, and ``method`` says so.
        checkpoint: File for the state, or ``Checkpoint(file, every=)``; if it exists, the solve
            resumes from it.
        progress: Show a line on the terminal; by default when there is one.

    Returns:
        Fewer than ``k`` pairs only if the solve ended before there were ``k``.

    Raises:
        Interrupted: A ``KeyboardInterrupt``: Ctrl-C or a termination signal ended the solve between
            two steps. Its ``partial`` holds the pairs found so far; a checkpoint is saved first.
    """
    shown(progress)
    products = Products(as_operator(operator), deflate, near_one=True)
    keeping = as_checkpoint(checkpoint)
    start = check_start(v0, products)
    asked = request(
        products,
        k,
        which=which,
        tol=tol,
        relative_to=relative_to,
        seed=seed,
        max_products=max_products,
        certify=certify,
        room=room,
    )
    if dense is not None:
        flag(dense=dense)
    if dense and products.space.sharded:
        raise ValueError("dense=True needs whole vectors; this operator's are in shards")
    allowed = max_products is None or dense_products(products) <= max_products
    if dense and not allowed:
        raise ValueError(
            f"dense=True takes up to {dense_products(products)} products; max_products= allows "
            f"{max_products}"
        )
    if dense or (dense is None and start is None and allowed and dense_is_cheaper(products, k)):
        return solve_dense(products, asked)
    return run(products, asked, vectors=start, keeping=keeping, progress=progress, method="lanczos")
