"""Block Lanczos: several vectors multiplied at once, for operators whose blocks are cheap.

The space is that of randomized block Krylov iteration; started from ``block`` random rows it sees
up to ``block`` copies of an eigenvalue at once. Counted in products it needs more than
:func:`~curvlab.eigen.lanczos`, so it pays only where a block costs much less than its rows one by
one. Everything else, restart, residuals, certification and what they promise, is the same code.

LOBPCG is not here: on trained networks it took three to four times the products of Lanczos for the
same residual.
"""

from pathlib import Path

from torch import Tensor

from curvlab.checks import integers, shown
from curvlab.eigen.products import Deflation, Products
from curvlab.eigen.request import Certify, Checkpoint, as_checkpoint, check_start, request
from curvlab.eigen.result import Eigenpairs, RelativeTo
from curvlab.eigen.room import Room
from curvlab.eigen.run import run
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
    certify: Certify | bool = True,
    room: Room | None = None,
    checkpoint: Checkpoint | str | Path | None = None,
    progress: bool | None = None,
) -> Eigenpairs:
    """The ``k`` outermost eigenpairs, from blocks of ``block`` vectors.

    Args:
        block: Rows multiplied together, at least 2; the other arguments are those of
            :func:`~curvlab.eigen.lanczos`.
    """
    shown(progress)
    products = Products(as_operator(operator), deflate, near_one=True)
    [block] = integers(block=block)
    if not 2 <= block <= products.room:
        raise ValueError(
            f"block= is a number of vectors between 2 and n = {products.room}; got {block!r}. "
            "For one vector at a time there is lanczos"
        )
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
        block=block,
    )
    method = f"block lanczos, {block} vectors at a time"
    return run(products, asked, vectors=start, keeping=keeping, progress=progress, method=method)
