"""The public edge of the solvers: every argument is checked here, once, with advice."""

import math
from typing import Any, get_args

import torch
from torch import Tensor

from curvlab.eigen.products import Products
from curvlab.eigen.result import RelativeTo
from curvlab.eigen.selection import check_which
from curvlab.probe import Certificate

LEAST_RESERVE = 8  # rows for a chain that looks for hidden copies, when memory is short
RESERVE = 32


def check_choice(name: str, value: str, choices: Any) -> str:
    """``value`` if it is one of a ``Literal``'s choices."""
    allowed = get_args(choices)
    if value not in allowed:
        raise ValueError(f"{name}= is one of {', '.join(map(repr, allowed))}; got {value!r}")
    return value


def check_numbers(
    products: Products, k: int, *, which: str, tol: float, relative_to: str, seed: int
) -> None:
    """Raise unless the request can be met in principle."""
    if isinstance(k, bool) or not isinstance(k, int):
        raise TypeError(f"k= is a whole number of pairs; got {type(k).__name__}")
    if not 1 <= k <= products.room:
        left = f"{products.n} - {products.n - products.room} deflated"
        raise ValueError(f"k= is between 1 and n = {left}; got {k}")
    check_which(which)
    if not 0.0 <= tol < 1.0:
        raise ValueError(f"tol= is a relative residual, 0 <= tol < 1; got {tol}")
    check_choice("relative_to", relative_to, RelativeTo)
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**40:
        raise ValueError(f"seed= is a whole number, 0 <= seed < 2**40; got {seed!r}")


def check_patience(
    doubt: float, certify_products: int | None, checkpoint_every: int, stride: int | None
) -> None:
    """Raise unless the numbers that steer a solve make sense."""
    if not 0.0 < doubt < 1.0:
        raise ValueError(f"doubt= is a probability, 0 < doubt < 1; got {doubt}")
    if certify_products is not None and certify_products < 1:
        raise ValueError(f"certify_products= is at least 1; got {certify_products}")
    if checkpoint_every < 1:
        raise ValueError(f"checkpoint_every= is at least 1; got {checkpoint_every}")
    if stride is not None and stride < 1:
        raise ValueError(f"stride= is at least 1; got {stride}")


def check_start(v0: Tensor | None, products: Products) -> Tensor | None:
    """Start vectors as rows ``(b, n)``, or ``None``."""
    if v0 is None:
        return None
    if not isinstance(v0, Tensor):
        raise TypeError(f"v0= is a tensor (n,) or (b, n); got {type(v0).__name__}")
    if v0.ndim not in (1, 2) or v0.shape[-1] != products.width:
        raise ValueError(
            f"v0= is (n,) or (b, n) with n = {products.width}; got {tuple(v0.shape)}. Vectors are "
            "rows"
        )
    if not v0.is_floating_point():
        raise TypeError(f"v0= is {v0.dtype}; it must be real floats")
    if v0.device != products.device:
        raise ValueError(f"v0= is on {v0.device}, the operator on {products.device}: move one")
    rows = v0.detach().reshape(-1, products.width)
    if not bool(torch.isfinite(rows).all()):
        raise ValueError("v0= holds NaN or infinity")
    return rows


def certify_operator(
    products: Products, limit: float | None, seed: int, resumes: bool
) -> Certificate | None:
    """The operator's certificate; a resumed solve takes that of its start from the file."""
    if limit is not None and not limit > 0.0:
        raise ValueError(f"limit= is a relative error above 0; got {limit}")
    return None if resumes else products.probe(limit, seed)


def error_limit(products: Products, limit: float | None, certificate: Certificate | None) -> float:
    """Largest operator error that the solve accepts."""
    if limit is not None:
        return limit
    rounding = products.eps * 2e3 * max(1.0, math.pow(products.n / 1e4, 0.25))
    return rounding if certificate is None else max(rounding, certificate.limit)


def product_budget(max_products: int | None, k: int) -> int:
    """How many products a solve may make."""
    if max_products is None:
        return max(1000, 50 * k)
    if max_products < 1:
        raise ValueError(f"max_products= is at least 1; got {max_products}")
    return max_products


def reserve_rows(products: Products, memory: int | None, certify: bool) -> int:
    """Rows kept for the chain that looks for hidden copies, and one for a product in the making."""
    if not certify:
        return 2
    most = products.room + 2
    if memory is not None:
        most = min(most, max(LEAST_RESERVE, _affordable(products, memory) // 4))
    return min(RESERVE, most)


def basis_rows(
    products: Products, k: int, block: int, basis: int | None, memory: int | None, certify: bool
) -> int:
    """Rows of the working basis."""
    least = min(products.room + block, k + 2 + block)
    if basis is not None and memory is not None:
        raise ValueError("give basis= (rows) or memory= (bytes), not both")
    if memory is not None:
        rows = _affordable(products, memory) - reserve_rows(products, memory, certify)
        if rows < least:
            size = products.width * torch.finfo(products.dtype).bits // 8
            needed = (least + LEAST_RESERVE) * size
            raise ValueError(
                f"memory= of {memory} bytes holds too few vectors of {size} bytes; k = {k} needs "
                f"at least {needed}. Ask for fewer pairs at a time with deflate="
            )
    elif basis is not None:
        if basis < least:
            raise ValueError(f"basis= needs at least {least} rows for k = {k}; got {basis}")
        rows = basis
    else:
        rows = max(2 * k + 32, 3 * k + 12) + 2 * (block - 1)
    return min(rows, products.room + block)


def _affordable(products: Products, memory: int) -> int:
    return memory // (-(-products.width // 16) * 16 * torch.finfo(products.dtype).bits // 8)
