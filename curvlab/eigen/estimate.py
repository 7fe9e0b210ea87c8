"""A number with an error bar, and the random vectors that all estimates are made from."""

import math
from dataclasses import dataclass

import torch
from curvlab_kernels import ops
from torch import Tensor

from curvlab.eigen.products import Products
from curvlab.probe import OperatorError


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value and its standard error (0 when exact); ``samples`` is what it was computed from."""

    value: float
    error: float
    samples: int

    @property
    def told(self) -> bool:
        """Whether the value can be told from zero: it is more than two standard errors away."""
        return abs(self.value) > 2.0 * self.error or self.error == 0.0

    def __str__(self) -> str:
        """The value with its error; where the error voids it, what can be said of its size."""
        if not self.told:
            low, high = self.value - 2.0 * self.error, self.value + 2.0 * self.error
            return f"between {low:.2g} and {high:.2g}"
        if self.error == 0.0:
            return f"{self.value:.8g} (exact)"
        # as many digits as the error leaves: to the second of its own
        digits = math.floor(math.log10(abs(self.value))) - math.floor(math.log10(self.error)) + 2
        return f"{self.value:.{digits}g} ± {self.error:.2g}"


def random_signs(products: Products, generator: torch.Generator, count: int) -> Tensor:
    """Random signs ``(count, width)``: of all draws with unit variance, the least noisy here."""
    signs = products.space.signs(generator, count)
    return signs.to(products.dtype).to(products.device)


def finite_images(products: Products, vectors: Tensor) -> Tensor:
    """Products with the rows of ``vectors`` ``(b, width)``; NaN or infinity is an error."""
    images = torch.zeros_like(vectors)
    products.into(vectors, images)
    if not bool(torch.isfinite(products.space.norm(images)).all()):  # on all ranks alike
        raise OperatorError("the operator returned NaN or infinity")
    return images


def dots(products: Products, first: Tensor, second: Tensor) -> Tensor:
    """Inner products of the rows of two blocks ``(b, width)``: ``(b,)``, float64, on the CPU."""
    rows, _ = ops.quantise(first, products.dtype)
    return products.space.total(ops.coefficients(rows, second)).diagonal().cpu()


def blocks(products: Products, count: int) -> list[int]:
    """Sizes of the blocks that ``count`` vectors are multiplied in: few where vectors are long."""
    size = max(1, min(8, (1 << 25) // products.width))
    return [min(size, count - first) for first in range(0, count, size)]
