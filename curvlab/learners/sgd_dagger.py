"""SGD-dagger: steps orthogonal to the leading eigenvectors of every past task's Hessian.

After task o: the eigenvectors of H_o at its solution with the largest absolute eigenvalues (early
Hessians are indefinite, and a direction of strong negative curvature hurts the second-order error
no less) join the memory M; each later step is ``g - M'(M g)``. A fixed number k per task, or as
many as hold ``1 - epsilon`` of the spectral energy ``||H||_F^2``: epsilon = 1 is plain SGD, and
epsilon = 0 stops learning after the first task.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from curvlab.checks import inside, whole
from curvlab.eigen.energy import spectral_energy
from curvlab.eigen.lanczos import lanczos
from curvlab.eigen.result import Eigenpairs
from curvlab.learners.base import Learner
from curvlab.learners.dense_memory import DenseMemory
from curvlab.learners.population import Population
from curvlab.learners.seeds import derived_seed, drawn
from curvlab.operators import Hessian
from curvlab.parameters import Selection
from curvlab.tasks.samples import Samples


class SGDDagger(Learner):
    """SGD off the leading Hessian eigenvectors of past tasks.

    Args:
        k: Eigenvectors kept per task; 0 is plain SGD and P stops learning. Or:
        epsilon: Share of the spectral energy of a task's Hessian that may be left unprotected.
        samples: Training samples, drawn per seed, for the Hessian of a task.
        tol: Relative residual to which eigenvectors are computed.
        storage: Dtype of the stored vectors, by default the parameters'; float16 halves the
            memory and its reading for a leak of about 1e-5.
        largest: Most eigenvectors that ``epsilon`` may take per task.
        first: Eigenpairs of the first task's Hessian if they are known already, one set per run
            with at least ``k`` pairs: learners that differ only in ``k`` can share that solve.
        select: Parameters that are protected, as in operators (``"body.*"``); the others, heads for
            example, stay free. A task protects only what it uses.

    If a solve ends before its pairs meet ``tol``, or before ``largest`` pairs hold the energy, the
    run continues with the vectors found. The notes say how many have ``converged``, the worst
    ``residual`` and the ``share`` of the energy that they hold. Vectors whose eigenvalue cannot be
    told from zero are not stored; the notes count them as ``null``.
    """

    serves_later_tasks = True
    settings = ("k", "epsilon", "samples", "tol", "storage", "largest")

    def __init__(
        self,
        k: int | None = None,
        *,
        epsilon: float | None = None,
        samples: int = 1000,
        tol: float = 1e-3,
        storage: torch.dtype | None = None,
        largest: int = 1000,
        first: Sequence[Eigenpairs] | None = None,
        select: Selection = None,
    ) -> None:
        super().__init__()
        if (k is None) == (epsilon is None):
            raise ValueError(f"SGDDagger takes either k= or epsilon=; got k={k}, epsilon={epsilon}")
        if k is not None:
            whole(0, k=k)
        if epsilon is not None:
            inside("[0, 1]", epsilon=epsilon)
        if first is not None and (k is None or any(len(pairs) < k for pairs in first)):
            raise ValueError(f"first= needs k= and at least that many pairs per run; got k={k}")
        whole(samples=samples)
        self.k, self.epsilon, self.samples, self.tol = k, epsilon, samples, tol
        self.storage, self.largest, self.first = storage, largest, first
        self.select = select
        self.memory: DenseMemory | None = None

    def before_task(self, population: Population, task: int, samples: Samples) -> None:  # noqa: ARG002
        if task == 0:
            self.memory = DenseMemory(population, self.storage)

    def transform_(self, population: Population) -> None:
        if self.memory is not None:
            self.memory.project_out_(population.gradients)

    def step_(
        self, population: Population, lr: float, weight_decay: float, momentum: float
    ) -> None:
        if self.memory is None or not self.transforms_as(SGDDagger):
            super().step_(population, lr, weight_decay, momentum)
        else:
            self.memory.step_(population, lr, weight_decay, momentum)

    def after_task(self, population: Population, task: int, samples: Samples) -> None:
        memory = self.memory
        if memory is None:
            raise RuntimeError("after_task was called before before_task; learn() calls both")
        found = [
            self._protect(memory, population, s, task, samples) for s in range(population.size)
        ]
        self.notes.append(
            {
                **{name: [one[name] for one in found] for name in found[0]},
                "directions": memory.sizes,
                "memory_bytes": memory.bytes,
            }
        )

    def _protect(
        self, memory: DenseMemory, population: Population, s: int, task: int, samples: Samples
    ) -> dict[str, Any]:
        names = population.chosen(self.select, task)
        where = population.layout.indices(names)
        # nothing or everything is to be kept: neither needs a solve
        if self.epsilon == 1.0 or self.k == 0 or not names:
            return {"k": 0, "new": 0, "products": 0}
        if self.epsilon == 0.0 or (self.k is not None and self.k >= len(where)):
            memory.fill(s, where)
            return {"k": len(where), "new": len(where), "products": 0}
        if self.first is not None and self.k is not None and task == 0:
            pairs, evidence = self.first[s].head(self.k), {"products": 0}
        else:
            hessian = task_hessian(population, s, task, samples, self.samples, names)
            seed = derived_seed(population.seeds[s], "lanczos", task)
            pairs, evidence = self._leading(hessian, seed)
        # vectors of a null space are whatever the solver began with: nothing to protect
        real = int((pairs.values.abs() > pairs.floor).sum())
        null, pairs = len(pairs) - real, pairs.head(real)
        vectors = pairs.vectors
        if len(where) < population.n:  # zero where the task has no say
            vectors = vectors.new_zeros(real, population.n)
            vectors[:, where.to(vectors.device)] = pairs.vectors
        new = memory.extend(s, vectors, task=task, values=pairs.values)
        return {"k": real, "null": null, "new": new, **evidence, **_quality(pairs)}

    def _leading(self, hessian: Hessian, seed: int) -> tuple[Eigenpairs, dict[str, Any]]:
        if self.epsilon is None:
            wanted = 0 if self.k is None else self.k
            pairs = lanczos(hessian, wanted, tol=self.tol, seed=seed, progress=False)
            return pairs, {"products": pairs.matvecs}
        energy = spectral_energy(
            hessian,
            self.epsilon,
            tol=self.tol,
            largest=min(self.largest, hessian.n),
            short=True,
            seed=seed,
            progress=False,
        )
        names = ("products", "share", "least", "most")
        return energy.pairs, {name: getattr(energy, name) for name in names}

    def state(self) -> dict[str, Tensor]:
        return {} if self.memory is None else self.memory.state()

    def load_state(self, population: Population, tensors: dict[str, Tensor]) -> None:
        if tensors:
            self.memory = DenseMemory(population, self.storage)
            self.memory.load_state(tensors)


def _quality(pairs: Eigenpairs) -> dict[str, Any]:
    """What is known of the vectors that were used, for the notes."""
    worst = pairs.residuals / pairs.values.abs().clamp_min(torch.finfo(torch.float64).tiny)
    return {
        "converged": int(pairs.converged.sum()),
        "residual": float(worst.max()) if len(pairs) else 0.0,
        "complete": pairs.complete,
    }


def task_hessian(
    population: Population,
    s: int,
    task: int,
    samples: Samples,
    size: int,
    names: Sequence[str] | None = None,
) -> Hessian:
    """The Hessian of run ``s`` on ``size`` samples of a task, chosen by the run's seed.

    At the run's present parameters, in eval mode, so with BatchNorm's running statistics.

    Args:
        population: The runs.
        s: Which of them.
        task: Index of the task.
        samples: The samples of the task.
        size: How many of them.
        names: The names of the parameters; ``None`` takes those that the task uses.
    """
    chosen = drawn(samples, size, population.seeds[s], "hessian", task)
    population.train_mode(False)
    model, prefix = population.models[s], ""
    if population.takes_task:
        model, prefix = _OfTask(model, task), "model."
    wanted = {prefix + name for name in (population.uses.of(task) if names is None else names)}
    some = len(wanted) < len(population.layout.names)
    return Hessian(
        model,
        population.loss,
        (chosen.inputs, chosen.targets),
        select=(lambda name, _: name in wanted) if some else None,
        reduction=None if population.loss is cross_entropy else "mean",
    )


class _OfTask(nn.Module):
    """A model that takes the task, as one of the inputs alone."""

    def __init__(self, model: nn.Module, task: int) -> None:
        super().__init__()
        self.model, self.task = model, task
        self.train(model.training)

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.model(inputs, self.task)
        return result
