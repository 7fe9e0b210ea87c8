"""A copy of the networks at an earlier moment, as a teacher for the present ones."""

from dataclasses import dataclass

import torch
from torch import Tensor

from curvlab.learners.population import Population
from curvlab.learners.rooms import aligned
from curvlab.storage import below


@dataclass(frozen=True, slots=True, eq=False)
class Kept:
    """Parameters ``(S, P)`` and buffers ``(S, ...)`` of a population at one moment."""

    population: Population
    parameters: Tensor
    buffers: dict[str, Tensor]

    @classmethod
    def of(cls, population: Population) -> "Kept":
        """As the population is now."""
        kept = aligned(population.parameters.clone())  # a run's bits do not depend on the others
        return cls(population, kept, population.buffers())

    @torch.no_grad()
    def logits(self, s: int, inputs: Tensor, task: int) -> Tensor:
        """Logits ``(N, C)`` of run ``s`` at that moment, in eval mode; the mode is restored."""
        model = self.population.models[s]
        training = model.training
        model.eval()
        try:
            buffers = {name: value[s].clone() for name, value in self.buffers.items()}
            return self.population.logits_of(s, inputs, task, self.parameters[s], buffers)
        finally:
            model.train(training)
            self.population.statistics.hold(s)

    def state(self) -> dict[str, Tensor]:
        """For a checkpoint."""
        return {"parameters": self.parameters, **{f"of/{k}": v for k, v in self.buffers.items()}}

    @classmethod
    def restored(cls, population: Population, tensors: dict[str, Tensor]) -> "Kept":
        """From what :meth:`state` gave."""
        here = {name: tensor.to(population.device) for name, tensor in tensors.items()}
        return cls(population, aligned(here["parameters"]), below(here, "of/"))
