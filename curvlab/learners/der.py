"""DER: dark experience replay. Old samples are kept with the logits they had, which must not move.

To the loss is added ``alpha`` times the mean squared change of the logits of samples drawn from a
reservoir; with ``beta`` above 0 (DER++) also ``beta`` times their loss. The logits kept are those
of the step in which a sample was learned, before its update.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import mse_loss, pad

from curvlab.checks import inside
from curvlab.learners.er import ER
from curvlab.learners.population import Population
from curvlab.learners.step import Step
from curvlab.tasks.samples import Task


class DER(ER):
    """Dark experience replay.

    Args:
        size: Samples kept per run.
        alpha: Weight of the squared change of logits.
        beta: Weight of the samples' loss; above 0 this is DER++.
        batch: Samples drawn in every step.
    """

    settings = (*ER.settings, "alpha", "beta")

    def __init__(
        self, size: int = 200, *, alpha: float = 0.3, beta: float = 0.0, batch: int = 10
    ) -> None:
        super().__init__(size, batch=batch)
        inside("[0, inf)", alpha=alpha, beta=beta)
        self.alpha, self.beta = alpha, beta
        self._logits: list[Tensor] = []  # of the present step
        self._widest = 0

    def expect(self, population: Population, tasks: Sequence[Task]) -> None:
        if population.takes_task:
            answers = [population.logits(t.train.inputs[:2], i) for i, t in enumerate(tasks)]
            self._widest = max(one.shape[2] for one in answers)

    def loss(self, population: Population, s: int, logits: Tensor) -> Tensor:
        total = super(ER, self).loss(population, s, logits)
        if s == 0:
            self._logits = []
        narrower = max(0, self._widest - logits.shape[1])
        self._logits.append(pad(logits.detach(), (0, narrower)).clone())
        if population.batch is None:
            return total
        drawn_parts = self.memory.draw(population, s, self.batch, population.batch)
        count = sum(len(drawn["targets"]) for _, drawn in drawn_parts)
        for task, drawn in drawn_parts:
            again = population.answer(s, drawn["inputs"], task)
            share = len(again) / count
            before = drawn["logits"][:, : again.shape[1]]  # heads may be narrower than the widest
            total = total + self.alpha * share * mse_loss(again, before)
            if self.beta:
                total = total + self.beta * share * population.loss(again, drawn["targets"])
        return total

    def after_step(self, population: Population, step: Step) -> None:
        del step
        if population.batch is not None:
            self.memory.add(population, population.batch, logits=torch.stack(self._logits))
