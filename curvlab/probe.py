"""The operator's certificate: is it repeatable, symmetric and linear, as far as rounding allows?

A wrong second derivative, live dropout, a reshuffling loader or a buffer handed out twice all show
up in a handful of products with random vectors. The figures are relative errors; each is compared
with what rounding can explain. Random vectors see an error anywhere in the operator with
probability one, but an error confined to few coordinates is seen diluted: the probe is strong
evidence, not a proof.

What rounding can explain is mostly a multiple of the machine epsilon. Not always: where a network
fits its data, ``p - onehot`` cancels and a right product loses a factor ``1 / (1 - p)``. Rounding
has a mark of its own. A vector times -2 is rounded everywhere as the vector is, so its product is
the same to the last bit; a mixture of vectors is rounded otherwise. An operator that passes the
first (dropout, drift, a constant term and clipping do not) shows the size of its rounding in the
second: as nonlinearity. Symmetry may be broken by as much, and not by more.
"""

import math
from dataclasses import dataclass, field
from itertools import combinations
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from curvlab.html import block
from curvlab.refusals import Refusal, Trap
from curvlab.rows.space import Space, space_of


@runtime_checkable
class LinearOperator(Protocol):
    """A symmetric linear map over flat vectors; blocks are rows."""

    @property
    def n(self) -> int: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...
    def __matmul__(self, vectors: Tensor, /) -> Tensor:
        """``(n,) -> (n,)`` and ``(b, n) -> (b, n)``."""
        ...


class OperatorError(Refusal):
    """The operator is asymmetric, unrepeatable, nonlinear or not finite: no solver can use it."""

    def __init__(self, message: str, trap: Trap = Trap.DERIVATIVE) -> None:
        super().__init__(message, trap)


@dataclass(frozen=True, slots=True)
class Certificate:
    """Relative errors measured by :func:`probe`, and the limit that rounding explains.

    Attributes:
        symmetry: The largest asymmetry of three pairs of vectors.
        repeatability: Measured where linearity fails; else linearity's, where noise would show at
            about the same size.
        linearity: How far the product of a mixture of three vectors is from that of their products.
        limit: What each of these may be at most: the usual limit, or ``RAGGED`` times the rounding
            of this operator where that had to be measured and is more.
        products: How many were made to measure them.
        exponent: Power of two by which products are far from one: squares of their elements may not
            be numbers. 0 where they are near.
        size: Mean length of the products with unit vectors, by two to the power of minus that.
    """

    symmetry: float
    repeatability: float
    linearity: float
    limit: float
    products: int
    exponent: int = 0
    size: float = field(default=0.0, compare=False)

    @property
    def passed(self) -> bool:
        # written so that a NaN fails
        errors = (self.symmetry, self.repeatability, self.linearity)
        return self.limit < math.inf and all(x <= self.limit for x in errors)

    def _repr_html_(self) -> str:
        """In a notebook: what was measured, beside what rounding explains."""
        rows = [
            [name, f"{getattr(self, name):.1e}", f"{self.limit:.1e}"]
            for name in ("symmetry", "repeatability", "linearity")
        ]
        title = f"Certificate: {'passed' if self.passed else 'failed'} ({self.products} products)"
        return block(title, ["", "relative error", "limit"], rows)

    def require(self) -> None:
        """Raise :class:`OperatorError` naming what failed and its usual causes."""
        if self.passed:
            return
        if not self.limit < math.inf:
            raise OperatorError(
                f"the certificate's limit is {self.limit}, which no error exceeds: it shows "
                "nothing. Measure it again with curvlab.probe.probe(operator)"
            )
        problems = []
        if not self.repeatability <= self.limit:
            problems.append(
                f"two products with one vector differ by {self.repeatability:.1e} (usual causes: "
                "train-mode dropout, a loader that reshuffles or augments, changing parameters)"
            )
        if not self.symmetry <= self.limit:
            problems.append(
                f"u'Av and v'Au differ by {self.symmetry:.1e} (usual causes: a layer with a wrong "
                "second derivative, such as torch._weight_norm, or train-mode BatchNorm)"
            )
        if not self.linearity <= self.limit:
            problems.append(
                f"A(au + bv) and aAu + bAv differ by {self.linearity:.1e} (usual causes: an "
                "operator with a constant term, a clipped or quantised product)"
            )
        raise OperatorError(
            "this is not a symmetric linear operator to rounding "
            f"(limit {self.limit:.1e}): " + "; ".join(problems)
        )


def require_image(result: object, vectors: Tensor) -> None:
    """Raise unless a product is a real tensor of the shape and on the device of its ``vectors``."""
    if not isinstance(result, Tensor):
        raise OperatorError(f"operator @ vectors must be a tensor; got {type(result).__name__}")
    if result.shape != vectors.shape:
        raise OperatorError(
            f"operator @ vectors must keep the shape {tuple(vectors.shape)}; "
            f"got {tuple(result.shape)}"
        )
    if not result.is_floating_point():
        raise OperatorError(
            f"operator @ vectors must be real floats; got {result.dtype}. A real symmetric "
            "operator has real images: take .real if the imaginary part vanishes"
        )
    if result.device != vectors.device:
        raise OperatorError(
            f"the operator says its device is {vectors.device} but answers on {result.device}"
        )


def probe(operator: LinearOperator, *, seed: int = 0, limit: float | None = None) -> Certificate:
    """Measure symmetry, linearity and repeatability with four products.

    Three are with random vectors u, v and w, the fourth with a mixture of them. Each pair of the
    three gives one number that vanishes for a symmetric operator; three of them are rarely all
    small by chance. Where one of these exceeds the limit, a fifth tells whether one vector gives
    two answers, and a sixth whether it can be rounding.

    Args:
        operator: Anything with ``n``, ``dtype``, ``device`` and ``@``.
        seed: The seed of the random vectors; the global generator is not touched.
        limit: Largest relative error accepted; by default what rounding can explain: a multiple of
            the epsilon of ``operator.dtype``, with room for products that sum over many samples, or
            the rounding measured.
    """

    space = space_of(operator)

    def draw(count: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(seed + 1_000_003)  # solvers draw from the seed
        # float32 whatever the dtype: the same vectors for the same operator in another precision
        rows = (space.normal(generator, torch.float32) for _ in range(count))
        return [row.to(operator.dtype).to(operator.device) for row in rows]

    def total(part: Tensor) -> float:
        return float(space.total(part))

    def norm(vector: Tensor) -> float:
        narrow = vector.dtype not in (torch.float32, torch.float64)
        return float(space.norm(vector.float() if narrow else vector))

    def combined_norm(*terms: tuple[float, Tensor]) -> float:
        return math.sqrt(total(combined_square(*terms)))

    def product(vector: Tensor, exponent: int = 0) -> Tensor:
        # copies: an operator that reuses its output buffer or overwrites its input must show as
        # wrong here, not corrupt the comparison.
        result = operator @ vector.clone()
        require_image(result, vector)
        return brought_near(result.detach().clone(), exponent)

    measured = limit is None
    limit = usual_limit(operator.dtype, operator.n) if limit is None else limit
    vectors = draw(len(MIXTURE))
    images = [product(vector) for vector in vectors]
    exponent = max((far_exponent(image, space) for image in images), key=abs)
    images = [brought_near(image, exponent) for image in images]
    lengths, sizes = [norm(vector) for vector in vectors], [norm(image) for image in images]
    differences = []
    for i, j in combinations(range(len(MIXTURE)), 2):
        scale = sizes[i] * lengths[j] + sizes[j] * lengths[i]
        # Random vectors are nearly orthogonal to each other's images, so u'Av is far below |u||Av|;
        # sqrt(n) gives the scale at which an asymmetric operator of the same size would show.
        difference = abs(total(_dot(vectors[i], images[j]) - _dot(vectors[j], images[i])))
        differences.append(_ratio(difference * operator.n**0.5, scale))
    symmetry = max(differences, key=lambda one: math.inf if math.isnan(one) else one)
    mixed = vectors.pop(0).mul_(MIXTURE[0])  # vectors can be large: as few as possible at a time
    for factor in MIXTURE[1:]:
        mixed.add_(vectors.pop(0), alpha=factor)  # in the operator's dtype, as the product sees it
    together = product(mixed, exponent)
    terms = zip((1.0, *(-factor for factor in MIXTURE)), (together, *images), strict=True)
    scale = sum(abs(factor) * size for factor, size in zip(MIXTURE, sizes, strict=True))
    linearity = repeatability = _ratio(combined_norm(*terms), scale)
    products = 4
    if not (linearity <= limit and symmetry <= limit):  # written so that a NaN fails

        def change(factor: float) -> float:
            image = product(draw(1)[0].mul_(factor), exponent)
            return _ratio(combined_norm((1.0, images[0]), (-1.0 / factor, image)), sizes[0])

        repeatability = change(1.0)
        products = 5
        if measured and repeatability <= limit:
            products = 6
            limit = max(limit, RAGGED * linearity) if change(TWICE) <= limit else limit
    size = math.fsum(sizes) / math.fsum(lengths)
    return Certificate(symmetry, repeatability, linearity, limit, products, exponent, size)


MIXTURE = (0.75, -1.5, 1.0)
TWICE = -2.0  # times which a vector is rounded everywhere as before
RAGGED = 10.0  # times the rounding measured once that rounding may reach elsewhere
PIECE = 1 << 15  # elements taken to float64 at a time: they stay in the cache
FAR = 400  # binary exponent of a number whose squares, summed, may not be a float64
# The same for each dtype, and what is nearest to the end of its range; in float32 squares are
# summed in float64 as well, but of smaller numbers the smallest elements lose their digits.
FARTHEST = {torch.float64: (FAR, 1000), torch.float32: (100, 120)}


def far_exponent(tensor: Tensor, space: Space | None = None) -> int:
    """The binary exponent of the largest element, if it is near an end of the range; else 0.

    Of a vector of which ``tensor`` is a part, if it lives in a ``space``.
    """
    if tensor.dtype not in FARTHEST or not tensor.numel():
        return 0
    far, most = FARTHEST[tensor.dtype]
    found = tensor.abs().max()
    largest = float(found if space is None else space.largest(found))
    exponent = math.frexp(largest)[1] if math.isfinite(largest) else 0
    return max(-most, min(most, exponent)) if abs(exponent) > far else 0


def brought_near(tensor: Tensor, exponent: int) -> Tensor:
    """``tensor`` by two to the power of minus ``exponent``, exactly."""
    return tensor * math.ldexp(1.0, -exponent) if exponent else tensor


def _dot(a: Tensor, b: Tensor) -> Tensor:
    pieces = zip(torch.split(a, PIECE), torch.split(b, PIECE), strict=True)
    products = [one.double() @ other.double() for one, other in pieces]
    return torch.stack(products).sum()


def combined_square(*terms: tuple[float, Tensor]) -> Tensor:
    """The squared norm of a combination of vectors, in float64 without making it."""
    squares = torch.zeros((), dtype=torch.float64, device=terms[0][1].device)
    for pieces in zip(*(torch.split(vector, PIECE) for _, vector in terms), strict=True):
        total = torch.zeros(len(pieces[0]), dtype=torch.float64, device=squares.device)
        for (factor, _), piece in zip(terms, pieces, strict=True):
            total.add_(piece, alpha=factor)
        squares += total @ total
    return squares


def _ratio(error: float, scale: float) -> float:
    return 0.0 if error == 0.0 else error / scale if scale > 0.0 else float("inf")


def usual_limit(dtype: torch.dtype, n: int) -> float:
    """The relative error of a product that rounding explains where nothing cancels."""
    growth: float = max(1.0, (n / 1e4) ** 0.25)
    return float(torch.finfo(dtype).eps) * 2e3 * growth
