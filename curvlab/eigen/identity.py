"""Whose state is in a file: what must agree before a computation goes on from a checkpoint.

Every operator is known by its product with a fixed vector: a few numbers that follow every change
of it (another loss, another mode, other rows deflated) and do not depend on how vectors are divided
over ranks. They are compared to rounding. A curvature of a model says more of itself
(``operator.about()``), digests of its parameters, of what else is in the model and of its data: a
training step too small for the product is seen there, and the error can name what differs.
"""

from pathlib import Path
from typing import Any

import torch
from curvlab_kernels import ops

from curvlab.eigen.products import Products
from curvlab.manifest import FINITE, fits

WITNESSES = 4  # numbers kept of the product with the fixed vector, besides its norm
PRODUCT = "product with a fixed vector"
MEASURED = ("engine", "loss")  # said of an operator, but it depends on the memory that was free
_SEED = 918_273_645


def identity(products: Products) -> dict[str, Any]:
    """What identifies ``P A P``, as JSON; costs one product."""
    about = getattr(products.operator, "about", None)
    said = {} if about is None else about()
    return {
        "n": products.n,
        "dtype": str(products.operator.dtype),
        **{name: fact for name, fact in said.items() if name not in MEASURED},
        **({"power of two": products.exponent} if products.exponent else {}),
        PRODUCT: _witness(products),
    }


def require_same(
    path: str | Path, what: str, saved: dict[str, Any], asked: dict[str, Any], rounding: float
) -> None:
    """Raise unless a file belongs to what is computed now; the error names both sides.

    Args:
        path: Of the file.
        what: What is computed, such as ``"density"``.
        saved: :func:`identity` and arguments from the file.
        asked: The same of now.
        rounding: Relative error of a product.
    """
    names = [*saved, *(name for name in asked if name not in saved)]
    differing = [n for n in names if not _agree(n, saved.get(n), asked.get(n), rounding)]
    if differing:
        details = "; ".join(
            f"{name} was {shown(saved.get(name))} and is {shown(asked.get(name))}"
            for name in differing
        )
        raise ValueError(
            f"{path} is a checkpoint of another {what}: {details}. Use another file, delete this "
            "one, or ask for the same"
        )


def _witness(products: Products) -> list[float]:
    """Norm of the product with a fixed vector, and its coefficients on fixed random signs."""
    space = products.space
    generator = torch.Generator().manual_seed(_SEED)
    vector = space.normal(generator, torch.float64).to(products.dtype).to(products.device)
    products.project_out_(vector)
    image = torch.zeros_like(vector)
    products.into(vector, image)
    products.overhead += 1
    signs = space.signs(generator, WITNESSES).to(products.dtype).to(products.device)
    rows, _ = ops.quantise(signs, products.dtype)
    # a difference of the images is seen at its own length: signs have unit elements
    return [float(space.norm(image)), *space.total(ops.coefficients(rows, image)).tolist()]


def _agree(name: str, saved: Any, asked: Any, rounding: float) -> bool:
    """Exactly, but for the product: data cut into other chunks are added in another order."""
    if name != PRODUCT or not fits(saved, [FINITE] * len(asked)):
        return bool(saved == asked)
    near = 100.0 * rounding * max(map(abs, (*saved, *asked)))
    return all(abs(a - b) <= near for a, b in zip(saved, asked, strict=True))


def shown(fact: Any) -> str:
    """A fact in an error: numbers with the digits that tell two of them apart."""
    if isinstance(fact, list):
        return f"[{', '.join(f'{n:.9g}' if isinstance(n, float) else repr(n) for n in fact)}]"
    return repr(fact)
