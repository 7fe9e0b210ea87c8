"""Strict parameter isolation: every parameter has at most one owner, and only the owner moves it.

Task ``o`` is predicted with the parameters of tasks up to ``o`` and zero in place of the others, so
its logits keep the same bits for ever. What usually breaks this, and how it is prevented here:

* weight decay and momentum move frozen weights: the loop adds decay before ``transform_``, which
  zeroes what is not owned, and a parameter that changes owner loses its momentum;
* zeroing by multiplication lets NaN and inf through: entries are filled, not multiplied;
* BatchNorm's running statistics drift: a population that lets them is refused.
"""

import torch
from torch import Tensor

from curvlab.learners.base import Learner
from curvlab.learners.population import Population
from curvlab.tasks.samples import Samples

LARGEST = 255  # owners are kept as bytes


class Ownership(Learner):
    """What the isolation learners share: the owners, the mask on gradients, the masked prediction.

    Attributes:
        owner: ``(S, P)`` bytes: 0 is free, ``t + 1`` belongs to task ``t``. Set by subclasses in
            ``before_task``, through :meth:`own_`.
        task: The task that is being learned; -1 before the first.
    """

    def __init__(self) -> None:
        super().__init__()
        self.owner = torch.zeros(0, 0, dtype=torch.uint8)
        self.task = -1
        self._foreign = torch.zeros(0, 0, dtype=torch.bool)

    def before_task(self, population: Population, task: int, samples: Samples) -> None:
        del samples
        if task >= LARGEST:
            raise ValueError(f"{type(self).__name__} counts tasks up to {LARGEST}; got task {task}")
        if task == 0:
            policy = population.statistics.policy
            if policy == "running":
                raise ValueError(
                    f"{type(self).__name__} isolates parameters, but with batchnorm='running' old "
                    "tasks are forgotten through BatchNorm's running statistics: choose "
                    "batchnorm='freeze' or 'per_task'"
                )
            self.owner = torch.zeros_like(population.parameters, dtype=torch.uint8)
        self.task = task

    def own_(self, population: Population, owner: Tensor) -> None:
        """Set the owners ``(S, P)``; parameters that the task does not own lose their momentum."""
        self.owner = owner
        self._foreign = owner != self.task + 1
        if population.velocity is not None:
            population.velocity.masked_fill_(self._foreign, 0.0)

    def transform_(self, population: Population) -> None:
        population.gradients.masked_fill_(self._foreign, 0.0)

    def after_task(self, population: Population, task: int, samples: Samples) -> None:
        del population, samples
        owned = (self.owner == task + 1).sum(1)
        free = (self.owner == 0).sum(1)
        self.notes.append(
            {
                "owned": owned.tolist(),
                "free": free.tolist(),
                "memory_bytes": self.owner.shape[1] * self.owner.element_size(),
            }
        )

    def weights_for(self, population: Population, task: int) -> Tensor:
        # free weights and those of later tasks were not there when this one was learned
        others = (self.owner == 0) | (self.owner > task + 1)
        return population.parameters.masked_fill(others, 0.0)

    def state(self) -> dict[str, Tensor]:
        return {"owner": self.owner, "task": torch.tensor(self.task)}

    def load_state(self, population: Population, tensors: dict[str, Tensor]) -> None:
        self.task = int(tensors["task"])
        self.owner = tensors["owner"].to(population.device)
        self._foreign = self.owner != self.task + 1
