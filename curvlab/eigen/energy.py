"""How many eigenvectors hold ``1 - epsilon`` of the spectral energy ``||A||_F^2``, and which.

No matrix is formed. The energy is split: squares of the eigenvalues found, which are exact to
rounding, and what random vectors see of the rest. One product per random vector ``z`` serves every
k: with the pairs found, the part of ``A z`` outside them is known, and its squared length estimates
the energy outside them without bias. So only the tail is estimated, and its error bar is small
where it matters. ``k`` is the smallest number whose share reaches ``1 - epsilon``; ``least`` and
``most`` are what it would be at two standard errors to either side.
"""

import math
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from curvlab_kernels import ops
from torch import Tensor

from curvlab.checks import seeded, shown, whole
from curvlab.eigen.estimate import Estimate, blocks, finite_images, random_signs
from curvlab.eigen.growing import Growing
from curvlab.eigen.lanczos import lanczos
from curvlab.eigen.products import Products
from curvlab.eigen.result import Eigenpairs
from curvlab.eigen.source import Source, as_operator
from curvlab.eigen.work import Interrupted, State, Work
from curvlab.probe import FAR
from curvlab.rows import Space
from curvlab.storage import StorageError

FIRST = 16  # pairs of the first attempt


@dataclass(frozen=True, slots=True, eq=False)
class SpectralEnergy:
    """The selected pairs and the evidence for their number.

    Attributes:
        pairs: The ``k`` selected eigenpairs, largest magnitude first.
        k: Their number.
        least: What ``k`` would be with a tail two standard errors smaller.
        most: The same with a larger one; 0 if ``largest`` pairs would then not suffice.
        total: ``||A||_F^2`` with its standard error.
        share: Of the total that the ``k`` pairs hold; below ``1 - epsilon`` only if asked for with
            ``short=True``.
        products: Operator products, all of them.
    """

    pairs: Eigenpairs
    k: int
    least: int
    most: int
    total: Estimate
    share: float
    products: int


def spectral_energy(
    operator: Source,
    epsilon: float,
    *,
    tol: float = 1e-3,
    probes: int = 24,
    largest: int = 1000,
    short: bool = False,
    seed: int = 0,
    dense: bool | None = None,
    checkpoint: str | Path | None = None,
    progress: bool | None = None,
) -> SpectralEnergy:
    """The leading eigenpairs that hold ``1 - epsilon`` of ``||A||_F^2``.

    Args:
        operator: As for :func:`curvlab.lanczos`.
        epsilon: Share of the energy that may be left out, ``0 < epsilon <= 1``.
        tol: Relative residual of the pairs.
        probes: Random vectors for the tail, one product each.
        largest: Most pairs to compute; if they do not suffice, an error says what was reached.
        short: Return what was found in place of an error where ``largest`` pairs do not suffice or
            a pair does not converge; ``share`` and ``pairs`` say what it is worth.
        seed: Of all random vectors.
        dense: Force or forbid the eigendecomposition of the whole matrix (the exact way).
        checkpoint: File for the random vectors' products and the search (a folder on several
            ranks); if it exists, the computation goes on from it. The exact way keeps none.
        progress: As for :func:`curvlab.lanczos`.

    Raises:
        Interrupted: On Ctrl-C, with the pairs so far and their share (none before there are pairs),
            once what is done is in ``checkpoint``.
    """
    if not 0.0 < epsilon <= 1.0:
        raise ValueError(
            f"epsilon= is the share of energy left out, 0 < epsilon <= 1; got {epsilon}. "
            "Nothing left out is the whole space: use torch.linalg.eigh on operator.dense()"
        )
    [probes], [largest], seed = whole(2, probes=probes), whole(largest=largest), seeded(seed)
    shown(progress)
    products = Products(as_operator(operator), None)
    certificate = products.probe(seed)
    if abs(certificate.exponent) > FAR:
        raise ValueError(
            f"products of this operator are near 2**{certificate.exponent}, and energy is a sum "
            "of squares, which leave float64: scale the operator, the pairs selected are the same"
        )
    n = products.n
    # the probes and a certified search for the first pairs take more products than this many
    small = n <= 4 * (FIRST + probes) and not products.space.sharded
    if dense or (dense is None and small):
        pairs = lanczos(operator, n, tol=tol, seed=seed, dense=True, progress=False)
        tail = torch.zeros(2, n + 1, dtype=torch.float64)
        return _selected(pairs, tail, epsilon, exact=True, products=products.count)
    asked = {"epsilon": epsilon, "tol": tol, "probes": probes, "largest": largest}
    asked |= {"short": short, "seed": seed}
    work = Work("energy", products, asked, checkpoint, progress)
    growing = Growing(products, certificate, tol=tol, seed=seed, progress=progress)
    selection = _Selection(work, growing, probes, epsilon, min(largest, n), short)
    with work.interruptible(selection.state, selection.partial):
        selection.resume()
        selection.draw(seed)
        return selection.settle()


class _Selection:
    """Images of random vectors, then attempts with more and more pairs.

    Attributes:
        images: Shape ``(probes, width)``.
        drawn: How many of them are there, and the products until then.
        found: Pairs of the last attempt, as far as it got.
    """

    def __init__(
        self, work: Work, growing: Growing, probes: int, epsilon: float, largest: int, short: bool
    ) -> None:
        self.work, self.growing, self.products = work, growing, work.products
        self.epsilon, self.largest, self.short = epsilon, largest, short
        width, dtype = self.products.width, self.products.dtype
        self.images = torch.zeros(probes, width, dtype=dtype, device=self.products.device)
        self.drawn = (0, self.products.spent)
        self.k, self.certify = min(FIRST, largest), False
        self.found: Eigenpairs | None = None

    def state(self) -> State | None:
        """For the file; ``None`` within a step of the search."""
        done, spent = self.drawn
        images = {"images": self.images[:done]}
        if self.growing.solver is None:
            return State(images, {}, {"search": None}, spent)
        search = self.growing.state()
        if search is None:
            return None
        rows, facts = {**images, **search.rows}, {"search": dict(search.facts)}
        return replace(search, rows=rows, facts=facts)

    def partial(self) -> SpectralEnergy | None:
        if self.found is None:
            return None
        tails = _tails(self.products.space, self.found, self.images)
        return self._selected(self.found, tails)

    def resume(self) -> None:
        """Take up what an earlier call left in the file."""
        form = (self.products.dtype, "probes", self.products.width)
        saved = self.work.resume({"search": (None, dict)}, {"images": form})
        if saved is None:
            return
        done, search, path = len(saved.rows["images"]), saved.facts["search"], self.work.path or ""
        if done > len(self.images) or (search is not None and done < len(self.images)):
            raise StorageError(f"{path} is damaged: it holds {done} images of {len(self.images)}")
        self.images[:done] = saved.rows["images"]
        self.drawn = (done, self.products.spent)
        if search is not None:
            self.k, self.certify = self.growing.restore(path, replace(saved, facts=search))

    def draw(self, seed: int) -> None:
        """Multiply random signs, those that are lacking."""
        generator, done = torch.Generator().manual_seed(seed + 1), 0
        for size in blocks(self.products, len(self.images)):
            signs, done = random_signs(self.products, generator, size), done + size
            if done > self.drawn[0]:
                self.images[done - size : done] = finite_images(self.products, signs)
                self.drawn = (done, self.products.spent)
                self.work.keep(self.state())
            self.work.show(done, len(self.images), "products", "random vectors")
        self.work.line.close()  # the search has its own
        if self.growing.solver is None:
            self.work.save(self.state())

    def settle(self) -> SpectralEnergy:
        """Find more pairs until their number is settled."""
        n, largest, epsilon = self.products.n, self.largest, self.epsilon
        while True:
            pairs = self._pairs()
            tails = _tails(self.products.space, pairs, self.images)
            tail, high = tails.mean(0), tails.mean(0) + 2 * _errors(tails, pairs.values)
            needed, converged = _needed(pairs.values, high, epsilon) or 0, pairs.converged
            if needed and bool(converged[:needed].all()) and not bool(converged.all()):
                # precision may not do for values that are not needed
                self.k, self.certify = needed, True
                continue
            if not self.short:
                pairs.require_converged()
            enough = _needed(pairs.values, tail, epsilon) is not None
            more = enough or self.k < largest
            if self.short and not (bool(pairs.converged.all()) and more):
                return self._selected(pairs, tails)
            # until the number is settled at the upper end of the error bar too
            settled = _needed(pairs.values, high, epsilon) is not None or self.k == n
            if settled or (enough and self.k == largest):
                if self.certify:
                    return self._selected(pairs, tails)
                self.certify = True  # of all attempts only the last has to be complete
            elif self.k == largest:
                reached = _shares(pairs.values, tail)[-1]
                raise ValueError(
                    f"{self.k} eigenpairs hold {reached:.4f} of the energy, short of "
                    f"{1 - epsilon:g}: raise largest=, or choose a larger epsilon="
                )
            else:
                guess = _guess(pairs.values, high[-1], epsilon)
                self.k, self.certify = min(largest, max(self.k + 1, guess)), False

    def _pairs(self) -> Eigenpairs:
        save = None if self.work.path is None else lambda: self.work.save(self.state())
        try:
            self.found = self.growing.pairs(self.k, certify=self.certify, save=save)
        except Interrupted as stop:
            if stop.partial is not None and len(stop.partial):
                self.found = stop.partial
            raise
        return self.found

    def _selected(self, pairs: Eigenpairs, tails: Tensor) -> SpectralEnergy:
        return _selected(pairs, tails, self.epsilon, exact=False, products=self.products.count)


def _tails(space: Space, pairs: Eigenpairs, images: Tensor) -> Tensor:
    """Each probe's estimate of the energy outside the first j pairs, ``(probes, k + 1)``."""
    rows, _ = ops.quantise(pairs.vectors.to(images.dtype), images.dtype)
    # (probes, k): value * coefficient, to the residual
    inside = space.total(ops.coefficients(rows, images))
    total = space.norm(images) ** 2
    falling = torch.cat([torch.zeros_like(inside[:, :1]), (inside**2).cumsum(1)], dim=1)
    return (total[:, None] - falling).clamp_min(0.0).cpu()


def _errors(tails: Tensor, values: Tensor) -> Tensor:
    """Standard errors of the mean over probes, ``(k + 1,)``: bounds, not sample deviations.

    A probe sees the tail with variance at most ``2 sum(lambda^4) <= 2 lambda_k^2 tail``. A few
    strong values in the tail make its samples so skewed that their own deviation is too small just
    when their mean is.
    """
    magnitudes = values.abs().cpu()
    beyond = torch.cat([magnitudes[:1], magnitudes])  # nothing in tail j exceeds this
    return beyond * (2.0 * tails.mean(0) / len(tails)).sqrt()


def _shares(values: Tensor, tail: Tensor) -> list[float]:
    """Share of the energy in the first j pairs, j = 0..k, given the tail beyond all k."""
    squares = values.cpu() ** 2
    total = float(squares.sum() + tail[-1])
    held = torch.cat([torch.zeros(1, dtype=torch.float64), squares.cumsum(0)])
    return [1.0] * len(held) if total == 0.0 else (held / total).tolist()


def _needed(values: Tensor, tail: Tensor, epsilon: float) -> int | None:
    """The smallest j whose share reaches ``1 - epsilon``; ``None`` if not even all do."""
    for j, share in enumerate(_shares(values, tail)):
        if share >= 1.0 - epsilon:
            return j
    return None


def _guess(values: Tensor, tail: Tensor, epsilon: float) -> int:
    """How many pairs to try next: squares go on falling as they did over the last half.

    At most twice as many: an attempt that falls short loses nothing, for the next goes on from it.
    """
    squares = (values.cpu() ** 2).clamp_min(1e-300)
    k = len(squares)
    half = max(1, k // 2)
    rate = float((squares[-1] / squares[k - half]).log()) / half
    rest = float(tail)
    total = float(squares.sum()) + rest
    missing = rest - epsilon * total
    if rate >= -1e-9:
        return 2 * k
    # sum of squares[-1] * exp(rate * i), i = 1..j, reaches what is missing
    ratio = 1.0 - missing * (1.0 - math.exp(rate)) / (float(squares[-1]) * math.exp(rate))
    more = math.log(ratio) / rate if ratio > 0.0 else k
    return min(2 * k, k + max(4, math.ceil(1.25 * more)))


def _selected(
    pairs: Eigenpairs, tails: Tensor, epsilon: float, *, exact: bool, products: int
) -> SpectralEnergy:
    tail = tails.mean(0)
    error = torch.zeros_like(tail) if exact else _errors(tails, pairs.values)
    k = _needed(pairs.values, tail, epsilon)
    k = len(pairs) if k is None else k
    squares = float((pairs.values**2).sum())
    share = _shares(pairs.values, tail)[k]
    return SpectralEnergy(
        pairs=pairs.head(k),
        k=k,
        least=_needed(pairs.values, (tail - 2 * error).clamp_min(0.0), epsilon) or 0,
        most=_needed(pairs.values, tail + 2 * error, epsilon) or 0,
        total=Estimate(squares + float(tail[-1]), float(error[-1]), len(tails)),
        share=share,
        products=products + (pairs.matvecs if exact else 0),
    )
