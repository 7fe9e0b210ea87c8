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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from curvlab_kernels import ops
from torch import Tensor

from curvlab.checks import seeded, shown, whole
from curvlab.eigen.outcome import Outcome
from curvlab.eigen.products import Deflation, Products, orthogonality
from curvlab.eigen.request import check_choice, check_numbers, product_budget
from curvlab.eigen.result import Eigenpairs, judge
from curvlab.eigen.selection import order
from curvlab.eigen.source import Source, as_operator
from curvlab.eigen.work import State, Work
from curvlab.manifest import COUNT, FINITE, Shape
from curvlab.probe import Certificate, OperatorError
from curvlab.rows import Rows
from curvlab.storage import StorageError

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
    checkpoint: str | Path | None = None,
    progress: bool | None = None,
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
        checkpoint: A file for what is done; if it exists, the solve goes on from it. It must come
            from the same arguments and operator.
        progress: Show a line on the terminal; by default when there is one.

    Raises:
        Interrupted: On Ctrl-C, with the pairs found so far, once everything done is in
            ``checkpoint``.
    """
    shown(progress)
    by_value = check_choice("stop", stop, Stop) == "value"
    tol = (CHANGE if by_value else 1e-3) if tol is None else tol
    products = Products(as_operator(operator), deflate, near_one=True)
    k = check_numbers(products, k, which="LM", tol=tol, relative_to="value")
    seed = seeded(seed)
    began = time.perf_counter()
    certificate = products.probe(seed)
    [per_pair] = whole(steps=steps) if steps is not None else [STEPS if by_value else None]
    asked = {"stop": stop, "tol": tol, "seed": seed, "steps": per_pair}
    work = Work("power iteration", products, asked, checkpoint, progress)
    search = _Search(work, by_value, tol, per_pair, product_budget(max_products, k), seed)

    def result() -> Eigenpairs:
        seconds = time.perf_counter() - began
        return _result(products, search.found, by_value, tol, search.spent, certificate, seconds)

    with work.interruptible(search.state, lambda: result() if search.found.values else None):
        while len(search.found.values) < k:
            search.step()
            work.keep(search.state())
            work.show(len(search.found.values), k, "pairs")
    return result()


@dataclass(frozen=True, slots=True)
class _Found:
    """Pairs found one by one, and the next one in the making.

    Attributes:
        values: Of the pairs found.
        vectors: Shape ``(j, width)``, unit rows.
        images: Shape ``(j, width)``: the products with them.
        vector: Shape ``(width,)``: the next to be multiplied; ``None`` before a pair is begun.
        last: The present pair's value a step ago, or with ``stop="residual"`` its image's length.
        done: Its steps.
        draws: Random vectors drawn.
        spent: Products made.
    """

    values: tuple[float, ...]
    vectors: Tensor
    images: Tensor
    vector: Tensor | None = None
    last: float = 0.0
    done: int = 0
    draws: int = 0
    spent: int = 0


class _Search:
    """Finds pairs one by one; all that changes is ``found``, once a step."""

    def __init__(
        self, work: Work, by_value: bool, tol: float, steps: int | None, budget: int, seed: int
    ) -> None:
        self.products, self.space = work.products, work.products.space
        self.by_value, self.tol, self.steps, self.budget = by_value, tol, steps, budget
        self.generator = torch.Generator().manual_seed(seed)
        products = self.products
        none = torch.zeros(0, products.width, dtype=products.dtype, device=products.device)
        self.found = _Found((), none, none, spent=products.spent)
        self.known = Rows(self.space, products.n, dtype=products.dtype, device=products.device)
        long: Shape = (products.dtype, "pairs", products.width)
        saved = work.resume(
            {"values": [FINITE], "last": FINITE, "done": COUNT, "draws": COUNT},
            {"vectors": long, "images": long, "current": (products.dtype, "one", products.width)},
        )
        if saved is not None:
            facts = saved.facts
            if len(facts["values"]) != len(saved.rows["vectors"]) or facts["draws"] > 10 * budget:
                raise StorageError(f"{work.path} is damaged: its figures contradict each other")
            current = saved.rows["current"]
            self.found = _Found(
                tuple(facts["values"]), saved.rows["vectors"], saved.rows["images"],
                current[0] if len(current) else None, facts["last"], facts["done"], facts["draws"],
                products.spent,
            )  # fmt: skip
            for _ in range(self.found.draws):
                self._draw()

    @property
    def spent(self) -> bool:
        return self.products.spent >= self.budget

    def state(self) -> State:
        found = self.found
        current = found.vectors[:0] if found.vector is None else found.vector[None]
        rows = {"vectors": found.vectors, "images": found.images, "current": current}
        names = ("values", "last", "done", "draws")
        return State(rows, {}, {name: getattr(found, name) for name in names}, found.spent)

    def step(self) -> None:
        """One product with the present pair's vector."""
        found = self.found
        known = self._known()
        vector, draws = self._begin(known) if found.vector is None else (found.vector, found.draws)
        follows = self.by_value and found.vector is None and len(known) > 0
        image = found.images[-1] if follows else self._image(vector)
        applied = image.clone()
        if self.by_value:
            weights = torch.tensor(found.values, dtype=torch.float64).to(vector.device)
            known.subtract_(known.coefficients(vector) * weights, applied)
        else:
            known.project_out_(applied)
        value, length, rest, whole = self._figures(vector, applied, image)
        if not length < float("inf"):
            raise OperatorError("the operator returned NaN or infinity")
        # half: the pairs found so far add their share when they are mixed at the end
        settled = (
            abs(value - found.last) < self.tol * abs(value)
            if self.by_value
            else rest <= 0.5 * self.tol * abs(value)
        )
        done = found.done + 1
        nothing = length == 0.0 or (not self.by_value and self._rounding_only(length, whole))
        ends = settled or nothing or self.spent or (self.steps or done + 1) <= done
        forward = self._inside(applied / length) if length > 0.0 else vector
        if ends:
            if self.by_value:  # returned is a step further than what was multiplied
                vector, image = forward, self._image(forward)
            self.found = _Found(
                (*found.values, value), torch.cat([found.vectors, vector[None]]),
                torch.cat([found.images, image[None]]), draws=draws,
                spent=self.products.spent,
            )  # fmt: skip
        else:
            following = forward if self.by_value else self._separated(known, forward)
            self.found = replace(
                found, vector=following, last=value if self.by_value else length, done=done,
                draws=draws, spent=self.products.spent,
            )  # fmt: skip

    def _rounding_only(self, length: float, whole: float) -> bool:
        """Whether what is left of an image without the pairs found is nothing to go on with.

        It has no digits where all but its last bits were along those pairs. And where it is no
        longer than what counts as zero, it may grow yet: a random vector shows little of one
        eigenvector among many. If it does not, the values that are left are zeros.

        Args:
            length: Of what is left.
            whole: Length of the image.
        """
        norm = max(whole, *map(abs, self.found.values), 0.0)
        still = length <= min(self.found.last, _floor(self.products, norm))
        return still or length <= 16.0 * self.products.eps * whole

    def _inside(self, vector: Tensor) -> Tensor:
        """A unit vector without what rounding has left in it of the deflated directions.

        An image is free of them to rounding, but what is left of it may be much shorter.
        """
        if self.products.deflation is None:
            return vector
        self.products.project_out_(vector)
        return vector / self.space.norm(vector)

    def _image(self, vector: Tensor) -> Tensor:
        image = torch.zeros_like(vector)
        self.products.into(vector, image)
        return image

    def _known(self) -> Rows:
        """The vectors found; orthonormal as far as the rule that ended each has made them."""
        for vector in self.found.vectors[len(self.known) :]:
            self.known.put(len(self.known), vector)
            self.known.admit()
        return self.known

    def _figures(self, vector: Tensor, applied: Tensor, image: Tensor) -> list[float]:
        """Rayleigh quotient, length, that of what is not along ``vector``, that of the image."""
        row, _ = ops.quantise(vector[None], self.products.dtype)
        value = self.space.total(ops.coefficients(row, applied))[0]
        rest = self.space.norm(applied.double() - value * vector.double())
        lengths = self.space.norm(applied), rest, self.space.norm(image)
        found: list[float] = torch.stack([value, *lengths]).tolist()  # one transfer
        return found

    def _begin(self, known: Rows) -> tuple[Tensor, int]:
        """The first vector of a pair, and how many were drawn with it."""
        if self.by_value and len(known):
            return self.found.vectors[-1], self.found.draws
        vector = self._draw()
        if not self.by_value:
            return self._separated(known, vector), self.found.draws + 1
        return vector / self.space.norm(vector), self.found.draws + 1

    def _draw(self) -> Tensor:
        products = self.products
        vector = self.space.normal(self.generator, torch.float64)
        if self.by_value:
            # uniform, as the paper's tool draws; what pads a shard stays zero
            uniform = 0.5 * (1.0 + torch.erf(vector / 2**0.5))
            vector = torch.where(vector == 0.0, vector, uniform)
        vector = vector.to(products.dtype).to(products.device)
        products.project_out_(vector)
        return vector

    def _separated(self, known: Rows, vector: Tensor) -> Tensor:
        """The part of ``vector`` orthogonal to the rows ``known``, of unit length."""
        for _ in range(2):  # twice is enough
            known.project_out_(vector)
        return vector / self.space.norm(vector)


def _rayleigh_ritz(products: Products, found: _Found) -> tuple[Tensor, Tensor, Tensor]:
    """Values, vectors and images of the pairs that the span of the vectors ``(k, width)`` holds."""
    rows, _ = ops.quantise(found.vectors, products.dtype)
    small = products.space.total(ops.coefficients(rows, found.images)).cpu()
    values, mixing = torch.linalg.eigh((small + small.T) / 2)
    turn = mixing.T.to(found.vectors)
    return values, turn @ found.vectors, turn @ found.images


def _left(products: Products, vectors: Tensor) -> Tensor:
    """Length of what rows ``(k, width)`` still hold of deflated directions, ``(k,)``.

    A may take it anywhere.
    """
    inside = vectors.clone()
    products.project_out_(inside)
    return products.space.norm(inside.sub_(vectors)).cpu()


def _floor(products: Products, norm: float) -> float:
    """Below it a value, for an operator of this norm, is zero to the operator's precision."""
    return (2.0 * products.error + 16.0 * products.eps) * max(norm, products.size)


def _result(
    products: Products,
    found: _Found,
    by_value: bool,
    tol: float,
    spent: bool,
    certificate: Certificate,
    seconds: float,
) -> Eigenpairs:
    if by_value:
        values, vectors, images = (
            torch.tensor(found.values, dtype=torch.float64),
            found.vectors,
            found.images,
        )
        chosen = values.argsort(descending=True)
    else:
        values, vectors, images = _rayleigh_ritz(products, found)
        chosen = order(values, len(values), "LM")
    values, vectors, images = values[chosen], vectors[chosen], images[chosen]
    space = products.space
    stored = vectors.to(products.operator.dtype).contiguous()
    norm = float(values.abs().max())
    residuals = products.residuals(stored, values)
    if residuals is None:
        rest = images.double() - values[:, None].to(images.device) * vectors.double()
        # products are rounded, and so are the vectors to be returned
        residuals = space.norm(rest).cpu() + products.rounding(norm) + products.eps * norm
        if products.deflation is not None:  # else it is nothing, and a wait for the device
            residuals += _left(products, vectors) * max(norm, products.size)
    floor = _floor(products, norm)
    judged = judge(values, residuals, tol=tol, relative_to="value", norm=norm, floor=floor)
    converged = judged.converged
    if bool(converged.all()):
        outcome = Outcome.NOT_CERTIFIED
        reason = "converged; power iteration does not look for missing copies"
    elif spent:
        outcome, reason = Outcome.OUT_OF_PRODUCTS, "max_products ran out"
    else:
        outcome = Outcome.NOT_SETTLED
        reason = "the stopping rule was met before the residuals were"
    device, unit = products.device, products.unit
    return Eigenpairs(
        space=space,
        values=values.to(device) * unit,
        vectors=space.canonical_signs_(stored),
        residuals=residuals.to(device) * unit,
        converged=converged.to(device),
        complete=False,
        doubt=1.0,
        orthogonality=orthogonality(stored, space),
        norm=norm * unit,
        floor=floor * unit,
        asymmetry=0.0,
        matvecs=products.count,
        restarts=0,
        seconds=seconds,
        outcome=outcome,
        reason=reason + judged.note,
        method=f"deflated power iteration, stopped on {'values' if by_value else 'residuals'}",
        which="LM",
        tol=tol,
        relative_to="value",
        certificate=certificate,
    )
