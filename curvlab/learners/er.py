"""ER: experience replay. Every step also learns from a few earlier samples of the stream.

The samples are kept in a reservoir: each of the N samples so far is kept with the same probability.
A step minimises the mean loss over the batch and the samples drawn, each on the head of its own
task if there are several. Drawn samples pass through the network after the batch, not with it. That
matters where layers mix the samples of a batch (BatchNorm). Augmented inputs are kept as augmented.
"""

from torch import Tensor

from curvlab.checks import whole
from curvlab.learners.base import Learner
from curvlab.learners.population import Population
from curvlab.learners.reservoir import Reservoir
from curvlab.learners.step import Step
from curvlab.tasks.samples import Samples


class ER(Learner):
    """Experience replay.

    Args:
        size: Samples kept per run.
        batch: Samples drawn in every step.
    """

    settings: tuple[str, ...] = ("size", "batch")

    def __init__(self, size: int = 200, *, batch: int = 10) -> None:
        super().__init__()
        whole(batch=batch)
        self.size, self.batch, self.memory = size, batch, Reservoir(size)

    def loss(self, population: Population, s: int, logits: Tensor) -> Tensor:
        own = super().loss(population, s, logits)
        if population.batch is None:
            return own
        total, count = own * len(logits), len(logits)
        for task, drawn in self.memory.draw(population, s, self.batch, population.batch):
            again = population.answer(s, drawn["inputs"], task)
            total = total + population.loss(again, drawn["targets"]) * len(again)
            count += len(again)
        return total / count

    def after_step(self, population: Population, step: Step) -> None:
        del step
        if population.batch is not None:
            self.memory.add(population, population.batch)

    def after_task(self, population: Population, task: int, samples: Samples) -> None:
        del population, task, samples
        self.notes.append({"kept": len(self.memory), "memory_bytes": self.memory.bytes})

    def state(self) -> dict[str, Tensor]:
        return self.memory.state()

    def load_state(self, population: Population, tensors: dict[str, Tensor]) -> None:
        self.memory.load_state(population, tensors)
