"""What a solve is asked for: every argument checked here, once, for every way of solving.

:class:`Certify`, :class:`Room` and :class:`Checkpoint` are what a caller may say about proof,
memory and files; :func:`request` makes one :class:`Request` of everything, with defaults filled in.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from curvlab.checks import flag, inside, integers, seeded, whole
from curvlab.eigen.products import Products
from curvlab.eigen.result import RelativeTo
from curvlab.eigen.room import RESERVE, Quota, Room, quota
from curvlab.eigen.selection import check_which
from curvlab.probe import brought_near, far_exponent

EVERY = 50  # products of a search between two saves


@dataclass(frozen=True, slots=True)
class Certify:
    """How a result is proved.

    Args:
        copies: Whether to look for hidden copies, and other eigenvalues that were missed.
        doubt: Probability with which that may be wrong.
        products: Most products for one attempt; after them the result says that it is not complete.
            By default half of those used to converge, at least 24, and more for longer vectors and
            smaller doubts: 33 for 124 M elements.
        explicit: Compute every residual from a product with the vector itself, one per pair. By
            default they come from the decomposition, and those of a matrix always from its entries;
            see :mod:`curvlab.eigen.finish`.
    """

    copies: bool = True
    doubt: float = 1e-3
    products: int | None = None
    explicit: bool = False

    def __post_init__(self) -> None:
        flag(copies=self.copies, explicit=self.explicit)
        inside("(0, 1)", doubt=self.doubt)
        if self.products is not None:
            object.__setattr__(self, "products", *whole(products=self.products))


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Where the state of a solve is kept: if the file exists, the solve goes on from it.

    Args:
        file: A file; on several ranks a folder.
        every: Products between two saves.
    """

    file: str | Path
    every: int = EVERY

    def __post_init__(self) -> None:
        object.__setattr__(self, "every", *whole(every=self.every))
        if not isinstance(self.file, str | Path):
            raise TypeError(f"Checkpoint(file=) is a path; got {type(self.file).__name__}")

    @property
    def path(self) -> Path:
        return Path(self.file)


@dataclass(frozen=True, slots=True)
class Request:
    """A checked request; see :func:`curvlab.lanczos` for what is not explained here.

    Attributes:
        quota: Rows of the search, and those that certification may take.
        block: Rows multiplied together.
        stride: Steps between two looks at the coefficients, where looking costs a transfer.
    """

    k: int
    which: str
    tol: float
    relative_to: RelativeTo
    seed: int
    max_products: int
    certify: Certify
    quota: Quota
    block: int
    stride: int

    @property
    def search_products(self) -> int:
        """Products after which the search ends, so that those of explicit residuals are left."""
        return self.max_products - (self.k if self.certify.explicit else 0)

    def identity(self) -> dict[str, Any]:
        """What must be the same for a checkpoint to belong to this solve."""
        plain = ("k", "which", "tol", "relative_to", "seed", "block", "stride")
        return {
            **{name: getattr(self, name) for name in plain},
            "copies": self.certify.copies,
            "doubt": self.certify.doubt,
            "certify products": self.certify.products,
            "rows": self.quota.search,
            "reserve": self.quota.reserve,
        }


def request(
    products: Products,
    k: int,
    *,
    which: str = "LM",
    tol: float = 1e-3,
    relative_to: RelativeTo = "value",
    seed: int = 0,
    max_products: int | None = None,
    certify: Certify | bool = True,
    room: Room | None = None,
    block: int = 1,
) -> Request:
    """Check what was asked of a solver and fill in what was not."""
    k = check_numbers(products, k, which=which, tol=tol, relative_to=relative_to)
    if isinstance(certify, bool):
        certify = Certify(copies=certify)
    if not isinstance(certify, Certify):
        raise TypeError(f"certify= is True, False or Certify(...); got {type(certify).__name__}")
    if not isinstance(room, Room | None):
        raise TypeError(f"room= is Room(rows=, bytes=, file=); got {type(room).__name__}")
    room = room or Room()
    given = quota(products, k, block, room, certify.copies)
    budget = product_budget(max_products, k)
    if max_products is None:
        # No more than the whole matrix takes. Where a basis of the whole space fits, that ends the
        # search, and chains that are forgotten may take as many again.
        whole_space = given.search >= products.room
        budget = min(budget, 2 * (products.room + RESERVE) if whole_space else products.room)
    if certify.explicit and budget <= k:
        raise ValueError(
            f"max_products={budget} leaves none for the search: Certify(explicit=True) takes {k}"
        )
    return Request(
        k=k,
        which=which,
        tol=tol,
        relative_to=relative_to,
        seed=seeded(seed),
        max_products=budget,
        certify=certify,
        quota=given,
        block=block,
        stride=1 if products.device.type == "cpu" or block > 1 else 4,
        # On a GPU, to see whether a row needs more, each product would have to be waited for.
    )


def as_checkpoint(checkpoint: Checkpoint | str | Path | None) -> Checkpoint | None:
    """A path as the checkpoint in that file."""
    return checkpoint if isinstance(checkpoint, Checkpoint | None) else Checkpoint(checkpoint)


def check_choice(name: str, value: str, choices: Any) -> str:
    """``value`` if it is one of a ``Literal``'s choices."""
    allowed = get_args(choices)
    if value not in allowed:
        raise ValueError(f"{name}= is one of {', '.join(map(repr, allowed))}; got {value!r}")
    return value


def check_numbers(products: Products, k: int, *, which: str, tol: float, relative_to: str) -> int:
    """``k``; raise unless the request can be met in principle."""
    [k] = integers(k=k)
    if not 1 <= k <= products.room:
        left = f"{products.n} - {products.n - products.room} deflated"
        raise ValueError(f"k= is between 1 and n = {left}; got {k}")
    check_which(which)
    inside("[0, 1)", tol=tol)
    check_choice("relative_to", relative_to, RelativeTo)
    return k


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
    if any(far_exponent(row) for row in rows):
        rows = torch.stack([brought_near(row, far_exponent(row)) for row in rows])
    for row in rows:  # one at a time: there may be no room for a copy of all
        length = float(products.space.norm(row.to(products.dtype)))
        if not math.isfinite(length):
            raise ValueError("v0= holds NaN or infinity")
        if length == 0.0:
            raise ValueError("v0= holds a vector of zeros: nothing can start from it")
    return rows


def product_budget(max_products: int | None, k: int) -> int:
    """How many products a solve may make."""
    if max_products is None:
        return max(1000, 50 * k)
    return whole(max_products=max_products)[0]
