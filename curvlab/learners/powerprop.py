"""Powerpropagation for a stream: PackNet over a model that trains towards sparsity.

Make the model with :func:`curvlab.nets.powerprop.powerpropagate`. Pruning by |w| is pruning by
|phi|, for one grows with the other. A pruned weight cannot start the next task from zero, as
PackNet's do: its gradient would be zero for ever. It starts from its initial value.
"""

import torch
from torch import Tensor

from curvlab.learners.packnet import PackNet
from curvlab.learners.population import Population
from curvlab.nets.powerprop import PowerConv2d, PowerLinear
from curvlab.tasks.samples import Samples


class Powerpropagation(PackNet):
    """PackNet whose free weights restart from where they were before the first task.

    Args:
        fraction, prune_at: As in :class:`PackNet`; sparse training bears larger fractions.
    """

    def __init__(self, fraction: float = 0.75, prune_at: float = 0.5) -> None:
        super().__init__(fraction, prune_at)
        self._initial = torch.zeros(0, 0)

    def before_task(self, population: Population, task: int, samples: Samples) -> None:
        if task == 0:
            modules = population.models[0].modules()
            if not any(isinstance(m, PowerLinear | PowerConv2d) for m in modules):
                raise ValueError(
                    "Powerpropagation needs a reparametrised model: call "
                    "curvlab.nets.powerprop.powerpropagate(model, alpha) first, or use PackNet"
                )
            self._initial = population.parameters.clone()
        super().before_task(population, task, samples)

    def start_(self, population: Population, free: Tensor) -> None:
        population.parameters.copy_(torch.where(free, self._initial, population.parameters))

    def state(self) -> dict[str, Tensor]:
        return {**super().state(), "initial": self._initial}

    def load_state(self, population: Population, tensors: dict[str, Tensor]) -> None:
        super().load_state(population, tensors)
        self._initial = tensors["initial"].to(population.device)
