"""Products with an operator: counted, copied, checked and deflated.

The operator gets a copy of each vector and its result is copied at once, so an operator that
overwrites its input or hands out one buffer again and again is harmless here.
"""

import math
from typing import Protocol, runtime_checkable

import torch
from curvlab_kernels.block import gram
from torch import Tensor

from curvlab.operators import Curvature, Dense, Operator
from curvlab.probe import (
    Certificate,
    LinearOperator,
    OperatorError,
    brought_near,
    far_exponent,
    probe,
    require_image,
    usual_limit,
)
from curvlab.rows import Rows, Space, space_of

TOGETHER = 32  # vectors whose residuals are computed at once: two float64 copies of them are made


@runtime_checkable
class Deflation(Protocol):
    """Directions to leave out, such as a :class:`curvlab.basis.Basis`."""

    @property
    def n(self) -> int: ...
    @property
    def size(self) -> int: ...
    def project_out_(self, vectors: Tensor, /) -> object: ...


def orthogonality(rows: Tensor, space: Space) -> float:
    """Largest element of ``|V V' - I|`` for rows ``(m, width)``, as they are stored."""
    inner = space.total(gram(rows))
    return float((inner - torch.eye(*inner.shape).to(inner)).abs().max()) if len(rows) else 0.0


class Products:
    """``P A P`` for an operator ``A``, with ``P`` the deflation's projector (or the identity).

    Attributes:
        count: Products with ``A`` so far; a block of ``b`` counts ``b``.
        overhead: Those of them that are no part of the computation: they told whose file it is, or
            measured the operator again. What a number of products decides goes by the others
            (:attr:`spent`), so that no result depends on how often it was resumed.
        error: Relative error of a product, as the probe measured it.
        size: Mean length of ``A``'s products with unit vectors, where some of it is deflated: what
            is left may be nothing but the rounding of that.
        exponent: Products are those of ``A`` by two to the power of minus this; not 0 only where
            ``near_one`` is asked for and squares of ``A`` would not be numbers.
        frozen: Whether it is a copy that nobody changes, and changes nothing itself.
        matrix: Its entries ``(n, n)``, where it was given as a matrix.
        dtype: Of the working vectors: float64 for a float64 operator, else float32.
        space: Where they live; ``width`` of their ``n`` elements are held here.
    """

    def __init__(
        self,
        operator: LinearOperator,
        deflate: Deflation | Tensor | None,
        *,
        near_one: bool = False,
    ) -> None:
        self.operator = operator
        self.near_one, self.exponent = near_one, 0
        self.space = space_of(operator)
        self.n, self.width = self.space.n, self.space.width
        self.device = torch.device(operator.device)
        self.dtype = torch.float64 if operator.dtype == torch.float64 else torch.float32
        self.eps = float(torch.finfo(operator.dtype).eps)
        self.frozen = isinstance(operator, Dense | Curvature)
        self.matrix = operator.matrix if isinstance(operator, Dense) else None
        self.count = self.overhead = 0
        self.error = self.size = self._summed = 0.0
        self.deflation = _deflation(deflate, self)
        self.room = self.n - (0 if self.deflation is None else self.deflation.size)

    def probe(self, seed: int) -> Certificate:
        """The operator's own certificate, or a new one; raises if the operator failed it."""
        certificate = self._known()
        if certificate is None:
            if isinstance(self.operator, Operator):
                certificate = self.operator.certificate  # which it keeps for the next solve
            else:
                certificate = probe(self.operator, seed=seed)
            self.count += certificate.products
        if not certificate.passed:  # is that the reason?
            self._require_digits(certificate, math.ldexp(certificate.size, certificate.exponent))
        certificate.require()
        self.trust(certificate)
        return certificate

    def _require_digits(self, certificate: Certificate, size: float) -> None:
        """Raise where products of unit vectors, of this ``size``, are too small to have digits."""
        arithmetic = torch.finfo(self.operator.dtype)
        if 0.0 < certificate.limit * size < self.n * arithmetic.smallest_normal * arithmetic.eps:
            raise OperatorError(
                f"products of this operator are about {size:.1e} long, and so small numbers have "
                f"few digits in {arithmetic.dtype}: multiply it by a power of two, which "
                "leaves its eigenvectors as they are"
            )

    def trust(self, certificate: Certificate) -> None:
        """Take the error of a product, and the size of products, from a certificate."""
        self.error = max(certificate.linearity, certificate.repeatability)
        self.exponent = certificate.exponent if self.near_one else 0
        self.size = 0.0 if self.deflation is None else certificate.size
        if self.matrix is not None:  # not probed; its sums are rounded nevertheless
            near = brought_near(self.matrix, self.exponent)
            # in float64: squares may not be float32's
            frobenius = torch.linalg.vector_norm(near, dtype=torch.float64)
            self._summed = self.eps / 2 * float(frobenius)
            if not self.near_one:
                self._require_digits(certificate, float(frobenius) / math.sqrt(self.n))
            if self.deflation is not None:
                self.size = float(frobenius) / math.sqrt(self.n)

    def rounding(self, norm: float) -> float:
        """Norm of the error of a product with a unit vector, for an operator of this norm.

        A matrix is not probed, but how its sums of ``n`` terms are rounded is known. Partial sums
        of terms of either sign grow like a random walk: half an epsilon of the Frobenius norm. Of
        one sign they grow evenly, ``j / n`` of the image after ``j`` terms, and ``n`` independent
        roundings of them are ``sqrt(n) / 3`` of the last one's: the leading vector of a positive
        matrix is such a case, and random vectors do not show it.

        Nothing is righter than the last bit: where sums cancel, for a value far below the norm,
        that of what cancels stays. A probe that shows less was lucky, as it may be in a few
        dimensions. Numbers below the normal ones have a last bit of fixed size: ``n`` sums of ``n``
        terms are off by less than ``n`` of those.
        """
        arithmetic = torch.finfo(self.operator.dtype)
        summed = self._summed
        if self.matrix is not None:
            summed += self.eps / 2 * math.sqrt(self.n) / 3 * norm
        shift = -self.exponent - self._lift
        least = math.ldexp(self.n * arithmetic.smallest_normal * arithmetic.eps, shift)
        norm = max(norm, self.size)
        return max(self.error * norm, summed, arithmetic.eps / 2 * norm) + least

    def residuals(self, vectors: Tensor, values: Tensor) -> Tensor | None:
        """Residuals ``(k,)`` of rows ``(k, n)`` from a matrix's entries; ``None`` without any.

        Sums are in float64, of ``sqrt(n)`` sums of ``sqrt(n)`` terms: no float64 copy of the matrix
        is made, and sums that grow evenly are off by ``sqrt(n)`` roundings at most, though their
        terms may all round alike. These are added, those of terms of either sign, and what rows to
        be deflated lose when they are stored.
        """
        if self.matrix is None:
            return None
        piece = math.isqrt(self.n) + 1
        found = []
        pairs = torch.split(vectors, TOGETHER), torch.split(values, TOGETHER)
        for rows, theirs in zip(*pairs, strict=True):
            images, inside = rows.new_zeros(rows.shape, dtype=torch.float64), rows.double().clone()
            self.project_out_(inside)
            terms = torch.split(self.matrix, piece), torch.split(inside, piece, 1)
            for entries, weights in zip(*terms, strict=True):
                images += weights @ brought_near(entries.double(), self.exponent)
            self.project_out_(images)
            rest = images.sub_(theirs.to(rows.device)[:, None] * rows)
            found.append(torch.linalg.vector_norm(rest, dim=1))
        roundings = self._summed / self.eps + math.sqrt(self.n) / 2 * values.abs()
        rounded = torch.finfo(torch.float64).eps * roundings
        if self.deflation is not None:
            rounded += 2.0 * self._summed
        return torch.cat(found).cpu() + rounded

    def _known(self) -> Certificate | None:
        """A certificate that needs no products: one already measured, or that of a matrix."""
        if self.matrix is not None:  # made symmetric when it was built
            limit = usual_limit(self.operator.dtype, self.n)
            return Certificate(0.0, 0.0, 0.0, limit, 0, far_exponent(self.matrix))
        known = getattr(self.operator, "__dict__", {}).get("certificate")
        return known if isinstance(known, Certificate) else None

    @property
    def spent(self) -> int:
        """Products that the computation itself has made."""
        return self.count - self.overhead

    def resume(self, spent: int, overhead: int) -> None:
        """Go on from so many products; what this call has made until now is overhead."""
        self.overhead = self.count + overhead
        self.count = self.overhead + spent

    @property
    def _lift(self) -> int:
        """Power of two by which vectors are multiplied, so that small products keep their digits.

        Half of what products are small by: a model's own numbers are further from either end then.
        """
        return max(0, -self.exponent) // 2

    @property
    def unit(self) -> float:
        """By which values of these products are multiplied to be those of ``A``."""
        return math.ldexp(1.0, self.exponent)

    def into(self, vectors: Tensor, targets: Tensor) -> None:
        """``targets = P A vectors``; both ``(width,)`` or ``(b, width)``, already in P's range."""
        given = brought_near(vectors, -self._lift).to(self.operator.dtype, copy=not self.frozen)
        result = self.operator @ given
        self.count += 1 if vectors.ndim == 1 else vectors.shape[0]
        require_image(result, vectors)
        targets.copy_(brought_near(result.detach(), self.exponent + self._lift))
        self.project_out_(targets)

    def project_out_(self, vectors: Tensor) -> None:
        """Remove the deflated directions from ``(width,)`` or ``(b, width)``, in place."""
        if self.deflation is not None:
            self.deflation.project_out_(vectors)


def _deflation(deflate: Deflation | Tensor | None, products: Products) -> Deflation | None:
    if deflate is None:
        return None
    if isinstance(deflate, Tensor):
        if deflate.ndim != 2 or deflate.shape[1] != products.width:
            raise ValueError(
                f"deflate= takes orthonormal rows (q, {products.width}); got {tuple(deflate.shape)}"
            )
        if not deflate.is_floating_point():
            raise TypeError(f"deflate= rows are {deflate.dtype}; they must be real floats")
        if deflate.device != products.device:
            raise ValueError(
                f"deflate= is on {deflate.device}, the operator on {products.device}: move one"
            )
        deflate = Rows.of(deflate, "deflate=", products.space, products.dtype)
    if not isinstance(deflate, Deflation):
        raise TypeError(
            "deflate= takes a curvlab Basis or a tensor of orthonormal rows; got "
            f"{type(deflate).__name__}"
        )
    if deflate.n != products.n:
        raise ValueError(
            f"deflate= holds vectors of {deflate.n} elements; the operator has {products.n}"
        )
    return None if deflate.size == 0 else deflate
