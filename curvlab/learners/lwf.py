"""LwF: learning without forgetting. The network must answer new inputs as it did before the task.

To the loss is added, for every earlier task, ``strength`` times the cross-entropy between the
softened answers (logits over ``temperature``) of the network as the last task left it and its own,
on the present batch: on that task's head, or on one head among the classes that came before. No
sample is kept. The old network answers in eval mode, with the statistics it had.
"""

from collections.abc import Sequence

from torch import Tensor

from curvlab.checks import inside
from curvlab.learners.base import Learner
from curvlab.learners.kept import Kept
from curvlab.learners.population import Population
from curvlab.tasks.samples import Samples, Task


class LwF(Learner):
    """Learning without forgetting.

    Args:
        strength: Weight of each earlier task's answers.
        temperature: What logits are divided by, 2 as published.
    """

    settings = ("strength", "temperature")

    def __init__(self, strength: float = 1.0, *, temperature: float = 2.0) -> None:
        super().__init__()
        inside("[0, inf)", strength=strength)
        inside("(0, inf)", temperature=temperature)
        self.strength, self.temperature = strength, temperature
        self._old: Kept | None = None
        self._labels: list[tuple[int, ...] | None] = []

    def expect(self, population: Population, tasks: Sequence[Task]) -> None:
        del population
        self._labels = [task.labels for task in tasks]

    def before_task(self, population: Population, task: int, samples: Samples) -> None:
        del samples
        if task > 0:
            self._old = Kept.of(population)

    def loss(self, population: Population, s: int, logits: Tensor) -> Tensor:
        total = super().loss(population, s, logits)
        batch, old = population.batch, self._old
        if batch is None or old is None:
            return total
        inputs, task = batch.inputs[s].clone(), batch.step.task  # aligned, as alone
        if not population.takes_task:
            before = old.logits(s, inputs, task)
            seen = sorted({label for one in self._labels[:task] for label in one or ()})
            if seen:
                before, logits = before[:, seen], logits[:, seen]
            return total + self.strength * self._distance(logits, before)
        for o in range(task):
            before = old.logits(s, inputs, o)
            total = total + self.strength * self._distance(population.answer(s, inputs, o), before)
        return total

    def _distance(self, logits: Tensor, before: Tensor) -> Tensor:
        wanted = (before / self.temperature).softmax(1)
        found = (logits / self.temperature).log_softmax(1)
        return -(wanted * found).sum(1).mean()

    def after_task(self, population: Population, task: int, samples: Samples) -> None:
        del task, samples
        size = population.parameters.element_size()
        self.notes.append({"memory_bytes": population.n * size})

    def state(self) -> dict[str, Tensor]:
        return {} if self._old is None else self._old.state()

    def load_state(self, population: Population, tensors: dict[str, Tensor]) -> None:
        self._old = Kept.restored(population, tensors) if tensors else None
