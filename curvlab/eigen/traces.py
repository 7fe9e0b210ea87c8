"""Trace and diagonal from random vectors, each with an error bar.

Random signs ``z`` have ``E[z' A z] = tr A`` and ``E[z * A z] = diag A``. Both computations can be
interrupted after any block of products and resumed from a file with the same bits.
"""

import math
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from curvlab.checks import seeded, shown, whole
from curvlab.eigen.estimate import (
    Estimate,
    blocks,
    dots,
    finite_images,
    random_signs,
)
from curvlab.eigen.products import Products
from curvlab.eigen.source import Source, as_operator
from curvlab.eigen.work import State, Work
from curvlab.manifest import COUNT, FINITE
from curvlab.rows import Rows


def trace(
    operator: Source,
    *,
    probes: int = 48,
    seed: int = 0,
    checkpoint: str | Path | None = None,
    progress: bool | None = None,
) -> Estimate:
    """``tr A`` with about ``probes`` products: Hutch++ (Meyer, Musco, Musco, Woodruff 2021).

    A third of the products finds the directions that matter, whose share is then exact; random
    vectors estimate only the rest B. The error bar is not the samples' own deviation: a few strong
    values in the rest make that too small just when the estimate is off. It is the bound
    ``2 ||B||_F^2`` of a sample's variance, with ``||B||_F^2`` from the same products.

    Args:
        operator: As for :func:`curvlab.lanczos`.
        probes: Products.
        seed: Of the random vectors.
        checkpoint: A file for what is done; if it exists, the computation goes on from it. It must
            come from the same arguments and operator.
        progress: Show a line on the terminal; by default when there is one.

    Raises:
        Interrupted: On Ctrl-C, with the estimate so far (none before there are samples of the
            rest), once everything done is in ``checkpoint``.
    """
    products = Products(as_operator(operator), None, near_one=True)
    [probes], seed = whole(probes=probes), seeded(seed)
    shown(progress)
    products.probe(seed)
    third = max(1, probes // 3)  # sketch, exact shares, rest: the split of Hutch++
    if products.n <= probes and not products.space.sharded:  # no dearer, and exact
        rows = torch.eye(products.n, dtype=products.dtype, device=products.device)
        images = finite_images(products, rows)
        return Estimate(float((rows * images).double().sum()) * products.unit, 0.0, products.n)
    work = Work("trace", products, {"probes": probes, "seed": seed}, checkpoint, progress)
    return _hutch(work, min(third, products.n), max(2, probes - 2 * third), seed)


@dataclass(frozen=True, slots=True)
class _Found:
    """What is finished: images of the first vectors, exact shares, and samples of the rest.

    Attributes:
        sketch: Shape ``(j, width)``.
        shares: ``f' A f`` for every row ``f`` of the frame that the sketch spans.
        samples: ``z' B z`` and ``|B z|^2`` for every random vector.
    """

    sketch: Tensor
    shares: tuple[float, ...] = ()
    samples: tuple[tuple[float, float], ...] = ()

    def state(self) -> State:
        return State({"sketch": self.sketch}, {}, {"shares": self.shares, "samples": self.samples})

    def estimate(self, products: Products) -> Estimate:
        """From two samples on."""
        count = len(self.samples)
        rest = math.fsum(value for value, _ in self.samples) / count
        square = math.fsum(square for _, square in self.samples) / count
        # Exact shares have no variance, but they cancel: their rounding is that of their sizes.
        rounding = max(products.eps, products.error) * math.fsum(map(abs, self.shares))
        error = math.hypot(math.sqrt(2.0 * square / count), rounding)
        value = math.fsum(self.shares) + rest
        return Estimate(value * products.unit, error * products.unit, count)


def _hutch(work: Work, first: int, last: int, seed: int) -> Estimate:
    """``first`` vectors for the frame, as many products with it, ``last`` for the rest."""
    products, space = work.products, work.products.space
    generator = torch.Generator().manual_seed(seed)
    total = 2 * first + last
    found = _Found(torch.zeros(0, products.width, dtype=products.dtype, device=products.device))
    saved = work.resume(
        {"samples": [[FINITE, FINITE]], "shares": [FINITE]},
        {"sketch": (products.dtype, "rows", products.width)},
    )
    if saved is not None:
        samples = tuple((value, square) for value, square in saved.facts["samples"])
        found = _Found(saved.rows["sketch"], tuple(saved.facts["shares"]), samples)

    def partial() -> Estimate | None:
        return found.estimate(products) if len(found.samples) > 1 else None

    with work.interruptible(lambda: found.state(), partial):
        done = 0
        for size in blocks(products, first):
            # Signs are drawn for finished blocks too: a resumed run must meet the same ones.
            vectors, done = random_signs(products, generator, size), done + size
            if done > len(found.sketch):
                images = finite_images(products, vectors)
                found = replace(found, sketch=torch.cat([found.sketch, images]))
                work.keep(found.state())
            work.show(done, total, "products")
        frame = Rows(space, first, dtype=products.dtype, device=products.device)
        frame.extend(found.sketch)
        done = 0
        for size in blocks(products, len(frame)):
            rows, done = frame.rows(done, done + size), done + size
            if done > len(found.shares):
                along = dots(products, rows, finite_images(products, rows)).tolist()
                found = replace(found, shares=(*found.shares, *along))
            work.show(first + done, total, "products")
        done = 0
        for size in blocks(products, last):
            vectors, done = random_signs(products, generator, size), done + size
            if done > len(found.samples):
                frame.project_out_(vectors)
                images = finite_images(products, vectors)
                values = dots(products, vectors, images).tolist()
                frame.project_out_(images)  # B is projected on both sides
                squares = space.norm(images).square().tolist()
                more = tuple(zip(values, squares, strict=True))
                found = replace(found, samples=(*found.samples, *more))
                work.keep(found.state())
            work.show(2 * first + done, total, "products")
    return found.estimate(products)


def diagonal(
    operator: Source,
    *,
    probes: int = 64,
    seed: int = 0,
    checkpoint: str | Path | None = None,
    progress: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """Estimate of the diagonal and its standard error, each ``(n,)``, float64.

    Random signs ``z``: the mean of ``z * A z``. The error of an element is the norm of the rest of
    its row over the square root of ``probes``, so this is for operators with a strong diagonal. On
    a sharded operator both are this rank's shards.

    Args:
        operator: As for :func:`curvlab.lanczos`.
        probes: Products, at least 2.
        seed: Of the random vectors.
        checkpoint: As for :func:`trace`.
        progress: As for :func:`trace`.

    Raises:
        Interrupted: As for :func:`trace`.
    """
    products = Products(as_operator(operator), None, near_one=True)
    [probes], seed = whole(probes=probes), seeded(seed)
    shown(progress)
    if probes < 2:
        raise ValueError("diagonal needs probes >= 2 for an error bar")
    products.probe(seed)
    work = Work("diagonal", products, {"probes": probes, "seed": seed}, checkpoint, progress)
    generator = torch.Generator().manual_seed(seed)
    sums = torch.zeros(2, products.width, dtype=torch.float64, device=products.device)
    finished = (sums, 0)  # of the samples and of their squares; how many
    saved = work.resume({"done": COUNT}, {"sums": (torch.float64, 2, products.width)})
    if saved is not None:
        finished = (saved.rows["sums"], int(saved.facts["done"]))

    def state() -> State:
        return State({"sums": finished[0]}, {}, {"done": finished[1]})

    def result() -> tuple[Tensor, Tensor]:
        mean, error = _mean_and_error(*finished)
        return mean * products.unit, error * products.unit

    with work.interruptible(state, lambda: result() if finished[1] > 1 else None):
        done = 0
        for size in blocks(products, probes):
            signs, done = random_signs(products, generator, size), done + size
            if done > finished[1]:
                samples = (signs * finite_images(products, signs)).double()
                more = torch.stack([samples.sum(0), samples.square().sum(0)])
                finished = (finished[0] + more, done)
                work.keep(state())
            work.show(done, probes, "products")
    return result()


def _mean_and_error(sums: Tensor, count: int) -> tuple[Tensor, Tensor]:
    mean = sums[0] / count
    # Of equal samples the difference is rounding, and may be negative.
    variance = (sums[1] / count - mean**2).clamp_min(0.0) * count / (count - 1)
    return mean, (variance / count).sqrt()
