"""OGD: steps orthogonal to the gradients of old tasks' logits, so that these do not move at first.

Stored for each sample of a task: the gradients of all its logits (OGD), or only of that of its true
label (OGD-GTL). The paper's variant keeps of a task's gradients the leading singular directions
that hold 1 - eps of the squared singular values.

What this protects is the outer-product part of the Hessian, H^O: with all logits stored, u' H^O u
is zero for every allowed u, but u' H u is not, away from a minimum. With the true label alone the
protection depends on the number of classes and does not become exact as the predictions become
certain: of the output Hessian diag(p) - p p' it removes one direction, and the others vanish no
faster (p1 -> 1 leaves them at 1/(K-1) of the removed one).
"""

from typing import Literal

import torch
from torch import Tensor

from curvlab.checks import inside, whole
from curvlab.learners.base import Learner
from curvlab.learners.dense_memory import DenseMemory
from curvlab.learners.population import Population
from curvlab.learners.sample_gradients import Factors, mlp_factors, sample_gradients
from curvlab.learners.seeds import drawn
from curvlab.learners.stacked import StackedMLP
from curvlab.learners.structured import StructuredMemory, Workspace, kept_by_energy
from curvlab.parameters import Selection
from curvlab.storage import below
from curvlab.tasks.samples import Samples

Logits = Literal["true", "all"]
# Columns of dense rows that are converted to float64 at once.
COLUMNS = 1 << 16


class OGD(Learner):
    """Orthogonal gradient descent.

    Args:
        epsilon: Share of the squared singular values of a task's gradients that may be left out;
            0 keeps everything.
        samples: How many samples of each task are used; every seed draws its own.
        logits: ``"true"`` stores one gradient per sample (OGD-GTL), ``"all"`` one per logit.
        structured: Keep factors instead of rows, for plain MLPs (:mod:`.structured`); ``None`` does
            so where possible. Otherwise the end of a task needs ``samples * P`` numbers, and the
            directions kept are stored as rows.
        largest: Bytes that dense rows may take at the end of a task: the memory of all runs, plus
            the new gradients and directions of one run.
        select: Parameters that are protected, as in operators (``"body.*"``); the others, heads for
            example, stay free.
    """

    serves_later_tasks = True
    settings = ("epsilon", "samples", "logits", "structured")

    def __init__(
        self,
        epsilon: float = 0.01,
        *,
        samples: int = 1000,
        logits: Logits = "true",
        structured: bool | None = None,
        largest: int = 8 << 30,
        select: Selection = None,
    ) -> None:
        super().__init__()
        inside("[0, 1]", epsilon=epsilon)
        whole(samples=samples)
        if logits not in ("true", "all"):
            raise ValueError(f"logits= must be 'true' or 'all'; got {logits!r}")
        self.epsilon, self.samples, self.logits = epsilon, samples, logits
        self.structured, self.largest, self.select = structured, largest, select
        self._parts: list[int] = []  # of a plain MLP, the layers that are protected
        self._factors: list[StructuredMemory] = []
        self._dense: DenseMemory | None = None

    def before_task(self, population: Population, task: int, samples: Samples) -> None:
        if task == 0:
            self._prepare(population)
        if self._dense is None:
            return
        rows = min(self.samples, len(samples))
        if self.logits == "all":
            rows *= population.logits(samples.inputs[:1], task).shape[2]
        size = population.n * population.parameters.element_size()
        # the gradients and the directions made of them, beside what is kept of all runs already
        needed = 2 * rows * size + sum(self._dense.bytes)
        if needed > self.largest:
            raise ValueError(
                f"OGD on task {task}: {rows} gradients of {population.n} numbers, as many "
                f"directions and the memory so far take {needed / 1e9:.2f} GB, more than largest="
                f"{self.largest / 1e9:.2f} GB: lower samples=, take logits='true', train fewer "
                "seeds side by side or raise largest="
            )

    def _prepare(self, population: Population) -> None:
        parts = _whole_layers(population, self.select)
        if self.structured and parts is None:
            raise ValueError(
                "structured=True needs plain MLPs (linear layers with ReLU or Tanh between) and "
                "select= of whole layers; leave it out for others"
            )
        if isinstance(population, StackedMLP) and parts and self.structured is not False:
            workspace, self._parts = Workspace(), parts
            self._factors = [
                StructuredMemory(
                    [population.layers[i] for i in parts],
                    population.n,
                    dtype=population.dtype,
                    device=population.device,
                    workspace=workspace,
                )
                for _ in population.seeds
            ]
        else:
            self._dense = DenseMemory(population)

    def transform_(self, population: Population) -> None:
        if self._dense is not None:
            self._dense.project_out_(population.gradients)
        if isinstance(population, StackedMLP) and self._factors:
            made_of = population.gradient_factors()
            for s, memory in enumerate(self._factors):
                factors = None
                if made_of is not None:
                    came_in, came_back = made_of
                    factors = (
                        [came_in[i][s] for i in self._parts],
                        [came_back[i][s] for i in self._parts],
                    )
                memory.project_out_(population.gradients[s], factors)

    def step_(
        self, population: Population, lr: float, weight_decay: float, momentum: float
    ) -> None:
        rows = [memory.dense for memory in self._factors if memory.dense is not None]
        if not self.transforms_as(OGD) or len(rows) < len(self._factors):
            super().step_(population, lr, weight_decay, momentum)
        elif self._dense is not None:
            self._dense.step_(population, lr, weight_decay, momentum)
        else:
            for one, (values, slopes, momenta) in zip(rows, population.runs, strict=True):
                one.sgd_step_([values], [slopes], momenta, lr, weight_decay, momentum)

    def after_task(self, population: Population, task: int, samples: Samples) -> None:
        new = []
        for s, seed in enumerate(population.seeds):
            chosen = drawn(samples, self.samples, seed, "ogd", task)
            cotangents = self._cotangents(population, chosen, task)
            if self._dense is None and isinstance(population, StackedMLP):
                parameters = population.parameters[s]
                every = mlp_factors(population.layers, parameters, chosen.inputs, cotangents)
                factors = Factors(
                    [every.inputs[i] for i in self._parts],
                    [every.signals[i] for i in self._parts],
                )
                new.append(self._factors[s].extend(factors, self.epsilon))
            elif self._dense is not None:
                count, filled = cotangents.shape[1] * len(chosen), 0
                rows = population.parameters.new_zeros(count, population.n)
                for k in range(cotangents.shape[1]):
                    for block in sample_gradients(
                        population, s, chosen.inputs, cotangents[:, k], task
                    ):
                        rows[filled : filled + len(block)] = block
                        filled += len(block)
                for where in population.left_out(self.select):
                    rows[:, where] = 0.0
                directions, values = leading_directions(rows, self.epsilon)
                new.append(self._dense.extend(s, directions, task=task, values=values))
        sizes = [memory.size for memory in self._factors]
        sizes_in_bytes = [memory.bytes for memory in self._factors]
        if self._dense is not None:
            sizes, sizes_in_bytes = self._dense.sizes, self._dense.bytes
        self.notes.append({"new": new, "directions": sizes, "memory_bytes": sizes_in_bytes})

    def directions(self) -> list[Tensor]:
        """For each run, the orthonormal rows ``(r, P)`` that gradients are projected off, float64.

        For tests and small uses: of a structured memory they have to be built.
        """
        if self._dense is not None:
            return [basis.rows().double() for basis in self._dense.bases]
        return [memory.rows() for memory in self._factors]

    def _cotangents(self, population: Population, chosen: Samples, task: int) -> Tensor:
        """Which combinations of logits, ``(n, K, C)``."""
        classes = population.logits(chosen.inputs[:1], task).shape[2]
        every = torch.eye(classes, dtype=population.dtype, device=population.device)
        if self.logits == "all":
            return every.expand(len(chosen), -1, -1)
        return every[chosen.targets].unsqueeze(1)

    def state(self) -> dict[str, Tensor]:
        if self._dense is not None:
            return self._dense.state()
        return {
            f"{s}/{name}": value
            for s, memory in enumerate(self._factors)
            for name, value in memory.state().items()
        }

    def load_state(self, population: Population, tensors: dict[str, Tensor]) -> None:
        self._prepare(population)
        if self._dense is not None:
            self._dense.load_state(tensors)
        for s, memory in enumerate(self._factors):
            memory.load_state(below(tensors, f"{s}/"))


def _whole_layers(population: Population, select: Selection) -> list[int] | None:
    """Layers of a plain MLP that ``select`` takes; ``None`` if it splits one, or for others."""
    if not isinstance(population, StackedMLP):
        return None
    free = {where.start for where in population.left_out(select)}
    taken = []
    for i, layer in enumerate(population.layers):
        left = [where.start in free for where in layer.slices]
        if any(left) and not all(left):
            return None
        if not any(left):
            taken.append(i)
    return taken


@torch.no_grad()
def leading_directions(rows: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Right singular vectors of ``rows`` ``(n, P)`` with 1 - epsilon of the squared values.

    Through the Gram matrix in float64: ``n`` is small beside ``P``.

    Returns:
        Orthonormal directions ``(r, P)`` in the rows' dtype, and their singular values ``(r,)``,
        largest first.
    """
    gram = torch.zeros(len(rows), len(rows), dtype=torch.float64, device=rows.device)
    pieces = [slice(start, start + COLUMNS) for start in range(0, rows.shape[1], COLUMNS)]
    for columns in pieces:
        block = rows[:, columns].double()
        gram += block @ block.T
    # The Gram matrix squares the condition number: directions 1e-8 below the largest are lost. They
    # hold 1e-16 of the energy, far below what any epsilon but 0 leaves out.
    squares, vectors = torch.linalg.eigh(gram)
    squares, vectors = squares.flip(0), vectors.flip(1)  # eigh sorts upwards
    kept = kept_by_energy(squares, epsilon)
    values = squares[:kept].sqrt()
    mixing = (vectors[:, :kept] / values).T
    directions = torch.zeros(kept, rows.shape[1], dtype=rows.dtype, device=rows.device)
    for columns in pieces:
        directions[:, columns] = (mixing @ rows[:, columns].double()).to(rows.dtype)
    return directions, values
