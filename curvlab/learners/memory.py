"""The memory of runs side by side: one orthonormal :class:`~curvlab.basis.Basis` for each."""

import torch
from torch import Tensor

from curvlab.basis import Basis
from curvlab.learners.population import Population


class DenseMemory:
    """Directions that gradients of S runs may not have.

    A run whose memory spans everything has its gradient set to zero, exactly.

    Args:
        population: The runs.
        dtype: Of the stored rows; by default the parameters' dtype.
    """

    def __init__(self, population: Population, dtype: torch.dtype | None = None) -> None:
        self.bases = [
            Basis(
                population.n,
                population.n,
                dtype=population.dtype if dtype is None else dtype,
                device=population.device,
            )
            for _ in population.seeds
        ]
        self._everything = [False] * population.size

    @property
    def sizes(self) -> list[int]:
        """Directions held for each run."""
        return [
            basis.n if everything else basis.size
            for basis, everything in zip(self.bases, self._everything, strict=True)
        ]

    @property
    def bytes(self) -> list[int]:
        """For each run."""
        return [basis.bytes for basis in self.bases]

    def fill(self, s: int) -> None:
        """Protect every direction of run ``s``: nothing more is learned."""
        self._everything[s] = True

    def extend(self, s: int, vectors: Tensor, *, task: int, values: Tensor) -> int:
        """Add rows ``(k, P)``, the most important first; returns how many were new."""
        return int(self.bases[s].extend(vectors, task=str(task), values=values).sum())

    def project_out_(self, gradients: Tensor) -> None:
        """Remove each run's directions from its row of ``gradients`` ``(S, P)``, in place."""
        # run by run: a memory that fits the cache is then read from memory once, not twice
        for s, basis in enumerate(self.bases):
            if self._everything[s] or basis.size == basis.n:
                gradients[s].zero_()
            elif basis.size:
                basis.project_out_(gradients[s])

    def state(self) -> dict[str, Tensor]:
        """Rows as they are stored, their Gram matrices and origins."""
        tensors: dict[str, Tensor] = {"everything": torch.tensor(self._everything)}
        for s, basis in enumerate(self.bases):
            tensors.update({f"{s}/{name}": tensor for name, tensor in basis.state().items()})
        return tensors

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        self._everything = tensors["everything"].tolist()
        for s, basis in enumerate(self.bases):
            own = f"{s}/"
            basis.load_state(
                {n.removeprefix(own): t for n, t in tensors.items() if n.startswith(own)}
            )
