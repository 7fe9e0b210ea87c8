"""Block Lanczos: several vectors multiplied at once, for operators whose blocks are cheap.

The space is that of randomized block Krylov iteration; started from ``block`` random rows it sees
up to ``block`` copies of an eigenvalue at once. Counted in products it needs more than
:func:`~curvlab.eigen.lanczos`, so it pays only where a block costs much less than its rows one by
one. Everything else, restart, residuals, certification and what they promise, is the same code.

LOBPCG is not here: on trained networks it took three to four times the products of Lanczos for the
same residual.
"""

from pathlib import Path

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
from curvlab.eigen.lanczos import Multiplicity, Verify
from curvlab.eigen.options import Options
from curvlab.eigen.products import Deflation, Products
from curvlab.eigen.result import Eigenpairs, RelativeTo
from curvlab.eigen.run import Keeping, run
from curvlab.eigen.selection import Which
from curvlab.eigen.source import Source, as_operator


def block_lanczos(
    operator: Source,
    k: int,
    *,
    block: int = 4,
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
    verify: Verify = "recurrence",
    limit: float | None = None,
    checkpoint: str | Path | None = None,
    checkpoint_every: int = 50,
    progress: bool | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Eigenpairs:
    """The ``k`` outermost eigenpairs, from blocks of ``block`` vectors.

    Args:
        block: Rows multiplied together, at least 2; the other arguments are those of
            :func:`~curvlab.eigen.lanczos`.
    """
    products = Products(as_operator(operator, dtype=dtype, device=device), deflate)
    check_numbers(products, k, which=which, tol=tol, relative_to=relative_to, seed=seed)
    if isinstance(block, bool) or not isinstance(block, int) or not 2 <= block <= products.room:
        raise ValueError(
            f"block= is a number of vectors between 2 and n = {products.room}; got {block!r}. "
            "For one vector at a time there is lanczos"
        )
    check_patience(1e-3, None, checkpoint_every, None)
    start = check_start(v0, products)
    keeping = Keeping(None if checkpoint is None else Path(checkpoint), checkpoint_every, progress)
    certificate = certify_operator(products, limit, seed, keeping.resumes(products.space))
    certify = check_choice("multiplicity", multiplicity, Multiplicity) == "certify"
    options = Options(
        k=k,
        which=which,
        tol=tol,
        relative_to=relative_to,
        seed=seed,
        max_products=product_budget(max_products, k),
        basis=basis_rows(products, k, block, basis, memory, certify),
        reserve=reserve_rows(products, memory, certify) + block,
        block=block,
        certify=certify,
        doubt=1e-3,
        certify_products=None,
        limit=error_limit(products, limit, certificate),
        stride=1,
    )
    return run(
        products,
        options,
        start=start,
        explicit=check_choice("verify", verify, Verify) == "explicit",
        certificate=certificate,
        keeping=keeping,
        method=f"block lanczos, {block} vectors at a time",
    )
