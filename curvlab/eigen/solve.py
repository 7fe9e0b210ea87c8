"""Linear systems ``(A + damping) x = b`` by conjugate gradients, with a residual that is measured.

For a positive definite ``A + damping``: a direction that shows otherwise ends the solve with the
damping that it asks for. Eigenpairs of A, if given, take their directions out of the iteration: the
start solves them exactly, and the preconditioner brings them down to the last of them, so that the
steps depend on the rest of the spectrum only. The residual reported is not the recurrence's, which
drifts: it is computed from a product with the solution, and rounding is added to it. Where it is
still too large the iteration starts again from there, as long as that helps.
"""

import math
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from curvlab_kernels import ops
from torch import Tensor

from curvlab.checks import seeded, shown, whole
from curvlab.eigen.products import Products
from curvlab.eigen.result import Eigenpairs, NotConvergedError
from curvlab.eigen.source import Source, as_operator
from curvlab.eigen.work import State, Work
from curvlab.manifest import FINITE, Shape
from curvlab.probe import FARTHEST, OperatorError, brought_near, far_exponent


@dataclass(frozen=True, slots=True, eq=False)
class Solution:
    """An approximate solution of ``(A + damping) x = b`` and the evidence for it.

    Attributes:
        x: Shape ``(n,)``, in the wider of b's and the operator's dtype: ``residual`` is that of x
            as it is returned (this rank's shard on a sharded operator).
        residual: Upper bound of ``|b - (A + damping) x| / |b|``.
        converged: Whether that is at most ``tol``.
        tol: What was asked for.
        products: Products with A, all of them.
        seconds: Wall-clock time.
        reason: Why the solve ended.
    """

    x: Tensor
    residual: float
    converged: bool
    tol: float
    products: int
    seconds: float
    reason: str

    def require_converged(self) -> "Solution":
        """This solution, or :class:`~curvlab.NotConvergedError` with advice."""
        if not self.converged:
            raise NotConvergedError(
                f"the residual is {self.residual:.1e} of |b|, tol= asks for {self.tol:.1e}: "
                f"{self.reason}. Allow more products, give pairs= of the largest eigenvalues, "
                "raise damping=, loosen tol= or use an operator in float64"
            )
        return self

    def __repr__(self) -> str:
        return (
            f"Solution(residual={self.residual:.2e}, converged={self.converged}, tol={self.tol:g}, "
            f"{self.products} products, {self.seconds:.2f} s; {self.reason})"
        )


def solve(
    operator: Source,
    b: Tensor,
    *,
    damping: float = 0.0,
    pairs: Eigenpairs | None = None,
    tol: float = 1e-4,
    max_products: int = 1000,
    seed: int = 0,
    checkpoint: str | Path | None = None,
    progress: bool | None = None,
) -> Solution:
    """Solve ``(A + damping) x = b`` for a positive definite ``A + damping``.

    Args:
        operator: As for :func:`curvlab.lanczos`.
        b: Right-hand side ``(n,)``, such as a gradient (a shard on a sharded operator).
        damping: At least 0; a Hessian away from a minimum needs more than its most negative value.
        pairs: Eigenpairs of A, usually its largest: fewer steps.
        tol: Residual allowed, relative to ``|b|``.
        max_products: Products after which the solve ends.
        seed: Of the probe.
        checkpoint: As for :func:`curvlab.trace`.
        progress: As for :func:`curvlab.trace`.

    Raises:
        ValueError: If ``A + damping`` is not positive definite, with the damping it needs.
        Interrupted: On Ctrl-C, with the solution so far, once it is in ``checkpoint``.
    """
    began = time.perf_counter()
    products = Products(as_operator(operator), None, near_one=True)
    [max_products], seed = whole(max_products=max_products), seeded(seed)
    shown(progress)
    far = far_exponent(b) if isinstance(b, Tensor) else 0
    b = brought_near(b, far) if far else b  # its squares would leave float64
    _check(products, b, damping, tol)
    products.probe(seed)
    if products.exponent and damping > 0.0:  # of the larger of the two
        larger = max(products.exponent, math.frexp(damping)[1])
        far_off, _ = FARTHEST[products.dtype]
        products.exponent = larger if abs(larger) > far_off else 0
    digest = products.space.digest
    asked = {
        "damping": damping,
        "b": digest(b[None]),
        "pairs": "" if pairs is None else digest(pairs.vectors),
    }
    work = Work("solve", products, asked, checkpoint, progress)
    system = _System(work, b, damping, pairs, max_products)

    def result() -> Solution:
        at, seconds = system.at, time.perf_counter() - began
        residual = at.residual + system.rounding
        good = residual <= tol
        reason = "converged" if good else at.ended or "it was interrupted"
        # in b's own, narrower dtype x would have another residual
        wide = torch.promote_types(b.dtype, products.operator.dtype)
        x = brought_near(brought_near(at.x, products.exponent), -far).to(wide)
        if not bool(torch.isfinite(products.space.norm(x))):
            raise ValueError(f"x is beyond the numbers of {wide}: scale b, or give it in float64")
        return Solution(
            x,
            residual,
            good,
            tol,
            products.count,
            seconds,
            reason,
        )

    with work.interruptible(system.state, result):
        while not system.at.ended and system.at.residual + system.rounding > tol:
            system.step(0.5 * tol)
            work.keep(system.state())
    return result()


@dataclass(frozen=True, slots=True)
class _Round:
    """Conjugate gradients on what was left of b, from zero.

    Attributes:
        total: The solution of it so far, ``(width,)``, float64.
        rest: Its residual by recurrence, ``(width,)``.
        ahead: The next direction, ``(width,)``.
        along: ``rest`` times its preconditioned form.
        left: Length of ``rest``.
    """

    total: Tensor
    rest: Tensor
    ahead: Tensor
    along: float
    left: float


@dataclass(frozen=True, slots=True)
class _At:
    """How far a solve has come; replaced as a whole.

    Attributes:
        x: Shape ``(width,)``, float64.
        rest: ``b - (A + damping) x``, from products, ``(width,)``, float64.
        residual: Its length relative to ``|b|``.
        norm: The largest ``|(A + damping) p| / |p|`` seen.
        spent: Products made.
        round: What improves x at present.
        ended: Why there is no going on, if so.
    """

    x: Tensor
    rest: Tensor
    residual: float
    norm: float
    spent: int
    round: _Round | None = None
    ended: str = ""


class _System:
    """``(A + damping) x = b``, and rounds of conjugate gradients on what is left of b."""

    def __init__(
        self, work: Work, b: Tensor, damping: float, pairs: Eigenpairs | None, budget: int
    ) -> None:
        self.work, self.products, self.space = work, work.products, work.products.space
        self.damping, self.budget = math.ldexp(damping, -self.products.exponent), budget
        self.size = float(self.space.norm(b.to(self.products.dtype)))
        self.rows, self.shrink, self.inverse = self._deflation(pairs)
        wide: Shape = (torch.float64, 1, self.products.width)
        saved = work.resume({"residual": FINITE, "norm": FINITE}, {"x": wide, "rest": wide})
        if saved is None:
            nothing = torch.zeros(self.products.width, dtype=torch.float64, device=b.device)
            # products along deflated directions are in no step's figures
            largest = float(1.0 / self.inverse.min()) if len(self.rows) else self.damping
            start = b.to(torch.float64, copy=True)
            residual, spent = 1.0 if self.size else 0.0, self.products.spent
            self.at = _At(nothing, start, residual, largest, spent)
        else:
            rows, facts, inner = saved.rows, saved.facts, None
            if "total" in rows:
                narrow: Shape = (self.products.dtype, 1, self.products.width)
                parts = {"total": wide, "round rest": narrow, "ahead": narrow}
                work.require(saved, {"along": FINITE, "left": FINITE}, parts)
                total, rest, ahead = (rows[name][0] for name in ("total", "round rest", "ahead"))
                inner = _Round(total, rest, ahead, facts["along"], facts["left"])
            figures, spent = (facts["residual"], facts["norm"]), self.products.spent
            self.at = _At(rows["x"][0], rows["rest"][0], *figures, spent, inner)

    @property
    def rounding(self) -> float:
        """What the operator's precision may hide of the residual, relative to ``|b|``."""
        if not self.size:
            return 0.0
        error = max(self.products.eps, self.products.error)
        norm = self.at.norm + self.damping  # of A and damping apart: they may all but cancel
        return 2.0 * error * norm * float(self.space.norm(self.at.x)) / self.size

    def state(self) -> State:
        at, inner = self.at, self.at.round
        rows = {"x": at.x[None], "rest": at.rest[None]}
        facts = {"residual": at.residual, "norm": at.norm}
        if inner is not None:
            rows |= {"total": inner.total[None], "round rest": inner.rest[None]}
            rows["ahead"] = inner.ahead[None]
            facts |= {"along": inner.along, "left": inner.left}
        return State(rows, {}, facts, at.spent)

    def step(self, goal: float) -> None:
        """Begin a round, go one step on in it, or end it with the true residual.

        Args:
            goal: Residual by recurrence with which a round ends, relative to ``|b|``.
        """
        at = self.at.round
        if at is None:
            following = self._begin()
            self.at = replace(self.at, round=following, spent=self.products.spent)
        elif at.left <= goal * self.size or self.products.spent >= self.budget - 1:
            self._finish(at)
        else:
            self._advance(at)
            note = f"residual {at.left / self.size:.1e}"
            self.work.show(self.products.spent, self.budget, "products", note)

    def _begin(self) -> _Round:
        rest = self.at.rest.to(self.products.dtype, copy=True)
        total = self._coarse(rest)
        if len(self.rows):
            rest = (self.at.rest - self._image(total)).to(self.products.dtype)
        ahead = self._precondition(rest)
        along, left = float(self._dot(rest, ahead)), float(self.space.norm(rest))
        return _Round(total, rest, ahead, along, left)

    def _advance(self, at: _Round) -> None:
        image = self._image(at.ahead)
        curvature = self._dot(at.ahead, image)
        share = at.along / curvature
        total = at.total + at.ahead.double() * share
        rest = at.rest - (image * share).to(at.rest.dtype)
        ahead = self._precondition(rest)
        along = self._dot(rest, ahead)
        lengths = [self.space.norm(one) for one in (at.ahead, rest, image)]
        numbers = [curvature, along, *lengths]
        bent, forward, long, left, stretched = torch.stack(numbers).tolist()  # one transfer
        if not math.isfinite(bent):
            raise OperatorError("the operator returned NaN or infinity")
        if bent <= 0.0:
            raise self._indefinite(bent / long**2 if long > 0.0 else 0.0)
        following = _Round(total, rest, ahead + at.ahead * (forward / at.along), forward, left)
        norm = max(self.at.norm, stretched / long)
        self.at = replace(self.at, norm=norm, spent=self.products.spent, round=following)

    def _finish(self, done: _Round) -> None:
        """Add the round's solution, if the true residual is smaller with it."""
        before = self.at
        rest = before.rest - self._image(done.total)
        residual = float(self.space.norm(rest)) / self.size
        if not math.isfinite(residual):
            raise OperatorError("the operator returned NaN or infinity")
        ended = ""
        if self.products.spent >= self.budget - 1:
            ended = f"the budget of {self.budget} products is exhausted"
        elif residual > 0.5 * before.residual:
            error = max(self.products.eps, self.products.error)
            ended = f"products are right to {error:.1e}, which allows no smaller residual"
        following = replace(before, spent=self.products.spent, round=None, ended=ended)
        if residual < before.residual:
            following = replace(following, x=before.x + done.total, rest=rest, residual=residual)
        self.at = following

    def _indefinite(self, curvature: float) -> ValueError:
        unit = self.products.unit
        least = (self.damping - curvature) * unit
        return ValueError(
            "A + damping is not positive definite: a direction has curvature "
            f"{curvature * unit:.3g} with damping={self.damping * unit:g}. Give a damping above "
            f"{least:.3g}, or use a Gauss-Newton or Fisher operator"
        )

    def _image(self, vector: Tensor) -> Tensor:
        """``(A + damping)`` times a vector; the operator gets it in its own precision."""
        given = vector.to(self.products.dtype)
        image = torch.zeros_like(given)
        self.products.into(given, image)
        return image.to(vector.dtype) + self.damping * vector

    def _dot(self, first: Tensor, second: Tensor) -> Tensor:
        row, _ = ops.quantise(first[None], self.products.dtype)
        return self.space.total(ops.coefficients(row, second))[0]

    def _deflation(self, pairs: Eigenpairs | None) -> tuple[Tensor, Tensor, Tensor]:
        """Rows of the pairs, and by what their components shrink and are divided, float64."""
        products = self.products
        if pairs is None or not len(pairs):
            none = torch.zeros(0, products.width, dtype=products.dtype, device=products.device)
            empty = torch.zeros(0, dtype=torch.float64, device=products.device)
            return none, empty, empty
        if pairs.vectors.shape[1] != products.width:
            raise ValueError(
                f"pairs= has vectors of {pairs.vectors.shape[1]} elements; the operator's have "
                f"{products.width}"
            )
        values = brought_near(pairs.values.double().to(products.device), products.exponent)
        shifted = values + self.damping
        if float(shifted.min()) <= 0.0:
            raise self._indefinite(float(shifted.min()))
        rows, _ = ops.quantise(pairs.vectors.to(products.dtype), products.dtype)
        return rows, shifted.min() / shifted - 1.0, shifted.reciprocal()

    def _coarse(self, rest: Tensor) -> Tensor:
        """The solution in the span of the pairs, float64."""
        found = torch.zeros_like(rest)
        if len(self.rows):
            ops.apply_(self.rows, -self._along(rest) * self.inverse, found)
        return found.double()

    def _precondition(self, rest: Tensor) -> Tensor:
        """``rest`` with the pairs' components brought down to that of the smallest of them."""
        found = rest.clone()
        if len(self.rows):
            ops.apply_(self.rows, -self._along(rest) * self.shrink, found)
        return found

    def _along(self, rest: Tensor) -> Tensor:
        return self.space.total(ops.coefficients(self.rows, rest))


def _check(products: Products, b: Tensor, damping: float, tol: float) -> None:
    if not isinstance(b, Tensor) or b.shape != (products.width,) or not b.is_floating_point():
        came = f"{b.dtype} {tuple(b.shape)}" if isinstance(b, Tensor) else type(b).__name__
        raise ValueError(f"b= is a vector ({products.width},) of real floats; got {came}")
    if b.device != products.device:
        raise ValueError(f"b= is on {b.device}, the operator on {products.device}: move one")
    if not bool(torch.isfinite(products.space.norm(b.to(products.dtype)))):
        raise ValueError("b= holds NaN or infinity")
    if not (0.0 <= damping < math.inf):
        raise ValueError(f"damping= is a finite number of at least 0; got {damping}")
    if not 0.0 < tol < 1.0:
        raise ValueError(f"tol= is a relative residual, 0 < tol < 1; got {tol}")
