"""Spectral density by random vectors, with error bars on what it is used for.

This is stochastic Lanczos quadrature: from each random start a short Lanczos run,
fully reorthogonalised, gives nodes and weights that reproduce ``n^-1 tr f(A)`` for polynomials f of
twice its length. Error bars are standard errors over the random vectors; they cover the sampling,
not the smoothing that a picture applies.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from curvlab.checks import seeded, shown, whole
from curvlab.eigen.estimate import Estimate, random_signs
from curvlab.eigen.products import Products
from curvlab.eigen.source import Source, as_operator
from curvlab.eigen.work import State, Work
from curvlab.html import block, spark
from curvlab.manifest import COUNT, Shape, require_facts, require_tensors
from curvlab.probe import OperatorError
from curvlab.rows import Rows
from curvlab.storage import load_tensors, save_tensors

HOLDS: dict[str, Shape] = dict.fromkeys(("nodes", "weights"), (torch.float64, "probes", "steps"))
STRIDE = 8  # steps between two looks at the coefficients, where looking is a wait for a GPU


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

    def decades(
        self, points: int = 400, *, width: float = 0.05, least: float | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The density over the logarithm of the magnitude, positive and negative values apart.

        Args:
            points: Of the grid of magnitudes, evenly spaced in their logarithm.
            width: Standard deviation with which each node is smeared, in decades.
            least: Smallest magnitude of the grid; by default a millionth of the largest.

        Returns:
            Magnitudes ``(points,)``, and eigenvalues per decade there, ``(points,)`` each: the
            area under both curves together is the number of eigenvalues above ``least``.
        """
        magnitudes = self.nodes.abs()
        largest = float(magnitudes.max())
        least = 1e-6 * largest if least is None else least
        if not (width > 0.0 and (0.0 < least <= largest or largest == 0.0)):
            raise ValueError(
                f"decades needs width > 0 and least= between 0 and the largest magnitude "
                f"{largest:g}; got {width} and {least}"
            )
        if largest == 0.0:
            raise ValueError("every eigenvalue that was seen is zero: there are no decades")
        ends = math.log10(least), math.log10(largest) + 4 * width
        x = torch.linspace(*ends, points, dtype=torch.float64)
        logs = magnitudes.clamp_min(1e-300).log10()
        curves = []
        for sign in (1.0, -1.0):
            share = self.weights * (sign * self.nodes > 0.0)
            scaled = (x[:, None, None] - logs) / width
            bumps = torch.exp(-0.5 * scaled**2) / (width * math.sqrt(2 * math.pi))
            curves.append(self.n * (bumps * share).sum(2).mean(1))
        return 10.0**x, curves[0], curves[1]

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
        counted = self._trace_of((self.nodes.abs() > threshold).double())
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
        return self._trace_of(self.nodes**power)

    def trace(
        self, function: Callable[[Tensor], Tensor], *, lowest: float | None = None
    ) -> Estimate:
        """``tr f(A)`` for a smooth ``function`` of tensors, element by element.

        To the sampling error comes that of the quadrature: its difference from the Gauss-Radau rule
        with a node at ``lowest``. The truth lies between the two rules for functions whose
        derivatives alternate in sign, such as the logarithm, the reciprocal and roots.

        Args:
            function: Such as ``torch.log``; finite on the spectrum.
            lowest: A lower bound of the spectrum (0 for a semidefinite operator); by default the
                smallest Ritz value, which is close to it.
        """
        found = self._trace_of(function(self.nodes).double())
        lowest = float(self.nodes.min()) if lowest is None else lowest
        rules = [_radau_rule(*row, lowest) for row in zip(self.nodes, self.weights, strict=True)]
        sums = [float((weights * function(nodes).double()).sum()) for nodes, weights in rules]
        unresolved = abs(found.value - self.n * math.fsum(sums) / len(sums))
        if not math.isfinite(found.value + unresolved):
            raise ValueError(
                "the function is not finite on the spectrum: add damping to its argument; values "
                f"from {min(lowest, float(self.nodes.min())):.3g} to "
                f"{float(self.nodes.max()):.3g} were seen"
            )
        return Estimate(found.value, found.error + unresolved, found.samples)

    def _trace_of(self, at_nodes: Tensor) -> Estimate:
        """``tr f(A)`` from f at the nodes ``(p, m)``.

        Random signs ``z`` see ``z' f(A) z`` with variance at most ``2 tr f(A)^2``, which the same
        quadrature estimates: steadier than the deviation of a few samples, and there for one.
        """
        value = float((self.weights * at_nodes).sum(1).mean())
        square = float((self.weights * at_nodes**2).sum(1).mean())
        samples = len(self.nodes)
        return Estimate(self.n * value, math.sqrt(2.0 * self.n * square / samples), samples)

    def _repr_html_(self) -> str:
        """In a notebook: the shape on a logarithmic scale, and its moments."""
        _, height = self.curve(60)
        logs = (height.clamp_min(1e-6 * float(height.max())) / float(height.max())).log10() + 6.0
        low, high = float(self.nodes.min()), float(self.nodes.max())
        rows = [
            ["Ritz values", f"{low:.5g} to {high:.5g}"],
            ["trace", str(self.moment(1))],
            ["sum of squares", str(self.moment(2))],
        ]
        title = f"Spectral density of n = {self.n:,} ({self.products} products)"
        return block(title, ["", ""], rows, spark(logs.tolist()))

    def save(self, path: str | Path, about: Mapping[str, Any] | None = None) -> Path:
        """Write to one ``.safetensors`` file; ``about`` adds facts to its manifest."""
        facts = {"n": self.n, "products": self.products, "about": dict(about or {})}
        return save_tensors(path, "density", {"nodes": self.nodes, "weights": self.weights}, facts)

    @classmethod
    def load(cls, path: str | Path) -> "Density":
        """Read what :meth:`save` wrote."""
        tensors, facts = load_tensors(path, "density")
        require_tensors(path, tensors, HOLDS)
        require_facts(path, facts, {"n": COUNT, "products": COUNT})
        return cls(tensors["nodes"], tensors["weights"], facts["n"], facts["products"])


def _radau_rule(nodes: Tensor, weights: Tensor, end: float) -> tuple[Tensor, Tensor]:
    """The rule with a node at ``end`` and as many in all, of the measure that a Gauss rule is of.

    Lanczos with the diagonal matrix of the nodes ``(m,)``, from the roots of their weights, gives
    back the tridiagonal matrix that they came from; its last entry is changed (Golub 1973).
    """
    kept = weights > 0.0
    nodes, vector = nodes[kept], weights[kept].sqrt()
    rows = [vector / vector.norm()]
    for _ in range(len(nodes) - 1):
        image, known = nodes * rows[-1], torch.stack(rows)
        for _ in range(2):  # twice is enough
            image = image - (known @ image) @ known
        if not float(image.norm()) > 1e-14 * float(nodes.abs().max()):
            break  # what is left has no weight
        rows.append(image / image.norm())
    frame = torch.stack(rows)
    matrix = (frame * nodes) @ frame.T
    if len(matrix) > 1 and float(torch.linalg.eigvalsh(matrix[:-1, :-1])[0]) > end:
        shifted = matrix[:-1, :-1] - end * torch.eye(len(matrix) - 1, dtype=torch.float64)
        column = matrix[:-1, -1]
        matrix[-1, -1] = end + column @ torch.linalg.solve(shifted, column)
    values, vectors = torch.linalg.eigh(matrix)
    return values, vectors[0] ** 2


def spectral_density(
    operator: Source,
    *,
    probes: int = 8,
    steps: int = 60,
    seed: int = 0,
    checkpoint: str | Path | None = None,
    progress: bool | None = None,
) -> Density:
    """Stochastic Lanczos quadrature with ``probes * steps`` products (and the probe's four).

    Args:
        operator: As for :func:`curvlab.lanczos`.
        probes: Random vectors.
        steps: Products with each.
        seed: Of the vectors.
        checkpoint: A file for finished vectors; if it exists, they are not done again. It must come
            from the same arguments and operator.
        progress: Show a line on the terminal; by default when there is one.

    Raises:
        Interrupted: On Ctrl-C, with the density of the finished vectors, once they are in
            ``checkpoint``.
    """
    products = Products(as_operator(operator), None, near_one=True)
    (probes, steps), seed = whole(probes=probes, steps=steps), seeded(seed)
    shown(progress)
    products.probe(seed)
    steps = min(steps, products.n)
    asked = {"probes": probes, "steps": steps, "seed": seed}
    work = Work("density", products, asked, checkpoint, progress)
    generator = torch.Generator().manual_seed(seed)
    none = torch.zeros(0, steps, dtype=torch.float64)
    finished = (none, none)  # nodes and weights, a row for each vector
    saved = work.resume({}, {}, {name: (*kind[:2], steps) for name, kind in HOLDS.items()})
    if saved is not None:
        finished = (saved.others["nodes"], saved.others["weights"])

    def state() -> State:
        return State({}, {"nodes": finished[0], "weights": finished[1].clone()})

    def result() -> Density:
        return Density(finished[0] * products.unit, finished[1], products.n, products.count)

    with work.interruptible(state, lambda: result() if len(finished[0]) else None):
        for row in range(probes):
            start = random_signs(products, generator, 1)[0]
            if row >= len(finished[0]):
                nodes, weights = _quadrature(work, start, steps, row, probes)
                finished = (
                    torch.cat([finished[0], nodes[None]]),
                    torch.cat([finished[1], weights[None]]),
                )
                work.keep(state())
    return result()


def _quadrature(
    work: Work, start: Tensor, steps: int, row: int, probes: int
) -> tuple[Tensor, Tensor]:
    """Nodes and weights ``(steps,)`` from random signs ``start`` ``(width,)``."""
    products = work.products
    rows = Rows(products.space, steps + 1, dtype=products.dtype, device=products.device)
    rows.reserve(steps + 1)
    rows.put(0, start / math.sqrt(products.n))
    alphas: list[float] = []
    betas: list[float] = []
    fresh: list[Tensor] = []  # those that are still on the device, which is asked once in a stride
    stride = 1 if products.device.type == "cpu" else STRIDE
    beta: Tensor | None = None
    for step in range(steps):
        rows.admit()
        image = rows.row(step + 1)
        products.into(rows.row(step), image)
        alpha, beta, _ = rows.lanczos_step_(image, beta)
        fresh.append(torch.stack([alpha, beta]))
        work.show(row * steps + step + 1, probes * steps, "products")
        if len(fresh) < stride and step + 1 < steps:
            continue
        for each in zip(*torch.stack(fresh, 1).tolist(), strict=True):
            if betas and betas[-1] == 0.0:
                break  # what came after the last direction came from zeros
            if not math.isfinite(each[0]):
                raise OperatorError("the operator returned NaN or infinity")
            alphas.append(each[0])
            betas.append(each[1])
        fresh = []
        if betas[-1] == 0.0:
            break
    size = len(alphas)
    off = torch.tensor(betas[: size - 1], dtype=torch.float64)
    tridiagonal = torch.diag(torch.tensor(alphas, dtype=torch.float64))
    tridiagonal += torch.diag(off, 1) + torch.diag(off, -1)
    values, vectors = torch.linalg.eigh(tridiagonal)
    # A run that ended early has seen all that its vector meets: pad with weight zero.
    nodes = torch.cat([values, values[-1:].expand(steps - size)])
    return nodes, torch.cat([vectors[0] ** 2, torch.zeros(steps - size, dtype=torch.float64)])
