"""What a solve was asked for, checked and with defaults filled in."""

from dataclasses import dataclass

from curvlab.eigen.result import RelativeTo


@dataclass(frozen=True, slots=True)
class Options:
    """See :func:`curvlab.eigen.lanczos` for what is not explained here.

    Attributes:
        basis: Rows up to which the search goes before it compresses.
        reserve: Rows beyond those, for the chain that looks for hidden copies.
        block: Rows multiplied together.
        certify: Whether to look for hidden copies.
        stride: Steps between two looks at the coefficients.
    """

    k: int
    which: str
    tol: float
    relative_to: RelativeTo
    seed: int
    max_products: int
    basis: int
    reserve: int
    block: int
    certify: bool
    doubt: float
    certify_products: int | None
    limit: float
    stride: int
