"""Spectral density, trace and diagonal from random vectors, each with an error bar.

The density is that of stochastic Lanczos quadrature: from each random start a short Lanczos run,
fully reorthogonalised, gives nodes and weights that reproduce ``n^-1 tr f(A)`` for polynomials f of
twice its length. Error bars are standard errors over the random vectors; they cover the sampling,
not the smoothing that a picture applies.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from curvlab_kernels import ops
from torch import Tensor

from curvlab.eigen.products import Products
from curvlab.eigen.source import Source, as_operator
from curvlab.probe import OperatorError
from curvlab.storage import load_tensors, save_tensors

CHECKPOINT = "density checkpoint"


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value and its standard error (0 when exact); ``samples`` is what it was computed from."""

    value: float
    error: float
    samples: int


@dataclass(frozen=True, slots=True, eq=False)
class Density:
    """Quadrature of the spectrum: each of the p random vectors is one estimate of all of it.

    Attributes:
        nodes: Shape ``(p, m)``, float64: Ritz values.
        weights: Shape ``(p, m)``, float64: share of the spectrum at each node; rows add up to 1.
        n: Size of the operator.
        products: Operator products spent.
    """

    nodes: Tensor
    weights: Tensor
    n: int
    products: int

    def curve(self, points: int = 400, *, width: float | None = None) -> tuple[Tensor, Tensor]:
        """Abscissae and density ``(points,)`` with each node drawn as a Gaussian.

        Args:
            points: Of the grid, evenly spaced over the spectrum and a margin.
            width: Standard deviation of the Gaussians; by default 1 % of the spectrum's span.
        """
        low, high = float(self.nodes.min()), float(self.nodes.max())
        span = (high - low) or abs(high) or 1.0
        width = 0.01 * span if width is None else width
        if not width > 0.0:
            raise ValueError(f"width= is a positive standard deviation; got {width}")
        x = torch.linspace(low - 4 * width, high + 4 * width, points, dtype=torch.float64)
        scaled = (x[:, None, None] - self.nodes) / width
        bumps = torch.exp(-0.5 * scaled**2) / (width * math.sqrt(2 * math.pi))
        return x, (bumps * self.weights).sum(2).mean(1)

    def count_above(self, threshold: float, *, relative: bool = False) -> Estimate:
        """How many eigenvalues exceed ``threshold`` in magnitude.

        The error is the standard error over the random vectors plus what the quadrature cannot
        resolve: by the inequalities of Chebyshev, Markov and Stieltjes the spectrum on one side of
        a cut differs from the weights there by at most the weight of a node next to the cut.

        Args:
            threshold: Absolute, or
            relative: a share of the largest magnitude seen.
        """
        if threshold < 0.0:
            raise ValueError(f"threshold= is at least 0; got {threshold}")
        if relative:
            threshold *= float(self.nodes.abs().max())
        counted = _estimate(self.n * (self.weights * (self.nodes.abs() > threshold)).sum(1))
        unresolved = sum(self._beside(cut) for cut in (-threshold, threshold))
        return Estimate(counted.value, counted.error + self.n * unresolved, counted.samples)

    def _beside(self, cut: float) -> float:
        """Mean over the random vectors of the larger weight next to ``cut``."""
        found = []
        for nodes, weights in zip(self.nodes, self.weights, strict=True):
            neighbours = torch.cat([weights[nodes <= cut][-1:], weights[nodes > cut][:1]])
            found.append(float(neighbours.max()))
        return math.fsum(found) / len(found)

    def moment(self, power: int) -> Estimate:
        """``tr A^power``."""
        return _estimate(self.n * (self.weights * self.nodes**power).sum(1))

    def save(self, path: str | Path, about: Mapping[str, Any] | None = None) -> Path:
        """Write to one ``.safetensors`` file; ``about`` adds facts to its manifest."""
        facts = {"n": self.n, "products": self.products, "about": dict(about or {})}
        return save_tensors(path, "density", {"nodes": self.nodes, "weights": self.weights}, facts)

    @classmethod
    def load(cls, path: str | Path) -> "Density":
        """Read what :meth:`save` wrote."""
        tensors, facts = load_tensors(path, "density")
        return cls(tensors["nodes"], tensors["weights"], facts["n"], facts["products"])


def spectral_density(
    operator: Source,
    *,
    probes: int = 8,
    steps: int = 60,
    seed: int = 0,
    checkpoint: str | Path | None = None,
) -> Density:
    """Stochastic Lanczos quadrature with ``probes * steps`` products (and the probe's four).

    Args:
        probes: Random vectors.
        steps: Products with each.
        seed: Of the vectors.
        checkpoint: A file, replaced after every vector; if it exists, its vectors are not done
            again. It must come from the same arguments.
    """
    products = Products(as_operator(operator), None)
    _check_positive(probes=probes, steps=steps)
    products.probe(None, seed)
    steps = min(steps, products.n)
    generator = torch.Generator().manual_seed(seed)
    nodes = torch.zeros(probes, steps, dtype=torch.float64)
    weights = torch.zeros(probes, steps, dtype=torch.float64)
    asked = {"n": products.n, "probes": probes, "steps": steps, "seed": seed}
    done = 0 if checkpoint is None else _resume(Path(checkpoint), asked, nodes, weights, products)
    for row in range(probes):
        start = _random(products, generator)
        if row < done:
            continue
        values, shares = _quadrature(products, start, steps)
        nodes[row, : len(values)], weights[row, : len(values)] = values, shares
        nodes[row, len(values) :] = values[-1]  # the run ended early: pad with weight zero
        if checkpoint is not None:
            facts = {"asked": asked, "done": row + 1, "products": products.count}
            save_tensors(checkpoint, CHECKPOINT, {"nodes": nodes, "weights": weights}, facts)
    return Density(nodes, weights, products.n, products.count)


def _resume(
    path: Path, asked: dict[str, int], nodes: Tensor, weights: Tensor, products: Products
) -> int:
    """Fill in the finished rows of a checkpoint; returns how many there are."""
    if not path.exists():
        return 0
    tensors, facts = load_tensors(path, CHECKPOINT)
    if facts["asked"] != asked:
        raise ValueError(
            f"{path} is a checkpoint of another density ({facts['asked']}, asked for {asked}): "
            "delete it, or ask for the same"
        )
    nodes.copy_(tensors["nodes"])
    weights.copy_(tensors["weights"])
    products.count = facts["products"]
    return int(facts["done"])


def trace(operator: Source, *, probes: int = 48, seed: int = 0) -> Estimate:
    """``tr A`` with about ``probes`` products: Hutch++.

    A third of the products finds the directions that matter, whose share is then exact; random
    vectors estimate only the rest.
    """
    products = Products(as_operator(operator), None)
    _check_positive(probes=probes)
    products.probe(None, seed)
    generator = torch.Generator().manual_seed(seed)
    n, third = products.n, max(1, probes // 3)
    if third >= n:
        rows = torch.eye(n, dtype=products.dtype, device=products.device)
        return Estimate(float((rows * _images(products, rows)).double().sum()), 0.0, n)
    sketch = _images(products, torch.stack([_random(products, generator) for _ in range(third)]))
    empty, _ = ops.quantise(sketch[:0], products.dtype)
    kept = ops.orthonormalise_block_(empty, sketch)
    frame = sketch[kept]
    exact = float((frame.double() * _images(products, frame).double()).sum())
    rows, _ = ops.quantise(frame, products.dtype)
    samples = []
    for _ in range(max(2, probes - 2 * third)):
        vector = _random(products, generator)
        ops.project_(rows, vector)
        image = _images(products, vector[None])[0]
        samples.append(float(torch.dot(vector.double(), image.double())))
    rest = _estimate(torch.tensor(samples, dtype=torch.float64))
    return Estimate(exact + rest.value, rest.error, rest.samples)


def diagonal(operator: Source, *, probes: int = 64, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Estimate of the diagonal and its standard error, each ``(n,)``, float64.

    Random signs ``z``: the mean of ``z * A z``. The error of an element is the norm of the rest of
    its row over the square root of ``probes``, so this is for operators with a strong diagonal.
    """
    products = Products(as_operator(operator), None)
    _check_positive(probes=probes)
    if probes < 2:
        raise ValueError("diagonal needs probes >= 2 for an error bar")
    products.probe(None, seed)
    generator = torch.Generator().manual_seed(seed)
    total = torch.zeros(products.n, dtype=torch.float64, device=products.device)
    squares = torch.zeros_like(total)
    for _ in range(probes):
        signs = _random(products, generator)
        sample = (signs * _images(products, signs[None])[0]).double()
        total += sample
        squares += sample**2
    mean = total / probes
    variance = (squares / probes - mean**2).clamp_min(0.0) * probes / (probes - 1)
    return mean, (variance / probes).sqrt()


def _quadrature(products: Products, start: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Nodes and weights from one start vector ``(n,)``."""
    rows, _ = ops.quantise(
        torch.zeros(steps + 1, products.n, dtype=products.dtype, device=products.device),
        products.dtype,
    )
    n = products.n
    rows[0, :n] = start / float(ops.norm(start))
    diagonal_: list[float] = []
    beside: list[float] = []
    for step in range(steps):
        image = torch.zeros_like(start)
        products.into(rows[step, :n], image)
        beta_before = beside[-1] if step > 0 else None
        alpha, beta, _ = ops.lanczos_step_(rows[: step + 1], image, beta_before)
        if not math.isfinite(float(alpha)):
            raise OperatorError("the operator returned NaN or infinity")
        diagonal_.append(float(alpha))
        beside.append(float(beta))
        if beside[-1] == 0.0:
            break
        rows[step + 1, :n] = image
    size = len(diagonal_)
    tridiagonal = torch.diag(torch.tensor(diagonal_, dtype=torch.float64))
    off = torch.tensor(beside[: size - 1], dtype=torch.float64)
    tridiagonal += torch.diag(off, 1) + torch.diag(off, -1)
    values, vectors = torch.linalg.eigh(tridiagonal)
    return values, vectors[0] ** 2


def _random(products: Products, generator: torch.Generator) -> Tensor:
    """Random signs ``(n,)``: of all distributions with unit variance, the least noisy here."""
    bits = torch.randint(2, (products.n,), generator=generator)
    return (2 * bits - 1).to(products.dtype).to(products.device)


def _images(products: Products, rows: Tensor) -> Tensor:
    images = torch.zeros_like(rows)
    products.into(rows, images)
    if not bool(torch.isfinite(images).all()):
        raise OperatorError("the operator returned NaN or infinity")
    return images


def _estimate(samples: Tensor) -> Estimate:
    count = len(samples)
    spread = float(samples.std()) / math.sqrt(count) if count > 1 else math.inf
    return Estimate(float(samples.mean()), spread, count)


def _check_positive(**numbers: int) -> None:
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}= is a whole number of at least 1; got {value!r}")
