"""Deflated power iteration: one pair after the other, for comparison with the papers that use it.

``stop="value"`` is the rule of the tool behind the paper's ResNet and ViT results: at most 20 steps
per pair, until the eigenvalue changes by less than 1e-4; later pairs start from the one before and
see ``A - sum(lambda v v')``. It certifies nothing: values settle long before vectors do, and errors
of one pair enter the next through the deflation. The result says so: its residuals are those of the
vectors returned, and ``orthogonality`` shows what is left of their independence.

``stop="residual"`` iterates each pair, orthogonal to those found, until its residual meets ``tol``,
and then mixes the pairs so that they do not disturb each other (Rayleigh-Ritz, no more products).
It is right, and slow: the number of steps grows with ``1 / log(|lambda_i / lambda_i+1|)``.
"""

import time
from typing import Literal

import torch
from curvlab_kernels import ops
from torch import Tensor

from curvlab.eigen.arguments import check_choice, check_numbers, product_budget
from curvlab.eigen.products import Deflation, Products, orthogonality
from curvlab.eigen.result import Eigenpairs, canonical_signs_, tolerances
from curvlab.eigen.selection import order
from curvlab.eigen.source import Source, as_operator
from curvlab.probe import Certificate, OperatorError

Stop = Literal["residual", "value"]
STEPS = 20  # of the paper's tool, per pair
CHANGE = 1e-4  # of the eigenvalue, relative


def power_iteration(
    operator: Source,
    k: int,
    *,
    stop: Stop = "residual",
    tol: float | None = None,
    deflate: Deflation | Tensor | None = None,
    seed: int = 0,
    steps: int | None = None,
    max_products: int | None = None,
) -> Eigenpairs:
    """The ``k`` pairs of largest magnitude by deflated power iteration.

    Args:
        operator: As for :func:`curvlab.lanczos`.
        k: How many pairs.
        stop: ``"residual"`` or ``"value"``; see above.
        tol: Relative residual (default 1e-3), or relative change of a value (default 1e-4).
        deflate: Directions to leave out.
        seed: Of the start vectors.
        steps: Most steps per pair: by default 20 with ``"value"``, no limit with ``"residual"``.
        max_products: Products after which the solve ends (default ``max(1000, 50 k)``).
    """
    by_value = check_choice("stop", stop, Stop) == "value"
    tol = (CHANGE if by_value else 1e-3) if tol is None else tol
    products = Products(as_operator(operator), deflate)
    check_numbers(products, k, which="LM", tol=tol, relative_to="value", seed=seed)
    began = time.perf_counter()
    certificate = products.probe(None, seed)
    search = _Search(products, product_budget(max_products, k), torch.Generator().manual_seed(seed))
    per_pair = steps if steps is not None else STEPS if by_value else None
    pairs = [search.pair(by_value, tol, per_pair) for _ in range(k)]
    values = torch.tensor([value for value, _, _ in pairs], dtype=torch.float64)
    vectors = torch.stack([vector for _, vector, _ in pairs])
    images = torch.stack([image for _, _, image in pairs])
    if by_value:
        # the product that ended each pair was with the vector before: look at the one returned
        for vector, image in zip(vectors, images, strict=True):
            products.into(vector, image)
        chosen = values.argsort(descending=True)
        method = "deflated power iteration, stopped on values"
    else:
        values, vectors, images = _rayleigh_ritz(vectors, images)
        chosen = order(values, k, "LM")
        method = "deflated power iteration, stopped on residuals"
    return _result(
        products, values[chosen], vectors[chosen], images[chosen], tol, method, search.spent,
        certificate, time.perf_counter() - began,
    )  # fmt: skip


class _Search:
    """Finds pairs one by one; remembers those found."""

    def __init__(self, products: Products, budget: int, generator: torch.Generator) -> None:
        self.products, self.budget, self.generator = products, budget, generator
        self.values: list[float] = []
        self.vectors: list[Tensor] = []

    @property
    def spent(self) -> bool:
        return self.products.count >= self.budget

    def pair(self, by_value: bool, tol: float, steps: int | None) -> tuple[float, Tensor, Tensor]:
        """Value, unit vector ``(n,)`` and product of the vector, of the next pair."""
        vector = self.vectors[-1].clone() if by_value and self.vectors else self._random(by_value)
        if not by_value:
            self._separate(vector)
        vector /= float(ops.norm(vector))
        image = torch.zeros_like(vector)
        value, last, done = 0.0, 0.0, 0
        while True:
            self.products.into(vector, image)
            applied = image.clone()
            self._deflate(applied, vector, by_value)
            done += 1
            value = float(torch.dot(vector.double(), applied.double()))
            length = float(ops.norm(applied))
            if not length < float("inf"):
                raise OperatorError("the operator returned NaN or infinity")
            rest = float(ops.norm(applied.double() - value * vector.double()))
            # half: the pairs found so far add their share when they are mixed at the end
            settled = (
                abs(value - last) < tol * abs(value) if by_value else rest <= 0.5 * tol * abs(value)
            )
            if by_value and length > 0.0:
                vector = applied / length
            if settled or length == 0.0 or self.spent or (steps is not None and done >= steps):
                break
            last = value
            if not by_value:
                vector = applied / length
                self._separate(vector)
                vector /= float(ops.norm(vector))
        self.values.append(value)
        self.vectors.append(vector)
        return value, vector, image

    def _random(self, uniform: bool) -> Tensor:
        products = self.products
        draw = torch.rand if uniform else torch.randn
        vector = draw(products.n, generator=self.generator, dtype=torch.float64)
        vector = vector.to(products.dtype).to(products.device)
        products.project_out_(vector)
        return vector

    def _deflate(self, applied: Tensor, vector: Tensor, by_value: bool) -> None:
        for value, found in zip(self.values, self.vectors, strict=True):
            along = vector if by_value else applied
            weight = float(torch.dot(found.double(), along.double()))
            applied.sub_(found, alpha=weight * value if by_value else weight)

    def _separate(self, vector: Tensor) -> None:
        for _ in range(2):
            for found in self.vectors:
                vector.sub_(found, alpha=float(torch.dot(found.double(), vector.double())))


def _rayleigh_ritz(vectors: Tensor, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Values, vectors and images of the pairs that the span of ``vectors`` ``(k, n)`` holds."""
    small = vectors.double() @ images.double().T
    values, mixing = torch.linalg.eigh((small + small.T).cpu() / 2)
    turn = mixing.T.to(vectors)
    return values, turn @ vectors, turn @ images


def _result(
    products: Products,
    values: Tensor,
    vectors: Tensor,
    images: Tensor,
    tol: float,
    method: str,
    spent: bool,
    certificate: Certificate,
    seconds: float,
) -> Eigenpairs:
    rest = images.double() - values[:, None].to(images.device) * vectors.double()
    norm = float(values.abs().max())
    residuals = ops.norm(rest).cpu() + products.eps * norm
    floor = 16.0 * products.eps * norm
    zero = (values.abs() <= floor) & (residuals <= floor)
    converged = (residuals <= tolerances(values, tol, "value", norm)) | zero
    if bool(converged.all()):
        reason = "converged; power iteration does not look for missing copies"
    elif spent:
        reason = "max_products ran out"
    else:
        reason = "the stopping rule was met before the residuals were"
    device, stored = products.device, vectors.to(products.operator.dtype).contiguous()
    padded, _ = ops.quantise(vectors, products.dtype)
    return Eigenpairs(
        values=values.to(device),
        vectors=canonical_signs_(stored),
        residuals=residuals.to(device),
        converged=converged.to(device),
        complete=False,
        doubt=1.0,
        orthogonality=orthogonality(padded, products.space),
        norm=norm,
        floor=floor,
        asymmetry=0.0,
        matvecs=products.count,
        restarts=0,
        seconds=seconds,
        reason=reason,
        method=method,
        which="LM",
        tol=tol,
        relative_to="value",
        certificate=certificate,
    )
