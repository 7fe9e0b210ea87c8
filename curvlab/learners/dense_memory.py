"""The memory of runs side by side: one orthonormal :class:`~curvlab.basis.Basis` for each."""

import torch
from torch import Tensor

from curvlab.basis import Basis
from curvlab.learners.population import Population
from curvlab.storage import below


class DenseMemory:
    """Directions that gradients of S runs may not have.

    A run whose memory spans everything has its gradient set to zero, exactly.

    Args:
        population: The runs.
        dtype: The dtype of the stored rows; by default the parameters' dtype.
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
        self._filled: dict[int, Tensor] = {}  # by run (P,): parameters that may not move at all

    @property
    def sizes(self) -> list[int]:
        """Directions held for each run."""
        filled = {s: int(mask.sum()) for s, mask in self._filled.items()}
        return [
            basis.n if self._everything[s] else basis.size + filled.get(s, 0)
            for s, basis in enumerate(self.bases)
        ]

    @property
    def bytes(self) -> list[int]:
        """For each run."""
        return [basis.bytes for basis in self.bases]

    def fill(self, s: int, indices: Tensor) -> None:
        """Protect every direction of run ``s`` in the parameters at ``indices`` ``(m,)``."""
        basis = self.bases[s]
        if len(indices) == basis.n:
            self._everything[s] = True
            return
        filled = torch.zeros(basis.n, dtype=torch.bool, device=basis.device)
        filled[indices.to(basis.device)] = True
        self._filled[s] = filled | self._filled[s] if s in self._filled else filled
        if basis.size:  # what is left of the rows beside them
            rows = basis.rows().masked_fill(self._filled[s], 0.0)
            self.bases[s] = Basis(basis.n, basis.capacity, dtype=basis.dtype, device=basis.device)
            self.bases[s].extend(rows, task="earlier")

    def extend(self, s: int, vectors: Tensor, *, task: int, values: Tensor) -> int:
        """Add rows ``(k, P)``, the most important first; returns how many were new."""
        if s in self._filled:
            vectors = vectors.masked_fill(self._filled[s], 0.0)
        return int(self.bases[s].extend(vectors, task=str(task), values=values).sum())

    def project_out_(self, gradients: Tensor) -> None:
        """Remove each run's directions from its row of ``gradients`` ``(S, P)``, in place."""
        # run by run: a memory that fits the cache is then read from memory once, not twice
        for s, gradient in enumerate(gradients):
            self._project_(s, gradient)

    def _project_(self, s: int, gradient: Tensor) -> None:
        basis = self.bases[s]
        if self._everything[s] or basis.size == basis.n:
            gradient.zero_()
        elif basis.size:
            basis.project_out_(gradient)
        if s in self._filled:
            gradient.masked_fill_(self._filled[s], 0.0)

    def step_(
        self, population: Population, lr: float, weight_decay: float, momentum: float
    ) -> None:
        """Decay, :meth:`project_out_`, momentum and update of every run, to the same bits."""
        for s, (basis, (values, slopes, momenta)) in enumerate(
            zip(self.bases, population.runs, strict=True)
        ):
            special = self._everything[s] or s in self._filled or basis.size == basis.n
            if basis.whole is not None and not special:
                basis.sgd_step_([values], [slopes], momenta, lr, weight_decay, momentum)
                continue
            if weight_decay:
                slopes.add_(values, alpha=weight_decay)
            self._project_(s, slopes)
            for velocity in momenta:
                slopes = velocity.mul_(momentum).add_(slopes)
            values.add_(slopes, alpha=-lr)

    def state(self) -> dict[str, Tensor]:
        """Rows as they are stored, their Gram matrices and origins."""
        tensors: dict[str, Tensor] = {"everything": torch.tensor(self._everything)}
        for s, basis in enumerate(self.bases):
            tensors.update({f"{s}/{name}": tensor for name, tensor in basis.state().items()})
        return tensors | {f"filled/{s}": mask for s, mask in self._filled.items()}

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        self._everything = tensors["everything"].tolist()
        self._filled = {
            s: tensors[f"filled/{s}"].to(basis.device)
            for s, basis in enumerate(self.bases)
            if f"filled/{s}" in tensors
        }
        for s, basis in enumerate(self.bases):
            basis.load_state(below(tensors, f"{s}/"))
