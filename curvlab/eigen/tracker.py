"""A spectrum followed through training: each solve starts where the last one ended."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from curvlab.eigen.lanczos import lanczos
from curvlab.eigen.result import Eigenpairs
from curvlab.eigen.source import Source


@dataclass(slots=True)
class SpectrumTracker:
    """The top ``k`` pairs at each step that asks for them.

    Args:
        k: How many pairs.
        tol: Relative residual.
        which: Part of the spectrum, as for :func:`curvlab.lanczos`.

    Attributes:
        steps: What was given to :meth:`update`.
        values: One ``(k,)`` tensor per step.
        overlaps: For each step but the first, the mean squared cosine of the principal angles
            between its eigenvectors' span and the previous one: 1 is the same subspace.
        pairs: The newest result.
    """

    k: int
    tol: float = 1e-2
    which: str = "LM"
    steps: list[int] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    overlaps: list[float] = field(default_factory=list)
    pairs: Eigenpairs | None = None

    def update(self, operator: Source, step: int, **options: Any) -> Eigenpairs:
        """Solve for ``operator``, the curvature at training step ``step``.

        Args:
            operator: At the model's present parameters; make a new one for each step.
            step: For the record.
            options: Passed to :func:`curvlab.lanczos`.
        """
        start = None if self.pairs is None else self.pairs.vectors
        # Ctrl-C raises here: a step whose solve was cut short leaves no mark.
        pairs = lanczos(operator, self.k, which=self.which, tol=self.tol, v0=start, **options)  # type: ignore[arg-type]
        if pairs.vectors.shape[1] != pairs.n:
            raise ValueError("SpectrumTracker compares whole vectors; these are in shards")
        if self.pairs is not None:
            cosines = self.pairs.vectors.double() @ pairs.vectors.double().T
            self.overlaps.append(float((cosines**2).sum()) / self.k)
        self.steps.append(step)
        self.values.append(pairs.values.cpu())
        self.pairs = pairs
        return pairs

    def table(self) -> Tensor:
        """All values, ``(steps, k)``."""
        return torch.stack(self.values) if self.values else torch.zeros(0, self.k)
